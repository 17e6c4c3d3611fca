"""The port at which a run's rank 0 will wait for the others, and the ways to it. Needs only the standard library.

Some seconds pass between its choice and the moment at which rank 0 binds it. A second launch would choose it as well, and its
ranks would find the store of the first one's.
"""

import asyncio
import errno
import socket
from contextlib import suppress

from .host_facts import addresses

_ANOTHER = "another launch, which has chosen it"  # as it stands after "in use by"


def listening_socket(port: int) -> socket.socket:
    """A socket that listens on a TCP port of all addresses, of IPv6 too where this host has it. port: 0 for any"""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)


class HeldPort:
    """A TCP port of this host that no other launch, and no program that asks for a free port, gets while this object lives.

    listening: a socket that listens on it, until release(); number: of the port
    """

    def __init__(self, wanted: int) -> None:
        """wanted: 0 for any. Raises OSError where it is taken."""
        # Names of the abstract space belong to a network namespace, as ports do.
        self._claim = socket.socket(socket.AF_UNIX)
        self._bound: socket.socket | None = None
        while True:
            self.listening = listening_socket(wanted)
            self.number: int = self.listening.getsockname()[1]
            try:
                self._claim.bind(f"\0brigade-port-{self.number}")
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # a container without such names: the port itself has to do
                    return
                self.listening.close()
                if wanted:
                    raise OSError(errno.EADDRINUSE, _ANOTHER) from None

    def release(self) -> None:
        """Let rank 0 bind it, but nobody who asks for a free one: a socket that is bound and does not listen keeps only those
        away, as rank 0's and this one both reuse addresses."""
        self.listening.close()
        self._bound = socket.socket(self.listening.family)
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            self._bound.bind(("", self.number))


async def ways_to(
    targets: list[str], port: int, greeting: str, seconds: float, said: bytes = b""
) -> dict[str, dict[str, str]]:
    """Try to reach a listening host under each of its addresses, all at once. greeting: with which it answers `said`

    Returns address -> {"peer": its address as it is seen here, "own" and "interface": ours on that way}, or {"error": why not}.
    """

    async def attempt(address: str) -> dict[str, str]:
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(address, port)
                writer.write(said)
                answer = await reader.read(len(greeting))
                peer, own = writer.get_extra_info("peername")[0], writer.get_extra_info("sockname")[0]
                writer.close()
        except TimeoutError:
            return {"error": f"no answer within {seconds:g} s"}
        except OSError as error:
            return {"error": error.strerror or str(error)}
        if answer.decode(errors="replace") != greeting:
            return {"error": "another program answers there"}
        return {"peer": peer, "own": own, "interface": addresses().get(own, "lo")}

    return dict(zip(targets, await asyncio.gather(*map(attempt, targets)), strict=True))
