"""Ports and packets between hosts, one end listens and the other one tries; and who else works on a host. Needs only
the standard library."""

import asyncio
import errno
import json
import os
import pwd
import resource
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from ...hosts import Facts
from ...hosts.held_port import listening_socket
from ...hosts.host_facts import addresses, holder
from ...hosts.ssh import loses_long_ones
from .names import family_of, interfaces

T = TypeVar("T")
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PROBE = 10, 23, 3  # linux/in.h, linux/in6.h: never divide, ask no cache
CONNECTING = 5.0  # seconds: three tries of TCP
AT_ONCE = 64  # ports that one host tries at a time, each under a few addresses: an open file each
RETRIES, PAUSE = 4, 0.25  # of a datagram, and seconds between them
COUNTED, EVERY, LAST = 40, 0.01, 1.0  # datagrams that are counted, seconds between them, and for the last answers
FEW = 0.9  # of them: from less on short packets are lost too
# Bytes over TCP, for which a socket that nobody reads has room, and seconds: after 3 s Linux may try smaller packets
# (tcp_mtu_probing).
LONG, LONGEST = 2**15, 8.0
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
PEOPLE = 1000  # UID_MIN of login.defs: lower ones are the system's
NOBODY = range(65534, 65536)  # of services, and of users of other namespaces


# ---- the end that listens ----------------------------------------------------------------------------------------
def listen(host: str, token: str, count: int, master: int | None = None) -> Iterator[Facts]:
    """Hold ports until the block ends: `count` of them spread over the range from which the kernel chooses, and `master`.

    Whoever connects is told the token and this host's name; datagrams are answered with their length.
    range: of the ephemeral ports; ports: those that are open here; master: its port, absent where it is taken: taken says by whom
    datagrams: a UDP port; long: a TCP port that nobody reads
    control: a TCP port of the loopback that says who was heard, and ends all this
    """
    first, last = map(int, RANGE.read_text().split()) if RANGE.exists() else (32768, 60999)
    sockets: list[socket.socket] = []
    facts: Facts = {"range": [first, last]}

    def open_one(port: int) -> int:
        listening = listening_socket(port)
        sockets.append(listening)
        return int(listening.getsockname()[1])

    if master is not None:
        try:
            facts["master"] = open_one(master)
        except OSError as error:
            facts["taken"] = holder(master) or error.strerror or "?"
    step = max(1, (last - first + 1) // max(1, count))
    tried = (_first_free(open_one, start, step) for start in range(first, first + count * step, step))
    facts["ports"] = [port for port in tried if port]
    long = listening_socket(0)  # nobody takes its connections: the kernel confirms what it has room for
    facts["long"] = long.getsockname()[1]
    datagrams = socket.socket(long.family, socket.SOCK_DGRAM)
    if long.family == socket.AF_INET6:
        datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    datagrams.bind(("", 0))
    control = socket.create_server(("127.0.0.1", 0))
    facts |= {"datagrams": datagrams.getsockname()[1], "control": control.getsockname()[1]}
    greeting = json.dumps({"token": token, "host": host}).encode()
    threading.Thread(target=_serve, args=(sockets, datagrams, control, greeting, token), daemon=True).start()
    yield facts


def _first_free(open_one: Callable[[int], int], start: int, step: int) -> int:
    for port in range(start, start + min(step, 20)):
        with suppress(OSError):
            return open_one(port)
    return 0


def _serve(
    sockets: list[socket.socket], datagrams: socket.socket, control: socket.socket, greeting: bytes, token: str
) -> None:
    """Answer whoever connects, until the control port is asked."""
    heard: set[str] = set()
    selector = selectors.DefaultSelector()
    for listener in (*sockets, datagrams, control):
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            with suppress(OSError):
                asked = key.fileobj
                assert isinstance(asked, socket.socket)
                if asked is datagrams:
                    data, sender = asked.recvfrom(2**16)
                    words = data.rstrip(b"\0").decode(errors="replace").split()
                    if len(words) == 2 and words[0] == token:
                        heard.add(words[1])
                        asked.sendto(f"{token} {len(data)}".encode(), sender)
                    continue
                connection, _ = asked.accept()
                with connection:
                    if asked is not control:
                        connection.sendall(greeting)
                        continue
                    for each in (*sockets, datagrams):
                        each.close()
                    connection.sendall(json.dumps(sorted(heard)).encode())
                return


def heard(control: int) -> Facts:
    """Return from whom datagrams came in, and end what listens here."""
    with socket.create_connection(("127.0.0.1", control), timeout=5) as asked, asked.makefile() as answer:
        return {"heard": json.load(answer)}


# ---- the end that tries ------------------------------------------------------------------------------------------
def connect(host: str, token: str, targets: dict[str, Facts]) -> Facts:
    """Try ports of other hosts, each of them under all of the host's addresses at once. A datagram goes to each besides.

    targets: host -> {"addresses": [...], "ports": [...], "datagrams": port}
    failed: host -> port -> why; hosts of which every port was reached are left out
    lost: host -> which share of short datagrams, there or on the way back; hosts that answer none are left out
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    answered = _of_each(targets, lambda target: _answers_of(f"{token} {host}".encode(), token, target))
    lost = {peer: 1 - count / COUNTED for peer, count in answered.items() if count}
    return {"failed": asyncio.run(_connect_all(host, token, targets)), "lost": lost}


def _of_each(targets: dict[str, Facts], ask: Callable[[Facts], T]) -> dict[str, T]:
    """host -> what a function says of it; all hosts at the same time"""
    with ThreadPoolExecutor(max(1, len(targets))) as threads:
        return dict(zip(targets, threads.map(ask, targets.values()), strict=True))


def _answers_of(hello: bytes, token: str, target: Facts) -> int:
    with _senders(target) as senders:
        address = _first_that_answers(senders, hello, token)
        return _count_answers(senders[address], hello, token) if address else 0


def _count_answers(sender: socket.socket, hello: bytes, token: str) -> int:
    """How many of COUNTED datagrams are answered."""
    expected, answered = f"{token} {len(hello)}".encode(), 0
    for number in range(1, COUNTED + 1):
        with suppress(OSError):
            sender.send(hello)
        until = time.monotonic() + (EVERY if number < COUNTED else LAST)
        while answered < COUNTED and (left := until - time.monotonic()) > 0:
            if select.select([sender], [], [], left)[0]:
                with suppress(OSError):
                    answered += sender.recv(200) == expected
    return answered


async def _connect_all(host: str, token: str, targets: dict[str, Facts]) -> dict[str, dict[str, str]]:
    few = asyncio.Semaphore(AT_ONCE)

    async def attempt(peer: str, port: int) -> tuple[str, int, str]:
        async with few:
            tries = [
                asyncio.ensure_future(_greeted(peer, token, address, port)) for address in targets[peer]["addresses"]
            ]
            why = "it has no address"
            try:
                for done in asyncio.as_completed(tries):
                    why = await done
                    if not why:
                        break
            finally:
                for task in tries:
                    task.cancel()
            return peer, port, why

    _say_hello(host, token, targets)
    jobs = [attempt(peer, port) for peer, target in targets.items() for port in target["ports"]]
    found: dict[str, dict[str, str]] = {}
    for peer, port, why in await asyncio.gather(*jobs):
        if why:
            found.setdefault(peer, {})[str(port)] = why
    if found:
        _say_hello(host, token, targets)  # once more: some are lost on a busy line
    return found


async def _greeted(peer: str, token: str, address: str, port: int) -> str:
    """ "" where the right host answers there, else what went wrong."""
    try:
        async with asyncio.timeout(CONNECTING):
            reader, writer = await asyncio.open_connection(address, port)
            greeting = json.loads(await reader.read() or "null")
            writer.close()
    except TimeoutError:
        return f"no answer within {CONNECTING:g} s"
    except OSError as error:
        return (os.strerror(error.errno) if error.errno else str(error)).lower()
    except ValueError:
        greeting = None
    return "" if greeting == {"token": token, "host": peer} else "another program answers there"


def _say_hello(host: str, token: str, targets: dict[str, Facts]) -> None:
    for target in targets.values():
        for address in target["addresses"]:
            with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as sender:
                sender.sendto(f"{token} {host}".encode(), (address, target["datagrams"]))


def packets(host: str, token: str, targets: dict[str, Facts]) -> Facts:
    """Send each host a short datagram and one as long as this host's interface takes, which nobody may divide.

    targets: as of connect, and "long": its port; sent: host -> {"size": of the packet, "arrived": see below}
    all: both arrived; none: neither; else only the short one:
    told: the network, or this host, says that the long one is too long, so TCP sends shorter ones
    hangs: it is lost in silence, and so are LONG bytes over TCP; lost: it is lost, and TCP passes or does not connect
    any: short ones are lost too, now and then
    """
    return {"sent": _of_each(targets, lambda target: _packets_to(host, token, target))}


def _packets_to(host: str, token: str, target: Facts) -> Facts:
    sizes = {name["name"]: name["mtu"] for name in interfaces()}
    mine, hello = addresses(), f"{token} {host}".encode()
    with _senders(target) as senders:
        address = _first_that_answers(senders, hello, token)
        if address is None:
            return {"size": 0, "arrived": "none"}
        sender = senders[address]
        size = min(sizes.get(mine.get(str(sender.getsockname()[0]), ""), 1500), 65535)
        headers = 48 if sender.family == socket.AF_INET6 else 28  # of IP and UDP
        arrived = _answered(sender, hello.ljust(size - headers, b"\0"), token)
        if arrived == "lost" and _count_answers(sender, hello, token) < FEW * COUNTED:
            arrived = "any"
        if arrived == "lost" and _hangs(address, target["long"]):
            arrived = "hangs"
        return {"size": size, "arrived": arrived}


@contextmanager
def _senders(target: Facts) -> Iterator[dict[str, socket.socket]]:
    """address -> _sender() to it, of those to which there is a way"""
    with ExitStack() as stack:
        found = ((address, _sender(address, target["datagrams"])) for address in target["addresses"])
        yield {address: stack.enter_context(sender) for address, sender in found if sender}


def _sender(address: str, port: int) -> socket.socket | None:
    """A socket whose datagrams nobody may divide; None where there is no way to that address."""
    sender = socket.socket(family_of(address), socket.SOCK_DGRAM)
    six = sender.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER) if six else (socket.IPPROTO_IP, IP_MTU_DISCOVER)
    try:
        sender.setsockopt(level, option, PROBE)
        sender.connect((address, port))
    except OSError:
        sender.close()
        return None
    return sender


def _first_that_answers(senders: dict[str, socket.socket], hello: bytes, token: str) -> str | None:
    """The first address, in their order, of those from which an answer comes soonest; all are tried at the same time."""
    expected, names = f"{token} {len(hello)}".encode(), {sender: address for address, sender in senders.items()}
    answered: set[str] = set()
    for number in range(RETRIES if names else 0):
        for sender in names:
            with suppress(OSError):
                sender.send(hello)
        until = time.monotonic() + PAUSE * (number + 1)
        while (left := until - time.monotonic()) > 0 and next(iter(senders)) not in answered:
            for sender in select.select(list(names), [], [], left)[0]:
                with suppress(OSError):  # refused: the other end is not there yet, or a firewall says so
                    if sender.recv(200) == expected:
                        answered.add(names[sender])
                        until = min(until, time.monotonic() + 0.1 * PAUSE)
        if answered:
            return next(address for address in senders if address in answered)
    return None


def _answered(sender: socket.socket, data: bytes, token: str) -> str:
    """ "all" where the other end says that all of it came in, "told" where it is said to be too long, else "lost"."""
    sender.settimeout(PAUSE)
    for number in range(RETRIES):
        try:
            sender.send(data)
            until = time.monotonic() + PAUSE * (number + 1)
            while time.monotonic() < until:
                with suppress(TimeoutError):
                    if sender.recv(200) == f"{token} {len(data)}".encode():
                        return "all"
        except OSError as error:
            if error.errno == errno.EMSGSIZE:  # ICMP "fragmentation needed", which connected sockets are told
                return "told"
            time.sleep(PAUSE)
    return "lost"


def _hangs(address: str, port: int) -> bool:
    """Tell whether a connection opens there, over which LONG bytes do not pass."""
    try:
        connection = socket.create_connection((address, port), timeout=CONNECTING)
    except OSError:
        return False
    with connection:
        connection.setblocking(False)
        return asyncio.run(loses_long_ones(connection, LONG, LONGEST))


def users() -> Facts:
    """others: names of other people who have processes here; hidden: the kernel does not list them (hidepid)"""
    owners, hidden = set(), not Path("/proc/1").exists()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                owners.add(entry.stat().st_uid)
    others = {user for user in owners if user >= PEOPLE and user not in NOBODY and user != os.geteuid()}
    return {"others": sorted(map(_name, others)), "hidden": hidden}


def _name(user: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return str(user)
