"""Measure how far the planner's estimates are from published runs, and from rows that nothing was fitted to.

    python -m benchmarks.planner            # writes docs/evidence/planner-accuracy.md, brigade/plan/costs/intervals.yaml, each
                                            # fitted `sustained` of brigade/plan/hardware/hardware.yaml
    python -m benchmarks.planner --check    # says whether they are what the tables give

The tables lie in benchmarks/data/ with their sources. One number per GPU kind is fitted to them: `sustained`, the share of
their best that products reach in training. Everything else is counted, or published by others (planner-accuracy.md).
"""

import argparse
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from brigade.errors.tables import table
from brigade.plan import hardware
from brigade.plan.costs.estimate import memory_key, time_key
from brigade.plan.hardware import calibration

from .pages import EVIDENCE, REPOSITORY, filled, markdown
from .planner_hosts import Held, checkpoints, disk_table, loading, memory_table, published
from .planner_rows import (
    CHIPS,
    TABLES,
    Run,
    _estimate,
    best,
    fit,
    left_out,
    memory_error,
    runs,
    speed_error,
    unseen_error,
)
from .planner_tables import (
    beside_simumax,
    by_chip,
    by_engine,
    by_group,
    by_set,
    first_choices,
    leave_one_out,
    memory_left_out,
    playbook,
    spread,
)
from .published.table import counts_allocated

PAGE = EVIDENCE / "planner-accuracy.md"
INTERVALS = REPOSITORY / "brigade" / "plan" / "costs" / "intervals.yaml"
Rows = list[tuple[Run, float]] | list[tuple[Held, float]]  # with predicted over measured
# Of a chip that no run was fitted to chips are left out; of experts on several ranks, where two sources have five rows, rows.
LEFT_OUT = {"time_unseen": "chip", "memory_experts": "place"}
MEMORY = ("memory", "memory_zero", "memory_experts")
TIMES = ("time_inside", "time_across", "time_zero", "time_experts")
OURS = ("ddp", "fsdp2", "zero")  # engines of train.py that have rows
HELD = 75.0  # percent of left-out rows that an interval holds at least; meant are 80


# ---- the intervals -----------------------------------------------------------------------------------------------
def interval(errors: Iterable[float], tail: float) -> tuple[float, float]:
    """Factors on a prediction; a share `tail` of measurements lay outside on each side. errors: predicted over measured."""
    ordered = sorted(1 / error for error in errors)
    cut = int(tail * (len(ordered) - 1))
    return round(ordered[cut], 2), round(ordered[-1 - cut], 2)


@cache
def residuals() -> dict[str, list[tuple[Run, float]]]:
    """Predicted over measured, by memory_key() and time_key(); speed's from left-out sources."""
    found: dict[str, list[tuple[Run, float]]] = {name: [] for name in (*MEMORY, *TIMES)}
    for run in runs():
        if run.memory:
            found[memory_key(run.job)].append((run, memory_error(run)))
    for members in left_out(lambda run: run.source).values():
        for run, error in members:
            # FP8 and DeepSpeed of 2021 are no train.py's
            if run.healthy and not run.job.fp8 and run.job.engine != "zero-2021" and hardware.gpu(run.job.gpu).seen:
                found[time_key(run.job)].append((run, 1 / error))
    return found | {
        "time_unseen": [
            (run, 1 / unseen_error(run)) for run in runs() if run.fits_speed and run.chip and not run.job.fp8
        ]
    }


def of_hosts() -> dict[str, list[tuple[Held, float]]]:
    """Predicted over measured: of a host's memory, and of checkpoints."""
    memory = [one for one in [*published(), *loading()] if one.predicted]
    return {
        "host": [(one, one.predicted / one.measured) for one in memory],
        "disk": [(one, one.predicted / one.measured) for one in checkpoints()],
    }


def inside(found: Rows, tail: float, group: str = "source") -> list[bool]:
    """Return whether each row lies inside the interval that the other sources' rows give, or other groups'."""
    between: dict[str, tuple[float, float]] = {}
    for name in {getattr(run, group) for run, _ in found}:
        others = [error for run, error in found if getattr(run, group) != name]
        between[name] = interval(others, tail) if others else (0.0, 0.0)
    return [low <= 1 / error <= high for run, error in found for low, high in [between[getattr(run, group)]]]


def tail_of(found: Rows, group: str = "source") -> float:
    """The share of rows to cut on each side: as much as leaves HELD percent of left-out groups' rows inside, of all and of
    each of train.py's engines with ten.

    A tenth on each side would hold fewer: rows of one source err together, and a new source in its own way.
    """

    def enough(tail: float) -> bool:
        each: dict[str, list[bool]] = defaultdict(list)
        for (run, _), one in zip(found, inside(found, tail, group), strict=True):
            each["all"].append(one)
            if isinstance(run, Run) and run.job.engine in OURS:
                each[run.job.engine].append(one)
        return all(100 * sum(of) >= HELD * len(of) for name, of in each.items() if name == "all" or len(of) >= 10)

    return next((tail for tail in (tail / 100 for tail in range(10, -1, -1)) if enough(tail)), 0.0)


def held(found: Rows, group: str = "source") -> tuple[tuple[float, float], float]:
    """(interval, percent of left-out groups' rows inside)"""
    tail = tail_of(found, group)
    covered = 100 * sum(inside(found, tail, group)) / len(found)
    return interval((error for _, error in found), tail), covered


@cache
def within(kinds: tuple[str, ...]) -> dict[int, bool]:
    """Return for a run's place whether the run lies in the interval of the other sources, for those kinds of residuals()."""
    found: dict[int, bool] = {}
    for name in kinds:
        rows, group = residuals()[name], LEFT_OUT.get(name, "source")
        each = inside(rows, tail_of(rows, group), group)
        found |= {run.place: held for (run, _), held in zip(rows, each, strict=True)}
    return found


@cache
def by_what() -> dict[str, tuple[tuple[float, float], float]]:
    """held() of everything that has an interval."""
    every = residuals() | of_hosts()
    return {name: held(rows, LEFT_OUT.get(name, "source")) for name, rows in every.items()}


# ---- what is written ----------------------------------------------------------------------------------------------
def tables() -> dict[str, str]:
    """Return the tables of docs/evidence/planner-accuracy.md, with what hardware.yaml says now."""
    book, found = playbook(), residuals()
    memory = [one for name in MEMORY for one in found[name]]
    near = {name: f"{sum(share >= 0.9 for share in of)} of {len(of)}" for name, of in book["shares"].items()}
    errors = {
        "memory, where the source says that it was allocated": [
            error for run, error in memory if run.says_what and counts_allocated(run.row)
        ],
        "memory, where it says that it was reserved, or of the device": [
            error for run, error in memory if run.says_what and not counts_allocated(run.row)
        ],
        "memory, all": [error for _, error in memory],
        "tokens per second, runs with an MFU above 20 %": [speed_error(run, {}) for run in runs() if run.fits_speed],
        "the same, each source left out of the fit": [
            error for of in left_out(lambda run: run.source).values() for run, error in of if run.healthy
        ],
    }
    fitted = {run.chip for run in runs() if run.fits_speed}
    sustained = {chip: hardware.gpu(kind).sustained for kind, chip in CHIPS.items() if chip in fitted}
    intervals = [
        [name.replace("_", " "), f"{low:.2f} to {high:.2f}", f"{100 * (high - low):.0f}%", len(of), f"{covered:.0f}%"]
        for name, ((low, high), covered) in by_what().items()
        for of in [(found | of_hosts())[name]]
    ]
    off = {name: f"{book[name][1]:.1f}% median, {book[name][2]:.1f}% p90" for name in ("memory", "speed", "speed_all")}
    whole = [
        ["configurations", book["rows"], ""],
        ["that can be expressed", book["told"], ""],
        ["that ran", book["ok"], f"{book['refused']} of them are called unfit"],
        [
            "TP up to 8, as many micro-batches as stages, less than 70 GB",
            book["sane"],
            f"memory {off['memory']}; speed {off['speed_all']}",
        ],
        ["of these with an MFU above 20 %", book["healthy"], f"speed {off['speed']}"],
        ["cells of (model, nodes): first choice within 10 % of the best", near["all"], ""],
        ["the same among runs with an MFU above 20 %", near["healthy"], ""],
    ]
    return {
        "summary": markdown(
            ["what", "rows", "median", "p90", "bias"], [[name, *spread(of)] for name, of in errors.items()]
        ),
        "sustained": markdown(
            ["chip", "sustained", "rows", "best run"],
            [
                [
                    chip,
                    f"{value:.2f}",
                    sum(run.chip == chip and run.fits_speed for run in runs()),
                    f"{100 * best()[chip]:.1f}%" if chip in best() else "",
                ]
                for chip, value in sustained.items()
            ],
        ),
        "sets": by_set(TABLES, runs()),
        "sources": leave_one_out(lambda run: run.source, "source", within(TIMES)),
        "models": leave_one_out(lambda run: run.model, "model", within(TIMES)),
        "memory": memory_left_out(within(MEMORY)),
        "first-choices": first_choices(runs()),
        "engines": by_engine(within(TIMES), within(MEMORY)),
        "groups": by_group(within(TIMES), within(MEMORY)),
        "chips": by_chip(lambda run: by_what()[time_key(run.job, hardware.gpu(run.job.gpu).seen)][0]),
        "simumax": beside_simumax(),
        "playbook": markdown(["the whole table", "rows", "error"], whole),
        "host-memory": memory_table(),
        "disk": disk_table(),
        "intervals": markdown(["of", "factors", "width, of the prediction", "rows", "coverage"], intervals),
    }


def intervals() -> str:
    """intervals.yaml."""
    lines = [f"{name}: [{low}, {high}]" for name, ((low, high), _) in by_what().items()]
    reached = best()
    kinds = ", ".join(f"{kind}: {reached[chip]:.3f}" for kind, chip in CHIPS.items() if chip in reached)
    lines += ["# Of its dense peak in bf16, what the best run on a chip computed with", f"best: {{{kinds}}}"]
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
        for remembered in (table, hardware.usual_share, _estimate):
            remembered.cache_clear()
    hold(INTERVALS, intervals())
    hold(PAGE, filled(PAGE.read_text(), tables()))
    for path in changed:
        print(f"{path} is not what the tables give" if options.check else f"wrote {path}")
    if changed and not options.check:
        print("Recipes' headers have these figures too: python -m brigade plan --headers")
    if not changed:
        print("hardware.yaml, intervals.yaml and planner-accuracy.md are what the tables give.")
    return bool(options.check and changed)


if __name__ == "__main__":
    raise SystemExit(main())
