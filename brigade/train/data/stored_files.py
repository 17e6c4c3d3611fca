"""The files of a store, compared with its manifest before anything of them is used."""

import numpy as np
from numpy.typing import DTypeLike

from ..host.checksums import BLOCK, Manifest


class Flat:
    """A file of values end to end, mapped into memory. A block of it is compared with its checksum when it is read first."""

    def __init__(self, manifest: Manifest, name: str, dtype: DTypeLike) -> None:
        """Raises DamagedFile where the file has another size than it was written with."""
        manifest.check_size(name)
        self._manifest, self._name = manifest, name
        # A file of no bytes cannot be mapped.
        self._bytes = (
            np.memmap(manifest.folder / name, np.uint8, "r") if manifest.bytes[name] else np.zeros(0, np.uint8)
        )
        self._values = self._bytes.view(dtype)

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return a part whose ends are given. Raises DamagedFile where it is not what was written."""
        size = self._values.itemsize
        self._manifest.check(self._name, self._block, int(part.start) * size, int(part.stop) * size)
        return self._values[part]

    def _block(self, begin: int) -> np.ndarray:
        return self._bytes[begin : begin + BLOCK]


def array(manifest: Manifest, name: str) -> np.ndarray:
    """Return an array that np.save wrote, mapped into memory, once all of it is what was written. Raises DamagedFile."""
    manifest.check_file(name)
    return np.load(manifest.folder / name, mmap_mode="r")  # type: ignore[no-any-return]
