"""Checksums of what Brigade keeps: of a JSON document, and of a folder's files in blocks.

They find what disks, copies and editors have done. They are not a signature: whoever changes a file can change its checksum too.
"""

import functools
import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from ...errors import UserError
from ...errors.tables import Document, Fields

ALGORITHM = "xxh3_128"  # 5.6 GiB/s on one core, where CRC-32 has 1.6 and SHA-256 has 1.0
MANIFEST = ".manifest.json"  # of a folder; write_manifest() says what is in it
BLOCK = 2**17  # bytes: what Linux reads ahead, so that a block is hardly more to read than a part of it
SAMPLED = 16  # blocks of a file that of_samples() reads: 2 MiB
_SUM = 8  # bytes of a block's checksum, xxh3_64
_NO_DIGEST = "0" * 32


def sealed(document: Document) -> str:
    """Return a document as JSON with a key `itself`: the checksum of the text, in which it counts as zeros."""
    text = json.dumps({"itself": _NO_DIGEST, **document}, indent=1, default=str)
    return text.replace(_NO_DIGEST, _digest(text), 1)


def unsealed(text: str) -> Fields:
    """Return the document of which sealed() made a text. Raises ValueError where that is not what was written."""
    document = json.loads(text)
    if not isinstance(document, dict) or not is_itself(text, document.pop("itself", None)):
        raise ValueError("it is not what was written: its checksum is another")
    return document


def is_itself(text: str, itself: object) -> bool:
    """Whether a text that sealed() made is what was written. itself: the checksum in it"""
    if not isinstance(itself, str) or len(itself) != len(_NO_DIGEST):
        return False
    return _digest(text.replace(itself, _NO_DIGEST, 1)) == itself


def _digest(text: str) -> str:
    return xxhash.xxh3_128(text.encode()).hexdigest()


def of_file(path: Path) -> str:
    """Return the xxh3_128 of a file, in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(16 * 2**20):
            digest.update(block)
    return digest.hexdigest()


def of_samples(path: Path) -> str:
    """Return the xxh3_128 of SAMPLED blocks of a file, evenly spread, with its first and its last: whatever its size, it takes
    milliseconds. It finds another file, and one whose parts were lost, but no single bit."""
    digest, last = xxhash.xxh3_128(), max(0, path.stat().st_size - 1) // BLOCK
    with path.open("rb", buffering=0) as file:
        for block in sorted({last * number // (SAMPLED - 1) for number in range(SAMPLED)}):
            digest.update(os.pread(file.fileno(), BLOCK, block * BLOCK))
    return digest.hexdigest()


def write_manifest(folder: Path, name: str) -> None:
    """Write the manifest of a folder that will have this name: {"name", "files": {name: {"bytes", "blocks"}}}, blocks being the
    checksums of its blocks as hexadecimal digits. Links are left out: what they lead to is another's."""
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path != folder / MANIFEST
    )
    entries = {}
    for path in paths:
        with path.open("rb", buffering=0) as file:
            blocks = [xxhash.xxh3_64_hexdigest(block) for block in iter(lambda: file.read(BLOCK), b"")]
            entries[str(path.relative_to(folder))] = {"bytes": file.tell(), "blocks": "".join(blocks)}
    (folder / MANIFEST).write_text(sealed({"name": name, "files": entries}))


class DamagedFile(UserError):
    """A file of a folder is not what was written."""


class Manifest:
    """The manifest of a folder, and which blocks of its files have been compared with it."""

    def __init__(self, folder: Path) -> None:
        """Raises DamagedFile for a manifest that is not what was written, or is another folder's."""
        self.folder = folder
        if not (folder / MANIFEST).is_file():  # a pipe would be waited for
            raise self._damaged(MANIFEST, "is missing, as in what an earlier version of Brigade wrote")
        try:
            document = unsealed((folder / MANIFEST).read_text())
            entries = {
                name: (entry["bytes"], bytes.fromhex(entry["blocks"])) for name, entry in document["files"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._damaged(MANIFEST, "is not what was written") from None
        if document.get("name") != folder.name:
            raise self._damaged(MANIFEST, f"is that of {document.get('name')}")
        self.bytes = {name: size for name, (size, _) in entries.items()}
        self._sums = {name: sums for name, (_, sums) in entries.items()}
        self._seen = {name: bytearray(len(sums) // _SUM) for name, sums in self._sums.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.bytes

    def check_size(self, name: str) -> None:
        """Raises DamagedFile for a file that is not there with its size."""
        path, size = self.folder / name, self.bytes.get(name, 0)
        if not path.is_file():
            raise self._damaged(name, "is missing")
        there = path.stat().st_size
        if there != size:
            raise self._damaged(name, f"has {there:,} bytes of {size:,}")

    def check(self, name: str, read: Callable[[int], Any], begin: int, end: int) -> None:
        """Compare the blocks that hold the bytes from `begin` to `end` of a file, unless they have been compared before.

        read: gives the block that begins at this byte, as bytes or an array. Raises DamagedFile where one is not what was written
        """
        seen, sums = self._seen[name], self._sums[name]
        last = -(-end // BLOCK)
        block = seen.find(0, begin // BLOCK, last)
        while block >= 0:
            if xxhash.xxh3_64_digest(read(block * BLOCK)) != sums[block * _SUM : (block + 1) * _SUM]:
                with suppress(OSError):  # so that its next opening reads it whole
                    os.utime(self.folder / MANIFEST)
                raise self._damaged(name, f"is not what was written from byte {block * BLOCK:,} on")
            seen[block] = 1
            block = seen.find(0, block + 1, last)

    def check_file(self, name: str, most: int | None = None) -> None:
        """Compare all blocks of a file, or `most` of them that are drawn at random. Raises DamagedFile."""
        self.check_size(name)
        blocks = range(len(self._seen[name]))
        with (self.folder / name).open("rb") as file:
            read = functools.partial(os.pread, file.fileno(), BLOCK)
            for block in blocks if most is None else random.sample(blocks, min(most, len(blocks))):
                self.check(name, read, block * BLOCK, (block + 1) * BLOCK)

    def _damaged(self, name: str, problem: str) -> DamagedFile:
        cure = f"start again: it is made anew. Where it cannot be written to, remove {self.folder} first"
        return DamagedFile(str(self.folder), f"{name} {problem}", cure, "passing")
