"""The images of prepared samples: where each lies, or its encoded bytes, and the size in which it is read. No pixels."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..host.checksums import Manifest
from .images import ImageSource
from .stored_files import Flat, array

# An image: where its path (is_file) or its encoded bytes stand in DATA, and what else ImageSource says of it.
IMAGE = np.dtype(
    [
        ("begin", np.int64),
        ("end", np.int64),
        ("width", np.int32),
        ("height", np.int32),
        ("is_file", bool),
        ("size", np.int64),
        ("changed", np.int64),
        ("digest", np.uint8, 16),
        ("scaled", bool),
    ]
)
DATA, TABLE, BEGINS = "image_data", "images.npy", "image_begins.npy"


class ImageWriter:
    """Appends the images of samples, in order, to the store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data = (folder / DATA).open("wb")
        self._images: list[tuple[int, int, int, int, bool, int, int, np.ndarray, bool]] = []
        self._begins = [0]

    def add(self, samples: Iterable[tuple[ImageSource, ...]]) -> None:
        for images in samples:
            for image in images:
                begin = self._data.tell()
                self._data.write(os.fsencode(image.path) if image.content is None else image.content)
                about = image.width, image.height, image.content is None, image.size, image.changed
                digest = np.frombuffer(image.digest, np.uint8)
                self._images.append((begin, self._data.tell(), *about, digest, image.scaled))
            self._begins.append(len(self._images))

    def counts(self) -> np.ndarray:
        """Return how many images each sample has; int64 (samples,)."""
        return np.diff(self._begins)

    def scaled(self) -> np.ndarray:
        """Return how many images of each sample are scaled before the processor sees them; int64 (samples,)."""
        return np.diff(np.cumsum([0, *(image[-1] for image in self._images)])[self._begins])

    def close(self) -> None:
        self._data.close()
        np.save(self.folder / TABLE, np.array(self._images, IMAGE))
        np.save(self.folder / BEGINS, np.array(self._begins, np.int64))


class StoredImages:
    """The images in a folder's store, each read when it is asked for."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        """Raises DamagedFile, as reading an image does, where a file is not what was written.

        manifest: the folder's, where it was read already
        """
        manifest = manifest or Manifest(folder)
        self._data = Flat(manifest, DATA, np.uint8)
        self._table, self._begins = array(manifest, TABLE), array(manifest, BEGINS)

    @staticmethod
    def are_in(manifest: Manifest) -> bool:
        """Whether the samples of a folder may have images."""
        return BEGINS in manifest

    def of(self, sample: int) -> list[ImageSource]:
        """Return the images of a sample, in the order of their tokens."""
        return [self._image(number, int(sample)) for number in range(self._begins[sample], self._begins[sample + 1])]

    def _image(self, number: int, sample: int | None = None) -> ImageSource:
        begin, end, width, height, is_file, size, changed, digest, scaled = self._table[number].tolist()
        content = self._data[begin:end].tobytes()
        path = os.fsdecode(content) if is_file else ""
        encoded = None if is_file else content
        return ImageSource(path, encoded, width, height, size, bytes(digest), changed, sample, scaled)

    def one(self) -> ImageSource:
        """Return the first image that is scaled before the processor sees it, or else the first one. There has to be one."""
        return self._image(int(self._table["scaled"].argmax()))

    def changed(self) -> ImageSource | None:
        """Return the first file that is no longer what was prepared, or cannot be read; None where there is none."""
        files = (self._image(int(number)) for number in np.flatnonzero(self._table["is_file"]))
        return next((image for image in files if not image.is_unchanged()), None)

    def digest(self) -> str:
        """Return what identifies the content of all images, and the sizes in which they are read; not where they lie."""
        sizes = np.stack([self._table["width"], self._table["height"]], axis=1)
        whole = hashlib.sha256(np.ascontiguousarray(self._begins).tobytes())
        whole.update(np.ascontiguousarray(self._table["digest"]).tobytes())
        whole.update(sizes.astype(np.int64).tobytes())
        return whole.hexdigest()
