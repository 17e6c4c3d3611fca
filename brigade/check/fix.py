"""`check --fix`: the lines that make hosts sound. `--yes` runs them, and checks those rows again; nothing runs without it."""

import secrets
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from .checks import Result, Wanted, checks
from .run import Outcome, Session, Told, View, run

SECONDS = 900.0  # that a line may take: pip may have to load torch


@dataclass(frozen=True)
class Done:
    """One line that ran on one host. problem: "" where it ended well; said: its last words"""

    host: str
    line: str
    problem: str
    said: tuple[str, ...]


def lines(results: Iterable[Result]) -> dict[str, list[str]]:
    """Return host -> the shell lines that cure it, each once."""
    cures: dict[str, list[str]] = {}
    for result in results:
        if result.fix and result.level in ("yellow", "red") and result.fix not in cures.setdefault(result.host, []):
            cures[result.host].append(result.fix)
    return {host: own for host, own in cures.items() if own}


def printed(outcome: Outcome) -> list[str]:
    """The lines that --fix prints: each one in a form that can be pasted into a shell here, and what no line can cure."""
    cures = lines(outcome.results)
    text = [f"ssh {host} {shlex.quote(line)}" for host, own in cures.items() for line in own]
    rest = [r for r in outcome.results if r.level in ("yellow", "red") and not r.fix]
    if rest:
        text.append(f"# {len(rest)} more of the above need a person: see their cures")
    return text or ["# nothing to fix"]


async def apply(wanted: Wanted, outcome: Outcome, told: Callable[[Done], None], checked: Told) -> Outcome:
    """Run the lines on their hosts, and check again what they were to cure.

    One host after another, and before each but the first the rows are checked again: hosts that share an environment or a clone
    are cured with the first of them, and two installations would write over each other.
    told: of each line that has ended; checked: as run()'s `told`. Returns the outcome with those rows as they are now.
    """
    cures = lines(outcome.results)
    touched = {row.name for row in outcome.rows if any(r.fix and r.host in cures for r in row.results)}
    others = [check.name for check in checks() if check.name not in touched]
    began, left = time.monotonic(), cures
    for number, (host, own) in enumerate(cures.items()):
        if number:
            left = lines((await run(wanted, outcome.size, name=_name(), told=checked, skip=others)).results)
        still = [line for line in own if line in left.get(host, [])]
        for line in own:
            if line not in still:
                told(Done(host, line, "", ("not needed any more: nothing was run",)))
        if still:
            await _on(wanted, host, still, told)
    again = await run(wanted, outcome.size, name=_name(), told=checked, skip=others)
    now = {row.name: row for row in again.rows}
    rows = [now.get(row.name, row) for row in outcome.rows]
    return replace(outcome, rows=rows, seconds=round(outcome.seconds + time.monotonic() - began, 2))


def _name() -> str:
    return secrets.token_hex(8)


async def _on(wanted: Wanted, host: str, own: list[str], told: Callable[[Done], None]) -> None:
    """The lines of one host, one after another."""
    session = Session(Wanted({host: wanted.slots[host]}, None, wanted.environment, wanted.launcher), _name())
    try:
        await session.open()
        for line in own:
            told(await _run(View(session), host, line))
    finally:
        await session.close()


async def _run(view: View, host: str, line: str) -> Done:
    facts = (await view.ask("actions.run", SECONDS + 5, per_host={host: {"line": line}}, limit=SECONDS)).get(host)
    if facts is None:
        return Done(host, line, view.failed.get(host, "the host cannot be reached"), ())
    ended = f"it ended with {facts['code']}" if facts["code"] else ""
    problem = f"it had not ended after {SECONDS:.0f} s" if facts["code"] is None else ended
    return Done(host, line, problem, tuple(facts["said"]))
