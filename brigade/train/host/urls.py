"""URLs of object storage, as recipes and flags name them, and where a run lies locally whose output is at one."""

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from ...errors import UserError

LOCAL = "BRIGADE_LOCAL_OUTPUT"  # the folder below which runs lie locally whose output is in object storage
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


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
