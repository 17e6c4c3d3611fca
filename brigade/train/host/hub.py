"""Whether Hugging Face's Hub can be reached, and what helps where it refuses."""

import functools
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ...errors import first_line
from ...errors.tables import table

OFFICIAL = "https://huggingface.co"
CONNECT = 10.0  # seconds
OUTPUTS = "outputs/"  # where runs write if nothing else is said
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_TRUE = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub and datasets read them (huggingface_hub/constants.py: _is_true)
# Exceptions of huggingface_hub, datasets, httpx and Python that mean that nothing was asked, or nothing came.
_UNANSWERED = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ConnectTimeout")


def endpoint() -> str:
    """Return the Hub's address, or that of the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or OFFICIAL).rstrip("/")


def stays_offline() -> bool:
    """Return whether the environment tells Hugging Face's libraries to look only into their caches."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in OFFLINE)


@functools.cache
def hub_is_away() -> str:
    """Return `huggingface.co does not resolve, and the cache does not have it`, or "".

    Where no connection can be had, Hugging Face's libraries are told to look only into their caches: they would ask for each
    file six times, 23 s with a line for each (huggingface_hub/utils/_http.py: http_backoff), and for a data set twice as
    long. A proxy resolves names itself.
    """
    address = urlsplit(endpoint())
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    if getproxies() or stays_offline():
        return ""
    try:
        socket.create_connection((host, port), CONNECT).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are loaded later, and for other processes
        if "huggingface_hub" in sys.modules:
            sys.modules["huggingface_hub"].constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        away = "does not resolve" if isinstance(error, socket.gaierror) else f"cannot be reached ({first_line(error)})"
        return f"{host} {away}, and the cache does not have it"
    return ""


def refusal(error: BaseException, name: str, kind: str = "model", revision: str | None = None) -> tuple[str, str]:
    """Return (problem, cure), from hub.yaml, for a model or data set that the Hub did not give; for an error that does not come
    from the Hub, its own words and "".

    error: raised by one of Hugging Face's libraries, which wrap the Hub's answer in words of their own
    kind: "model" or "dataset"
    """
    case = "path" if is_path(name) else _case(error)
    if not case:
        return first_line(error), ""
    from huggingface_hub import constants

    problem, cure = table(Path(__file__).with_name("hub.yaml"))[case].values()
    hub, folder = endpoint(), name if kind == "model" else f"datasets/{name}"
    words: dict[str, Any] = {"page": f"{hub}/{folder}", "hub": hub, "name": name, "cache": constants.HF_HUB_CACHE}
    words |= {"revision": repr(revision or "main"), "away": hub_is_away(), "status": status_of(error)}
    words |= {
        "type": "" if kind == "model" else " --repo-type dataset",
        "kind": "data set" if kind == "dataset" else kind,
    }
    problem, cure = problem.format(**words), cure.format(**words)
    if hub != OFFICIAL:
        cure += f"; or unset HF_ENDPOINT, which makes {hub} the Hub"
    return problem, cure


def is_path(name: str) -> bool:
    """Whether a name is that of a directory, and cannot be one on the Hub: OWNER/NAME. What lies in outputs/ is a run's, whether
    or not that run is over."""
    return name.startswith((".", "/", "~", OUTPUTS)) or name.count("/") > 1


def _case(error: BaseException) -> str:
    """Return the key in hub.yaml for an error, or ""."""
    from huggingface_hub import get_token

    names, status = [type(cause).__name__ for cause in _chain(error)], status_of(error)
    is_gated = "GatedRepoError" in names or "is a gated dataset" in str(error)
    if is_gated or status in (401, 403):
        kind = "gated" if is_gated else "invalid token" if status == 401 else "forbidden"
        return kind if get_token() else "gated, no token" if is_gated else "no token"
    if status == 404 or {"RepositoryNotFoundError", "DatasetNotFoundError"} & set(names):
        kinds = {"RevisionNotFoundError": "revision", "RemoteEntryNotFoundError": "file"}
        return next((case for kind, case in kinds.items() if kind in names), "missing")
    if status:
        return "busy" if status == 429 else "fails"
    if set(names) & set(_UNANSWERED):
        return "no network" if hub_is_away() else "offline" if stays_offline() else "no answer"
    return ""


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those from which it was raised."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of the first answer in an error's chain, or None."""
    answers: Iterator[Any] = (getattr(cause, "response", None) for cause in _chain(error))
    return next((int(answer.status_code) for answer in answers if answer is not None), None)
