"""One table of all checks: checks down, hosts across. Hosts that agree are one column."""

import re
from typing import TYPE_CHECKING, Any, Literal

from ..errors.console import counted
from .checks import GROUPS, LEVELS, SIGNS, Result, gravest
from .run import LOGIN, UNREACHED, Outcome, Row

if TYPE_CHECKING:  # rich takes long to import
    from rich.table import Table
    from rich.text import Text

STYLES = {"green": "green", "yellow": "bold yellow", "red": "bold red", "grey": "dim"}
COLUMNS = 6  # of odd hosts that stand in the table; the lines below it name all


def columns(outcome: Outcome) -> list[list[str]]:
    """Groups of hosts that got the same from every check, each group in the hostfile's order; the largest group first."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for host in outcome.hosts:
        found = (_of(row, host) for row in outcome.rows)
        # Two hosts with 31.2 and 31.4 GiB free agree.
        alike = tuple(tuple((r.level, r.value if r.amount is None else "") for r in results) for results in found)
        groups.setdefault(alike, []).append(host)
    return sorted(groups.values(), key=len, reverse=True)


def result_table(outcome: Outcome) -> "Table":
    """A rich Table."""
    from rich.table import Table
    from rich.text import Text

    groups = columns(outcome)
    shown = groups[: COLUMNS + 1]
    drawn = Table(title=_title(outcome), title_justify="left", header_style="bold")
    drawn.add_column("check", no_wrap=True)
    for hosts in shown:
        drawn.add_column(_name(hosts))
    if len(groups) > len(shown):
        drawn.add_column(f"... and {counted(sum(map(len, groups[len(shown) :])), 'more host')}")
    for group in GROUPS:
        rows = [row for row in outcome.rows if row.group == group and not _is_unreached(row)]
        if rows:
            drawn.add_row(Text(group, "bold"))
        for row in rows:
            cells = [_cell([r for host in hosts for r in _of(row, host)]) for hosts in shown]
            rest = [r for hosts in groups[len(shown) :] for host in hosts for r in _of(row, host)]
            drawn.add_row(f"  {row.name}", *cells, *([_cell(rest)] if rest else []))
    return drawn


def _is_unreached(row: Row) -> bool:
    """Whether a check has looked at no host, as none was reached: `login` says so once."""
    return bool(row.results) and all(r.problem == UNREACHED for r in row.results)


def _title(outcome: Outcome) -> str:
    ranks = counted(sum(outcome.hosts.values()), "rank")
    return f"{counted(len(outcome.hosts), 'host')}, {ranks}: {counted(len(outcome.rows), 'check')} in {outcome.seconds:.1f} s"


def _of(row: Row, host: str) -> list[Result]:
    return row.by_host.get(host, [])


def _name(hosts: list[str]) -> str:
    if len(hosts) == 1:
        return hosts[0]
    return ", ".join(hosts) if len(hosts) <= 3 else f"{hosts[0]} ... {hosts[-1]} ({len(hosts):,} hosts)"


def _cell(results: list[Result]) -> "Text":
    """The gravest of what one check found on the hosts of a column."""
    from rich.text import Text

    if not results:
        return Text("-", "dim")
    level = gravest(results)
    grave = [r for r in results if r.level == level]
    measured = sorted((r for r in grave if r.amount is not None), key=lambda r: r.amount or 0.0)
    values = [measured[0].value, measured[-1].value] if measured else [r.value for r in grave]
    words = " to ".join(dict.fromkeys(values)) if measured else " / ".join(dict.fromkeys(values))
    sign = SIGNS[level]
    return Text(sign if words == sign else f"{sign} {words}", STYLES[level])


def result_lines(outcome: Outcome, least: Literal["grey", "yellow"] = "grey") -> "list[Text]":
    """What each warning and fault is, where, why it matters and what cures it; hosts with the same one share an entry. Then, in
    one line each, what cannot be known; and what quick checks do not try. least: leave out what is less grave"""
    from rich.text import Text

    hosts_by_words: dict[tuple[str, ...], list[str]] = {}
    for row in outcome.rows:
        for r in row.results:
            if r.level != "green" and r.problem != UNREACHED:
                # What differs only by the host's own name is the same.
                words = (r.level, row.name, *(_without(r.host, text) for text in (r.problem, r.why, r.cure)))
                hosts_by_words.setdefault(words, []).append(r.host)
    shown = []
    for level in reversed(LEVELS[LEVELS.index(least) :]):
        for (its_level, name, problem, why, cure), hosts in hosts_by_words.items():
            if its_level != level:
                continue
            where = _name(hosts) if hosts != list(outcome.hosts) or len(hosts) == 1 else "all hosts"
            own = [text.replace(_HOST, hosts[0] if len(hosts) == 1 else "HOST") for text in (problem, why, cure)]
            head = Text.assemble((SIGNS[level], STYLES[level]), f" {name}, {where}: {own[0]}")
            if level == "grey":
                shown.append(head)
                continue
            shown.append(head.append(f"\n     why: {own[1]}\n    cure: {own[2]}"))
    if least == "grey":
        unreached = (
            [r.host for r in outcome.rows[0].results if r.level == "red"] if outcome.rows[0].name == LOGIN else []
        )
        if unreached:
            shown.append(Text.assemble((SIGNS["grey"], "dim"), f" all other rows of {_name(unreached)}: see login"))
        if outcome.left_out:
            names = ", ".join(outcome.left_out)
            shown.append(Text(f"Left out, for there is nothing to look at here: {names}", "dim"))
    if outcome.size == "quick" and any(row.name == "packages" and not _is_unreached(row) for row in outcome.rows):
        shown.append(Text(NOT_IMPORTED, "dim"))
    return shown


_HOST = "\0"
# With what `launch` runs too. An import takes seconds, and minutes on a cold network file system.
NOT_IMPORTED = "torch was not imported: `python -m brigade check --only imports` tries whether it loads"


def _without(host: str, text: str) -> str:
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", _HOST, text) if host else text
