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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...hosts.host_facts import addresses, holder
from .names import family_of, interfaces

IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PROBE = 10, 23, 3  # linux/in.h, linux/in6.h: never divide, ask no cache
CONNECTING = 5.0  # seconds: three tries of TCP
AT_ONCE = 64  # ports that one host tries at a time, each under a few addresses: an open file each
RETRIES, PAUSE = 4, 0.25  # of a datagram, and seconds between them
LONG, LONGEST = 100_000, 8.0  # bytes over TCP, and seconds: after 3 s Linux may try smaller packets (tcp_mtu_probing)
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
PEOPLE = 1000  # UID_MIN of login.defs: lower ones are the system's
NOBODY = range(65534, 65536)  # of services, and of users of other namespaces


# ---- the end that listens ----------------------------------------------------------------------------------------
def listen(host: str, token: str, count: int, master: int | None = None) -> Iterator[dict[str, Any]]:
    """Hold ports until the block ends: `count` of them spread over the range from which the kernel chooses, and `master`.

    Whoever connects is told the token and this host's name; datagrams are answered with their length.
    range: of the ephemeral ports; ports: those that are open here; master: its port, absent where it is taken: taken says by whom
    datagrams: a UDP port; long: a TCP port that reads LONG bytes and answers with their number
    control: a TCP port of the loopback that says who was heard, and ends all this
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    first, last = map(int, RANGE.read_text().split()) if RANGE.exists() else (32768, 60999)
    sockets: list[socket.socket] = []
    facts: dict[str, Any] = {"range": [first, last]}

    def open_one(port: int) -> int:
        listening = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        sockets.append(listening)
        return int(listening.getsockname()[1])

    if master is not None:
        try:
            facts["master"] = open_one(master)
        except OSError as error:
            facts["taken"] = holder(master) or error.strerror or "?"
    step = max(1, (last - first + 1) // max(1, count))
    facts["ports"] = [
        port for start in range(first, first + count * step, step) if (port := _first_free(open_one, start, step))
    ]
    datagrams = socket.socket(family, socket.SOCK_DGRAM)
    if both:
        datagrams.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    datagrams.bind(("", 0))
    long = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=1024)
    facts["long"] = long.getsockname()[1]
    threading.Thread(target=_swallow, args=(long, token), daemon=True).start()
    control = socket.create_server(("127.0.0.1", 0))
    facts |= {"datagrams": datagrams.getsockname()[1], "control": control.getsockname()[1]}
    greeting = json.dumps({"token": token, "host": host}).encode()
    threading.Thread(target=_serve, args=(sockets, datagrams, control, greeting, token), daemon=True).start()
    yield facts


def _first_free(open_one: Any, start: int, step: int) -> int:
    for port in range(start, start + min(step, 20)):
        with suppress(OSError):
            return int(open_one(port))
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


def _swallow(server: socket.socket, token: str) -> None:
    """Reads what whoever comes sends, all of them at the same time. It ends with the process, which its master ends."""

    def read(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(2 * LONGEST)
            left = LONG
            while left and (data := connection.recv(min(left, 2**16))):
                left -= len(data)
            connection.sendall(f"{token} {LONG - left}".encode())

    while True:
        with suppress(OSError):
            threading.Thread(target=read, args=(server.accept()[0],), daemon=True).start()


def heard(control: int) -> dict[str, Any]:
    """Return from whom datagrams came in, and end what listens here."""
    with socket.create_connection(("127.0.0.1", control), timeout=5) as asked, asked.makefile() as answer:
        return {"heard": json.load(answer)}


# ---- the end that tries ------------------------------------------------------------------------------------------
def connect(host: str, token: str, targets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Try ports of other hosts, each of them under all of the host's addresses at once. A datagram goes to each besides.

    targets: host -> {"addresses": [...], "ports": [...], "datagrams": port}
    failed: host -> port -> why; hosts of which every port was reached are left out
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return {"failed": asyncio.run(_connect_all(host, token, targets))}


async def _connect_all(host: str, token: str, targets: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    few = asyncio.Semaphore(AT_ONCE)

    async def attempt(peer: str, port: int) -> tuple[str, int, str]:
        async with few:
            tries = [
                asyncio.ensure_future(_greeted(peer, token, address, port)) for address in targets[peer]["addresses"]
            ]
            why = "it has no address"
            try:
                for done in asyncio.as_completed(tries):
                    if not (why := await done):
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


def _say_hello(host: str, token: str, targets: dict[str, dict[str, Any]]) -> None:
    for target in targets.values():
        for address in target["addresses"]:
            with suppress(OSError), socket.socket(family_of(address), socket.SOCK_DGRAM) as sender:
                sender.sendto(f"{token} {host}".encode(), (address, target["datagrams"]))


def packets(host: str, token: str, targets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Send each host a short datagram and one as long as this host's interface takes, which nobody may divide.

    targets: as of connect, and "long": its port; sent: host -> {"size": of the packet, "arrived": see below}
    all: both arrived; none: neither; else only the short one:
    told: the network, or this host, says that the long one is too long, so TCP sends shorter ones
    hangs: it is lost in silence, and so are LONG bytes over TCP; lost: it is lost, and TCP passes or does not connect
    """
    found: dict[str, dict[str, Any]] = {}
    threads = []
    for peer, target in targets.items():

        def work(peer: str = peer, target: dict[str, Any] = target) -> None:
            found[peer] = _packets_to(host, token, target)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return {"sent": found}


def _packets_to(host: str, token: str, target: dict[str, Any]) -> dict[str, Any]:
    sizes = {name["name"]: name["mtu"] for name in interfaces()}
    mine, hello = addresses(), f"{token} {host}".encode()
    senders = {address: sender for address in target["addresses"] if (sender := _sender(address, target["datagrams"]))}
    try:
        if (address := _first_that_answers(senders, hello, token)) is None:
            return {"size": 0, "arrived": "none"}
        sender = senders[address]
        size = min(sizes.get(mine.get(str(sender.getsockname()[0]), ""), 1500), 65535)
        headers = 48 if sender.family == socket.AF_INET6 else 28  # of IP and UDP
        arrived = _answered(sender, hello.ljust(size - headers, b"\0"), token)
        if arrived == "lost" and _hangs(address, target["long"]):
            arrived = "hangs"
        return {"size": size, "arrived": arrived}
    finally:
        for sender in senders.values():
            sender.close()


def _sender(address: str, port: int) -> socket.socket | None:
    """A socket whose datagrams nobody may divide; None where there is no way to that address."""
    sender = socket.socket(family := family_of(address), socket.SOCK_DGRAM)
    six = family == socket.AF_INET6
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
        connection.settimeout(LONGEST)
        try:
            connection.sendall(bytes(LONG))
            connection.recv(200)
        except TimeoutError:
            return True
        except OSError:  # reset by somebody, which is another fault than silence
            pass
    return False


def users() -> dict[str, Any]:
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
