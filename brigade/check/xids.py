"""What is wrong with one GPU, from NVIDIA's Xid errors: those that come now (NVML), and those of the kernel's log."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .gpus import XIDS, Finding, bus
from .hosts import Facts
from .results import LEVELS, Level

NEEDED = (1, 2, 6, 7)  # NVML_GPU_RECOVERY_ACTION_*: a reset or a reboot; with the others programs go on
RECOVERY = 154  # the Xid that tells of it, when it comes and when it goes
OFF_THE_BUS = 79
OF_MEMORY = {48, 64, 95, 140}  # Xids of errors that leave a row to be replaced
DAY = 86_400


def xid(number: int, age: float, now: bool) -> Finding:
    """One Xid error. age: seconds; now: it comes right now, or NVML still says so; else only the log tells of it"""
    entry = XIDS["xids"].get(number, {"means": "it is not in Brigade's table", "action": "watch"})
    action = XIDS["actions"][entry["action"]]
    level: Level = action["level"]
    if not now:
        level = "green" if age > DAY else "yellow"
    when = "now" if age < 1 else f"{age / 3600:.0f} h ago" if age >= 3600 else f"{age / 60:.0f} min ago"
    problem = f"Xid {number}, {when}: {entry['means']}"
    return Finding(level, f"Xid {number}", problem, "the next run may fail in the same way", action["cure"])


def xids(gpu: Facts, _: Mapping[str, Any]) -> Iterator[Finding]:
    """Of each number the newest; the gravest first. gpu: with `log`, as with_log() makes it"""
    waits, lost = gpu.get("recovery") in NEEDED, gpu.get("lost", False)
    live = [number for number in gpu["live"] if number != RECOVERY]
    newest: dict[int, tuple[float, bool]] = {}
    for one in sorted(gpu["log"], key=lambda one: one["age"]):
        row = one["xid"] in OF_MEMORY and bool(gpu.get("remapped", {}).get("pending"))
        newest.setdefault(one["xid"], (one["age"], waits or row or lost))
    newest |= dict.fromkeys([*live, *([RECOVERY] if waits else [])], (0, True))
    found = [xid(number, age, now) for number, (age, now) in newest.items()]
    grave = [finding for finding in found if finding.level != "green"]
    yield from sorted(grave, key=lambda finding: LEVELS.index(finding.level), reverse=True)


def with_log(gpus: Sequence[Facts], log: list[Facts]) -> list[Facts]:
    """Each GPU with `log`, its own Xids of the kernel's log since the driver last said that it needs nothing any more. A
    container reads of the other GPUs of its machine too: they are nobody's here. A lost GPU does not tell its address: it is
    one that fell off the bus and that no other has."""
    found, addresses = [], {bus(gpu["bus"]) for gpu in gpus if "bus" in gpu}
    fallen = [one for one in log if one["xid"] == OFF_THE_BUS and bus(one["bus"]) not in addresses]
    for gpu in gpus:
        own = [one for one in log if "bus" in gpu and bus(one["bus"]) == bus(gpu["bus"])]
        own += fallen if gpu.get("lost") and "bus" not in gpu else []
        cured = min((one["age"] for one in own if one.get("action") == 0), default=math.inf)
        found.append(gpu | {"log": [one for one in own if one["age"] < cured]})
    return found
