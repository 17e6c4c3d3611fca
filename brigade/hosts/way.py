"""The way to a host's sshd, where no agent answers: a login that hangs or breaks off looks alike when the host is down, when
packets are lost, and when only long ones are. TCP alone is asked, for which the kernel at the other end answers."""

import asyncio
import fcntl
import re
import socket
import struct
import termios
import time
from contextlib import suppress

from . import ssh

# What is said of such a way, and of others.
LIKELY = re.compile("did not answer|timed out|[Cc]losed by|reset by|Broken pipe|kex_exchange")
TRIES = 5  # connections at the same time: sshd takes ten that have not logged in (MaxStartups), `ufw limit` six in 30 s
ANSWERS, LATE = (
    4.0,
    0.9,
)  # seconds for a connection, of which one comes so late if a packet was lost (RFC 6298: after 1 s again)
LONG, SECONDS = (
    8192,
    4.0,
)  # bytes, more than a packet on any way but the loopback, and how long the other end has to confirm them
GREETING = b"SSH-2.0-brigade\r\n"


async def fault(host: str, hopeless: bool = False) -> str:
    """What is wrong with the way to a host, "" where nothing is, where nothing answers, or where ssh goes by another host.

    hopeless: look only for the loss of all long packets, which waiting does not cure: TCP gets through where only some are lost
    """
    address = await asyncio.to_thread(_address, host)
    if address is None:
        return ""
    tries = (
        [await _connect(*address)] if hopeless else await asyncio.gather(*(_connect(*address) for _ in range(TRIES)))
    )
    opened = [(connection, seconds) for connection, seconds in tries if connection is not None]
    try:
        late = sum(seconds > LATE for _, seconds in opened)
        if late:
            said = f"{late} of {TRIES} connections to its port {address[1]} came about late"
            return "" if hopeless else f"packets are lost on the way: {said}"
        if opened and await loses_long_ones(opened[0][0]):
            return (
                f"long packets are lost on the way: its port {address[1]} takes short ones, and not {LONG // 1024} KiB"
            )
        return ""
    finally:
        for connection, _ in opened:
            connection.close()


def _address(host: str) -> tuple[str, int] | None:
    """Where ssh would connect, of what `ssh -G` says; None where it goes by a jump host or a program."""
    said = dict(line.partition(" ")[::2] for line in ssh.said("ssh", "-G", "--", host).splitlines())
    if any(said.get(by, "none") != "none" for by in ("proxyjump", "proxycommand")):
        return None
    with suppress(KeyError, ValueError):
        return said["hostname"], int(said["port"])
    return None


async def _connect(name: str, port: int) -> tuple[socket.socket | None, float]:
    """A connection, and the seconds that it took to come about."""
    loop, began = asyncio.get_running_loop(), time.monotonic()
    connection = None
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWERS):
            family, kind, _, _, address = (await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM))[0]
            began = time.monotonic()  # a name may take its time too
            connection = socket.socket(family, kind)
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
            return connection, time.monotonic() - began
    if connection is not None:
        connection.close()
    return None, time.monotonic() - began


async def loses_long_ones(connection: socket.socket, size: int = LONG, seconds: float | None = None) -> bool:
    """Tell whether the other end confirms a few bytes of TCP, and not `size` of them. An sshd that refuses what it reads has
    got it; nobody need read at all, as long as so much has room there. seconds: to confirm them, SECONDS unless given"""
    limit = SECONDS if seconds is None else seconds
    with suppress(OSError):
        connection.send(GREETING)
        if await _confirmed(connection, limit):
            connection.send(bytes(size))
            return not await _confirmed(connection, limit)
    return False


async def _confirmed(connection: socket.socket, seconds: float) -> bool:
    """Wait until the kernel at the other end has confirmed all that was sent (tcp(7): SIOCOUTQ), or has hung up."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        waiting: int = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]
        if not waiting or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return True
        await asyncio.sleep(0.05)
    return False
