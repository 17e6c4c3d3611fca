"""Measure how far the planner's estimates are from rows that nobody fitted: benchmarks/data/strangers.csv.

    python -m benchmarks.strangers            # writes their tables in docs/evidence/planner-accuracy.md
    python -m benchmarks.strangers --check    # 1 where the page has others

No constant is fitted to these rows. What `plan` says now is compared with what they measured. Intervals are made of them too
(planner_intervals.py); a row is counted as held where it lies in the interval that the other sources give.
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from brigade.plan import hardware
from brigade.plan.constants import CONSTANTS
from brigade.plan.costs.estimate import time_group
from brigade.plan.hardware import calibration

from . import baseline, varying
from .pages import EVIDENCE, command, markdown
from .planner_intervals import grouped, groups, holds, other_programs
from .planner_rows import (
    DATA,
    HEALTHY,
    STRANGERS,
    Run,
    first_sight,
    memory_error,
    run_verdict,
    runs,
    speed_error,
    strangers,
)
from .planner_tables import by_set, first_choices, spread
from .published import table
from .published.table import counts_allocated, predict

PAGE = EVIDENCE / "planner-accuracy.md"
ALLOCATED, SHOWN, FIRST_SIGHT = "allocated", "reserved, or shown by nvidia-smi", "memory at first sight"


def measured(run: Run) -> str:
    """Which memory a row's source measured."""
    if not run.says_what:
        return "which, its source does not say"
    return "allocated" if counts_allocated(run.row) else "reserved, or of the device"


def errors() -> str:
    memory, fast = ([run for run in strangers() if getattr(run, what)] for what in ("memory", "speed"))
    healthy = [run for run in fast if run.healthy]
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in memory:
        groups[f"memory, {measured(run)}"].append(run)
    groups["memory, all"] = memory
    speeds = {
        "tokens per second, all": fast,
        f"the same, runs with an MFU above {HEALTHY:.0f} %": healthy,
        "of these inside a host": [run for run in healthy if run.job.nodes == 1],
        "of these across hosts": [run for run in healthy if run.job.nodes > 1],
    }
    lines = [[what, len({run.source for run in of}), *spread(map(memory_error, of))] for what, of in groups.items()]
    for what, of in speeds.items():
        lines.append([what, len({run.source for run in of}), *spread(speed_error(run, {}) for run in of)])
    return markdown(["what", "sources", "rows", "median", "p90", "bias"], lines)


def at_first_sight() -> str:
    """What was said of these rows when they were first seen: errors, and how many lay in the interval that was printed then."""
    lines: list[list[Any]] = []
    for what, column in (("memory", "pred_mem_gib"), ("speed", "pred_tok_s_gpu")):
        known = [
            (run, first_sight()[run.name]) for run in strangers() if getattr(run, what) and run.name in first_sight()
        ]
        for number in sorted({row["round"] for _, row in known}):
            of = [(run, row) for run, row in known if row["round"] == number]
            off = spread(float(row[column]) / getattr(run, what) for run, row in of)
            held = sum(
                float(row[f"{column}_low"]) <= getattr(run, what) <= float(row[f"{column}_high"]) for run, row in of
            )
            lines.append([what, number, len({run.source for run, _ in of}), *off, f"{held} of {len(of)}"])
    return markdown(["what", "round", "sources", "rows", "median", "p90", "bias", "in the interval"], lines)


def verdicts() -> str:
    """Count what could be estimated, and what was said of runs that failed and that ran."""
    known, rows = strangers(), table.read(DATA / "strangers.csv")
    failed, ran = ([run for run in known if run.ok == ok] for ok in (False, True))
    lines: list[list[Any]] = [
        ["rows", len(rows), len({row["set"] for row in rows})],
        ["that can be expressed", len(known), len({run.source for run in known})],
    ]
    for what, of, wrong in (
        ("failed, and are called fitting", failed, [run for run in failed if run_verdict(run) == "yes"]),
        ("ran, and may not fit", ran, [run for run in ran if run_verdict(run) == "maybe"]),
        ("ran, and are called unfit", ran, [run for run in ran if run_verdict(run) == "no"]),
    ):
        lines.append([what, f"{len(wrong)} of {len(of)}", len({run.source for run in of})])
    return markdown(["", "rows", "sources"], lines)


def refused() -> str:
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in table.read(DATA / "strangers.csv"):
        if reason := predict(row)["reason"]:
            reasons[reason].append(row["id"])
    return markdown(["refused", "because"], [[", ".join(names), reason] for reason, names in reasons.items()])


def place(run: Run) -> str:
    return "inside a host" if run.job.nodes == 1 else "across hosts"


def coverage() -> str:
    """Count the rows in the 80 % interval that other sources give: of all, by interval, by place, and by engine.

    Beside them is how wide it is, the upper end over the lower: the median of the rows.

    Memory is of train.py's engines, but at first sight. Times are of runs in 16 bits with an MFU above HEALTHY.
    """
    new = {run.name for run in strangers()}
    seen: dict[str, dict[Run, tuple[bool, float]]] = {
        name: {run: (held, group.width) for group in of for run, held in holds(group) if run.name in new}
        for name, of in {
            ALLOCATED: groups("memory").values(),
            SHOWN: groups("device").values(),
            FIRST_SIGHT: [other_programs()],
            "time": groups("time").values(),
        }.items()
    }
    seen["time"] = {run: one for run, one in seen["time"].items() if not run.job.fp8}

    def interval(run: Run) -> str:
        return f"`{time_group(run.job, hardware.gpu(run.job.gpu))}`"

    def engine(run: Run) -> str:
        return str(run.job.engine)

    ways: list[tuple[str, Callable[[Run], str]]] = [
        *((what, name_of) for what in (ALLOCATED, SHOWN, FIRST_SIGHT) for name_of in (lambda run: "all", engine)),
        ("time", lambda run: "all"),
        ("time", place),
        ("time", interval),
        ("time", lambda run: f"{run.job.engine}, {place(run)}"),
    ]
    lines = []
    for what, name_of in ways:
        members: dict[str, list[Run]] = defaultdict(list)
        for run in seen[what]:
            members[name_of(run)].append(run)
        for name, of in sorted(members.items()):
            count = sum(seen[what][run][0] for run in of)
            width = statistics.median(seen[what][run][1] for run in of)
            share = f"{count} ({100 * count / len(of):.0f}%)"
            lines.append([what, name, len({run.source for run in of}), len(of), share, f"{width:.2f}"])
    return markdown(["of", "interval, place or engine", "sources", "rows", "in the interval", "its width"], lines)


def beside_baseline() -> str:
    """Compare the planner with a baseline on strangers' rows: errors, coverage and width, of intervals that are made alike.

    Of either, all rows that measured the same are one group, and a row is held where it lies in the interval of other sources.
    """
    new, lines = {run.name for run in strangers()}, []
    for what, title in {"memory": ALLOCATED, "device": SHOWN, "time": "time"}.items():
        theirs = baseline.group(what)
        found = grouped(
            [(run, 1 / speed_error(run, {}) if what == "time" else memory_error(run)) for run, _ in theirs.rows]
        )
        told: list[Any] = []
        for of in (found, theirs):
            known = [(error, held) for (run, error), held in zip(of.rows, of.held, strict=True) if run.name in new]
            off = [1 / error if what == "time" else error for error, _ in known]
            told += [baseline.spread(off), f"{sum(held for _, held in known)} of {len(known)}", f"{of.width:.2f}"]
        sources = len({run.source for run, _ in theirs.rows if run.name in new})
        lines.append([title, sources, *told])
    each = ["median, p90", "in its interval", "its width"]
    head = ["of", "sources", *(f"{who}: {what}" for who in ("planner", "baseline") for what in each)]
    return markdown(head, lines)


def scaling() -> str:
    """Compare runs of FSDP that differ in their ranks only, some over many_ranks: speed against that on the fewest ranks."""
    alike: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in [*runs(), *strangers()]:
        job = run.job
        if run.speed and job.stage == 3 and not job.deepspeed and job.pipeline == 1:
            alike[run.source, run.model, job.gpu, job.micro_batch, job.sequence, job.driver].append(run)
    lines = []
    for (source, model, *_), members in alike.items():
        whole = sorted((run for run in members if run.job.shard_ranks == run.job.gpus), key=lambda run: run.job.gpus)
        if len(whole) < 2 or whole[-1].job.gpus <= CONSTANTS.many_ranks:
            continue
        first = whole[0]
        for run in [*whole[1:], *(run for run in members if run not in whole and run.job.gpus > CONSTANTS.many_ranks)]:
            assert run.speed and first.speed
            speed = run.speed / first.speed
            lines.append([source, model, first.job.gpus, run.job.gpus, run.job.shard_ranks, f"{speed:.2f}",
                          f"{speed * speed_error(run, {}) / speed_error(first, {}):.2f}"])  # fmt: skip
    head = ["source", "model", "ranks", "against ranks", "that share a copy", "speed of each, times", "by `plan`"]
    return markdown(head, lines)


def tables() -> dict[str, str]:
    os.environ[calibration.VARIABLE] = ""  # the factors of nobody's own cluster
    return {
        "strangers": errors(),
        "first-sight": at_first_sight(),
        "strangers-verdicts": verdicts(),
        "strangers-refused": refused(),
        "strangers-coverage": coverage(),
        "strangers-baseline": beside_baseline(),
        "strangers-sets": by_set(STRANGERS, strangers()),
        "strangers-choices": first_choices(strangers()),
        "scaling": scaling(),
        "varying": varying.table(),
    }


def main(argv: list[str] | None = None) -> int:
    return command(PAGE, tables, __doc__ or "", argv)


if __name__ == "__main__":
    raise SystemExit(main())
