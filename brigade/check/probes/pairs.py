"""What TCP reaches between two hosts. Needs only the standard library: no host imports torch for it.

One host listens until it is released, and others send to it. The receiving end decides when the time is over, so that each pair
takes equally long, however slow its link is.
"""

import asyncio
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ...hosts import Facts
from ...hosts.held_port import listening_socket, ways_to

BLOCK = 2**20
CONNECT = 3.0  # seconds
DRAIN = 5.0
WELCOME = "welcome\n"  # what the end that listens says to whoever greets it


def serve(token: str) -> Iterator[Facts]:
    """Listen on a port of the system's choice, and take what others send. token: what they have to know

    free: another port, which is kept free for torch's store: two sockets may have it while neither listens, and no third takes it
    """
    listening = listening_socket(0)
    threading.Thread(target=_accept, args=(listening, token), daemon=True).start()
    with socket.socket(listening.family) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", 0))
        yield {"port": listening.getsockname()[1], "free": kept.getsockname()[1], "links": links(), "fabric": fabric()}


def links() -> dict[str, Facts]:
    """Interface -> speed in Mbit/s, None where it does not know its own; real: a card or several, whose speed means something
    (a veth says 10,000 whatever lies below it)."""
    found = {}
    for path in Path("/sys/class/net").glob("*"):
        speed = 0
        with suppress(OSError, ValueError):
            speed = int((path / "speed").read_text())
        real = (path / "device").exists() or (path / "bonding").exists()
        found[path.name] = {"speed": speed if speed > 0 else None, "real": real}
    return found


def fabric() -> float:
    """Gbit/s of all InfiniBand and RoCE ports that are up, which NCCL takes before TCP; 0 without any."""
    rates = 0.0
    for port in Path("/sys/class/infiniband").glob("*/ports/*"):
        with suppress(OSError, ValueError, IndexError):
            if "ACTIVE" in (port / "state").read_text():
                rates += float((port / "rate").read_text().split()[0])  # `400 Gb/sec (4X NDR)`
    return rates


def way(addresses: list[str], port: int, token: str) -> Facts:
    """Try to reach a listening host by each of its addresses: address -> who answers there, and our own address and interface on
    that way, or what went wrong."""
    return asyncio.run(ways_to(addresses, port, WELCOME, CONNECT, _line_of({"token": token, "do": "greet"})))


def send(address: str, port: int, token: str, streams: int, warm_up: float, window: float, attempt: int = 0) -> Facts:
    """Send to a listening host, or error.

    gbit: Gbit/s that arrived there, over `window` s after `warm_up`, by all streams together
    busy: the share of that time in which the busier end's threads computed or waited for a processor: near 1, the network was
        not what bounded it
    lost: the share of segments that were sent again; round_trip: the shortest, in ms
    attempt: makes a repeated question another one
    """
    order = {"token": token, "do": "take", "warm_up": warm_up, "window": window}
    answers: list[Facts] = []
    errors: list[str] = []

    def stream() -> None:
        try:
            with _connect(address, port, order) as connection:
                answers.append(_push(connection, warm_up + window + DRAIN))
        except OSError as error:
            errors.append(_words(error))
        except ValueError:
            errors.append("the other end broke off")

    threads = [threading.Thread(target=stream, daemon=True) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(CONNECT + warm_up + window + 2 * DRAIN)
    if errors or len(answers) < streams:
        return {"error": errors[0] if errors else "it does not end"}
    rate = sum(answer["bytes"] / answer["seconds"] for answer in answers)
    busy = max(sum(answer[end] for answer in answers) / streams for end in ("taker", "sender"))
    again, segments = (sum(answer[key] for answer in answers) for key in ("again", "segments"))
    round_trip = min(answer["round_trip"] for answer in answers)
    lost = again / segments if segments else 0.0
    return {"gbit": rate * 8e-9, "busy": round(busy, 3), "lost": round(lost, 5), "round_trip": round_trip}


def _connect(address: str, port: int, order: Facts) -> socket.socket:
    connection = socket.create_connection((address, port), CONNECT)
    connection.sendall(_line_of(order))
    return connection


def _line_of(message: Facts) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _words(error: OSError) -> str:
    return f"no answer within {CONNECT:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _push(connection: socket.socket, limit: float) -> Facts:
    """Send until the other end has counted enough. Raises OSError, ValueError where it says nothing."""
    connection.settimeout(limit)
    block, began, busy = memoryview(bytes(BLOCK)), time.monotonic(), _processor()
    while True:
        readable, writable, _ = select.select([connection], [connection], [], limit)
        if readable:
            break
        if not writable or time.monotonic() - began > limit:
            raise TimeoutError
        connection.send(block)
    share = (_processor() - busy) / (time.monotonic() - began)
    seen = _seen(connection)
    said = connection.makefile("rb").readline()
    # What still waits to be sent is of no use: drop it.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return {**json.loads(said), **seen, "sender": share}


def _seen(connection: socket.socket) -> Facts:
    """Return what TCP saw of the way: segments that it sent, how many of them again, and the shortest round trip in ms.

    From struct tcp_info of linux/tcp.h, which only grows at its end: tcpi_total_retrans, tcpi_data_segs_out, tcpi_min_rtt (us).
    """
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(told) < 160:
        return {"again": 0, "segments": 0, "round_trip": 0.0}
    again, shortest, segments = (struct.unpack_from("I", told, offset)[0] for offset in (100, 148, 156))
    return {"again": again, "segments": segments, "round_trip": 0.0 if shortest == 2**32 - 1 else shortest / 1000}


def _accept(listening: socket.socket, token: str) -> None:
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_serve, args=(connection, token), daemon=True).start()


def _serve(connection: socket.socket, token: str) -> None:
    with connection, suppress(OSError, ValueError, KeyError):
        connection.settimeout(DRAIN)
        order = json.loads(_line(connection))
        if order["token"] != token:
            return
        if order["do"] == "greet":
            connection.sendall(WELCOME.encode())
            return
        connection.sendall(_line_of(_take(connection, order["warm_up"], order["window"])))
        connection.settimeout(DRAIN)
        scratch = bytearray(BLOCK)
        while connection.recv_into(scratch):
            pass


def _line(connection: socket.socket) -> bytes:
    line, byte = b"", b"?"
    while byte and not line.endswith(b"\n") and len(line) < 1000:
        byte = connection.recv(1)
        line += byte
    return line


def _take(connection: socket.socket, warm_up: float, window: float) -> Facts:
    """Count what arrives in `window` seconds after `warm_up`."""
    scratch, count = bytearray(BLOCK), 0
    first = time.monotonic() + warm_up
    _take_until(connection, scratch, first)
    began, busy = time.monotonic(), _processor()
    count = _take_until(connection, scratch, began + window)
    passed = time.monotonic() - began
    return {"bytes": count, "seconds": passed, "taker": (_processor() - busy) / passed}


def _take_until(connection: socket.socket, scratch: bytearray, end: float) -> int:
    count = 0
    while (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        with suppress(TimeoutError):
            got = connection.recv_into(scratch)
            if not got:
                raise ConnectionResetError
            count += got
    return count


def _processor() -> float:
    """Seconds that this thread has computed or waited for a processor."""
    try:
        computed, waited = map(int, Path("/proc/thread-self/schedstat").read_text().split()[:2])
    except (OSError, ValueError):  # a kernel without CONFIG_SCHED_INFO
        return time.thread_time()
    return (computed + waited) * 1e-9
