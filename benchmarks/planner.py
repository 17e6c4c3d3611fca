"""How far the planner's estimates are from published runs, and from rows that nothing was fitted to.

    python -m benchmarks.planner            # writes docs/planner-accuracy.md, and in brigade/estimate/ intervals.yaml and each
                                            # fitted `sustained` of hardware.yaml
    python -m benchmarks.planner --check    # says whether they are what the tables give

The tables lie in benchmarks/data/ with their sources. One number per GPU kind is fitted to them: `sustained`, the share of
their best that products reach in training. Everything else is counted, or published by others (docs/planner-accuracy.md).
"""

import argparse
import os
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from brigade.errors import UserError
from brigade.estimate import calibration, hardware, table
from brigade.estimate.estimate import Estimate, estimate, of_time
from brigade.estimate.hardware import Gpu
from brigade.estimate.job import Job
from brigade.estimate.words import Inexpressible

DATA = Path(__file__).with_name("data")
REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "planner-accuracy.md"
INTERVALS = REPOSITORY / "brigade" / "estimate" / "intervals.yaml"
TABLES = ("published", "collected")
# GPU kinds that share their `sustained`: the same chip at the same power.
CHIPS = {"A100 40GB": "A100", "A100 80GB": "A100", "H100 80GB": "H100", "H200": "H100", "H100 94GB": "H100, 500 W",
         "RTX 4090": "RTX 4090"}  # fmt: skip
HEALTHY = 20.0  # percent of MFU below which a run waits for something that no formula knows
HELD = 75.0  # percent of left-out rows that an interval holds at least; meant are 80


@dataclass(frozen=True)
class Run:
    """A row that can be expressed. memory, speed: what was measured, or None."""

    place: int
    row: dict[str, str]
    job: Job
    memory: float | None
    speed: float | None

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
        return bool(re.search(r"alloc|active|reserved|device|smi", self.row["mem_kind"].lower()))

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
    found: list[Run] = []
    for name in TABLES:
        for row in table.read(DATA / f"{name}.csv"):
            try:
                job = table.expressed(row).job
            except (Inexpressible, UserError):
                continue
            ok = row["status"] == "ok"
            memory, speed = ((table.figure(row, name) if ok else None) for name in ("peak_mem_gib", "tok_s_gpu"))
            found.append(Run(len(found), row, job, memory, speed))
    return found


@cache
def _estimate(place: int, hundredths: int | None) -> Estimate:
    run = runs()[place]
    device: Gpu = hardware.gpu(run.job.gpu)
    return estimate(run.job, replace(device, sustained=hundredths / 100) if hundredths else device)


def estimated(run: Run, sustained: dict[str, float]) -> Estimate:
    """With a chip's `sustained`, in hundredths, or the catalogue's where it is not given."""
    value = sustained.get(run.chip)
    return _estimate(run.place, round(100 * value) if value else None)


def speed_error(run: Run, sustained: dict[str, float]) -> float:
    """Predicted over measured tokens per second."""
    assert run.speed
    return estimated(run, sustained).tokens_per_second_per_gpu / run.speed


def memory_error(run: Run) -> float:
    assert run.memory
    found = estimated(run, {})
    return (found.allocated_gib if table.counts_allocated(run.row) else found.reserved_gib) / run.memory


# ---- fitting -----------------------------------------------------------------------------------------------------
def fit(training: Iterable[Run]) -> dict[str, float]:
    """`sustained` of each chip that has at least three healthy rows: it makes the median of predicted over measured speed 1."""
    by_chip: dict[str, list[Run]] = defaultdict(list)
    for run in training:
        if run.fits_speed and run.chip:
            by_chip[run.chip].append(run)
    return {chip: _root(members) for chip, members in by_chip.items() if len(members) >= 3}


def _root(members: list[Run]) -> float:
    """By bisection over hundredths; speed grows with `sustained`."""
    low, high, chip = 30, 120, members[0].chip
    while high - low > 1:
        middle = (low + high) // 2
        above = statistics.median(speed_error(run, {chip: middle / 100}) for run in members) > 1
        low, high = (low, middle) if above else (middle, high)
    return high / 100


def left_out(key: Callable[[Run], str]) -> dict[str, list[tuple[Run, float]]]:
    """For each source (or model): its runs, and predicted over measured speed with `sustained` fitted to all others."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs():
        if run.speed:
            groups[key(run)].append(run)
    result = {}
    for name, members in groups.items():
        sustained = fit(run for run in runs() if key(run) != name)
        result[name] = [(run, speed_error(run, sustained)) for run in members]
    return result


# ---- the intervals -----------------------------------------------------------------------------------------------
def interval(errors: Iterable[float], tail: float) -> tuple[float, float]:
    """Factors on a prediction; a share `tail` of measurements lay outside on each side. errors: predicted over measured."""
    ordered = sorted(1 / error for error in errors)
    cut = int(tail * (len(ordered) - 1))
    return round(ordered[cut], 2), round(ordered[-1 - cut], 2)


def residuals() -> dict[str, list[tuple[Run, float]]]:
    """Predicted over measured: of memory, and of time inside a node, across nodes and of experts, speed's from left-out
    sources."""
    found: dict[str, list[tuple[Run, float]]] = {"memory": [(run, memory_error(run)) for run in runs() if run.memory]}
    for members in left_out(lambda run: run.source).values():
        for run, error in members:
            if run.healthy:
                found.setdefault(of_time(run.job), []).append((run, 1 / error))
    return found


def coverage(found: list[tuple[Run, float]], tail: float) -> float:
    """Percent of rows inside the interval that the other sources' rows give."""
    inside = 0
    for source in {run.source for run, _ in found}:
        others = [error for run, error in found if run.source != source]
        if not others:
            continue
        low, high = interval(others, tail)
        inside += sum(low <= 1 / error <= high for run, error in found if run.source == source)
    return 100 * inside / len(found)


def held(found: list[tuple[Run, float]]) -> tuple[tuple[float, float], float]:
    """(interval, its coverage): the tails are cut as far as leaves HELD percent of left-out sources' rows inside.

    A tenth on each side would hold fewer: rows of one source err together, and a new source in its own way.
    """
    tail = next((tail / 100 for tail in range(10, 0, -1) if coverage(found, tail / 100) >= HELD), 0.0)
    return interval((error for _, error in found), tail), coverage(found, tail)


# ---- the page ----------------------------------------------------------------------------------------------------
def spread(errors: Iterable[float]) -> str:
    """Rows, median and p90 of |predicted / measured - 1|, and the median with its sign."""
    ordered = sorted(errors)
    count, median, p90 = table.quantiles(error - 1 for error in ordered)
    if not count:
        return " |  |  | "
    return f"{count} | {median:.1f}% | {p90:.1f}% | {100 * (statistics.median(ordered) - 1):+.1f}%"


def by_set() -> str:
    lines = ["| set | rows | estimated | memory: rows | median | p90 | bias | speed: rows | median | p90 | bias "
             "| failed, called unfit | ran, called unfit |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name in TABLES:
        rows = table.read(DATA / f"{name}.csv")
        for source in dict.fromkeys(row["set"] for row in rows):
            members = [run for run in runs() if run.source == source]
            memory = spread(memory_error(run) for run in members if run.memory)
            speed = spread(speed_error(run, {}) for run in members if run.speed)
            unfit = {True: [0, 0], False: [0, 0]}
            for run in members:
                unfit[run.ok][0] += not estimated(run, {}).fits
                unfit[run.ok][1] += 1
            verdicts = " | ".join(f"{told} of {count}" if count else "" for told, count in (unfit[False], unfit[True]))
            lines.append(
                f"| {source} | {sum(row['set'] == source for row in rows)} | {len(members)} | {memory} | {speed} | {verdicts} |"
            )
    return "\n".join(lines)


def measured_mfu(run: Run) -> float:
    found = estimated(run, {})
    return found.mfu * run.speed / found.tokens_per_second_per_gpu if run.speed else 100.0


def trivial(run: Run, others: list[Run]) -> float:
    """Predicted over measured speed if every run had the median MFU of the other sources' runs on that chip."""
    same = [one for one in others if one.chip == run.chip] or others
    return statistics.median(measured_mfu(one) for one in same) / measured_mfu(run)


def leave_one_out(key: Callable[[Run], str], what: str) -> str:
    """The table of left-out groups, beside a model that knows nothing but the median MFU of the others."""
    lines = [
        f"| left out: {what} | speed: rows | median | p90 | bias | median with the others' MFU |",
        "|---|---|---|---|---|---|",
    ]
    every, plain = [], []
    for name, members in left_out(key).items():
        healthy = [(run, error) for run, error in members if run.healthy]
        if len(healthy) < 3:
            every += [error for _, error in healthy]
            continue
        others = [run for run in runs() if key(run) != name and run.speed and run.healthy]
        simple = [trivial(run, others) for run, _ in healthy]
        every += [error for _, error in healthy]
        plain += simple
        lines.append(
            f"| {name} | {spread(error for _, error in healthy)} | {table.quantiles(e - 1 for e in simple)[1]:.1f}% |"
        )
    lines.append(f"| **all** | {spread(every)} | {table.quantiles(e - 1 for e in plain)[1]:.1f}% |")
    return "\n".join(lines)


def first_choices() -> str:
    """Of cells (source, model, GPU kind, GPUs, sequence length) with several configurations: is the first choice a good one?"""
    cells: dict[str, dict[tuple[Any, ...], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs():
        if run.speed:
            cells[run.source][run.model, run.job.gpu, run.job.gpus, run.job.sequence].append(run)
    lines = ["| set | cells | first choice within 10 % of the best | worst |", "|---|---|---|---|"]
    every: list[float] = []
    for source, members in cells.items():
        shares = [_share_of_best([(estimated(run, {}).tokens_per_second_per_gpu, run.speed or 0.0) for run in cell])
                  for cell in members.values() if len(cell) > 1]  # fmt: skip
        if shares:
            lines.append(_near(source, shares))
        every += shares
    return "\n".join([*lines, _near("**all**", every)])


def _near(name: str, shares: list[float]) -> str:
    return f"| {name} | {len(shares)} | {sum(share >= 0.9 for share in shares)} | {100 * min(shares):.0f}% |"


def _share_of_best(cell: list[tuple[float, float]]) -> float:
    """cell: (predicted, measured) speeds. The share of the best measured one that the predicted best has."""
    return max(cell)[1] / max(measured for _, measured in cell)


def playbook() -> dict[str, Any]:
    """Errors and ranking on the Ultra-Scale Playbook's whole table."""
    rows = [row | table.predict(row) for row in table.read(DATA / "playbook_h100.csv")]
    told = [row for row in rows if not row["reason"]]
    ok = [row for row in told if row["status"] == "ok"]
    sane = [
        row
        for row in ok
        if int(row["tp"]) <= 8 and int(row["grad_acc"]) >= int(row["pp"]) and float(row["mem_gb"]) < 70
    ]
    healthy = [row for row in sane if float(row["mfu_pct"]) > HEALTHY]
    cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in sane:
        cells[row["model"], row["nodes"]].append(row)
    shares = {
        name: [_share_of_best([(float(row["pred_tok_s_gpu"]), float(row["tok_s_gpu"])) for row in cell])
               for members in cells.values() if (cell := [row for row in members if float(row["mfu_pct"]) > least])]
        for name, least in (("all", 0.0), ("healthy", HEALTHY))
    }  # fmt: skip
    return {"rows": len(rows), "told": len(told), "ok": len(ok), "sane": len(sane), "healthy": len(healthy),
            "memory": table.quantiles(table.errors(row)[0] for row in sane),
            "speed": table.quantiles(table.errors(row)[1] for row in healthy),
            "speed_all": table.quantiles(table.errors(row)[1] for row in sane), "shares": shares,
            "refused": sum(row["fits"] == "no" for row in ok)}  # fmt: skip


def page(sustained: dict[str, float], found: dict[str, list[tuple[Run, float]]]) -> str:
    """docs/planner-accuracy.md."""
    book = playbook()
    near = {
        name: f"{sum(share >= 0.9 for share in members)} of {len(members)}" for name, members in book["shares"].items()
    }
    every_memory, every_speed = ([error for run, error in members if run.healthy] for members in (
        found["memory"], [(run, speed_error(run, {})) for run in runs() if run.speed]))  # fmt: skip
    widths = "\n".join(
        f"| {name.replace('_', ' ')} | {low:.2f} to {high:.2f} | {100 * (high - low):.0f}% | {len(found[name])} | "
        f"{covered:.0f}% |"
        for name, ((low, high), covered) in ((name, held(members)) for name, members in found.items())
    )
    values = {
        "by_set": by_set(), "by_source": leave_one_out(lambda run: run.source, "source"),
        "by_model": leave_one_out(lambda run: run.model, "model"),
        "sustained": "\n".join(f"| {chip} | {value:.2f} | {sum(run.chip == chip and run.fits_speed for run in runs())} |"
                               for chip, value in sustained.items()),
        "memory_all": spread(every_memory), "speed_all": spread(every_speed), "intervals": widths,
        **{f"book_{key}": str(value) for key, value in book.items() if isinstance(value, int)},
        **{f"book_{key}": f"{value[1]:.1f}% median, {value[2]:.1f}% p90" for key, value in book.items()
           if isinstance(value, tuple)},
        "first_choices": first_choices(), "near_all": near["all"], "near_healthy": near["healthy"],
    }  # fmt: skip
    text = Path(__file__).with_name("planner_page.md").read_text()
    for key, value in values.items():
        text = text.replace("{" + key + "}", value)
    return text


def intervals(found: dict[str, list[tuple[Run, float]]]) -> str:
    """intervals.yaml."""
    lines = [
        f"{name}: [{low}, {high}]" for name, ((low, high), _) in ((n, held(members)) for n, members in found.items())
    ]
    return "\n".join(
        ["# Factors on a prediction between which 80 % of measurements lie: python -m benchmarks.planner", *lines, ""]
    )


def catalogue(sustained: dict[str, float]) -> str:
    """hardware.yaml with the fitted values; its text is otherwise as it was."""
    text = hardware.CATALOGUE.read_text()
    for kind, chip in CHIPS.items():
        if chip in sustained:
            entry = re.compile(rf"(^  {re.escape(kind)}:\n(?:    .*\n)*?    .*?\bsustained: )[\d.]+", re.M)
            text, count = entry.subn(rf"\g<1>{sustained[chip]:.2f}", text)
            if count != 1:
                raise SystemExit(
                    f"{hardware.CATALOGUE}: {kind} has no `sustained`: write one, the fitted is {sustained[chip]:.2f}"
                )
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a file is not what the tables give"
    )
    options = parser.parse_args(argv)
    os.environ[calibration.VARIABLE] = ""  # the factors of nobody's own cluster
    changed = []

    def hold(path: Path, text: str) -> None:
        if path.read_text() != text:
            changed.append(path.relative_to(REPOSITORY))
            if not options.check:
                path.write_text(text)

    sustained = fit(runs())
    hold(hardware.CATALOGUE, catalogue(sustained))
    if not options.check:  # the page's estimates are with what hardware.yaml says now
        for remembered in (hardware._published, _estimate):
            remembered.cache_clear()
    found = residuals()
    hold(INTERVALS, intervals(found))
    hold(PAGE, page(sustained, found))
    for path in changed:
        print(f"{path} is not what the tables give" if options.check else f"wrote {path}")
    if changed and not options.check:
        print("Recipes' headers have these figures too: python -m brigade plan --headers")
    if not changed:
        print("hardware.yaml, intervals.yaml and planner-accuracy.md are what the tables give.")
    return bool(options.check and changed)


if __name__ == "__main__":
    raise SystemExit(main())
