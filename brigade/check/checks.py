"""What a check is: the hosts that it asks, the result that it says of each, and the list of all checks."""

import importlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, Protocol, TypeVar, get_args

from ..errors import UserError
from ..errors.tables import Fields, table
from ..hosts import Facts as Facts
from ..hosts.job import Job
from ..hosts.rendezvous import as_one

Level = Literal["green", "grey", "yellow", "red"]
T = TypeVar("T")
SIGNS = {"green": "ok", "yellow": "WARN", "red": "FAIL", "grey": "?"}  # a table without colours says the same
NO_ANSWER = "no answer"
LEVELS: tuple[Level, ...] = ("green", "grey", "yellow", "red")  # the gravest last
_TABLE = Path(__file__).with_name("thresholds.yaml")
Size = Literal["quick", "usual", "full"]  # of a check: from which size of `check` on it runs
# Whose faults stop a launch: no run could begin with them, and they are certain. All others are told, and the launch goes on.
# More slots than GPUs is no row of these: launch itself refuses that, and the row `gpus` is red too where somebody uses one.
STOP = frozenset({"ports", "python", "packages", "driver", "code", "paths", "output directory"})
SIZES: tuple[Size, ...] = get_args(Size)
# Groups and their modules with checks, in the order of the table.
GROUPS: dict[str, tuple[str, ...]] = {
    "reach": ("names", "reach"),
    "sameness": ("packages", "sameness"),
    "devices": ("devices", "resources"),
    "storage": ("storage",),
    "network": ("pairs", "collectives", "waiting"),
    "kernels": ("proven_kernels",),
    "rehearsal": ("rehearsal",),
}


@dataclass(frozen=True)
class Result:
    """What one check found on one host.

    value: what was found, in a few words; it stands in the table
    amount: the same as a number, where it was measured: hosts that differ only in it still agree
    problem, why, cure: what is wrong, why it matters, the command that cures it; of yellow and red ones
    fix: a shell line that makes this host sound when it runs there; "" where a person has to act
    detail: what the cell does not show, and a later run should be compared with
    """

    host: str
    level: Level
    value: str
    amount: float | None = None
    problem: str = ""
    why: str = ""
    cure: str = ""
    fix: str = ""
    detail: tuple[str, ...] = ()


def sound(host: str, value: str, amount: float | None = None, detail: tuple[str, ...] = ()) -> Result:
    """The result of a host on which all is well."""
    return Result(host, "green", value, amount, detail=detail)


def unknown(host: str, because: str) -> Result:
    """A result for what cannot be known here, and why."""
    return Result(host, "grey", "?", None, because)


class NotHere(Exception):
    """Raised by a check that has nothing to look at on any of these hosts: it gets no row. Another row says why."""


class CannotKnow(Exception):
    """Raised by a check that can say nothing of any host here, with the reason: its cells are grey."""


@dataclass(frozen=True)
class Threshold:
    """The limits from which a measured figure is a warning, and from which the host is not sound.

    yellow, red: in `unit`; None: no such level. Where yellow lies above red, small figures are the bad ones.
    """

    yellow: float | None
    red: float | None
    unit: str
    source: str
    below: bool = False

    def level(self, amount: float) -> Level:
        for level, limit in (("red", self.red), ("yellow", self.yellow)):
            if limit is not None and (amount < limit if self.below else amount > limit):
                return "red" if level == "red" else "yellow"
        return "green"


@cache
def thresholds() -> dict[str, Threshold]:
    """The table of thresholds.yaml."""
    return {name: Threshold(**row) for name, row in table(_TABLE).items()}


def gravest(results: list[Result]) -> Level:
    """The most severe level among results; green where there are none."""
    return max((result.level for result in results), key=LEVELS.index, default="green")


def worst(results: list[Result]) -> Result | None:
    """The first of the results that have the most severe level; None where all are sound."""
    level = gravest(results)
    return None if level == "green" else next(result for result in results if result.level == level)


def most_common(values: Mapping[str, T]) -> T:
    """Return what most hosts have; of equally common ones, that of the first host. Raises ValueError without any."""
    if not values:
        raise ValueError("no host answered")
    counts = Counter(values.values())
    return max(values.values(), key=lambda value: counts[value])  # max takes the first of equals


def exit_code(results: list[Result]) -> int:
    """0: sound, 1: with warnings, 3: not sound."""
    return {"yellow": 1, "red": 3}.get(gravest(results), 0)


def refusal(results: list[Result]) -> UserError | None:
    """The error that red results mean for a launch, except those of hosts that did not answer; None without any."""
    red = [result for result in results if result.level == "red" and result.value != NO_ANSWER]
    if len(red) == 1:
        return UserError(red[0].host, f"{red[0].problem}: {red[0].why}", red[0].cure)
    return as_one("are not sound", [UserError(result.host, result.problem, result.cure) for result in red])


@dataclass(frozen=True)
class Wanted:
    """What the hosts are checked for.

    slots: host -> ranks, in the hostfile's order; job: of a recipe, None without one
    environment: variables that the ranks will get; launcher: how hosts are reached, "slurm" or by ssh
    measured: filled by checks: name -> what they measured, for checks that come after them
    """

    slots: dict[str, int]
    job: Job | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = ""
    measured: Fields = field(default_factory=dict)


class Hosts(Protocol):
    """wanted: see there; hello: host that answers -> what it said of itself (hosts/host_facts.py: look_around)

    failed: host -> why it did not answer a question of this check
    """

    wanted: Wanted
    hello: dict[str, Facts]
    failed: dict[str, str]

    async def ask(
        self, probe: str, seconds: float = 30, per_host: Mapping[str, Facts] | None = None, **arguments: object
    ) -> dict[str, Facts]:
        """Run a function of probes/ on hosts at the same time, each with a limit of `seconds`.

        probe: "MODULE.FUNCTION"; per_host: host -> further arguments, and only these hosts are asked; default: all that answer
        Returns host -> facts of those that answered; of the others `failed` says why. A question that was asked before with the
        same words is not asked again.
        """

    def hold(
        self, probe: str, seconds: float = 30, per_host: Mapping[str, Facts] | None = None, **arguments: object
    ) -> AbstractAsyncContextManager[dict[str, Facts]]:
        """Like ask(), but for a probe that yields its facts and goes on, a listening port for instance, until the block ends."""


Function = Callable[[Hosts], AsyncIterator[Result]]


@dataclass(frozen=True)
class Check:
    """name: of its row; group: of GROUPS; about: its docstring: what it reads, its threshold, that threshold's source

    seconds: its limit; alone: nothing else runs meanwhile, for it measures how fast something is
    It is called as its function is.
    """

    name: str
    group: str
    function: Function
    size: Size
    seconds: float
    alone: bool
    about: str

    def __call__(self, hosts: Hosts) -> AsyncIterator[Result]:
        return self.function(hosts)


def check(name: str, size: Size = "quick", seconds: float = 60, alone: bool = False) -> Callable[[Function], Check]:
    """Make a function a check. It yields a Result for each host; hosts for which it yields none did not answer."""

    def made(function: Function) -> Check:
        module = function.__module__.rpartition(".")[2]
        group = next(group for group, modules in GROUPS.items() if module in modules)
        about = " ".join((function.__doc__ or "").split())
        return Check(name, group, function, size, seconds, alone, about)

    return made


def checks(size: Size = "full") -> list[Check]:
    """All checks that belong to a size, in the order of the table."""
    few = SIZES[: SIZES.index(size) + 1]
    names = [name for modules in GROUPS.values() for name in modules]
    modules = [importlib.import_module(f".{name}", __package__) for name in names]
    every = [each for module in modules for each in vars(module).values() if isinstance(each, Check)]
    return [each for each in every if each.size in few]
