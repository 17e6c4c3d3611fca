"""Lines that two who share a token know to be each other's, over a connection that others can read and write.

First each sends a nonce. Then a line is `HMAC-SHA256 message`, under a key of the token, both nonces and the side that speaks,
over the line's number and its message. So the token is never sent, and a line of somebody else, of another connection, of the
other side, or said for the second time, or out of turn, is no line. It hides nothing: whoever is between the two reads what
they say, and can keep it from arriving.
"""

import hashlib
import hmac
import secrets

NONCE = 64  # letters
SIDES = ("coordinator", "replica")
OVERHEAD = 66  # bytes of a line beside its message


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
