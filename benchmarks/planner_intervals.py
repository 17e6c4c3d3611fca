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
from .planner_rows import first_sight, left_out, memory_error, runs, speed_error, strangers, unseen_error
from .published.reserved import OTHER_PROGRAMS

Rows = list[tuple[Any, float]]  # runs, or measured hosts, with predicted over measured
Ends = tuple[float, float]
ENOUGH = 5  # sources from which on a group says something of the next one
# Shares of rows to cut on each side, and a factor by which both ends lie farther out: the first pair is taken that holds enough.
WIDENING = [(tail / 100, 1.0) for tail in range(25, -1, -1)] + [(0.0, 1 + more / 100) for more in range(1, 101)]
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


def grouped(rows: Rows, of: Callable[[Any], str] = lambda run: str(run.source), fixed: tuple[Ends, ...] = ()) -> Group:
    """Return the group of these rows. Its interval is as wide as left-out sources need it, and holds those in `fixed`."""
    names = [of(run) for run, _ in rows]
    others = {name: [row for row in rows if of(row[0]) != name] for name in dict.fromkeys(names)}
    for tail, farther in WIDENING:
        known = {
            name: hull(*fixed, *([ends(rest, of, tail, farther)] if rest else [])) for name, rest in others.items()
        }
        held = [known[name][0] <= 1 / error <= known[name][1] for name, (_, error) in zip(names, rows, strict=True)]
        covers = covered(held, names)
        if len(others) < ENOUGH or min(covers, statistics.mean(held)) >= HELD:
            break
    return Group(rows, hull(*fixed, ends(rows, of, tail, farther)), held, len(others), covers)


def hull(*intervals: Ends) -> Ends:
    """Return the narrowest interval that holds these; of none, one that holds nothing."""
    return (min(low for low, _ in intervals), max(high for _, high in intervals)) if intervals else (1.0, 0.0)


@cache
def groups(what: str) -> dict[str, Group]:
    """Return the groups of "memory" or "time" by name. Under `unseen` are the rows of all that have too few sources, and what is
    promised there: the widest interval of any group, and of chips of which no run is known."""
    rows: dict[str, Rows] = defaultdict(list)
    widest: tuple[Ends, ...] = ()
    if what == "memory":
        for run in [*runs(), *strangers()]:
            if run.memory and run.says_what and run.job.engine in conventions.ENGINES:
                rows[memory_group(run.job)].append((run, memory_error(run)))
    else:
        new = [(run, speed_error(run, {})) for run in strangers() if run.speed]
        known = [*itertools.chain.from_iterable(left_out(lambda run: run.source).values()), *new]
        for run, error in known:
            if run.healthy:
                rows[time_group(run.job, hardware.gpu(run.job.gpu))].append((run, 1 / error))
        chips: Rows = [
            (run, 1 / unseen_error(run)) for run in runs() if run.fits_speed and run.chip and not run.job.fp8
        ]
        widest = (grouped(chips, lambda run: str(run.chip)).between,)
    apart = {OTHER_PROGRAMS: grouped(first_seen())} if what == "memory" else {}
    found = {name: grouped(members) for name, members in sorted(rows.items())}
    widest += tuple(group.between for group in found.values() if not group.unseen)
    few = [row for group in found.values() if group.unseen for row in group.rows]
    unseen = grouped(few, fixed=widest)
    held = {run.name: one for (run, _), one in zip(few, unseen.held, strict=True)}
    for name, group in found.items():
        if group.unseen:
            inside = [held[run.name] for run, _ in group.rows]
            covers = covered(inside, (run.source for run, _ in group.rows))
            found[name] = replace(group, between=unseen.between, held=inside, covers=covers)
    return found | {"unseen": unseen} | apart


def first_seen() -> Rows:
    """Return the memory of programs that nobody had compared, as it was predicted then. Their code has been read since."""
    known = [run for run in strangers() if run.memory and run.says_what and run.name in first_sight()]
    return [(run, float(first_sight()[run.name]["pred_mem_gib"]) / run.memory) for run in known if run.memory]


def within(what: str) -> dict[str, bool]:
    """Return for a run's name whether it lies in the interval that the other sources give."""
    found = groups(what).values()
    return {run.name: held for group in found for (run, _), held in zip(group.rows, group.held, strict=True)}


@cache
def of_hosts() -> dict[str, Group]:
    """Return what is said of a host's memory, and of checkpoints."""
    memory: Rows = [(one, one.predicted / one.measured) for one in published()]
    disk: Rows = [(one, one.predicted / one.measured) for one in checkpoints()]
    return {"host": grouped(memory), "disk": grouped(disk, lambda one: str(one.what))}
