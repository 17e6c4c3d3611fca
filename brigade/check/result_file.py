"""`check --json FILE` and `--baseline FILE`: what was found, for programs and for the next time."""

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import UserError
from ..errors.console import counted
from ..errors.tables import Fields
from ..train.host import files
from .checks import SIGNS, Level
from .collectives import Sweep
from .run import Outcome
from .sweep import bus_bandwidth

CHANGED = 0.2  # of a measured figure, from which on it counts as another one: single readings of a busy network differ by less


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Found(_Model):
    """What one check found on one host."""

    host: str
    level: Level
    value: str = Field(description="what was found, in a few words")
    amount: float | None = Field(None, description="the same as a number, where it was measured")
    problem: str = Field("", description="what is wrong; with grey: why it cannot be known")
    why: str = Field("", description="why it matters")
    cure: str = Field("", description="the command or change that cures it")
    detail: tuple[str, ...] = Field(
        (), description="what `value` leaves out: versions, variables, paths, changed files"
    )
    fix: str = Field("", description="a shell line that cures it when it runs on this host; --fix prints them")


class OfCheck(_Model):
    """One check."""

    name: str
    group: Literal["reach", "sameness", "devices", "storage", "network", "kernels", "rehearsal"]
    seconds: float = Field(description="what it took, on all hosts together")
    results: list[Found] = Field(description="one or more for each host, in the hostfile's order")


class Timed(_Model):
    """One collective with one payload."""

    collective: str
    payload: int = Field(description="bytes: what the larger end of the operation holds on one rank")
    seconds: float = Field(description="of the slowest rank, median of up to 7 times")
    bus: float = Field(description="bus bandwidth in GB/s, by nccl-tests' definition")


class OfSweep(_Model):
    """The collectives over all hosts."""

    backend: Literal["gloo", "nccl"]
    device: str = Field(description="what the ranks ran on")
    hosts: int
    ranks: int
    timed: list[Timed]


class Document(_Model):
    """What `python -m brigade check --json FILE` writes."""

    format: Literal[1] = 1
    time: datetime = Field(description="when it ended, UTC")
    size: Literal["quick", "usual", "full"]
    recipe: str | None
    hosts: dict[str, Annotated[int, Field(ge=1)]] = Field(description="host -> slots")
    seconds: float
    exit_code: Literal[0, 1, 3] = Field(description="0: sound, 1: with warnings, 3: not sound")
    checks: list[OfCheck]
    sweep: OfSweep | None = Field(None, description="what the row of collectives measured, each payload")


def document(outcome: Outcome, recipe: str | None, code: int, sweep: Sweep | None = None) -> Document:
    """The content of the result file for an outcome. code: the command's exit code"""
    keys = ("name", "group", "seconds")
    rows = [
        {key: getattr(row, key) for key in keys} | {"results": [vars(result) for result in row.results]}
        for row in outcome.rows
    ]
    return Document.model_validate(
        {
            "time": datetime.now(UTC),
            "size": outcome.size,
            "recipe": recipe,
            "hosts": outcome.hosts,
            "seconds": outcome.seconds,
            "exit_code": code,
            "checks": rows,
            "sweep": sweep and _of_sweep(sweep),
        }
    )


def _of_sweep(found: Sweep) -> Fields:
    timed = [
        {
            "collective": name,
            "payload": size,
            "seconds": took,
            "bus": 1e-9 * bus_bandwidth(name, size, took, found.ranks),
        }
        for name, size, took in found.rows
    ]
    return {key: getattr(found, key) for key in ("backend", "device", "hosts", "ranks")} | {"timed": timed}


def schema() -> Fields:
    """The JSON schema of the result file."""
    return Document.model_json_schema()


def write(found: Document, path: Path) -> None:
    """Write a result, whole or not at all. Raises OSError."""
    files.write(path, found.model_dump_json(indent=1) + "\n")


def check_target(path: Path) -> None:
    """Try to write there, before an hour's work is lost. Raises UserError where no result can be written."""
    place, cure = f"flag --json {path}", "name a new file in a directory that you can write to"
    if path.exists() and not is_ours(path):
        raise UserError(place, "it is there already, and is no result of check", cure)
    if not path.parent.is_dir():
        raise UserError(place, f"{path.parent} is no directory", cure)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UserError(place, f"{path.parent} cannot be written: {error.strerror}", cure) from None


def is_ours(path: Path) -> bool:
    """Tell whether a file that is there is an earlier result, which a newer one may replace."""
    try:
        return "checks" in json.loads(files.read(path))
    except (OSError, ValueError, TypeError):
        return False


def read(path: Path) -> Document:
    """Read an earlier result. Raises UserError for a file that is not one."""
    place = f"flag --baseline {path}"
    cure = "give a file that `python -m brigade check --json FILE` has written"
    try:
        return Document.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(place, f"it cannot be read: {error.strerror}", cure) from None
    except UnicodeDecodeError:
        raise UserError(place, "it is not text", cure) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(place, f"{where + ': ' if where else ''}{first['msg']}", cure) from None


def compared(earlier: Document, now: Document) -> str:
    """Say which rows changes() compares, and what else the two documents do not have in common."""
    rows, before = ({check.name for check in document.checks} for document in (now, earlier))
    words = [f"{counted(len(rows & before), 'row')} compared"]
    if before - rows:
        words.append(f"{len(before - rows)} were not checked now ({', '.join(sorted(before - rows))})")
    if rows - before:
        words.append(f"{len(rows - before)} are new ({', '.join(sorted(rows - before))})")
    if earlier.recipe != now.recipe:
        words.append(f"the recipe was {earlier.recipe or 'none'}")
    return "; ".join(words)


def changes(earlier: Document, now: Document) -> list[str]:
    """Say what differs, in one line each: hosts that came and went, levels, values, what these leave out, and measured figures by
    more than CHANGED."""
    lines = [f"{host}: not among the hosts then" for host in now.hosts if host not in earlier.hosts]
    lines += [f"{host}: no longer among the hosts" for host in earlier.hosts if host not in now.hosts]
    before = _by_place(earlier)
    for (check, host), results in _by_place(now).items():
        then = before.get((check, host))
        if then is None or host not in earlier.hosts:
            continue
        was, became = (" + ".join(f"{SIGNS[r.level]} {r.value}" for r in some) for some in (then, results))
        if was != became and not _same_figures(then, results):
            lines.append(f"{host}: {check} was {was}; it is {became}")
        details = [{line for result in some for line in result.detail} for some in (then, results)]
        lines += [f"{host}: {check}: no longer {line}" for line in sorted(details[0] - details[1])]
        lines += [f"{host}: {check}: now {line}" for line in sorted(details[1] - details[0])]
    return lines


def _by_place(found: Document) -> dict[tuple[str, str], list[Found]]:
    places: dict[tuple[str, str], list[Found]] = {}
    for check in found.checks:
        for result in check.results:
            places.setdefault((check.name, result.host), []).append(result)
    return places


def _same_figures(then: list[Found], now: list[Found]) -> bool:
    """Tell whether all that differs is measured figures, and those by little."""
    if len(then) != len(now):
        return False
    for a, b in zip(then, now, strict=True):
        if a.level != b.level or (a.amount is None) != (b.amount is None):
            return False
        if a.amount is None or b.amount is None:
            if a.value != b.value:
                return False
        elif abs(a.amount - b.amount) > CHANGED * max(abs(a.amount), abs(b.amount)):
            return False
    return True
