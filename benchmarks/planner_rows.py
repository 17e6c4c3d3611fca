"""Rows of published runs beside their estimates, and what is fitted to them: one share per chip."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from benchmarks.published import table
from benchmarks.published.job import PublishedJob
from benchmarks.published.parse_columns import Inexpressible
from benchmarks.published.verdict import verdict
from brigade.errors import UserError
from brigade.plan import hardware
from brigade.plan.costs.estimate import Estimate, estimate
from brigade.plan.hardware import Gpu
from brigade.train.watch.flops import flops_per_token

DATA = Path(__file__).with_name("data")
TABLES = ("published", "collected")
STRANGERS = ("strangers",)  # to whose rows no constant is fitted
# GPU kinds that share their `sustained`: the same chip at the same power.
CHIPS = {
    "A100 40GB": "A100",
    "A100 80GB": "A100",
    "A800 80GB": "A100",  # with fewer links between cards
    "H100 80GB": "H100",
    "H800": "H100",
    "H200": "H100",
    "H100 94GB": "H100, 500 W",
    "RTX 4090": "RTX 4090",
    "B200": "Blackwell",
    "GB200": "Blackwell",
    "B300": "Blackwell",
    "GB300": "Blackwell",
}
HEALTHY = 20.0  # percent of MFU below which a run waits for something that no formula knows


@dataclass(frozen=True, eq=False)
class Run:
    """A row that can be expressed. memory, speed: what was measured, or None."""

    row: dict[str, str]
    job: PublishedJob
    memory: float | None
    speed: float | None

    @property
    def name(self) -> str:
        """The row's name, which no row of another table has."""
        return self.row["id"]

    @property
    def source(self) -> str:
        return self.row["set"]

    @property
    def model(self) -> str:
        return self.job.shape.name

    @property
    def ok(self) -> bool:
        return self.row["status"] == "ok"

    @cached_property
    def healthy(self) -> bool:
        return (table.figure(self.row, "mfu_pct") or measured_mfu(self)) > HEALTHY

    @property
    def says_what(self) -> bool:
        """Whether its source says which memory it measured."""
        return table.says_what(self.row)

    @property
    def fits_speed(self) -> bool:
        """Whether `sustained` is fitted to it."""
        return bool(self.speed) and self.healthy

    @cached_property
    def chip(self) -> str:
        return CHIPS.get(hardware.gpu(self.job.gpu).kind, "")


@cache
def runs() -> list[Run]:
    """Every expressible row of TABLES."""
    return expressible(TABLES)


@cache
def strangers() -> list[Run]:
    """Every expressible row of STRANGERS."""
    return expressible(STRANGERS)


@cache
def first_sight() -> dict[str, dict[str, str]]:
    """What was said of each of strangers() when it was first seen, by its name."""
    return {row["id"]: row for row in table.read_plain(DATA / "first_sight.csv")}


def expressible(names: Iterable[str]) -> list[Run]:
    """Every expressible row of those tables."""
    found: list[Run] = []
    for name in names:
        for row in table.read(DATA / f"{name}.csv"):
            try:
                job = table.expressed(row).job
                assert isinstance(job, PublishedJob)
            except (Inexpressible, UserError):
                continue
            ok = row["status"] == "ok"
            memory, speed = ((table.figure(row, name) if ok else None) for name in ("peak_mem_gib", "tok_s_gpu"))
            found.append(Run(row, job, memory, speed))
    return found


@cache
def _estimate(run: Run, hundredths: int | None) -> Estimate:
    device: Gpu = hardware.gpu(run.job.gpu)
    return estimate(run.job, replace(device, sustained=hundredths / 100) if hundredths else device)


def estimated(run: Run, sustained: dict[str, float]) -> Estimate:
    """With a chip's `sustained`, in hundredths, or the catalogue's where it is not given."""
    value = sustained.get(run.chip)
    return _estimate(run, round(100 * value) if value else None)


def speed_error(run: Run, sustained: dict[str, float]) -> float:
    """Predicted over measured tokens per second."""
    assert run.speed
    return estimated(run, sustained).tokens_per_second_per_gpu / run.speed


def memory_error(run: Run) -> float:
    assert run.memory
    found = estimated(run, {})
    return (found.allocated_gib if table.counts_allocated(run.row) else table.held_gib(found, run.row)) / run.memory


def run_verdict(run: Run) -> str:
    """Return whether a run fits by its estimate: "yes", "maybe" or "no"."""
    return verdict(estimated(run, {}), run.row)


def measured_mfu(run: Run) -> float:
    found = estimated(run, {})
    return found.mfu * run.speed / found.tokens_per_second_per_gpu if run.speed else 100.0


@cache
def best() -> dict[tuple[str, str], float]:
    """(What drives a chip, chip) -> share of its dense peak with which the best of at least three published runs computed.

    By 6 N + 6 L h s per token; of all weights in 16 bits, without experts.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs():
        s, job = run.job.shape, run.job
        if run.speed and run.chip and job.method == "full" and not (job.fp8 or s.experts):
            needed = flops_per_token(s.active, s.layers, s.query_width, s.attended(job.length) / 2)
            found[job.driver, run.chip].append(run.speed * needed / (hardware.gpu(job.gpu).bf16_tflops * 1e12))
    return {key: max(shares) for key, shares in found.items() if len(shares) >= 3}


# ---- fitting -----------------------------------------------------------------------------------------------------
def fit(training: Iterable[Run]) -> dict[str, float]:
    """`sustained` of each chip that has at least three healthy rows: it makes the median of predicted over measured speed 1."""
    by_chip: dict[str, list[Run]] = defaultdict(list)
    for run in training:
        if run.fits_speed and run.chip:
            by_chip[run.chip].append(run)
    chosen = {chip: [run for run in members if not run.job.fp8] for chip, members in by_chip.items()}
    chosen = {chip: few if len(few) >= 3 else by_chip[chip] for chip, few in chosen.items()}
    return {chip: _root(members) for chip, members in chosen.items() if len(members) >= 3}


def _root(members: list[Run]) -> float:
    """By bisection over hundredths; speed grows with `sustained`."""
    low, high, chip = 30, 120, members[0].chip
    while high - low > 1:
        middle = (low + high) // 2
        above = statistics.median(speed_error(run, {chip: middle / 100}) for run in members) > 1
        low, high = (low, middle) if above else (middle, high)
    return high / 100


def left_out(key: Callable[[Run], str]) -> dict[str, list[tuple[Run, float]]]:
    """For each source (or model): its runs, and predicted over measured speed with `sustained` of all others."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs():
        if run.speed:
            groups[key(run)].append(run)
    result = {}
    for name, members in groups.items():
        others = [run for run in runs() if key(run) != name]
        sustained = fit(others)
        result[name] = [(run, speed_error(run, sustained)) for run in members]
    return result
