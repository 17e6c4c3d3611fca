"""Images beside texts: where each one lies, how large the processor gets it, and whether it can be read. Imports no torch.

While data is prepared an image is decoded once, for its size and to see that it is whole. Its pixels are not kept: a file is read
again when it is trained on, and has to be the same one then.
"""

import base64
import binascii
import functools
import hashlib
import io
import math
import re
import time
import warnings
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from ...errors import UserError, Whose, first_line, shown, whose
from ..host.files import LFS_CURE, is_lfs_pointer
from ..host.limits import IMAGE_BYTES, time_limit
from .rows import BadRow

if TYPE_CHECKING:
    from PIL import Image

MARK = "\ue001"  # of Unicode's private use: an image within the text of a message
# What is opened: not all that PIL knows, for it hands EPS to another program.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
STILL = ("MPO",)  # a camera's JPEG, behind whose picture its previews lie
DEEP = ("I", "F")  # modes of PIL, or their beginnings, whose values have more than 8 bits
DROP = "replace the image, or drop the row"
FETCH_SECONDS, FETCH_TRIES = 30.0, 3
FETCH_WHOLE = 300.0  # seconds for all of an image, however slowly it comes
_BUSY = (408, 429)  # answers of a server that may give another one later, as those from 500 on
# How JPEG, PNG, GIF, WebP, BMP and TIFF begin in base64. Paths have a point, which base64 has not.
BASE64 = re.compile(r"(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk|SUkq|TU0A)[A-Za-z0-9+/\s]{48,}={0,2}\s*")
_URL = re.compile(r"https?://", re.IGNORECASE)


class ImageRules(NamedTuple):
    """What a recipe says of images: data.max_pixels, data.min_pixels, data.fetch_images."""

    max_pixels: int | None = None
    min_pixels: int | None = None
    fetch: bool = False

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height that the processor gets of an image of this size: at most max_pixels, at least min_pixels,
        and each side at least 1."""
        pixels = width * height
        if self.max_pixels and pixels > self.max_pixels:
            scale = math.sqrt(self.max_pixels / pixels)
            width, height = max(1, int(width * scale)), max(1, int(height * scale))
            width = max(1, min(width, self.max_pixels // height))
            return width, min(height, self.max_pixels // width)
        if self.min_pixels and pixels < self.min_pixels:
            scale = math.sqrt(self.min_pixels / pixels)
            return math.ceil(width * scale), math.ceil(height * scale)
        return width, height


NO_RULES = ImageRules()


class ImageProcessor(Protocol):
    """The parts of a model's image processor (model/images/processor.py) that decide how samples are encoded."""

    image_token: str
    image_token_id: int
    scales: bool

    def expansion(self, width: int, height: int) -> str: ...

    def identity(self) -> str: ...


class LostImage(UserError):
    """An image file that is no longer what was prepared. sample: whose it is, by its number in the store; None: not known"""

    sample: int | None = None


class ImageSource(NamedTuple):
    """An image of a sample, not yet decoded.

    path: of its file, "" where there is none; content: the encoded bytes, where it is no file
    width, height: of what the processor gets, in pixels: after EXIF rotation and max_pixels or min_pixels
    size: of the encoded bytes; digest: of them, 16 bytes; changed: of a file, when it was changed last, in ns
    sample: whose it is, by its number in the store, where a store has it
    scaled: whether max_pixels or min_pixels made it another size
    """

    path: str
    content: bytes | None
    width: int
    height: int
    size: int = 0
    digest: bytes = b""
    changed: int = 0
    sample: int | None = None
    scaled: bool = False

    def open(self) -> "Image.Image":
        """Return the image in RGB, rotated as EXIF says, scaled to (width, height). Raises LostImage for a file that has
        changed since data was prepared, or cannot be read any more."""
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(self.encoded()), formats=_formats()) as opened:
            image = in_rgb(ImageOps.exif_transpose(opened))
        size = (self.width, self.height)
        return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)

    def encoded(self) -> bytes:
        """Return the encoded bytes. Raises LostImage as open() does."""
        if self.content is not None:
            return self.content
        try:
            content = Path(self.path).read_bytes()
        except OSError as error:
            problem = f"it was there when data was prepared, and cannot be read now: {error.strerror}"
            raise self._lost(problem, "host" if whose.of_error(error)[0] == "host" else "user") from None
        if digest_of(content) != self.digest:
            raise self._lost("it has changed since data was prepared", "user")
        return content

    def _lost(self, problem: str, of: Whose) -> LostImage:
        error = LostImage(self.path, problem, "put it back as it was; a new run prepares the data again", of)
        error.sample = self.sample
        return error

    def is_unchanged(self) -> bool:
        """Whether the file is still the same one: its size and the time of its last change say so, or else its content."""
        if self.content is not None:
            return True
        try:
            status = Path(self.path).stat()
            if status.st_size != self.size:
                return False
            return status.st_mtime_ns == self.changed or digest_of(Path(self.path).read_bytes()) == self.digest
        except OSError:
            return False


def in_rgb(image: "Image.Image") -> "Image.Image":
    """Return an image in RGB. What is transparent is laid on white, as by Transformers' convert_to_rgb (image_transforms.py)."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def digest_of(content: bytes) -> bytes:
    """Return what identifies an image's encoded bytes; 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()


class ImageReader:
    """Reads the images of a file's rows. rules: the recipe's; folder: where relative paths begin"""

    def __init__(self, rules: ImageRules, folder: Path) -> None:
        self.rules, self.folder = rules, folder
        self._known: dict[str, ImageSource] = {}

    def read(self, given: object) -> ImageSource:
        """Return an image as a row gives it: a path, an address, base64, or {"bytes", "path"} as the datasets library stores it.
        Raises BadRow, naming it, for one that is missing, broken, animated or too large."""
        if isinstance(given, dict):
            content = given.get("bytes")
            content = _from_base64(content, "bytes") if isinstance(content, str) else content
            if isinstance(content, (bytes, bytearray)):
                return self._embedded(
                    bytes(content), f"the image {given['path']!r}" if given.get("path") else "the image"
                )
            given = given.get("path") or given.get("url") if content is None else given
        if isinstance(given, (bytes, bytearray)):
            return self._embedded(bytes(given), "the image")
        if not isinstance(given, str) or not given:
            raise BadRow(f"an image is {shown(given)}", 'give a path, base64, or {"bytes": ..., "path": ...}')
        if given.startswith("data:"):
            about, comma, text = given.partition(",")
            if not comma or not about.endswith(";base64"):
                raise BadRow(f"the image {shown(given)} is no base64", "write data:image/png;base64,... or a path")
            return self._embedded(_from_base64(text, "the image"), "the image")
        if _URL.match(given):
            return self._embedded(self._fetched(given), f"the image {given}")
        if BASE64.fullmatch(given):
            return self._embedded(_from_base64(given, "the image"), "the image")
        return self._file(given)

    def _file(self, given: str) -> ImageSource:
        name = unquote(urlsplit(given).path) if given.startswith("file://") else given
        path = (self.folder / Path(name).expanduser()).absolute()
        if str(path) in self._known:
            return self._known[str(path)]
        where = "" if Path(name).is_absolute() else f" (relative paths begin at {self.folder}; image_folder changes it)"
        try:
            if not path.is_file():
                problem = "is no file" if path.exists() else "is missing"
                raise BadRow(f"the image {given!r} {problem}{where}", "fix the path, or drop the row")
            status = path.stat()
            _refuse_bytes(status.st_size, f"the image {given!r}")
            content = path.read_bytes()
        except (OSError, ValueError, RuntimeError) as error:  # a name of 300 letters, one with a zero byte, ~nobody
            raise BadRow(f"the image {shown(given)} cannot be read: {first_line(error)}", "fix the path") from None
        source = self._looked_at(content, f"the image {given!r}")
        known = source._replace(path=str(path), content=None, changed=status.st_mtime_ns)
        self._known[str(path)] = known
        return known

    def _embedded(self, content: bytes, called: str) -> ImageSource:
        _refuse_bytes(len(content), called)
        return self._looked_at(content, called)

    def _looked_at(self, content: bytes, called: str) -> ImageSource:
        size = _size_of(content, called)
        width, height = self.rules.scaled(*size)
        digest, scaled = digest_of(content), (width, height) != size
        return ImageSource("", content, width, height, len(content), digest, scaled=scaled)

    def _fetched(self, address: str) -> bytes:
        if not self.rules.fetch:
            problem = f"the image {shown(address)} lies on another host, and data.fetch_images is not set"
            raise BadRow(problem, "set fetch_images: true to fetch it once, or give a file")
        return _fetched(address)


def folder_of_images(given: str | None, source: str) -> Path:
    """Return where relative paths of images begin. given: Source.image_folder; source: the file or data set with the rows"""
    if given is not None:
        return Path(given).expanduser().absolute()
    place = Path(source).absolute()
    return place if place.is_dir() else place.parent


def _formats() -> list[str]:
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _size_of(content: bytes, called: str) -> tuple[int, int]:
    """Return width and height of an image, rotated as EXIF says, once it has been decoded to its end. Raises BadRow."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=_formats()) as image:
                frames = getattr(image, "n_frames", 1)
                if frames > 1 and image.format not in STILL:
                    raise BadRow(f"{called} has {frames:,} frames", f"give the one that is meant; {DROP}")
                if image.mode.startswith(DEEP):
                    raise BadRow(f"{called} has values of more than 8 bits (mode {image.mode})", "save it with 8 bits")
                image.load()
                width, height = ImageOps.exif_transpose(image).size
                return width, height
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadRow(f"{called} is too large: {first_line(error)}", f"scale it down; {DROP}") from None
    except (BadRow, MemoryError):
        raise
    except Exception as error:  # PIL's readers raise what they meet
        if is_lfs_pointer(content):
            raise BadRow(f"{called} is a pointer of Git LFS, not the image itself", LFS_CURE) from None
        problem = "it is of no format that is read" if isinstance(error, Image.UnidentifiedImageError) else ""
        raise BadRow(f"{called} is broken: {problem or first_line(error)}", DROP) from None


def _refuse_bytes(size: int, called: str) -> None:
    if size > IMAGE_BYTES:
        limit = f"{IMAGE_BYTES / 2**20:g} MiB (IMAGE_BYTES in brigade/train/host/limits.py)"
        raise BadRow(f"{called} has {size / 2**20:,.0f} MiB, more than {limit}", DROP)


def _from_base64(text: str, called: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(f"{called} is no base64: {first_line(error)}", DROP) from None


@functools.lru_cache(maxsize=16)
def _fetched(address: str) -> bytes:
    """Return what an address gives. Raises BadRow where its host has no such image, and UserError where it does not answer, which
    is not the row's fault: another try, or another host, would prepare other data."""
    for left in reversed(range(FETCH_TRIES)):
        try:
            request = Request(address, headers={"User-Agent": "Mozilla/5.0 (compatible; Brigade)"})
            # As a whole, headers too: a connection's timeout begins anew with each byte.
            with time_limit(FETCH_WHOLE), urlopen(request, timeout=FETCH_SECONDS) as answer:
                return cast(bytes, answer.read(IMAGE_BYTES + 1))
        except HTTPError as error:
            if error.code < 500 and error.code not in _BUSY:
                raise BadRow(f"the image {address} cannot be fetched: {error.code} {error.reason}", DROP) from None
            reason = f"{error.code} {error.reason}"
        except (OSError, HTTPException) as error:
            reason = first_line(error)
        except ValueError as error:  # no address
            raise BadRow(f"the image {shown(address)} cannot be fetched: {first_line(error)}", DROP) from None
        time.sleep(left and 1.0)
    cure = "look whether this host may reach it (proxies are taken from the environment), or download the images"
    raise UserError(address, f"the image cannot be fetched: {reason}", cure)
