"""The user's own ssh: what each of our calls has to say, which keys it cannot use without being asked, and what is wrong with the
way to a host's sshd."""

import asyncio
import base64
import fcntl
import re
import socket
import struct
import subprocess
import termios
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

# What ~/.ssh/config may say of a host for logins by hand, and no line to an agent works with. How long a line may be silent is
# ours to say: ServerAliveInterval would cut it before.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=0", "RemoteCommand=none")
# What only the user should use, and a host could: the ssh agent, the display, the ports.
_NOT_LENT = ("ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes")
_SINCE_8_7 = ("StdinNull=no", "ForkAfterAuthentication=no", "SessionType=default")  # an older ssh would refuse them


@cache
def version() -> tuple[int, int]:
    """Return the version of OpenSSH here, (0, 0) where it is not known."""
    found = re.match(r"OpenSSH_(\d+)\.(\d+)", said("ssh", "-V"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def options() -> list[str]:
    """The flags of every ssh that is started."""
    named = _OPTIONS + _NOT_LENT + (_SINCE_8_7 if version() >= (8, 7) else ())
    return ["-T", "-a", "-x", *(word for option in named for word in ("-o", option))]


@cache
def locked_key(host: str) -> str:
    """A key that ssh would show this host, if it could ask for its passphrase: no agent has it. "" for none."""
    held = said("ssh-add", "-L")
    lines = (line.partition(" ") for line in said("ssh", "-G", "--", host).splitlines())
    for name in (value for key, _, value in lines if key == "identityfile"):
        path = Path(name).expanduser()
        with suppress(OSError, ValueError, IndexError):
            if is_locked(path) and path.with_name(f"{path.name}.pub").read_text().split()[1] not in held:
                return str(path)
    return ""


def is_locked(path: Path) -> bool:
    """Tell whether a private key has a passphrase. Raises OSError, and ValueError for what is no key.

    OpenSSH's own form names the cipher after "openssh-key-v1\\0" and a length of four bytes (its PROTOCOL.key).
    """
    first, *rest = path.read_text(encoding="ascii").strip().splitlines()
    if "OPENSSH PRIVATE KEY" not in first:
        return "ENCRYPTED" in f"{first} {' '.join(rest[:1])}"
    return not base64.b64decode("".join(rest[:-1]))[15:].startswith(b"\0\0\0\4none")


def said(*words: str) -> str:
    """The output of a program of OpenSSH, "" where there is none."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=5
        )
        return done.stdout + done.stderr
    return ""


# ---- the way to a host's sshd, where no agent answers ----------------------------------------------------------------
# A login that hangs or breaks off looks alike when the host is down, when packets are lost, and when only long ones are. TCP
# alone is asked, for which the kernel at the other end answers.

# What is said of such a way, and of others.
LIKELY = re.compile("did not answer|timed out|[Cc]losed by|reset by|Broken pipe|kex_exchange")
TRIES = 5  # connections at the same time: sshd takes ten that have not logged in (MaxStartups), `ufw limit` six in 30 s
ANSWERS = 4.0  # seconds for a connection
LATE = 0.9  # seconds: a connection comes so late if a packet was lost (RFC 6298: after 1 s again)
LONG = 8192  # bytes, more than a packet on any way but the loopback
SECONDS = 4.0  # how long the other end has to confirm them
GREETING = b"SSH-2.0-brigade\r\n"


async def fault_on_the_way(host: str, hopeless: bool = False) -> str:
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
    goes = dict(line.partition(" ")[::2] for line in said("ssh", "-G", "--", host).splitlines())
    if any(goes.get(by, "none") != "none" for by in ("proxyjump", "proxycommand")):
        return None
    with suppress(KeyError, ValueError):
        return goes["hostname"], int(goes["port"])
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
