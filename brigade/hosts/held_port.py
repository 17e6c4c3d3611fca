"""The port at which a run's rank 0 will wait for the others. Needs only the standard library.

Between its choice and the moment at which rank 0 binds it pass some seconds. A second launch would choose it as well, and its
ranks would find the store of the first one's.
"""

import errno
import socket
from contextlib import suppress

_ANOTHER = "another launch, which has chosen it"  # as it stands after "in use by"


class HeldPort:
    """A TCP port of this host that no other launch, and no program that asks for a free port, gets while this object lives.

    listening: a socket that listens on it, until release(); number: of the port
    """

    def __init__(self, wanted: int) -> None:
        """wanted: 0 for any. Raises OSError where it is taken."""
        # Names of the abstract space belong to a network namespace, as ports do.
        self._claim = socket.socket(socket.AF_UNIX)
        self._bound: socket.socket | None = None
        both = socket.has_dualstack_ipv6()
        self._family = socket.AF_INET6 if both else socket.AF_INET
        while True:
            self.listening = socket.create_server(("", wanted), family=self._family, dualstack_ipv6=both, backlog=1024)
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
        self._bound = socket.socket(self._family)
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            self._bound.bind(("", self.number))
