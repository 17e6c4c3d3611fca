"""What checks may find: the rows of findings/*.yaml, and the results that are made of them."""

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors.tables import table
from ..train.recipe.files import REPOSITORY
from .checks import Facts, Level, Result, sound, thresholds

_FOLDER = Path(__file__).with_name("findings")


@dataclass(frozen=True)
class Finding:
    """One row: what is wrong, in words with {names} for what differs from case to case. {host}, {project} (the clone) and
    {python} (the interpreter) are always there.

    problem, why, cure: as in Result; value: in a few words, for the table; check: whose row it is
    level: of every case; "grey" where the threshold, or the check that finds it, says how grave it is
    threshold: the name of one in thresholds.yaml
    """

    check: str
    problem: str
    why: str
    cure: str
    value: str = "{value}"
    level: Level = "grey"
    threshold: str = ""

    def worded(self, level: Level | None, values: Facts) -> "Finding":
        """The finding with these values in its words."""
        words = {part: getattr(self, part).format(**values) for part in ("value", "problem", "why", "cure")}
        return replace(self, level=level or self.level, **words)


@cache
def findings() -> dict[str, Finding]:
    """The rows by their names. Raises ValueError where two have one name."""
    found: dict[str, Finding] = {}
    for file in sorted(_FOLDER.glob("*.yaml")):
        for check, rows in table(file).items():
            for name, row in rows.items():
                if name in found:
                    raise ValueError(f"{file.name}: two findings are called {name}")
                found[name] = Finding(check, **row)
    return found


def fault(
    name: str,
    host: str,
    level: Level | None = None,
    amount: float | None = None,
    /,
    *,
    fix: str = "",
    detail: tuple[str, ...] = (),
    **values: object,
) -> Result:
    """The finding of that name on a host, in its row's words. level: where the row leaves it open; values: of its {names}"""
    finding = findings()[name].worded(level, {"host": host, "project": REPOSITORY, "python": sys.executable, **values})
    assert finding.level != "grey", f"nothing says how grave {name} is"
    words = finding.problem, finding.why, finding.cure
    return Result(host, finding.level, finding.value, amount, *words, fix, detail)


def level_of(name: str, figure: float) -> Level:
    """How grave a figure is by the threshold of the finding of that name."""
    return thresholds()[findings()[name].threshold].level(figure)


def compared(name: str, host: str, figure: float, value: str, amount: float | None = None, /, **values: Any) -> Result:
    """Sound, with `value`, where the finding's threshold lets the figure pass; else the finding. amount: see Result"""
    level = level_of(name, figure)
    if level == "green":
        return sound(host, value, amount)
    return fault(name, host, level, amount, value=value, **values)
