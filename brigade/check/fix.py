"""`check --fix`: the lines that make hosts sound. `--yes` runs them, and checks those rows again; nothing runs without it."""

import secrets
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .hosts import Wanted
from .registry import checks
from .results import Result
from .run import Outcome, Told, run
from .session import Session, View

SECONDS = 900.0  # that a line may take: pip may have to load torch


@dataclass(frozen=True)
class Done:
    """One line that ran on one host. problem: "" where it ended well; said: its last words"""

    host: str
    line: str
    problem: str
    said: tuple[str, ...]


def lines(results: Iterable[Result]) -> dict[str, list[str]]:
    """Host -> the shell lines that cure it, each once."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.fix and result.level in ("yellow", "red") and result.fix not in found.setdefault(result.host, []):
            found[result.host].append(result.fix)
    return {host: own for host, own in found.items() if own}


def printed(outcome: Outcome) -> list[str]:
    """What --fix prints: each line in a form that can be pasted into a shell here, and what no line can cure."""
    found = lines(outcome.results)
    text = [f"ssh {host} {shlex.quote(line)}" for host, own in found.items() for line in own]
    rest = [r for r in outcome.results if r.level in ("yellow", "red") and not r.fix]
    if rest:
        text.append(f"# {len(rest)} more of the above need a person: see their cures")
    return text or ["# nothing to fix"]


async def apply(wanted: Wanted, outcome: Outcome, told: Callable[[Done], None], checked: Told) -> Outcome:
    """Run the lines on their hosts, all hosts at the same time, and check again what they were to cure.

    told: of each line that has ended; checked: as run()'s `told`. Returns the outcome with those rows as they are now.
    """
    cures = lines(outcome.results)
    session = Session(
        Wanted({host: wanted.slots[host] for host in cures}, None, wanted.environment, wanted.launcher), _name()
    )
    try:
        await session.open()
        for number in range(max(map(len, cures.values()), default=0)):
            await _each(View(session), {host: own[number] for host, own in cures.items() if number < len(own)}, told)
    finally:
        await session.close()
    touched = {row.name for row in outcome.rows if any(r.fix and r.host in cures for r in row.results)}
    others = [check.name for check in checks() if check.name not in touched]
    again = await run(wanted, outcome.size, name=_name(), told=checked, skip=others)
    now = {row.name: row for row in again.rows}
    rows = [now.get(row.name, row) for row in outcome.rows]
    return Outcome(outcome.hosts, outcome.size, rows, round(outcome.seconds + again.seconds, 2))


def _name() -> str:
    return secrets.token_hex(8)


async def _each(view: View, now: dict[str, str], told: Callable[[Done], None]) -> None:
    """One line on each host."""
    each = {host: {"line": line} for host, line in now.items()}
    found = await view.ask("fix.run", SECONDS + 5, each=each, limit=SECONDS)
    for host, line in now.items():
        facts = found.get(host)
        if facts is None:
            told(Done(host, line, view.failed.get(host, "the host cannot be reached"), ()))
            continue
        ended = f"it ended with {facts['code']}" if facts["code"] else ""
        problem = f"it had not ended after {SECONDS:.0f} s" if facts["code"] is None else ended
        told(Done(host, line, problem, tuple(facts["said"])))
