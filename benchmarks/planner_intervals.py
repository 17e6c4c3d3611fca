"""Intervals that hold sources which no fit has seen: brigade/plan/costs/intervals.yaml.

Published runs are grouped by engine and network (brigade/plan/costs/estimate.py: time_group, memory_group). In each group one
source after the other is left out, of the fit too, and the interval that the others give is widened until it holds most of what
was left out. Every source has the same weight: rows of one err together.
"""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from brigade.plan import hardware
from brigade.plan.costs import conventions
from brigade.plan.costs.estimate import memory_group, time_group

from .planner_hosts import checkpoints, published
from .planner_rows import Run, first_sight, left_out, memory_error, runs, speed_error, strangers
from .published.table import counts_allocated

Rows = list[tuple[Any, float]]  # runs, or measured hosts, with predicted over measured
Ends = tuple[float, float]
ENOUGH = 5  # sources from which on a group says something of the next one
# Shares of rows to cut on each side, and a factor by which both ends lie farther out: the first pair is taken that holds enough.
WIDENING = [(tail / 100, 1.0) for tail in range(25, -1, -1)] + [(0.0, 1 + more / 100) for more in range(1, 101)]
# What nobody has published: the interval of 80 % of all others' rows, and a factor by which both ends lie farther out.
FARTHER = [(0.1, 1 + more / 100) for more in range(101)]
# An interval holds at least so much of a left-out source's rows, the mean over sources, and of all rows.
HELD = 0.8


@dataclass(frozen=True)
class Group:
    """Runs of one kind.

    between: factors on a prediction; held: whether each row lies in those of the other sources; sources: how many there are
    """

    rows: Rows
    between: Ends
    held: list[bool]
    sources: int
    covers: float

    @property
    def unseen(self) -> bool:
        return self.sources < ENOUGH

    @property
    def width(self) -> float:
        return self.between[1] / self.between[0]


def ends(rows: Rows, of: Callable[[Any], str], tail: float, farther: float) -> Ends:
    """Return the factors between which measured over predicted lies, but for `tail` on each side.

    of: a run's source, of which each has the same weight; farther: a factor by which both ends lie farther out
    """
    sizes = Counter(of(run) for run, _ in rows)
    ordered = sorted((1 / error, 1 / sizes[of(run)]) for run, error in rows)
    reached = list(itertools.accumulate(weight for _, weight in ordered))
    places = [
        next(i for i, sum_of in enumerate(reached) if sum_of >= share * reached[-1] - 1e-9)
        for share in (tail, 1 - tail)
    ]
    low, high = (ordered[place][0] for place in places)
    return round(low / farther, 2), round(high * farther, 2)


def covered(held: Iterable[bool], sources: Iterable[str]) -> float:
    """Return the share of a source's rows that are held, the mean over sources."""
    each: dict[str, list[bool]] = defaultdict(list)
    for one, source in zip(held, sources, strict=True):
        each[source].append(one)
    return statistics.mean(map(statistics.mean, each.values()))


def grouped(rows: Rows, of: Callable[[Any], str] = lambda run: str(run.source)) -> Group:
    """Return the group of these rows. Its interval is as wide as left-out sources need it."""
    names = [of(run) for run, _ in rows]
    others = {name: [row for row in rows if of(row[0]) != name] for name in dict.fromkeys(names)}
    widening = WIDENING if len(others) >= ENOUGH else WIDENING[:1]
    return _as_wide_as_needed(rows, [*zip(names, rows, strict=True)], others, of, widening)


def never_seen(found: dict[str, Group]) -> Group:
    """Return what is said of a group that too few sources have published: how far the predictions of all others were off.

    Its interval is as wide as the groups need it of which that is true, each left out whole: a chip of its own, for example.
    """
    few = [(name, row) for name, group in found.items() if group.unseen for row in group.rows]
    others = {
        name: [row for other, group in found.items() if other != name for row in group.rows]
        for name in dict.fromkeys(name for name, _ in few)
    }
    rows = [row for group in found.values() for row in group.rows]
    return _as_wide_as_needed(rows, few, others, lambda run: str(run.source), FARTHER)


def _as_wide_as_needed(
    rows: Rows,
    left_out: list[tuple[str, tuple[Any, float]]],
    others: dict[str, Rows],
    of: Callable[[Any], str],
    widening: list[tuple[float, float]],
) -> Group:
    """Return the group whose interval is made of `rows`. Those made of `others` hold enough of what was left out of each.

    left_out: rows, each with the key of those in `others` that have not seen it
    widening: shares to cut and factors, of which the first pair is taken that holds enough, or the last
    """
    sources = [of(run) for _, (run, _) in left_out]
    for tail, farther in widening:
        known = {name: ends(rest, of, tail, farther) for name, rest in others.items() if rest}
        held = [name in known and known[name][0] <= 1 / error <= known[name][1] for name, (_, error) in left_out]
        covers = covered(held, sources)
        if min(covers, statistics.mean(held)) >= HELD:
            break
    return Group([row for _, row in left_out], ends(rows, of, tail, farther), held, len({*sources}), covers)


@cache
def groups(what: str) -> dict[str, Group]:
    """Return the groups by name of "memory", what torch allocates; "device", what it reserves, or nvidia-smi shows; or "time".

    Memory is of train.py's engines, and what a device shows of rows to which no constant was fitted: nearly all others were, and
    say too little of the next one. Under `unseen` are the rows of all that have too few sources, and what is promised there: see
    never_seen.
    """
    rows: dict[str, Rows] = defaultdict(list)
    if what == "time":
        new = [(run, speed_error(run, {})) for run in strangers() if run.speed]
        known = [*itertools.chain.from_iterable(left_out(lambda run: run.source).values()), *new]
        for run, error in known:
            if run.healthy:
                rows[time_group(run.job, hardware.gpu(run.job.gpu))].append((run, 1 / error))
    else:
        fitted = {run.name for run in runs()} if what == "device" else {}
        for run in measured(what):
            if run.job.engine in conventions.ENGINES and run.name not in fitted:
                rows[memory_group(run.job)].append((run, memory_error(run)))
    found = {name: grouped(members) for name, members in sorted(rows.items())}
    unseen = never_seen(found)
    held = {run.name: one for (run, _), one in zip(unseen.rows, unseen.held, strict=True)}
    for name, group in found.items():
        if group.unseen:
            inside = [held[run.name] for run, _ in group.rows]
            covers = covered(inside, (run.source for run, _ in group.rows))
            found[name] = replace(group, between=unseen.between, held=inside, covers=covers)
    return found | {"unseen": unseen}


def measured(what: str) -> list[Run]:
    """Return the runs whose sources say that they measured this memory: "memory" or "device"."""
    known = [run for run in [*runs(), *strangers()] if run.memory and run.says_what]
    return [run for run in known if counts_allocated(run.row) == (what == "memory")]


@cache
def other_programs() -> Group:
    """Return the group of programs as they were first seen."""
    return grouped(first_seen())


def first_seen() -> Rows:
    """Return the memory of programs that nobody had compared, as it was predicted then. Their code has been read since."""
    known = [run for run in strangers() if run.memory and run.says_what and run.name in first_sight()]
    return [(run, float(first_sight()[run.name]["pred_mem_gib"]) / run.memory) for run in known if run.memory]


def within(what: str) -> dict[str, bool]:
    """Return for a run's name whether it lies in the interval that the other sources give."""
    return {run.name: held for group in groups(what).values() for run, held in holds(group)}


def holds(group: Group) -> list[tuple[Run, bool]]:
    """Return whether each run of a group lies in the interval that its other sources give."""
    return [(run, held) for (run, _), held in zip(group.rows, group.held, strict=True)]


def widths(what: str) -> dict[str, float]:
    """Return for a run's name the upper end of its group's interval over the lower."""
    return {run.name: group.width for group in groups(what).values() for run, _ in group.rows}


@cache
def of_hosts() -> dict[str, Group]:
    """Return what is said of a host's memory, and of checkpoints."""
    memory: Rows = [(one, one.predicted / one.measured) for one in published()]
    disk: Rows = [(one, one.predicted / one.measured) for one in checkpoints()]
    return {"host": grouped(memory), "disk": grouped(disk, lambda one: str(one.what))}
