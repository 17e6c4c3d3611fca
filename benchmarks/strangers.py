"""Measure how far the planner's estimates are from rows that nobody fitted: benchmarks/data/strangers.csv.

    python -m benchmarks.strangers            # writes their tables in docs/evidence/planner-accuracy.md
    python -m benchmarks.strangers --check    # 1 where the page has others

No constant and no interval is made of these rows. What `plan` says now is compared with what they measured.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

from brigade.plan import hardware
from brigade.plan.costs.estimate import memory_group, time_group
from brigade.plan.hardware import calibration

from .pages import EVIDENCE, command, markdown
from .planner_rows import DATA, HEALTHY, Run, expressible, memory_error, run_verdict, speed_error
from .planner_tables import by_set, first_choices, spread
from .published import table
from .published.table import counts_allocated, predict

PAGE = EVIDENCE / "planner-accuracy.md"
NAMES = ("strangers",)


@cache
def strangers() -> list[Run]:
    return expressible(NAMES)


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


def inside(run: Run, what: str, seen: float | None) -> bool:
    """Return whether what was measured lies in the interval that `plan` prints. what: a column of predict()"""
    answer = predict(run.row)
    return float(answer[f"{what}_low"]) <= (seen or 0.0) <= float(answer[f"{what}_high"])


def place(run: Run) -> str:
    return "inside a host" if run.job.nodes == 1 else "across hosts"


def coverage() -> str:
    """Count the rows in the 80 % interval that `plan` prints: of all, by interval, by place, and by engine.

    Times are of runs in 16 bits with an MFU above HEALTHY.
    """
    timed = [run for run in strangers() if run.speed and run.healthy and not run.job.fp8]
    memory = {run: inside(run, "pred_mem_gib", run.memory) for run in strangers() if run.memory}
    times = {run: inside(run, "pred_tok_s_gpu", run.speed) for run in timed}

    def interval(run: Run) -> str:
        return f"`{time_group(run.job, hardware.gpu(run.job.gpu))}`"

    ways: list[tuple[str, dict[Run, bool], Callable[[Run], str]]] = [
        ("memory", memory, lambda run: "all"),
        ("memory", memory, lambda run: f"`{memory_group(run.job)}`"),
        ("memory", memory, lambda run: run.job.engine),
        ("time", times, lambda run: "all"),
        ("time", times, place),
        ("time", times, interval),
        ("time", times, lambda run: f"{run.job.engine}, {place(run)}"),
    ]
    lines = []
    for what, held, name_of in ways:
        groups: dict[str, list[Run]] = defaultdict(list)
        for run in held:
            groups[name_of(run)].append(run)
        for name, of in sorted(groups.items()):
            count = sum(held[run] for run in of)
            lines.append(
                [what, name, len({run.source for run in of}), len(of), f"{count} ({100 * count / len(of):.0f}%)"]
            )
    return markdown(["of", "interval, place or engine", "sources", "rows", "in the interval"], lines)


def tables() -> dict[str, str]:
    os.environ[calibration.VARIABLE] = ""  # the factors of nobody's own cluster
    return {
        "strangers": errors(),
        "strangers-verdicts": verdicts(),
        "strangers-refused": refused(),
        "strangers-coverage": coverage(),
        "strangers-sets": by_set(NAMES, strangers()),
        "strangers-choices": first_choices(strangers()),
    }


def main(argv: list[str] | None = None) -> int:
    return command(PAGE, tables, __doc__ or "", argv)


if __name__ == "__main__":
    raise SystemExit(main())
