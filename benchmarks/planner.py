"""Measure how far the planner's estimates are from published runs, and from rows that nothing was fitted to.

    python -m benchmarks.planner            # writes docs/evidence/planner-accuracy.md, brigade/plan/costs/intervals.yaml, each
                                            # fitted `sustained` of brigade/plan/hardware/hardware.yaml
    python -m benchmarks.planner --check    # says whether they are what the tables give

The tables lie in benchmarks/data/ with their sources. One number per GPU kind is fitted to them: `sustained`, the share of
their best that products reach in training. Everything else is counted, or published by others (planner-accuracy.md).
"""

import os
import re
from pathlib import Path

from brigade.errors.tables import table
from brigade.plan import hardware
from brigade.plan.costs.conventions import DRIVERS
from brigade.plan.costs.estimate import factors, time_group
from brigade.plan.hardware import calibration

from . import loading
from .pages import EVIDENCE, REPOSITORY, command_line, filled, markdown
from .planner_hosts import disk_table, memory_table
from .planner_intervals import groups, of_hosts, other_programs, within
from .planner_rows import CHIPS, TABLES, _estimate, best, fit, left_out, memory_error, runs, speed_error
from .planner_tables import (
    beside_simumax,
    by_chip,
    by_engine,
    by_set,
    first_choices,
    leave_one_out,
    memory_left_out,
    playbook,
    spread,
)
from .published.table import counts_allocated
from .published.verdict import OTHER_PROGRAMS

PAGE = EVIDENCE / "planner-accuracy.md"
INTERVALS = REPOSITORY / "brigade" / "plan" / "costs" / "intervals.yaml"


# ---- what is written ----------------------------------------------------------------------------------------------
def tables() -> dict[str, str]:
    """Return the tables of docs/evidence/planner-accuracy.md, with what hardware.yaml says now."""
    book = playbook()
    memory = [(run, memory_error(run)) for run in runs() if run.memory]
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
            ["chip", "sustained", "rows", *(f"best run, {driver}" for driver in DRIVERS)],
            [
                [
                    chip,
                    f"{value:.2f}",
                    sum(run.chip == chip and run.fits_speed for run in runs()),
                    *(f"{100 * best()[key]:.1f}%" if (key := (driver, chip)) in best() else "" for driver in DRIVERS),
                ]
                for chip, value in sustained.items()
            ],
        ),
        "sets": by_set(TABLES, runs()),
        "sources": leave_one_out(lambda run: run.source, "source", within("time")),
        "models": leave_one_out(lambda run: run.model, "model", within("time")),
        "memory": memory_left_out(within("memory") | within("device")),
        "first-choices": first_choices(runs()),
        "engines": by_engine(within("time"), within("memory") | within("device")),
        "chips": by_chip(lambda run: factors("time", time_group(run.job, hardware.gpu(run.job.gpu)))),
        "simumax": beside_simumax(),
        "playbook": markdown(["the whole table", "rows", "error"], whole),
        "host-memory": memory_table(),
        "loading": loading.table(),
        "disk": disk_table(),
        "intervals": markdown(
            ["of", "runs", "sources", "rows", "factors", "left-out sources' rows inside", "all rows inside"],
            [
                [
                    what,
                    name,
                    group.sources,
                    len(group.rows),
                    "unseen" if group.unseen and name != "unseen" else "{:.2f} to {:.2f}".format(*group.between),
                    f"{100 * group.covers:.0f}%",
                    f"{sum(group.held)} of {len(group.rows)}",
                ]
                for what, found in {
                    "memory": groups("memory") | {OTHER_PROGRAMS: other_programs()},
                    "device": groups("device"),
                    "time": groups("time"),
                    "hosts": of_hosts(),
                }.items()
                for name, group in found.items()
            ],
        ),
    }


def intervals() -> str:
    """intervals.yaml."""
    lines = ["# Factors on a prediction between which 80 % of measurements lie: python -m benchmarks.planner"]
    for what in ("memory", "device", "time"):
        lines.append(f"{what}:")
        lines += [f"  {OTHER_PROGRAMS}: {list(other_programs().between)}"] if what == "memory" else []
        lines += [
            f"  {name}: {list(group.between)}"
            for name, group in groups(what).items()
            if not group.unseen or name == "unseen"
        ]
    lines += [f"{name}: {list(group.between)}" for name, group in of_hosts().items()]
    lines += ["# Of its dense peak in bf16, what the best run on a chip computed with, by what drove it", "best:"]
    for driver in DRIVERS:
        shares = {kind: best()[key] for kind, chip in CHIPS.items() if (key := (driver, chip)) in best()}
        lines.append(f"  {driver}: {{{', '.join(f'{kind}: {share:.3f}' for kind, share in shares.items())}}}")
    return "\n".join([*lines, ""])


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
    parser = command_line(__doc__)
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
                for remembered in (
                    table,
                    hardware.usual_share,
                    _estimate,
                    groups,
                    other_programs,
                ):  # with what was written
                    remembered.cache_clear()

    sustained = fit(runs())
    hold(hardware.CATALOGUE, catalogue(sustained))
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
