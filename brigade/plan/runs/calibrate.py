"""`plan --calibrate RUN ...`: fold what runs measured on a cluster into factors of the user's own file (calibration.py).

A run inside one node gives the efficiency with which the formulas' step time becomes the measured one: predicted / measured. A
run over several nodes then gives the network's factor, by bisection, given that efficiency. A GPU kind's factor is the median
over its runs: one that a broken cable or a busy file system slowed down moves it little. record() keeps the Job of a run in its
run.yaml.
"""

import math
import statistics
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter

from ...errors import UserError, shortened
from ...errors.tables import Document, Fields
from ...train.host import files
from ...train.recipe.files import read_yaml
from ..costs.job import Job
from ..costs.step_time import StepTime, step_time
from ..hardware import Gpu, calibration, gpu
from ..hardware.network import links
from ..shape.from_code import MeasuredShape
from ..shape.model_shape import ModelShape


def take_network(
    kind: str, named: str, measured: float, ranks: int, node_size: int, link: str, file: Path
) -> list[str]:
    """Fold a bandwidth that was measured without a run into the network's factor of `kind`, and write `file`.

    Returns what changed, a line each.

    named: of the measurement; the same hosts' next one takes its place
    measured: GB/s of bus bandwidth over all `ranks`; link: as a recipe names it, "" for what is usual
    """
    supposed = links(replace(gpu(kind), efficiency=1.0, network=1.0), link, node_size).ring(ranks, 1)[0]
    factors: Fields = calibration.read(file)["factors"]
    lines: list[str] = []
    factors[kind] = fold(factors.get(kind, {}), "network", {Path(named): measured * 1e9 / supposed}, kind, lines)
    write(file, factors)
    return lines


def fold(entries: Fields, name: str, found: dict[Path, float], kind: str, lines: list[str]) -> Fields:
    """Return `entries` with the factors of runs in the entry `name`, and a line on what became of it."""
    if not found:
        return entries
    old = entries.get(name, {"factor": "none", "runs": {}})
    runs = old["runs"] | {str(folder): round(factor, 4) for folder, factor in found.items()}
    before, factor = old["factor"], round(statistics.median(runs.values()), 4)
    change = f"stays {factor}" if before == factor else f"{before} -> {factor}"
    spread = f"s, {min(runs.values())} to {max(runs.values())}" if len(runs) > 1 else ""
    lines.append(f"{kind}: {name} {change} ({len(runs)} run{spread})")
    return entries | {name: {"factor": factor, "runs": runs}}


def write(file: Path, factors: Fields) -> None:
    """Replace the section `factors`; all else of the file stays as its owner wrote it."""
    kept: list[str] = []
    inside = False
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else ():
        if line[:1] not in (" ", "\t", "\n", "\r", "#", ""):
            inside = line.startswith("factors:")
        if not inside or line.startswith("#"):
            kept.append(line)
    text = "".join(kept) or "# Measured on this cluster; brigade/plan/hardware/calibration.py says what belongs here.\n"
    section = yaml.safe_dump({"factors": factors}, sort_keys=False, width=120)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, text.rstrip("\n") + "\n" + section)
    except OSError as error:
        problem = f"it cannot be written: {error.strerror}"
        raise UserError(str(file), problem, "name another file: --calibration FILE") from None
    calibration.once.cache_clear()


def record(job: Job) -> Fields:
    """Return a Job as plain values, for YAML: those that differ from the defaults."""
    return dict(_plain(job))


def _plain(value: object) -> Any:
    if is_dataclass(value):
        values = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
        return {name: _plain(own) for name, (own, default) in values.items() if own != default}
    if isinstance(value, frozenset):
        return sorted(value)
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def job_of_record(values: Document, place: str) -> Job:
    """Return the Job that record() wrote. Raises UserError at `place` for anything else."""
    try:
        known = {**values, "shape": _shape(values["shape"])}
        compared = known.get("comparison")
        if compared:
            known["comparison"] = compared | {"shape": _shape(compared.get("shape"))}
        return TypeAdapter(Job).validate_python(known, extra="forbid")
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        problem = f"it is no configuration that this version of Brigade writes ({shortened(str(error), 160)})"
        raise UserError(place, problem, "run the recipe once more") from None


def _shape(values: Document | None) -> ModelShape | None:
    if values is None:
        return None
    measured = not values.keys() <= {field.name for field in fields(ModelShape)}  # counted in the model's code
    return TypeAdapter(MeasuredShape if measured else ModelShape).validate_python(values, extra="forbid")


NETWORK = (1 / 64, 64.0)  # between which a network's factor is looked for
LEAST_WAIT = 0.1  # of a step that has to wait for the network: where computing hides it, noise would decide its factor


class MeasuredRun(NamedTuple):
    """A run whose steps were measured. seconds: of a step"""

    folder: Path
    job: Job
    seconds: float


def read_run(folder: Path) -> MeasuredRun:
    """Read a run from its directory or run.yaml. Raises UserError for a run that measured no steps, or has no estimate."""
    path = folder if folder.is_file() else folder / "run.yaml"
    if not path.is_file():
        raise UserError(str(folder), "there is no run.yaml in it", "name the output directory of a run")
    record = read_yaml(path).get("run") or {}
    entry, place = record.get("prediction"), f"{path}: run.prediction"
    if not isinstance(entry, dict):
        problem = "this run measured nothing: it did not reach its tenth step, or is older than estimates are"
        raise UserError(place, problem, "let a run take ten steps, and name its directory")
    if "job" not in entry:
        raise UserError(place, f"the planner has no estimate of this run: {entry.get('none')}", "leave it out")
    seconds = (entry.get("measured") or {}).get("step_time")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        problem = f"{seconds!r} is not a number of seconds"
        raise UserError(f"{place}.measured.step_time", problem, "run the recipe once more")
    return MeasuredRun(path.parent.resolve(), job_of_record(entry["job"], f"{place}.job"), seconds)


def network(run: MeasuredRun, bare: Gpu) -> float | None:
    """Return the factor on the bandwidth between nodes with which the formulas give what was measured.

    None where no factor does, or where computing hides the network. bare: the GPU with its efficiency, and no factor yet
    """

    def step(factor: float) -> StepTime:
        return step_time(run.job, replace(bare, network=factor))

    low, high = NETWORK
    if not step(high).total < run.seconds < step(low).total:
        return None
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if step(middle).total > run.seconds else (low, middle)
    return low if step(low).across > LEAST_WAIT * run.seconds else None


def calibrate(folders: list[Path], file: Path) -> list[str]:
    """Fold runs into the factors of `file`, write it, and return what changed, a line each.

    The runs that an entry rests on stay in it: they are read again where they are still there (formulas may have changed), and
    keep their factor where they are not.
    """
    given = {run.folder: run for run in map(read_run, folders)}
    factors: Fields = calibration.read(file)["factors"]
    lines: list[str] = []
    for kind in sorted({gpu(run.job.gpu).kind for run in given.values()}):
        entries = factors.get(kind, {})
        known: dict[Path, MeasuredRun] = {}
        for name in (name for entry in entries.values() for name in entry["runs"]):
            with suppress(UserError):
                known[Path(name)] = read_run(Path(name))
        runs = [run for run in (known | given).values() if gpu(run.job.gpu).kind == kind]
        bare = replace(gpu(kind), efficiency=1.0, network=1.0)
        inside = {run.folder: step_time(run.job, bare).total / run.seconds for run in runs if run.job.nodes == 1}
        entries = fold(entries, "efficiency", inside, kind, lines)
        bare = replace(bare, efficiency=entries["efficiency"]["factor"] if "efficiency" in entries else 1.0)
        across = {run.folder: network(run, bare) for run in runs if run.job.nodes > 1}
        nothing = "says nothing of the network: no bandwidth explains its step time, or computing hides it"
        lines += [f"{kind}: {folder} {nothing}" for folder, factor in across.items() if factor is None]
        entries = fold(entries, "network", {folder: one for folder, one in across.items() if one}, kind, lines)
        if entries:
            factors[kind] = entries
    if not any(factors.values()):
        problem = "nothing follows from these runs: " + "; ".join(lines)
        raise UserError(", ".join(map(str, folders)), problem, "calibrate with a run inside one node first")
    write(file, factors)
    return lines
