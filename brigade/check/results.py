"""What a check says of a host, and the limits that it judges by."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import yaml

from ..errors import UserError

Level = Literal["green", "grey", "yellow", "red"]
T = TypeVar("T")
SIGNS = {"green": "ok", "yellow": "WARN", "red": "FAIL", "grey": "?"}  # a table without colours says the same
NO_ANSWER = "no answer"
LEVELS: tuple[Level, ...] = ("green", "grey", "yellow", "red")  # the gravest last


@dataclass(frozen=True)
class Result:
    """What one check found on one host.

    value: what was found, in a few words; it stands in the table
    amount: the same as a number, where it was measured: hosts that differ in it alone still agree
    detail: what `value` leaves out, and a later result is compared with
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
    return Result(host, "green", value, amount, detail=detail)


def unknown(host: str, because: str) -> Result:
    """What cannot be known here, and why."""
    return Result(host, "grey", "?", None, because)


class NotHere(Exception):
    """Raised by a check that has nothing to look at on any of these hosts: it gets no row. Another row says why."""


@dataclass(frozen=True)
class Threshold:
    """From where on a measured figure is a warning, and from where on the host is not sound.

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
    return {name: Threshold(**row) for name, row in yaml.safe_load(_TABLE.read_text(encoding="utf-8")).items()}


_TABLE = Path(__file__).with_name("thresholds.yaml")


def gravest(results: list[Result]) -> Level:
    return max((result.level for result in results), key=LEVELS.index, default="green")


def most_common(values: Mapping[str, T]) -> T:
    """What most hosts have; of equally common ones, that of the first host. Raises ValueError without any."""
    if not values:
        raise ValueError("no host answered")
    counts = Counter(values.values())
    return max(values.values(), key=lambda value: counts[value])  # max takes the first of equals


def exit_code(results: list[Result]) -> int:
    """0: sound, 1: with warnings, 3: not sound."""
    return {"yellow": 1, "red": 3}.get(gravest(results), 0)


def refusal(results: list[Result]) -> UserError | None:
    """The red ones, but for hosts that did not answer, in the words of a user's mistake."""
    red = [result for result in results if result.level == "red" and result.value != NO_ANSWER]
    if not red:
        return None
    lines = "; ".join(f"{result.host}: {result.problem}" for result in red[:8])
    more = f"; and {len(red) - 8} more" if len(red) > 8 else ""
    places = {result.host for result in red}
    place = red[0].host if len(places) == 1 else f"{len(places)} hosts are not sound"
    return UserError(place, f"{red[0].problem}: {red[0].why}" if len(red) == 1 else lines + more, red[0].cure)
