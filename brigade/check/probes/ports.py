"""Ports and packets between hosts: one end listens, the other one tries. By the standard library alone."""

import asyncio
import errno
import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...launch.host_facts import addresses, holder
from .reach import family_of, interfaces

IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PROBE = 10, 23, 3  # linux/in.h, linux/in6.h: never divide, ask no cache
CONNECTING = 5.0  # seconds: three tries of TCP
AT_ONCE = 64  # ports that one host tries at a time, each under a few addresses: an open file each
RETRIES, PAUSE = 4, 0.25  # of a datagram, and seconds between them
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


# ---- the end that listens ----------------------------------------------------------------------------------------
def listen(host: str, token: str, count: int, master: int | None = None) -> Iterator[dict[str, Any]]:
    """Hold ports until the block ends: `count` of them spread over the range from which the kernel chooses, and `master`.

    Whoever connects is told the token and this host's name; datagrams are answered with their length.
    range: of the ephemeral ports; ports: those that are open here; master: its port, absent where it is taken: taken says by whom
    datagrams: a UDP port; control: a TCP port of the loopback that says who was heard, and ends all this
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    first, last = map(int, RANGE.read_text().split()) if RANGE.exists() else (32768, 60999)
    sockets: list[socket.socket] = []
    facts: dict[str, Any] = {"range": [first, last]}

    def open_one(port: int) -> int:
        one = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        sockets.append(one)
        return int(one.getsockname()[1])

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
    """Until the control port is asked."""
    heard: set[str] = set()
    selector = selectors.DefaultSelector()
    for one in (*sockets, datagrams, control):
        one.setblocking(False)
        selector.register(one, selectors.EVENT_READ)
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


def heard(control: int) -> dict[str, Any]:
    """From whom datagrams came in; what listens here ends."""
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
                for one in tries:
                    one.cancel()
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

    targets: as of connect; sent: host -> {"size": of the packet, "arrived": "all", "short" (only the short one) or "none"}
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
    mine = addresses()
    for address in target["addresses"]:
        with suppress(OSError), socket.socket(family := family_of(address), socket.SOCK_DGRAM) as sender:
            six = family == socket.AF_INET6
            level, option = (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER) if six else (socket.IPPROTO_IP, IP_MTU_DISCOVER)
            sender.setsockopt(level, option, PROBE)
            sender.connect((address, target["datagrams"]))
            hello = f"{token} {host}".encode()
            if not _answered(sender, hello, token):
                continue
            size = min(sizes.get(mine.get(str(sender.getsockname()[0]), ""), 1500), 65535)
            full = hello.ljust(size - (48 if six else 28), b"\0")  # headers of IP and UDP
            return {"size": size, "arrived": "all" if _answered(sender, full, token) else "short"}
    return {"size": 0, "arrived": "none"}


def _answered(sender: socket.socket, data: bytes, token: str) -> bool:
    """Whether the other end says that all of it came in."""
    sender.settimeout(PAUSE)
    for number in range(RETRIES):
        try:
            sender.send(data)
            until = time.monotonic() + PAUSE * (number + 1)
            while time.monotonic() < until:
                with suppress(TimeoutError):
                    if sender.recv(200) == f"{token} {len(data)}".encode():
                        return True
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return False
            time.sleep(PAUSE)  # refused: the other end is not there yet, or a firewall says so
    return False
