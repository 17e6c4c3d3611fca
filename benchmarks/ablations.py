"""Measure what each refinement of the planner's estimate is worth: its errors, intervals and choices without it.

    python -m benchmarks.ablations                # measures each, and writes results/ablations.csv and the page's table
    python -m benchmarks.ablations NAME ...       # these alone; the other rows stay
    python -m benchmarks.ablations --gone NAME    # the code as it stands, from which somebody has taken NAME out

A refinement is switched off by the value at which its formula does without it. The shares of chips and the intervals are
fitted anew, as `python -m benchmarks.planner` fits them. What makes no row of anybody's better is taken out of the planner.
"""

import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from brigade.plan import hardware
from brigade.plan.constants import CONSTANTS
from brigade.plan.costs import conventions
from brigade.plan.hardware import calibration

from .pages import EVIDENCE, RESULTS, command_line, markdown, read, save, write
from .planner_intervals import groups, other_programs, widths, within
from .planner_rows import CHIPS, Run, _estimate, estimated, fit, left_out, memory_error, runs, speed_error, strangers
from .planner_tables import first_choices
from .published import job, table
from .published.table import counts_allocated

PAGE = EVIDENCE / "planner-accuracy.md"
FILE = RESULTS / "ablations.csv"
NOTHING = "(nothing)"
CHANGED = 0.03  # of a predicted speed, from which on a run counts as changed
NONE: dict[str, float] = {}
# What is left out -> the constants with which formulas do without it. `engines`: fields of conventions.yaml; `drivers`,
# `attention`: whether what drives a chip, and rates of attention by kernel, are told apart.
ABLATIONS: dict[str, dict[str, Any]] = {
    "launch-bound Python": {"launch_seconds": 0.0},
    "launching with adapters takes longer": {"adapter_launching": 1.0},
    "launching under ZeRO-3 and FSDP2 takes longer": {"engines": {"host_sharded": 1.0}},
    "launching grows with ranks": {"engines": {"host_rank": 0.0}},
    "launching and computing add up": {"engines": {"host_norm": float("inf")}},
    "grouped products": {"grouped_share": 1.0},
    "attention's own rates": {"attention": False},
    "attention's rate grows with the length": {"flash_half_length": NONE},
    "narrow heads are slower": {"exponential_width": NONE},
    "SDPA's memory-efficient kernel": {"efficient_attention": 1},
    "the last wave of a product": {"product_tile": (1e-6, 1e-6)},
    "a tile's start and end": {"tile_fill": 0},
    "drivers": {"drivers": False},
    "a ring's delay": {"ring_delay": 0.0},
    "latencies": {"peer_latency": 0.0, "call_latency": 0.0, "node_latency": 0.0},
    "communication slows computing": {"contention": 0.0},
    "PCIe tells the host's memory": {"pcie_5": 24},
    "collectives of a matrix each": {"engines": {"collectives": 1}},
    "scatters of ZeRO-3 that nothing hides": {"engines": {"scatters_hidden": True}},
    "adding up micro-batches": {"engines": {"accumulated": 0.0}},
    "the optimizer's traffic": {"adam_bytes": 0},
    "many ranks apart": {"many_ranks": 10**9},
    "less fragmentation where memory is short": {"short": 1.0},
    "ZeRO-3's pools at most": {"pools_at_most": 0},
    "norms' own backward pass": {"norm_back": 0},
    "dequantising": {"dequantise_bytes": 0.0},
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """Have the planner estimate without a refinement, "" for none, with shares and intervals fitted to that."""
    values = dict(ABLATIONS.get(name, {}))
    changes, drivers, attention = values.pop("engines", {}), values.pop("drivers", True), values.pop("attention", True)
    entries = hardware.table(hardware.CATALOGUE)["gpus"]
    with ExitStack() as stack:
        for of in (conventions.ENGINES, job.ENGINES):
            stack.enter_context(patch.dict(of, {key: replace(engine, **changes) for key, engine in of.items()}))
        if not drivers:
            stack.enter_context(patch.dict(conventions.DRIVERS, dict.fromkeys(conventions.DRIVERS, 1.0)))
        for entry in entries.values():
            stack.enter_context(patch.dict(entry, {} if attention else {"attention_tflops": {}}))
        was = {key: getattr(CONSTANTS, key) for key in values}
        try:
            for key, value in values.items():
                object.__setattr__(CONSTANTS, key, value)
            _forget()
            shares = fit(runs())
            for kind, chip in CHIPS.items():
                if chip in shares:
                    entries[kind]["sustained"] = shares[chip]
            _forget()
            yield
        finally:
            for key, value in was.items():
                object.__setattr__(CONSTANTS, key, value)
    _forget()


def _forget() -> None:
    for remembered in (hardware.usual_share, _estimate, groups, other_programs):
        remembered.cache_clear()


def measured(name: str, usual: dict[str, float]) -> dict[str, Any]:
    """Return errors in percent, coverage, width and choices without a refinement. usual: errors of speeds with it, by run"""
    with without(name):
        everyone = [*runs(), *strangers()]
        own = [error for of in left_out(lambda run: run.source).values() for run, error in of if run.healthy]
        fast = [run for run in strangers() if run.speed and run.healthy]
        held = [run for run in everyone if run.memory and run.says_what]
        allocated = [run for run in held if counts_allocated(run.row)]
        others = [run for run in held if not counts_allocated(run.row)]
        found: dict[str, Any] = {"without": name}
        for what, errors in {
            "speed": own,
            "speed_strangers": [speed_error(run, {}) for run in fast],
            "allocated": [memory_error(run) for run in allocated],
            "reserved": [memory_error(run) for run in others],
        }.items():
            _, median, p90 = table.quantiles(error - 1 for error in errors)
            found |= {f"{what}_median": f"{median:.2f}", f"{what}_p90": f"{p90:.1f}"}
        for what, kinds in {"time": ["time"], "memory": ["memory", "device"]}.items():
            inside = {run: one for kind in kinds for run, one in within(kind).items()}
            wide = {run: one for kind in kinds for run, one in widths(kind).items()}
            known = [run for run in everyone if run.name in inside]
            found[f"{what}_held"] = f"{100 * statistics.mean(inside[run.name] for run in known):.1f}"
            found[f"{what}_width"] = f"{statistics.median(wide[run.name] for run in known):.2f}"
        for what, of in {"choices": runs(), "choices_strangers": strangers()}.items():
            cells = first_choices(of).splitlines()[-1].split(" | ")
            found[what] = f"{cells[2]} of {cells[1]}"
        found |= _verdicts(everyone) | _changed(usual, speeds(""))
    return found


def speeds(name: str) -> dict[str, float]:
    """Return predicted over measured speed of each run by its name, without a refinement."""
    with without(name) if name else nullcontext():
        own = [pair for of in left_out(lambda run: run.source).values() for pair in of]
        new = [(run, speed_error(run, {})) for run in strangers() if run.speed]
    return {run.name: error for run, error in [*own, *new]}


def _changed(usual: dict[str, float], now: dict[str, float]) -> dict[str, Any]:
    """Count the runs whose speed is predicted otherwise, and return their median errors before and now, in percent."""
    changed = [run for run, error in usual.items() if abs(now[run] / error - 1) > CHANGED]
    errors = {"changed_with": usual, "changed_without": now}
    medians = {key: statistics.median(abs(of[run] - 1) for run in changed) for key, of in errors.items() if changed}
    return {"changed": len(changed) if usual else ""} | {
        key: f"{100 * medians[key]:.1f}" if changed else "" for key in errors
    }


def _verdicts(known: list[Run]) -> dict[str, int]:
    """Count runs that failed and are called fitting, and runs that ran and are called unfit, with train.py's own intervals."""
    said = [(run.ok, estimated(run, {})) for run in known]
    return {
        "failed_fitting": sum(found.fits for ok, found in said if not ok),
        "ran_unfit": sum(not found.may_fit for ok, found in said if ok),
    }


def tables() -> dict[str, str]:
    """Return the page's table, from the results."""
    of_speed = {"speed": "speed, each source left out", "speed_strangers": "speed of strangers' runs"}
    memory = {"allocated": "memory allocated", "reserved": "reserved, or of the device"}
    inside = {"time": "time: in the interval, its width", "memory": "memory: the same"}
    choices = {"choices": "first choices within 10 %", "choices_strangers": "of strangers'"}
    wrong = {"failed_fitting": "failed, called fitting", "ran_unfit": "ran, called unfit"}
    lines = []
    for row in read(FILE):
        errors = [f"{row[f'{what}_median']}%, {row[f'{what}_p90']}%" for what in (*of_speed, *memory)]
        held = [f"{row[f'{what}_held']}%, {row[f'{what}_width']}" for what in inside]
        both = f"{row['changed']}: {row['changed_with']}%, {row['changed_without']}%"
        changed = both if row["changed_with"] else row["changed"] if row["kept"] == "yes" else ""
        lines.append(
            [row["without"], *errors, *held, *(row[what] for what in (*choices, *wrong)), changed, row["kept"]]
        )
    changed = "speeds changed by 3 %: median with, without"
    head = [
        "without",
        *of_speed.values(),
        *memory.values(),
        *inside.values(),
        *choices.values(),
        *wrong.values(),
        changed,
        "kept",
    ]
    return {"ablations": markdown(head, lines)}


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a refinement (default: all)")
    parser.add_argument("--gone", metavar="NAME", help="what the code has no longer")
    options = parser.parse_args(argv)
    os.environ[calibration.VARIABLE] = ""  # the factors of nobody's own cluster
    asked = {options.gone: ""} if options.gone else {name: name for name in options.names or ["", *ABLATIONS]}
    rows = {row["without"]: row for row in read(FILE)} if FILE.exists() else {}
    with without(""):
        usual = {} if options.gone else speeds("")
    for title, name in asked.items():
        row = measured(name, usual) | {
            "without": title or NOTHING,
            "kept": "no" if options.gone else "yes" if name else "",
        }
        print(*row.values(), flush=True)
        rows[row["without"]] = row
        save(FILE, [*rows.values()])
    write(PAGE, tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
