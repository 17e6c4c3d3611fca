"""Object storage: a folder of objects by its URL, for a run's output and for data. This module imports no torch.

s3:// and gs:// are PyArrow's, which is pinned for data sets; hf:// is huggingface_hub's; any other scheme is fsspec's, with the
package that it names. Credentials come from where each of them looks for them (docs/hub.md), and stand in no message.
"""

import fnmatch
import hashlib
import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from ..errors import UserError, first_line
from ..errors.tables import table
from . import cache, hub
from .files import MOST

LOCAL = "BRIGADE_LOCAL_OUTPUT"  # the folder below which runs lie locally whose output is in object storage
CONNECT, SILENCE = 10.0, 60.0  # seconds without a connection, and without a byte
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_PACKAGES = {"abfs": "adlfs", "abfss": "adlfs", "az": "adlfs", "r2": "s3fs", "oci": "ocifs", "oss": "ossfs"}
_BLOCK = 16 * 2**20


def is_remote(name: str | None) -> bool:
    """Whether a name is an object's URL, and no path."""
    return bool(name and _URL.match(name))


def local_of(url: str) -> Path:
    """Return where a run lies on its hosts while its output goes to this URL: outputs/s3/BUCKET/PATH, or below another folder
    than `outputs` that $BRIGADE_LOCAL_OUTPUT names."""
    scheme, _, path = url.partition("://")
    parts = [part for part in PurePosixPath(path.lstrip("/")).parts if part not in (".", "..")]
    return Path(os.environ.get(LOCAL) or "outputs").expanduser().joinpath(scheme, *parts)


def checked(url: str, place: str) -> str:
    """Return a URL without a slash at its end. Raise UserError at `place` where it names no folder, or holds a password."""
    parts = urlsplit(url)
    if "@" in parts.netloc and parts.scheme != "hf":
        shown = f"{parts.scheme}://...@{parts.netloc.rpartition('@')[2]}{parts.path}"
        cure = "leave them out of the URL, which logs show, and export them (docs/hub.md)"
        raise UserError(place, f"{shown!r} holds credentials", cure)
    if parts.query or parts.fragment or ".." in parts.path.split("/"):
        raise UserError(place, f"{url!r} has a part that no object's name has", "write SCHEME://BUCKET/PATH")
    if not (parts.netloc + parts.path).strip("/"):
        raise UserError(place, f"{url!r} names no bucket", "write SCHEME://BUCKET/PATH")
    return url.rstrip("/")


class Storage:
    """A folder of objects. url: without a slash at its end; root: the same as its library names it

    Names of objects are relative to it. Methods raise what the libraries raise; explained() says it in a user's terms.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.root = url.partition("://")[2]

    def sizes(self) -> dict[str, int]:
        """Return {name: bytes} of all objects in it; {} where there is none."""
        raise NotImplementedError

    def version(self, name: str) -> str:
        """Return what changes when an object does."""
        raise NotImplementedError

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is removed."""
        raise NotImplementedError

    def put(self, files: Iterable[tuple[Path, str]]) -> None:
        """Upload local files under these names, in this order. An object is there as a whole, or not at all."""
        for source, name in files:
            with source.open("rb") as file:
                self._copy_in(file, name)

    def write(self, name: str, content: bytes) -> None:
        """Make an object of these bytes."""
        self._copy_in(io.BytesIO(content), name)

    def read(self, name: str) -> bytes:
        """Return the bytes of an object. Raise OSError where it has more than a record may have."""
        content = bytearray()
        with self._opened(name) as stream:
            while block := stream.read(2**20):
                content += block
                if len(content) > MOST:
                    raise OSError(f"{self.url}/{name} is larger than {MOST:,} bytes")
        return bytes(content)

    def get(self, name: str, target: Path) -> None:
        """Download an object into a file, whose folders are made, and sync it to the disk."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._opened(name) as stream, target.open("wb") as file:
            shutil.copyfileobj(stream, file, _BLOCK)
            file.flush()
            os.fsync(file.fileno())

    def probe(self) -> None:
        """Write a small object and remove it."""
        name = f".probe-{secrets.token_hex(8)}"
        self.write(name, b"whether this run may write here")
        self.remove([name])

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _relative(self, path: str) -> str:
        return path.lstrip("/").removeprefix(self.root.lstrip("/")).lstrip("/")

    def _opened(self, name: str) -> Any:
        raise NotImplementedError

    def _copy_in(self, file: Any, name: str) -> None:
        raise NotImplementedError


class _Arrow(Storage):
    """S3 and Google Cloud Storage by PyArrow. What is uploaded appears when its last part is there."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.system = _s3(self.root.partition("/")[0]) if url.startswith("s3://") else _gcs()

    def sizes(self) -> dict[str, int]:
        from pyarrow.fs import FileSelector, FileType

        entries = self.system.get_file_info(FileSelector(self.root, recursive=True, allow_not_found=True))
        return {self._relative(entry.path): entry.size for entry in entries if entry.type == FileType.File}

    def version(self, name: str) -> str:
        (info,) = self.system.get_file_info([self._path(name)])
        with self._opened(name) as stream:
            about = stream.metadata() or {}
        return f"{info.size} {info.mtime_ns} {about.get(b'ETag', b'').decode()}"

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self.system.delete_file(self._path(name))

    def _opened(self, name: str) -> Any:
        return self.system.open_input_stream(self._path(name), compression=None)

    def _copy_in(self, file: Any, name: str) -> None:
        stream = self.system.open_output_stream(self._path(name), compression=None)
        shutil.copyfileobj(file, stream, _BLOCK)
        stream.close()  # with its last part the object appears


class _Fsspec(Storage):
    """Whatever fsspec knows. `file://` is a folder on another disk."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        import fsspec

        self.system, self.root = fsspec.core.url_to_fs(url)

    def sizes(self) -> dict[str, int]:
        self.system.invalidate_cache()
        try:
            found = self.system.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        return {self._relative(path): int(about["size"]) for path, about in found.items()}

    def version(self, name: str) -> str:
        about = self.system.info(self._path(name))
        keys = (
            "size",
            "ETag",
            "etag",
            "mtime",
            "created",
            "last_modified",
            "last_commit",
            "blob_id",
            "xet_hash",
            "lfs",
        )
        return " ".join(str(about[key]) for key in keys if about.get(key) is not None)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self.system.rm_file(self._path(name))

    def _opened(self, name: str) -> Any:
        return self.system.open(self._path(name), "rb")

    def _copy_in(self, file: Any, name: str) -> None:
        path = self._path(name)
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)  # of folders that are none, nothing
        with self.system.open(path, "wb") as stream:
            shutil.copyfileobj(file, stream, _BLOCK)


class _Hub(_Fsspec):
    """Hugging Face's Hub: repositories, where what is uploaded or removed together is one commit, and buckets."""

    def put(self, files: Iterable[tuple[Path, str]]) -> None:
        self._commit([(str(source), name) for source, name in files], [])

    def write(self, name: str, content: bytes) -> None:
        self._commit([(content, name)], [])

    def remove(self, names: Iterable[str]) -> None:
        there = self.sizes() if (names := list(names)) else {}
        self._commit([], [name for name in names if name in there])

    def _commit(self, add: list[tuple[str | bytes, str]], delete: list[str]) -> None:
        if not add and not delete:
            return
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        place, api = self.system.resolve_path(self.root), HfApi()
        within = f"{place.path_in_repo if hasattr(place, 'repo_id') else place.path}/".lstrip("/")
        if hasattr(place, "bucket_id"):
            api.batch_bucket_files(
                place.bucket_id,
                add=[(source, within + name) for source, name in add],
                delete=[within + name for name in delete],
            )
        else:
            operations: list[Any] = [
                *(CommitOperationAdd(within + name, source) for source, name in add),
                *(CommitOperationDelete(within + name) for name in delete),
            ]
            words = f"{'Upload' if add else 'Remove'} {len(operations)} files of a run"
            api.create_commit(
                place.repo_id, operations, commit_message=words, repo_type=place.repo_type, revision=place.revision
            )
        self.system.invalidate_cache()


def _s3(bucket: str) -> Any:
    """PyArrow's S3 for a bucket, at AWS_ENDPOINT_URL where that is set; in the bucket's own region where none is named."""
    from pyarrow import fs

    options: dict[str, Any] = {}
    if address := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        parts = urlsplit(address)
        options = {"endpoint_override": parts.netloc + parts.path.rstrip("/"), "scheme": parts.scheme}
    elif not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        with suppress(OSError):  # the next call says what is wrong
            options = {"region": fs.resolve_s3_region(bucket)}
    # Small files in one request each; and the folders that S3 does not have are not made.
    return fs.S3FileSystem(connect_timeout=CONNECT, request_timeout=SILENCE, allow_delayed_open=True, **options)


def _gcs() -> Any:
    from datetime import timedelta

    from pyarrow import fs

    return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=SILENCE))


def open_storage(url: str, place: str) -> Storage:
    """Return the folder at a URL, which need not exist. Raise UserError at `place` where no package here knows its scheme."""
    url = checked(url, place)
    scheme = urlsplit(url).scheme
    kind: Callable[[str], Storage] = {"s3": _Arrow, "gs": _Arrow, "hf": _Hub}.get(scheme, _Fsspec)
    try:
        return kind(url)
    except ImportError:
        package = _PACKAGES.get(scheme, "the package that fsspec names for it")
        problem = f"{scheme}:// needs {package}, which is not installed"
        raise UserError(place, problem, f"pip install {package} -c constraints.txt, on every host", "host") from None
    except ValueError as error:  # fsspec knows no such scheme
        cure = "take s3://, gs:// or hf://, or a path"
        raise UserError(place, f"{url!r}: {first_line(error)}", cure) from None
    except Exception as error:
        raise explained(error, url, place) from None


def explained(error: BaseException, url: str, place: str = "") -> UserError:
    """Return an error of a storage library in a user's terms (storage.yaml): what is wrong with which URL, and what helps."""
    if isinstance(error, UserError):
        return error
    scheme, text = urlsplit(url).scheme, f"{type(error).__name__}: {error}"
    if scheme == "hf":
        kind = "dataset" if url.startswith("hf://datasets/") else "model"
        problem, cure = hub.refusal(
            error, "/".join(url.removeprefix("hf://").removeprefix("datasets/").split("/")[:2]), kind
        )
        cure = (
            cure
            or "make the repository or the bucket first (`hf repos create`), with a token that may write (HF_TOKEN)"
        )
        return UserError(place or url, f"{url}: {problem}", cure)
    for case in table(Path(__file__).with_name("storage.yaml")):
        if re.search(case["says"], text) and scheme in case.get("schemes", [scheme]):
            if case.get("without_credentials") and _has_credentials():
                continue
            words = {"url": url, "bucket": urlsplit(url).netloc, "why": first_line(error), "at": _endpoint()}
            whose = case.get("whose", "user")
            return UserError(
                place or url, f"{url}: {case['problem'].format(**words)}", case["cure"].format(**words), whose
            )
    return UserError(
        place or url, f"{url}: {first_line(error)}", "look at the storage and its credentials (docs/hub.md)"
    )


@contextmanager
def in_words(url: str, place: str) -> Iterator[None]:
    """Raise errors of a storage library as explained() says them."""
    try:
        yield
    except Exception as error:
        raise explained(error, url, place) from None


def _has_credentials() -> bool:
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_PROFILE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    )
    return any(map(os.environ.get, names)) or Path("~/.aws/credentials").expanduser().exists()


def _endpoint() -> str:
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return f" at {named}" if named else ""


# ---- data ----------------------------------------------------------------------------------------------------------
def downloaded(pattern: str, place: str) -> list[Path]:
    """Return local copies of the objects that a URL or a pattern names, in the order of their names. Each version of an object is
    downloaded once to a cache. Raise UserError at `place` where there is none, or none can be had."""
    fixed, wild = pattern, ""
    if any(sign in pattern for sign in "*?["):
        first = min(pattern.index(sign) for sign in "*?[" if sign in pattern)
        fixed = pattern[:first].rpartition("/")[0]
        wild = pattern[len(fixed) + 1 :]
    else:
        fixed, _, wild = pattern.rpartition("/")
    storage = open_storage(fixed, place)
    with in_words(fixed, place):
        names = sorted(name for name in storage.sizes() if _matches(name, wild))
        copies = [_copy(storage, name) for name in names]
    if not copies:
        raise UserError(place, f"there is no object {pattern!r}", "check the bucket and the path")
    return copies


def _matches(name: str, wild: str) -> bool:
    """Whether an object's name fits a pattern, in which `*` stands for no slash, and `**` for any folders."""
    if "**" in wild:
        return fnmatch.fnmatchcase(name, wild) or fnmatch.fnmatchcase(name, wild.replace("**/", ""))
    return name.count("/") == wild.count("/") and fnmatch.fnmatchcase(name, wild)


def _copy(storage: Storage, name: str) -> Path:
    version = f"{storage.url}/{name} {storage.version(name)}"
    folder = cache.cache_directory("objects") / hashlib.sha256(version.encode()).hexdigest()[:32]
    file = PurePosixPath(name).name
    return (
        cache.once(folder, lambda there: (there / file).is_file(), lambda aside: storage.get(name, aside / file)) / file
    )
