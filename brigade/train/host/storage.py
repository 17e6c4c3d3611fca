"""Object storage: a folder of objects by its URL, for a run's output and for data. This module imports no torch.

s3:// and gs:// are PyArrow's, which is pinned for data sets; hf:// is huggingface_hub's; any other scheme is fsspec's, with the
package that it names. Credentials come from where each of them looks for them (docs/hub.md), and stand in no message.
"""

import importlib.util
import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...errors import UserError, Whose, first_line
from ...errors.tables import table
from . import hub
from .files import MOST
from .urls import checked

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

CONNECT, SILENCE = 10.0, 60.0  # seconds without a connection, and without a byte
# Of schemes without the s of TLS, which some have, too.
_PACKAGES = {"abfs": "adlfs", "az": "adlfs", "http": "aiohttp", "oci": "ocifs", "oss": "ossfs"}
_BLOCK = 16 * 2**20
_OF_AWS = re.compile(r"^(?:When .*: )?AWS Error (\S+(?: \(HTTP status \d+\))?) during (\w+) operation.*")


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

    def put(self, contents: Iterable[tuple[Path | bytes, str]]) -> None:
        """Upload local files, or bytes, under these names, in this order."""
        for source, name in contents:
            with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
                self._copy_in(file, name)

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
        self.put([(b"whether this run may write here", name)])
        self.remove([name])

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _relative(self, path: str) -> str:
        return path.lstrip("/").removeprefix(self.root.lstrip("/")).lstrip("/")

    def _opened(self, name: str) -> IO[bytes]:
        raise NotImplementedError

    def _copy_in(self, file: IO[bytes], name: str) -> None:
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
        with self.system.open_input_stream(self._path(name), compression=None) as stream:
            about = stream.metadata() or {}
        return f"{info.size} {info.mtime_ns} {about.get(b'ETag', b'').decode()}"

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self.system.delete_file(self._path(name))

    def _opened(self, name: str) -> IO[bytes]:
        return self.system.open_input_stream(self._path(name), compression=None)

    def _copy_in(self, file: IO[bytes], name: str) -> None:
        path = self._path(name)
        stream = self.system.open_output_stream(path, compression=None)
        try:
            shutil.copyfileobj(file, stream, _BLOCK)
            stream.close()  # with its last part the object appears
        except Exception:
            if not stream.closed:  # else its C++ destructor closes it, and writes what fails there to stderr by itself
                with suppress(Exception):
                    stream.close()
                    self.system.delete_file(path)  # it has only what was left in the buffer
            raise


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

    def _opened(self, name: str) -> IO[bytes]:
        return self.system.open(self._path(name), "rb")

    def _copy_in(self, file: IO[bytes], name: str) -> None:
        path = self._path(name)
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)  # of folders that are none, nothing
        with self.system.open(path, "wb") as stream:
            shutil.copyfileobj(file, stream, _BLOCK)


class _Hub(_Fsspec):
    """Hugging Face's Hub: repositories, where what is uploaded or removed together is one commit, and buckets."""

    def put(self, contents: Iterable[tuple[Path | bytes, str]]) -> None:
        self._commit([(source if isinstance(source, bytes) else str(source), name) for source, name in contents], [])

    def remove(self, names: Iterable[str]) -> None:
        names = list(names)
        there = self.sizes() if names else {}
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


def _s3(bucket: str) -> "FileSystem":
    """PyArrow's S3 for a bucket, at AWS_ENDPOINT_URL where that is set; in the bucket's own region where none is named."""
    from pyarrow import fs

    options: dict[str, Any] = {}
    address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if address:
        parts = urlsplit(address)
        options = {"endpoint_override": parts.netloc + parts.path.rstrip("/"), "scheme": parts.scheme}
    elif not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        with suppress(OSError):  # the next call says what is wrong
            options = {"region": fs.resolve_s3_region(bucket)}
    # Small files in one request each; and the folders that S3 does not have are not made.
    return fs.S3FileSystem(connect_timeout=CONNECT, request_timeout=SILENCE, allow_delayed_open=True, **options)


def _gcs() -> "FileSystem":
    from pyarrow import fs

    return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=SILENCE))


def open_storage(url: str, place: str) -> Storage:
    """Return the folder at a URL, which need not exist. Raise UserError at `place` where no package here knows its scheme."""
    url = checked(url, place)
    scheme = urlsplit(url).scheme
    kind: Callable[[str], Storage] = {"s3": _Arrow, "gs": _Arrow, "hf": _Hub}.get(scheme, _Fsspec)
    try:
        return kind(url)
    except (ImportError, ValueError) as error:
        package = _PACKAGES.get(scheme) or _PACKAGES.get(scheme.removesuffix("s"))
        # Of some schemes fsspec learns by their package alone.
        if isinstance(error, ImportError) or (package and not importlib.util.find_spec(package)):
            package = package or "what fsspec names for it"
            problem, cure = (
                f"{scheme}:// needs {package}, which is not installed",
                f"pip install {package} -c constraints.txt",
            )
            raise UserError(place, problem, f"{cure}, on every host", "host") from None
        cure = "take s3://, gs:// or hf://, or a path"
        raise UserError(place, f"{url!r}: {first_line(error)}", cure) from None
    except Exception as error:
        raise explained(error, url, place) from None


def explained(error: BaseException, url: str, place: str = "") -> UserError:
    """Return an error of a storage library in a user's terms (storage.yaml, and hub.yaml for hf://): what is wrong at which URL,
    and what helps. place: the flag or key that named the URL"""
    if isinstance(error, UserError):
        return error
    problem, cure, whose = _of_hub(error, url) if url.startswith("hf://") else _of_table(error, url)
    return UserError(place or url, f"{url}: {problem}" if place else problem, cure, whose)


def _of_hub(error: BaseException, url: str) -> tuple[str, str, Whose]:
    kind, path = ("dataset" if url.startswith("hf://datasets/") else "model"), url.removeprefix("hf://")
    problem, cure = hub.refusal(error, "/".join(path.removeprefix("datasets/").split("/")[:2]), kind)
    usual = "make the repository or the bucket first (`hf repos create`), with a token that may write (HF_TOKEN)"
    return problem, cure or usual, "user"


def _of_table(error: BaseException, url: str) -> tuple[str, str, Whose]:
    scheme, text = urlsplit(url).scheme, f"{type(error).__name__}: {error}"
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    at = f" at {named}" if named and scheme == "s3" else ""
    why = _OF_AWS.sub(r"\2: \1", first_line(error))
    words = {"url": url, "bucket": urlsplit(url).netloc, "why": why, "at": at}
    for case in table(Path(__file__).with_name("storage.yaml")):
        fits = re.search(case["says"], text) and scheme in case.get("schemes", [scheme])
        if fits and not (case.get("without_credentials") and _has_credentials()):
            return case["problem"].format(**words), case["cure"].format(**words), case.get("whose", "user")
    return why, "look at the storage and its credentials (docs/hub.md)", "user"


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
