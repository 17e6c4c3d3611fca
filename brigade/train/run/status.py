"""How a run stands, from the files in its directory: for `status`, and whoever else looks from outside."""

from contextlib import suppress
from pathlib import Path

from ...errors.console import counted
from ...errors.tables import Document, Fields
from ..host import files
from ..recipe.files import read_yaml
from . import directory as runs
from . import events, on_disk, other_owner, owner, typed
from .success import SUCCESS, unfinished

LAST = 5  # events that are shown


def of(directory: Path) -> Fields:
    """{"directory", "state", "owner", "step", "steps", "loss", "checkpoint", ...}; what is not known is left out.

    state: running, succeeded, stopped, or ended: neither marker is there, so it failed or was killed
    """
    record = typed.kept(read_yaml(directory / runs.RECORD).get("run"), typed.RUN)
    told = events.read(directory)
    held = other_owner.holder(directory / owner.FILE)
    known: Fields = {"directory": str(directory), "strategy": record.get("strategy", {}).get("name")}
    known |= {key: record[key] for key in ("hosts", "started") if key in record}
    known |= {"ranks": ranks_of(record)} if "ranks" in record else {}
    marker = next((name for name in (SUCCESS, runs.STOPPED) if (directory / name).exists()), None)
    problem = unfinished(directory)
    if marker == SUCCESS and problem:
        marker, known["problem"] = None, problem
    states = {SUCCESS: "succeeded", runs.STOPPED: "stopped", None: "ended"}
    known["state"] = "running" if held else states[marker]
    known["owner"] = held
    if marker and not held:
        with suppress(OSError, ValueError):
            known["marker"] = typed.kept(typed.loaded(files.read(directory / marker)), typed.MARKER)
    for line in told:  # the last one that says it
        loss = ("loss",) if line.get("event") == "step" else ()  # an evaluation's is another
        keys = ("step", "steps", "tokens_per_second", "held_out_loss", *loss)
        known |= {key: line[key] for key in keys if line.get(key)}
    checkpoints = on_disk.whole_checkpoints(directory)
    if checkpoints:
        known["checkpoint"] = checkpoints[max(checkpoints)].name
    grace = events.slowest(directory, "grace")
    if grace:
        known["grace"] = grace
    return known | {"events": told[-LAST:]}


def ranks_of(record: Document) -> int:
    """Return how many ranks a run has, by run.yaml's `run`, whose `ranks` are those of each replica; 0 where it says none."""
    known = typed.kept(record, typed.RUN)
    return known.get("ranks", 0) * known.get("replicas", 1)


def lines(known: Document, in_full: bool) -> list[str]:
    """How the run stands, for people: one line, or with `in_full` what else is known."""
    state, marker = known["state"], known.get("marker", {})
    held = known["owner"]
    if held:
        state += f" ({held['host']}, process {held['pid']})"
    elif known["state"] == "stopped":
        state += f" by {marker.get('by', '?')} at {marker.get('time', '?')}"
    elif known["state"] == "ended":
        state += f", and {known['problem']}" if "problem" in known else " before its end"
    parts = [state, f"step {known.get('step', 0)}/{known.get('steps', '?')}"]
    parts += [f"loss {known['loss']:.4f}"] if "loss" in known else []
    parts += [known.get("checkpoint", "no checkpoint yet")]
    summary = f"{known['directory']}: {', '.join(parts)}"
    if not in_full:
        return [summary]
    hosts = ", ".join(map(str, known.get("hosts") or ())) or "?"
    ranks = counted(known["ranks"], "rank") if "ranks" in known else "? ranks"
    more = [f"  {ranks} on {hosts}, {known['strategy']}, since {known.get('started', '?')}"]
    if "grace" in known:
        more += [f"  to stop, a step and a checkpoint take up to {known['grace']:.0f} s"]
    for event in known["events"]:
        fields = ", ".join(
            f"{key} {f'{value:.5g}' if isinstance(value, float) else value}"
            for key, value in event.items()
            if key not in ("time", "event", "phases") and value is not None
        )
        more += [f"  {event.get('time', '')[:19]}  {event.get('event')}: {fields}"]
    return [summary, *more]
