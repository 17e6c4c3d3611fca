"""Rules and findings: lint prints all of them, a run raises the first error."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import UserError
from .tables import table

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Rule:
    """One entry of lint_rules.yaml, whose head explains the fields. about: the kind of file"""

    name: str
    about: str
    severity: Severity
    says: str
    problem: str = ""
    cure: str = ""
    issues: tuple[str, ...] = ()


@functools.cache
def rules() -> dict[str, Rule]:
    """The rules by their names, in the order of lint_rules.yaml."""
    groups = table(Path(__file__).with_name("lint_rules.yaml")).items()
    return {name: Rule(name, about, **entry) for about, group in groups for name, entry in group.items()}


@dataclass(frozen=True)
class Finding:
    """One rule broken in one place.

    file: as the user named it; at: a dotted key, a line's number, or "" for the file as a whole
    """

    rule: str
    file: str
    at: str | int
    problem: str
    cure: str

    @classmethod
    def of(cls, rule: str, file: str, at: str | int, /, **values: object) -> "Finding":
        """A finding in its rule's own words, with these values in them."""
        words = rules()[rule]
        return cls(rule, file, at, words.problem.format(**values), words.cure.format(**values))

    @property
    def severity(self) -> Severity:
        return rules()[self.rule].severity

    @property
    def place(self) -> str:
        if isinstance(self.at, int):
            return f"{self.file}, line {self.at}"
        return f"{self.file}: {self.at}" if self.at else self.file


def raise_first(findings: Iterable[Finding]) -> None:
    """Raise the first error among them as UserError; warnings and notes do not stop a run."""
    for finding in findings:
        if finding.severity == "error":
            raise UserError(finding.place, finding.problem, finding.cure)
