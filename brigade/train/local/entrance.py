"""The entrance of an elastic run's coordinator: whoever shows soon, and in few bytes, that it knows the run's token may speak
to it. From then on two who share the token know each other's lines, over a connection that others can read and write.

First each sends a nonce. Then a line is `HMAC-SHA256 message`, under a key of the token, both nonces and the side that speaks,
over the line's number and its message. So the token is never sent, and a line of somebody else, of another connection, of the
other side, or said for the second time, or out of turn, is no line. It hides nothing: whoever is between the two reads what
they say, and can keep it from arriving.
"""

import asyncio
import hashlib
import hmac
import json
import secrets
from collections import Counter
from typing import Any

NONCE = 64  # letters
SIDES = ("coordinator", "replica")


def nonce() -> bytes:
    """A line to begin with: what nobody has sent before."""
    return secrets.token_hex(NONCE // 2).encode() + b"\n"


class Seal:
    """The seal of one connection: it seals the lines of `side`, and opens those of the other.

    nonces: the line of the coordinator and the one of the replica. Raise ValueError where they are none.
    """

    def __init__(self, token: str, side: str, nonces: tuple[bytes, bytes]) -> None:
        if any(len(line) != NONCE + 1 or not line.endswith(b"\n") for line in nonces):
            raise ValueError("no nonce")
        keys = {each: _mac(token.encode(), each.encode() + b" " + b"".join(nonces)) for each in SIDES}
        self._ours = keys.pop(side)
        (self._theirs,) = keys.values()
        self._sent = self._got = 0

    def seal(self, message: bytes) -> bytes:
        """The next line, of a message without line breaks."""
        line = _mark_of_line(self._ours, self._sent, message) + b" " + message + b"\n"
        self._sent += 1
        return line

    def open(self, line: bytes) -> bytes:
        """The message of the next line. Raise ValueError for any other line."""
        mark, _, message = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or not hmac.compare_digest(mark, _mark_of_line(self._theirs, self._got, message)):
            raise ValueError("a line of somebody else")
        self._got += 1
        return message


def _mark_of_line(key: bytes, number: int, message: bytes) -> bytes:
    return _mac(key, number.to_bytes(8, "big") + message).hex().encode()


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)


GREETING = 5.0  # seconds until `hello`
FIRST = 2**12  # bytes of a line until then
WAITING = 64  # connections without `hello`; of more one is dropped, and an honest replica tries again
SAID = 2**20  # bytes that a replica says at once: a few hundred a rank, and when it comes digests of all files of code

Message = dict[str, Any]  # a line of JSON, between a replica and the coordinator


def longest(replicas: int) -> int:
    """Bytes of the longest line: what all replicas have said, which a replica that comes back repeats besides what it runs."""
    return SAID * (replicas + 2)


class Line:
    """A replica's connection, once it is known to be one. write() and close() as a StreamWriter has them."""

    def __init__(
        self, replica: int, seal: Seal, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, most: int
    ) -> None:
        self.replica, self.most, self.close = replica, most, writer.close
        self._seal, self._reader, self._writer = seal, reader, writer

    def write(self, message: bytes) -> None:
        self._writer.write(self._seal.seal(message))

    async def read(self) -> Message:
        """The next message. Raise ValueError for one that is not the replica's or too long, EOFError at the end."""
        line = bytearray()
        while not line.endswith(b"\n"):
            try:
                line += await self._reader.readuntil(b"\n")
            except asyncio.LimitOverrunError as over:  # the reader keeps no more than FIRST
                line += await self._reader.readexactly(over.consumed)
            if len(line) > self.most:
                raise ValueError("a line without an end")
        return json.loads(self._seal.open(bytes(line)))


class Entrance:
    """replicas: that the run may have"""

    def __init__(self, replicas: int, token: str) -> None:
        self.replicas, self.token = replicas, token
        self.waiting: dict[asyncio.StreamWriter, str] = {}  # until `hello`, the oldest first: from where

    async def admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Line:
        """Raise ValueError, KeyError, TypeError, OSError or EOFError for what is not a replica."""
        self.waiting[writer] = (writer.get_extra_info("peername") or ("",))[0]
        if len(self.waiting) > WAITING:
            self._drop_one()
        try:
            async with asyncio.timeout(GREETING):
                ours = nonce()
                writer.write(ours)
                theirs = await reader.readexactly(len(ours))
                seal = Seal(self.token, "coordinator", (ours, theirs))
                replica = json.loads(seal.open(await reader.readline()))["hello"]
        finally:
            self.waiting.pop(writer, None)
        if replica not in range(self.replicas):
            raise ValueError(replica)
        return Line(replica, seal, reader, writer, longest(self.replicas))

    def _drop_one(self) -> None:
        """The oldest of the host that has the most: a host that floods drops its own."""
        ((crowd, _),) = Counter(self.waiting.values()).most_common(1)
        oldest = next(writer for writer, host in self.waiting.items() if host == crowd)
        del self.waiting[oldest]
        oldest.transport.abort()
