"""The files that a recipe's data names. Each version of a file in object storage is downloaded once to the cache, and a run reads
the copy.

The data's fingerprint is made of the content, as for local files: where the objects lie, and when they were written, does not
change it.
"""

import fnmatch
import glob
import hashlib
from pathlib import Path, PurePosixPath

from ...errors import UserError
from ..host import cache
from ..host.storage import Storage, in_words, open_storage
from ..host.urls import is_remote
from ..recipe.files import find


def paths_of(name: str, place: str = "") -> list[Path]:
    """Return the files of a recipe's pattern or name, in the order of their names; for object storage, the cache's copies.
    Raises UserError at `place` where there are none."""
    if is_remote(name):
        return _downloaded(name, place)
    pattern = str(Path(name).expanduser())
    named = glob.escape(pattern), pattern  # a name may have brackets
    matches = next(filter(None, (sorted(glob.glob(each, recursive=True)) for each in named)), [])  # noqa: PTH207
    return [Path(path) for path in matches] or [find(name, place, "data file")]


def _downloaded(pattern: str, place: str) -> list[Path]:
    """Return local copies of the objects that a URL or a pattern names, in the order of their names. Each version of an object is
    downloaded once to a cache. Raise UserError at `place` where there is none, or where one cannot be downloaded."""
    first = min((pattern.index(sign) for sign in "*?[" if sign in pattern), default=len(pattern))
    fixed = pattern[:first].rpartition("/")[0]
    wild = pattern[len(fixed) + 1 :]
    remote = open_storage(fixed, place)
    with in_words(fixed, place):
        names = sorted(name for name in remote.sizes() if _matches(name, wild))
        copies = [_copy(remote, name, place) for name in names]
    if not copies:
        raise UserError(place, f"there is no object {pattern!r}", "check the bucket and the path")
    return copies


def _matches(name: str, wild: str) -> bool:
    """Whether an object's name fits a pattern, in which `*` stands for anything without a slash, and `**` for any folders."""
    if "**" in wild:
        return fnmatch.fnmatchcase(name, wild) or fnmatch.fnmatchcase(name, wild.replace("**/", ""))
    return name.count("/") == wild.count("/") and fnmatch.fnmatchcase(name, wild)


def _copy(remote: Storage, name: str, place: str) -> Path:
    version = f"{remote.url}/{name} {remote.version(name)}"
    folder = cache.cache_directory("objects") / hashlib.sha256(version.encode()).hexdigest()[:32]
    file = PurePosixPath(name).name

    def fetch(aside: Path) -> None:
        print(f"fetching {f'{remote.url}/{name}'!r} ({place})", flush=True)  # a recipe may be a stranger's
        remote.get(name, aside / file)

    return cache.once(folder, fetch) / file
