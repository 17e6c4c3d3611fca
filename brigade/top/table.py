"""What was seen of a cluster, as a table: rates, who is slow, and what the watchdog would say."""

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors.console import printable
from ..hosts import Facts
from ..train.distributed import hang_verdict
from ..train.run import events
from .watching import HostSeen, Watching

if TYPE_CHECKING:
    from rich.console import Group

SILENT = 10.0  # seconds of silence from which on a rank's is shown, and all ranks' is judged
STALE = 20.0  # seconds after which a rank's file was due again, twice over
GIB = 2**30
WORDS = {
    "stopped": "STOPPED",
    "gone": "GONE",
    "ended": "ended",
    "lost": "host lost",
    "old": "its file is old",
}  # of a state


@dataclass
class RankRow:
    """A rank as it is shown. state: running, silent, stopped, gone, ended (gone with a run that
    reached its end or was stopped), lost (its host) or old (its file); behind: others were more than a step further before it
    wrote its file"""

    rank: int
    host: str
    step: int
    phase: str
    silent: float
    state: str = "running"
    tokens_per_second: float | None = None
    cpu: float | None = None  # percent of one processor
    memory: int | None = None
    gpu: Facts | None = None
    slow: str = ""
    behind: bool = False
    waits: Facts | None = None
    age: float = 0.0  # seconds since its file was written


def rank_rows(watching: Watching) -> list[RankRow]:
    """All ranks of which anything is known, by number."""
    latest: dict[str, Facts] = dict(watching.read)
    for seen in watching.hosts.values():
        if seen.samples:
            latest |= seen.samples[-1][1].get("ranks", {})
    furthest = _furthest(watching)
    slow, ended = slow_now(watching.told), _last(watching.told) in ("end", "stopped")
    rows = []
    for key, says in latest.items():
        host = watching.hosts.get(says.get("host", ""))
        seconds = float(says.get("seconds") or 0.0)
        row = RankRow(
            int(key), str(says.get("host", "?")), int(says.get("step") or 0), str(says.get("phase", "?")), seconds
        )
        state = _state(says, host, seconds)
        row.state = "ended" if ended and state == "gone" else state
        row.waits, row.slow, row.age = says.get("waits"), slow.get(row.rank, ""), float(says.get("age") or 0.0)
        if host and not host.problem:
            row.behind = _is_behind(furthest, host, key)
            row.tokens_per_second = _rate(host, key, "tokens")
            row.cpu = _percent(_rate(host, key, "cpu", "at_host"))
            row.memory = says.get("memory")
            gpus = host.samples[-1][1].get("gpus", [])
            row.gpu = next((gpu for gpu in gpus if says.get("pid") in gpu.get("pids", ())), None)
        rows.append(row)
    return sorted(rows, key=lambda row: row.rank)


def _state(says: Facts, host: HostSeen | None, seconds: float) -> str:
    if host and host.problem and host.problem != "connecting":
        return "lost"
    if says.get("state") in ("stopped", "gone"):
        return str(says["state"])
    if float(says.get("age") or 0.0) > STALE:
        return "old"
    return "silent" if seconds > SILENT else "running"


def _furthest(watching: Watching) -> list[tuple[float, int]]:
    """Return (when, the furthest step that any rank's file said until then), oldest first, by the clock of who watches."""
    said = (
        (when, max((int(says.get("step") or 0) for says in facts.get("ranks", {}).values()), default=0))
        for seen in watching.hosts.values()
        for when, facts in seen.samples
    )
    ordered = sorted(said)
    furthest = accumulate((step for _, step in ordered), max)
    return [(when, step) for (when, _), step in zip(ordered, furthest, strict=True)]


def _is_behind(furthest: list[tuple[float, int]], host: HostSeen, key: str) -> bool:
    """Tell whether a rank was still at an earlier step when others had been more than a step further. Files are some seconds
    old, each another number: so a rank's is compared with what the others' said before it was written."""
    of_rank = [(when, facts["ranks"][key]) for when, facts in host.samples if key in facts.get("ranks", {})]
    newest = of_rank[-1][1] if of_rank else {}
    before = [when for when, says in of_rank if says.get("writings") != newest.get("writings")]
    if not before:
        return False
    others = furthest[bisect.bisect(furthest, (before[-1], math.inf)) - 1][1]
    return int(newest.get("step") or 0) < others - 1


def _last(told: list[Facts]) -> str:
    """The last event of a run."""
    return str(told[-1].get("event")) if told else ""


def _rate(host: HostSeen, key: str, figure: str, clock: str = "at") -> float | None:
    """The rate per second between the oldest and the newest sample in which a rank's figure differs."""
    points: list[tuple[float, float]] = []
    for _, facts in host.samples:
        says = facts.get("ranks", {}).get(key, {})
        when = facts.get("at") if clock == "at_host" else says.get("at")
        if says.get(figure) is not None and when is not None and (not points or when > points[-1][0]):
            points.append((when, says[figure]))
    if len(points) < 2 or points[-1][1] < points[0][1]:  # it began anew
        return None
    return float(points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def host_figures(host: HostSeen) -> dict[str, float]:
    """cpu in percent of all its processors, memory and memory_total in bytes, received and sent in bytes per second, watts,
    temperature; what is not known is left out."""
    if not host.samples:
        return {}
    first, last = host.samples[max(0, len(host.samples) - 6)][1], host.samples[-1][1]
    before, now, seconds = first["host"], last["host"], last["at"] - first["at"]
    found = {key: now[key] for key in ("memory", "memory_total", "temperature") if key in now}
    if seconds > 0 and {"busy", "total", "received", "sent"} <= set(now) & set(before):
        found["cpu"] = 100 * (now["busy"] - before["busy"]) / max(now["total"] - before["total"], 1e-9)
        found |= {key: (now[key] - before[key]) / seconds for key in ("received", "sent")}
        if "joules" in now and "joules" in before and now["joules"] >= before["joules"]:
            found["watts"] = (now["joules"] - before["joules"]) / seconds
    return found


def slow_now(told: list[Facts]) -> dict[int, str]:
    """Return rank -> why it is slow, by the run's own measure, until that finds none slow any more."""
    slow: dict[int, str] = {}
    fresh = True
    for line in told:
        if line.get("event") == "slow" and isinstance(line.get("rank"), int):
            slow = slow if fresh else {}
            fresh = True
            slow[line["rank"]] = f"score {line.get('score', '?')}: {line.get('why', '')}"
        elif line.get("event") == "step":
            fresh = False
            score = line.get("slowest_rank_score")
            if isinstance(score, int | float) and score >= events.SLOW:
                slow = {}
        elif line.get("event") == "started":
            slow = {}
    return slow


def verdict(rows: list[RankRow], told: list[Facts]) -> str:
    """Say what the watchdog says, or would say if this silence went on; else the last thing that went wrong."""
    apart = [row for row in rows if row.state in ("stopped", "gone", "lost")]
    quiet = rows and all(row.silent > SILENT or row.state != "running" for row in rows)
    if _last(told) in ("end", "stopped", "failed"):
        last = told[-1]
        words = {"end": "The run has reached its end.", "stopped": f"The run was stopped by {last.get('by', '?')}."}
        return words.get(last["event"], f"The run failed: {last.get('text', '')}")
    faults = [line for line in told if line.get("event") in ("fault", "failed", "started")]
    fault = faults[-1] if faults and faults[-1].get("event") != "started" else {}
    if _nobody_runs(rows):
        heard = (
            f"the last was heard of {min(row.age for row in rows):,.0f} s ago, at step {max(row.step for row in rows)}"
        )
        return f"No rank runs: {heard}; {fault.get('text') or fault.get('what') or 'nothing says what ended the run'}"
    if quiet or apart:
        known = [_silent(row) for row in rows]
        late, sentence = hang_verdict.culprits(known), hang_verdict.sentence(known)
        return f"The others wait: {sentence}" if 0 < len(late) < len(known) else sentence
    slow = [row for row in rows if row.slow]
    if slow:
        return "; ".join(f"rank {row.rank} on {row.host} is slow, {row.slow}" for row in slow)
    if fault:
        return str(fault.get("text") or fault.get("what") or "a fault was recorded")
    return "All ranks move." if rows else "No rank has written its heartbeat yet."


def _nobody_runs(rows: list[RankRow]) -> bool:
    """Tell whether each rank's process is gone, or its file is old where nobody looks at its host."""
    return bool(rows) and all(row.state in ("gone", "old", "ended") for row in rows)


def _silent(row: RankRow) -> hang_verdict.Silent:
    more = {key: value for key, value in (row.waits or {}).items() if key in ("collective", "number", "group")}
    phase = row.phase if row.phase in hang_verdict.PHASES else "starting"
    answers = row.state not in ("gone", "lost", "old")
    return hang_verdict.Silent(row.rank, row.host, phase, row.step, row.silent, row.state == "stopped", answers, **more)


# ---- drawn -------------------------------------------------------------------------------------------------------
def render(watching: Watching, height: int = 0) -> "Group":
    """A rich renderable. height: lines that there are; 0: as many as it takes"""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = rank_rows(watching)
    table = Table(box=None, pad_edge=False, header_style="dim")
    heads = ("host", "rank", "step", "phase", "tokens/s", "CPU %", "GPU %", "memory", "°C", "W", "in", "out", "")
    lines: list[tuple[list[str], str]] = []
    names = list(dict.fromkeys([*watching.hosts, *(row.host for row in rows)]))
    for name in names:
        host = watching.hosts.get(name)
        lines.append(_host_line(name, host))
        lines += [_rank_line(row, rows) for row in rows if row.host == name]
    room = max(4, height - 6) if height else len(lines)
    known = [place for place in range(len(heads)) if place < 2 or any(cells[place] for cells, _ in lines)]
    # What a narrow terminal has no room for is not told by empty columns.
    for head in (heads[place] for place in known):
        left = head in ("host", "phase", "")
        table.add_column(head, justify="left" if left else "right", no_wrap=bool(head or height))
    for cells, style in lines[:room]:
        table.add_row(*(printable(cells[place]) for place in known), style=style)
    more = (
        [Text(f"... {len(lines) - room} more lines; a larger terminal shows them", style="dim")]
        if len(lines) > room
        else []
    )
    heading = Text(
        printable(_heading(watching, not _nobody_runs(rows))), style="bold", no_wrap=True, overflow="ellipsis"
    )
    said = verdict(rows, watching.told) if watching.directory else _hosts_alone(watching)
    calm = said.startswith(("All ", "The run has"))
    return Group(
        heading,
        Text(""),
        table,
        *more,
        Text(""),
        Text(printable(said), style="" if calm else "bold red"),
        *([Text("q leaves", style="dim")] if height else []),
    )


def _hosts_alone(watching: Watching) -> str:
    lost = [name for name, host in watching.hosts.items() if host.problem and host.problem != "connecting"]
    return f"No answer from {', '.join(lost)}." if lost else "All hosts answer or are being asked."


def _heading(watching: Watching, runs: bool) -> str:
    if not watching.directory:
        return f"{len(watching.hosts)} hosts"
    last: Facts = next((line for line in reversed(watching.told) if line.get("event") == "step"), {})
    parts = [Path(watching.directory).name]
    if last:
        parts.append(f"step {last.get('step')}/{last.get('steps', '?')}")
        parts += [f"loss {last['loss']:.4f}"] if isinstance(last.get("loss"), float) else []
        speed = last.get("tokens_per_second")
        parts += [f"{speed:,.0f} tokens/s"] if runs and isinstance(speed, int | float) else []
    return ", ".join(parts)


def _host_line(name: str, host: HostSeen | None) -> tuple[list[str], str]:
    if host is None:
        return [name, *[""] * 11, "not asked"], "dim"
    if host.problem:
        lost = host.problem != "connecting"
        return [name, *[""] * 11, f"LOST: {host.problem}" if lost else host.problem], "bold red" if lost else "bold"
    figures = host_figures(host)
    memory = _memory(figures.get("memory"), figures.get("memory_total"))
    cells = [name, "", "", "", "", _number(figures.get("cpu")), "", memory]
    cells += [_number(figures.get("temperature")), _number(figures.get("watts"))]
    return [*cells, _bytes(figures.get("received")), _bytes(figures.get("sent")), ""], "bold"


def _rank_line(row: RankRow, rows: Iterable[RankRow]) -> tuple[list[str], str]:
    gpu = row.gpu or {}
    words = WORDS.get(row.state, f"silent for {row.silent:.0f} s" if row.silent > SILENT else "")
    # Where the ranks' own times name nobody, who is behind.
    measured = any(other.slow for other in rows)
    slowest = row.slow if measured else row.behind
    words = words or ("SLOWEST" if slowest else "")
    memory = _memory(gpu.get("memory"), gpu.get("memory_total")) if gpu else _memory(row.memory, None)
    cells = ["", str(row.rank), f"{row.step:,}", row.phase, _number(row.tokens_per_second), _number(row.cpu)]
    cells += [
        _number(gpu.get("used")),
        memory,
        _number(gpu.get("temperature")),
        _number(gpu.get("watts")),
        "",
        "",
        words,
    ]
    style = "red" if row.state in ("stopped", "gone", "lost") else "yellow" if words not in ("", "ended") else ""
    return cells, style


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _memory(used: float | None, total: float | None) -> str:
    if used is None:
        return ""
    return f"{used / GIB:.1f} GiB" if total is None else f"{used / GIB:.1f}/{total / GIB:.0f} GiB"


def _bytes(rate: float | None) -> str:
    if rate is None:
        return ""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.1f} {unit}B/s"
    return f"{rate:.0f} B/s"
