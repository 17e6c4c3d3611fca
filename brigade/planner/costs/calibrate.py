"""`plan --calibrate RUN ...`: what measured runs say of a cluster, as factors in the user's own file (calibration.py).

A run inside one node gives the efficiency with which the formulas' step time becomes the measured one: predicted / measured. A
run over several nodes then gives the network's factor, by bisection, given that efficiency. A GPU kind's factor is the median
over its runs: one that a broken cable or a busy file system slowed down moves it little.
"""

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError
from ...recipe.files import read_yaml
from ..choice.job import Job
from ..choice.job_of_run import job_of_record
from . import calibration
from .hardware import Gpu, gpu
from .step_time import StepTime, step_time

RECORD = "run.yaml"
NETWORK = (1 / 64, 64.0)  # between which a network's factor is looked for
TELLS = 0.1  # of a step that has to wait for the network: where computing hides it, noise would decide its factor


@dataclass(frozen=True)
class MeasuredRun:
    """seconds: of a step"""

    folder: Path
    job: Job
    seconds: float


def read_run(folder: Path) -> MeasuredRun:
    """A run's directory, or its run.yaml. Raises UserError where no promise was held against a measurement."""
    path = folder if folder.is_file() else folder / RECORD
    if not path.is_file():
        raise UserError(str(folder), f"there is no {RECORD} in it", "name the output directory of a run")
    told = (read_yaml(path).get("run") or {}).get("promise")
    place = f"{path}: run.promise"
    if not isinstance(told, dict):
        raise UserError(
            place,
            "this run measured nothing: it did not reach its tenth step, or is older than promises are",
            "let a run take ten steps, and name its directory",
        )
    if "job" not in told:
        raise UserError(place, f"this run got no promise: {told.get('none')}", "leave it out")
    seconds = (told.get("measured") or {}).get("step_time")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise UserError(
            f"{place}.measured.step_time", f"{seconds!r} is not a number of seconds", "run the recipe once more"
        )
    return MeasuredRun(path.parent.resolve(), job_of_record(told["job"], f"{place}.job"), seconds)


def efficiency(run: MeasuredRun, bare: Gpu) -> float:
    """The factor on all speeds inside a node with which the formulas give what was measured."""
    return step_time(run.job, bare).total / run.seconds


def network(run: MeasuredRun, bare: Gpu) -> float | None:
    """The factor on the bandwidth between nodes that does so, given `bare`'s efficiency; None where none does, or where
    computing hides the network."""

    def step(factor: float) -> StepTime:
        return step_time(run.job, replace(bare, network=factor))

    low, high = NETWORK
    if not step(high).total < run.seconds < step(low).total:
        return None
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if step(middle).total > run.seconds else (low, middle)
    return low if step(low).across > TELLS * run.seconds else None


def calibrate(folders: list[Path], file: Path) -> list[str]:
    """Fold runs into the factors of `file`, and write it; returns what changed, a line each.

    The runs that an entry rests on stay in it: they are read again where they are still there (formulas may have changed), and
    keep their factor where they are not.
    """
    given = {run.folder: run for run in map(read_run, folders)}
    factors: dict[str, Any] = calibration.read(file)["factors"] if file.exists() else {}
    lines: list[str] = []
    for kind in sorted({gpu(run.job.gpu).kind for run in given.values()}):
        entries = factors.get(kind, {})
        earlier = {
            Path(name): run for entry in entries.values() for name in entry["runs"] if (run := _again(Path(name)))
        }
        runs = [run for run in (earlier | given).values() if gpu(run.job.gpu).kind == kind]
        bare = replace(gpu(kind), efficiency=1.0, network=1.0)
        found = {run.folder: efficiency(run, bare) for run in runs if run.job.nodes == 1}
        entries = _fold(entries, "efficiency", found, kind, lines)
        bare = replace(bare, efficiency=entries["efficiency"]["factor"] if "efficiency" in entries else 1.0)
        over_nodes = {run.folder: network(run, bare) for run in runs if run.job.nodes > 1}
        for folder in (folder for folder, factor in over_nodes.items() if factor is None):
            lines.append(
                f"{kind}: {folder} says nothing of the network: no bandwidth explains its step time, or computing hides it"
            )
        entries = _fold(entries, "network", {run: factor for run, factor in over_nodes.items() if factor}, kind, lines)
        if entries:
            factors[kind] = entries
    if not any(factors.values()):
        raise UserError(
            ", ".join(map(str, folders)),
            "nothing follows from these runs: " + "; ".join(lines),
            "calibrate with a run inside one node first",
        )
    _write(file, factors)
    return lines


def _again(folder: Path) -> MeasuredRun | None:
    try:
        return read_run(folder)
    except UserError:
        return None


def _fold(entries: dict[str, Any], name: str, found: dict[Path, float], kind: str, lines: list[str]) -> dict[str, Any]:
    """`entries` with the factors of runs in the entry `name`, and a line on what became of it."""
    old = entries.get(name)
    runs = (dict(old["runs"]) if old else {}) | {str(folder): round(factor, 4) for folder, factor in found.items()}
    if not found or not runs:
        return entries
    factor = round(statistics.median(runs.values()), 4)
    before = old["factor"] if old else "none"
    change = f"stays {factor}" if before == factor else f"{before} -> {factor}"
    spread = f", {min(runs.values())} to {max(runs.values())}" if len(runs) > 1 else ""
    lines.append(f"{kind}: {name} {change} ({len(runs)} run{'s' if len(runs) > 1 else ''}{spread})")
    return entries | {name: {"factor": factor, "runs": runs}}


def _write(file: Path, factors: dict[str, Any]) -> None:
    """Replace the section `factors`; all else of the file stays as its owner wrote it."""
    section = yaml.safe_dump({"factors": factors}, sort_keys=False, width=120)
    kept: list[str] = []
    inside = False
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else ():
        if line[:1] not in (" ", "\t", "\n", "\r", "#", ""):
            inside = line.startswith("factors:")
        if not inside or line.startswith("#"):
            kept.append(line)
    text = "".join(kept) or "# Measured on this cluster; brigade/planner/costs/calibration.py says what belongs here.\n"
    temporary = file.with_name(f".{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text.rstrip("\n") + "\n" + section, encoding="utf-8")
        temporary.replace(file)
        calibration.once.cache_clear()
    except OSError as error:
        raise UserError(
            str(file), f"it cannot be written: {error.strerror}", "name another file: --calibration FILE"
        ) from None
