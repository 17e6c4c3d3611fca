"""The tables of docs/evidence/planner-accuracy.md: how far estimates are off, set by set, left out, and as a choice."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.pages import markdown
from benchmarks.published import table
from brigade.plan import hardware
from brigade.plan.costs.memory import GIB

from .planner_rows import (
    DATA,
    HEALTHY,
    Run,
    estimated,
    left_out,
    measured_mfu,
    memory_error,
    run_verdict,
    runs,
    speed_error,
)


def spread(errors: Iterable[float]) -> list[Any]:
    """Rows, median and p90 of |predicted / measured - 1|, and the median with its sign."""
    ordered = sorted(errors)
    count, median, p90 = table.quantiles(error - 1 for error in ordered)
    if not count:
        return [""] * 4
    return [count, f"{median:.1f}%", f"{p90:.1f}%", f"{100 * (statistics.median(ordered) - 1):+.1f}%"]


def by_set(names: Iterable[str], known: list[Run]) -> str:
    """Return the errors of each set in the tables of those names. known: their expressible rows"""
    lines = []
    for name in names:
        rows = table.read(DATA / f"{name}.csv")
        for source in dict.fromkeys(row["set"] for row in rows):
            members = [run for run in known if run.source == source]
            memory = spread(memory_error(run) for run in members if run.memory)
            speed = spread(speed_error(run, {}) for run in members if run.speed)
            failed, ran = ([run_verdict(run) for run in members if run.ok is ok] for ok in (False, True))
            told = (len(failed) - failed.count("yes"), failed), (ran.count("maybe"), ran), (ran.count("no"), ran)
            verdicts = [f"{number} of {len(of)}" if of else "" for number, of in told]
            count = sum(row["set"] == source for row in rows)
            lines.append([source, count, len(members), *memory, *speed, *verdicts])
    errors = ["median", "p90", "bias"]
    head = ["set", "rows", "estimated", "memory: rows", *errors, "speed: rows", *errors]
    return markdown([*head, "failed, not called fitting", "ran, may not fit", "ran, called unfit"], lines)


def trivial(run: Run, others: list[Run]) -> float:
    """Predicted over measured speed if every run had the median MFU of the other sources' runs on that chip."""
    same = [one for one in others if one.chip == run.chip] or others
    return statistics.median(measured_mfu(one) for one in same) / measured_mfu(run)


def leave_one_out(key: Callable[[Run], str], what: str, within: Mapping[str, bool]) -> str:
    """The table of left-out groups, beside a model that knows nothing but the median MFU of the others.

    within: a run's name -> whether it lies in the interval that the other sources give
    """
    lines = []
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
            [
                name,
                *spread(error for _, error in healthy),
                f"{table.quantiles(e - 1 for e in simple)[1]:.1f}%",
                counted(within, (run for run, _ in members)),
            ]
        )
    lines.append(
        ["**all**", *spread(every), f"{table.quantiles(e - 1 for e in plain)[1]:.1f}%", counted(within, runs())]
    )
    head = [f"left out: {what}", "speed: rows", "median", "p90", "bias", "median with the others' MFU"]
    return markdown([*head, "in the others' interval"], lines)


def textbook(run: Run) -> float:
    """GiB of model states by the table of Rajbhandari et al. 2020 (arXiv 1910.02054), and nothing else."""
    job = run.job
    shared = [job.shard_ranks if job.stage >= stage else 1 for stage in (1, 2, 3)]
    whole = job.shape.parameters / job.tensor / job.pipeline
    trained = job.trained / job.tensor / job.pipeline if job.trained else whole
    frozen = {"full": 0.0, "lora": 2.0, "qlora": 0.5}[job.method] * whole
    return (12 * trained / shared[0] + 2 * trained / shared[1] + (2 * trained + frozen) / shared[2]) / GIB


def memory_left_out(within: Mapping[str, bool]) -> str:
    """Return the errors by source, beside those of the textbook's states, times what the others' runs had of them.

    within: a run's name -> whether it lies in the interval that the others give
    """
    lines = []
    measured = [run for run in runs() if run.memory]
    plain: dict[bool, list[float]] = {True: [], False: []}
    for source in dict.fromkeys(run.source for run in measured):
        members = [run for run in measured if run.source == source]
        ratio = statistics.median((run.memory or 0.0) / textbook(run) for run in measured if run.source != source)
        simple = [ratio * textbook(run) / (run.memory or 0.0) - 1 for run in members]
        plain[members[0].says_what] += simple
        off = f"{table.quantiles(simple)[1]:.1f}%"
        lines.append([source, *spread(map(memory_error, members)), off, counted(within, members)])
    groups = {
        "where the source says what it measured": ([run for run in measured if run.says_what], plain[True]),
        "all": (measured, plain[True] + plain[False]),
    }
    for name, (members, simple) in groups.items():
        off = f"{table.quantiles(simple)[1]:.1f}%"
        lines.append([f"**{name}**", *spread(map(memory_error, members)), off, counted(within, members)])
    head = ["source", "memory: rows", "median", "p90", "bias", "median with the textbook's states"]
    return markdown([*head, "in the others' interval"], lines)


def first_choices(known: Iterable[Run]) -> str:
    """Say whether the first choice is good, in each cell (source, model, method, GPU kind, GPUs, length) with configurations.

    A run that failed has no speed, so that choosing it is as bad as can be. Beside it the least model parallelism that fits: the
    configuration with the fewest ranks that share a model, of those the largest micro-batch.
    """
    cells: dict[str, dict[tuple[Any, ...], list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in known:
        if run.speed or not run.ok:
            cells[run.source][run.model, run.job.method, run.job.gpu, run.job.gpus, run.job.sequence].append(run)
    lines: list[list[Any]] = []
    every: list[tuple[float, float]] = []
    for source, members in cells.items():
        measured = [cell for cell in members.values() if len(cell) > 1 and any(run.speed for run in cell)]
        shares = [(_first(cell, _speed), _first(cell, _least_divided)) for cell in measured]
        if shares:
            lines.append(_near(source, shares))
        every += shares
    head = [
        "set",
        "cells",
        "first choice within 10 % of the best",
        "worst",
        "least model parallelism that fits",
        "worst",
    ]
    return markdown(head, [*lines, _near("**all**", every)])


def _speed(run: Run) -> tuple[float, ...]:
    return (estimated(run, {}).tokens_per_second_per_gpu,)


def _least_divided(run: Run) -> tuple[float, ...]:
    return (-run.job.tensor * run.job.pipeline * run.job.context, run.job.micro_batch)


def _first(cell: list[Run], by: Callable[[Run], tuple[float, ...]]) -> float:
    """The share of the best measured speed that the first choice has, of those that are predicted to fit, or of all."""
    fitting = [run for run in cell if run_verdict(run) != "no"] or cell
    return (max(fitting, key=by).speed or 0.0) / max(run.speed or 0.0 for run in cell)


def _near(name: str, shares: list[tuple[float, float]]) -> list[Any]:
    found: list[Any] = [name, len(shares)]
    for each in zip(*shares, strict=True):
        found += [sum(share >= 0.9 for share in each), f"{100 * min(each):.0f}%"]
    return found


def beside_simumax() -> str:
    """Our errors and SimuMax's own (benchmarks/data/simumax.csv) on the rows of its release that both estimate."""
    theirs = {row["id"]: row for row in table.read_plain(DATA / "simumax.csv")}
    mine = {run.row["id"]: run for run in runs() if run.row["id"] in theirs}
    seconds = {name: table.figure(run.row, "step_time_s") for name, run in mine.items()}
    kinds: dict[str, tuple[list[float], list[float]]] = {
        "memory allocated": (
            [memory_error(run) for run in mine.values() if run.memory],
            [float(theirs[name]["memory_predicted_gib"]) / run.memory for name, run in mine.items() if run.memory],
        ),
        "seconds of a step": (
            [1 / speed_error(run, {}) for run in mine.values() if run.speed],
            [float(theirs[name]["step_seconds_predicted"]) / known for name, known in seconds.items() if known],
        ),
    }

    def off(errors: list[float]) -> list[str]:
        each = [100 * abs(error - 1) for error in errors]
        return [f"{statistics.median(each):.1f}%", f"{max(each):.1f}%"]

    lines = [[what, len(ours), *off(ours), *off(others)] for what, (ours, others) in kinds.items()]
    return markdown(["of", "rows", "the planner: median", "worst", "SimuMax: median", "worst"], lines)


def counted(within: Mapping[str, bool], members: Iterable[Run]) -> str:
    """Count how many of those runs lie in the others' interval, of those of which that is known."""
    known = [within[run.name] for run in members if run.name in within]
    return f"{sum(known)} of {len(known)}" if known else ""


def by_engine(times: Mapping[str, bool], memory: Mapping[str, bool]) -> str:
    """Return the errors by engine, a key of ENGINES. times, memory: a run's name -> whether it lies in the others' interval"""
    lines = []
    for engine in dict.fromkeys(run.job.engine for run in runs()):
        members = [run for run in runs() if run.job.engine == engine]
        held, fast = [run for run in members if run.memory], [run for run in members if run.speed and run.healthy]
        measured = [*spread(map(memory_error, held)), counted(memory, held)]
        lines.append([engine, *measured, *spread(speed_error(run, {}) for run in fast), counted(times, fast)])
    errors, inside = ["median", "p90", "bias"], "in the others' interval"
    return markdown(["engine", "memory: rows", *errors, inside, "speed: rows", *errors, inside], lines)


def by_chip(between: Callable[[Run], tuple[float, float]]) -> str:
    """Speed by chip, and how many rows lie in the interval that `plan` prints. between: factors on the predicted time"""
    lines = []
    kinds: dict[str, list[Run]] = defaultdict(list)
    for run in runs():
        if run.speed and run.healthy:
            kinds[run.chip or hardware.gpu(run.job.gpu).kind].append(run)
    for chip, members in kinds.items():
        errors = [speed_error(run, {}) for run in members]
        ends = map(between, members)
        inside = sum(low <= error <= high for error, (low, high) in zip(errors, ends, strict=True))
        lines.append([chip, *spread(errors), f"{inside} of {len(members)}"])
    return markdown(["chip", "speed: rows", "median", "p90", "bias", "in the interval"], lines)


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
        name: [
            _share_of_best([(float(row["pred_tok_s_gpu"]), float(row["tok_s_gpu"])) for row in cell])
            for members in cells.values()
            if (cell := [row for row in members if float(row["mfu_pct"]) > least])
        ]
        for name, least in (("all", 0.0), ("healthy", HEALTHY))
    }
    return {
        "rows": len(rows),
        "told": len(told),
        "ok": len(ok),
        "sane": len(sane),
        "healthy": len(healthy),
        "memory": table.quantiles(table.errors(row)[0] for row in sane),
        "speed": table.quantiles(table.errors(row)[1] for row in healthy),
        "speed_all": table.quantiles(table.errors(row)[1] for row in sane),
        "shares": shares,
        "refused": sum(row["fits"] == "no" for row in ok),
    }
