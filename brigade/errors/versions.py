"""Which versions of packages are installed, pinned and supported (versions.yaml). Needs only the standard library: what is judged
here may be missing, and is never imported, for that takes seconds."""

import functools
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
ANYWAY = "BRIGADE_OTHER_VERSIONS"  # set to 1: train with what is refused, and say so in the run's first table
FILES = ("requirements.txt", "constraints.txt")
_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;#]+)", re.MULTILINE)
_ROW = re.compile(r"^(\w+): (\{.*\})$", re.MULTILINE)
Versions = Mapping[str, str | None]  # package -> version, None where it is missing


@functools.cache
def supported() -> dict[str, dict]:
    """Package -> its row of versions.yaml, Python's own among them."""
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {name: json.loads(row) for name, row in _ROW.findall(text)}


@functools.cache
def pins(folder: Path = REPOSITORY) -> dict[str, str]:
    """Package -> the one version that the files allow. Who has copied the code alone has no files, and no pins."""
    texts = [(folder / name).read_text(encoding="utf-8") for name in FILES if (folder / name).is_file()]
    return dict(pin for text in texts for pin in _PIN.findall(text))


def installed(package: str) -> str | None:
    """Its version by its metadata, None where it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def meets(version: str | None, pin: str) -> bool:
    """PEP 440: 2.13.0+cpu meets a pin on 2.13.0, but not the other way round."""
    return version is not None and (version == pin or ("+" not in pin and version.partition("+")[0] == pin))


def release(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu, and of 2.13.0a0+b5d4 too: so NVIDIA's images name what they build of a release."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def is_newer(version: str, other: str) -> bool:
    """Whether it is of a later series: 2.15.1 is not newer than 2.15."""
    series = release(other)
    return release(version)[: len(series)] > series


def unsupported(package: str, version: str) -> str:
    """Why no run is supported with this version, "" where one is, or where nothing is said of the package."""
    row = supported().get(package, {})
    pin = pins().get(package)
    if row.get("exact") and pin and not meets(version, pin):
        return f"only {pin}"
    if "from" in row and release(version) < release(row["from"]):
        return range_of(package)
    why = row.get("bad", {}).get(version.partition("+")[0])
    return f"{range_of(package)}; not {version}: {why}" if why else ""


def lacks(axis: str) -> tuple[str, str] | None:
    """Why the packages here cannot divide a model along this axis of a strategy, experts for one: (problem, cure), or None."""
    for name, row in supported().items():
        since, version = row.get("axes", {}).get(axis), installed(name)
        if since and version and release(version) < release(since):
            return f"{name} {version} cannot divide {axis}", f"install {name} {since} or later, or remove the key"
    return None


def range_of(package: str) -> str:
    """What is supported, in words."""
    row = supported()[package]
    return f"{row['from']} and later" + (f", tried up to {row['tried']}" if "tried" in row else "")


def not_pinned(versions: Versions) -> str:
    """The packages of a run whose version is not the pinned one, each with what that means; "" where all are pinned."""
    words = []
    for name, version in versions.items():
        pin = pins().get(name)
        if version and pin and not meets(version, pin):
            tried = supported()[name].get("tried")
            meaning = ", which is not supported" if unsupported(name, version) else ""
            if tried and is_newer(version, tried):
                meaning = f", newer than {tried}, the newest that was tried"
            words.append(f"{name} {version}{meaning} (pinned {pin})")
    return "; ".join(words)


def of_this_process() -> dict[str, str | None]:
    """Each package of versions.yaml with its version here."""
    return {name: installed(name) for name in supported() if name != "python"}


def refusal(command: str, versions: Versions, needed: tuple[str, ...], judged: bool = True) -> str:
    """What to tell a user whose packages no run can begin with, "" where it can. Takes milliseconds.

    command: what was called; needed: the kinds of versions.yaml without which it cannot start; judged: see gate.enter()
    """
    missing = [name for name, row in supported().items() if row.get("needed") in needed and not versions.get(name)]
    if missing:
        problem = f"{sys.executable} (Python {sys.version.split()[0]}) lacks {', '.join(missing)}"
        return _text(command, problem, _cure(command, "-r requirements.txt"))
    wrong = {name: version for name, version in versions.items() if version and unsupported(name, version)}
    if not (wrong and judged) or os.environ.get(ANYWAY) == "1":
        return ""
    rows = [("package", "installed", "pinned", "supported")]
    rows += [(name, version, pins().get(name, "-"), unsupported(name, version)) for name, version in wrong.items()]
    wanted = [f"{name}=={pins()[name]}" if name in pins() else f"{name}>={supported()[name]['from']}" for name in wrong]
    cure = _cure(command, f"-c constraints.txt {' '.join(wanted)}")
    cure += f"; {ANYWAY}=1 goes on with them, at your own risk"
    return _text(command, f"no run is supported with these versions, in {sys.prefix}", cure, _aligned(rows))


def _text(place: str, problem: str, cure: str, table: Iterable[str] = ()) -> str:
    """The form of UserError, with a table."""
    return "\n".join([f"error: {place}", f"  {problem}", *table, f"  cure: {cure}"])


def _aligned(rows: list[tuple[str, str, str, str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["    " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _cure(command: str, install: str) -> str:
    """How to come to a Python that has the packages. command: one that begins with `python`; install: what pip is told"""
    environment = REPOSITORY / ".venv"
    here = f"cd {shlex.quote(str(REPOSITORY))}"
    if Path(sys.prefix).resolve() == environment.resolve():
        return f"{here} && .venv/bin/python -m pip install {install}"
    inside = command.replace("python", ".venv/bin/python", 1)
    if (environment / "bin" / "python").exists():
        return f"`{here} && {inside}`, or first `source .venv/bin/activate` there"
    return f"`{here} && make setup` makes an environment with the pinned ones; then `{inside}`"
