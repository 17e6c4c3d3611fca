"""What is wrong with one GPU, from what NVML says of it (probes/gpus.py). Everything here judges one device; devices.py asks."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors.tables import table
from .checks import LEVELS, Facts, Level, Result, most_common, sound, thresholds

KNOWN = table(Path(__file__).with_name("gpus.yaml"))
XIDS = table(Path(__file__).with_name("xids.yaml"))
IDLE = 1  # nvmlClocksEventReasonGpuIdle
COMPUTING = 2  # the lowest performance state in which GPUs compute: GeForce cards do in P2
COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
DOUBTFUL = {48, 95}  # Xids after which results are in doubt
GIB = 2**30
NEEDED = (1, 2, 6, 7)  # NVML_GPU_RECOVERY_ACTION_*: a reset or a reboot; with the others programs go on
RECOVERY = 154  # the Xid that tells of it, when it comes and when it goes
OFF_THE_BUS = 79
OF_MEMORY = {48, 64, 95, 140}  # Xids of errors that leave a row to be replaced
DAY = 86_400


@dataclass(frozen=True)
class Finding:
    """value: in a few words; problem follows "GPU 3: "; {host} and {gpu} in `cure` stand for their names."""

    level: Level
    value: str
    problem: str
    why: str
    cure: str


Judge = Callable[[Facts, Mapping[str, Any]], Iterator[Finding]]  # a GPU's figures, and what most of its kind have


def usual(hosts: Mapping[str, Facts]) -> dict[str, dict[str, Any]]:
    """Return name of a kind of GPU -> figure -> what most GPUs of that kind have."""
    kinds: dict[str, list[Facts]] = {}
    for facts in hosts.values():
        for gpu in facts.get("gpus", []):
            kinds.setdefault(gpu.get("name", "GPU"), []).append(gpu)
    found: dict[str, dict[str, Any]] = {}
    for name, gpus in kinds.items():
        figures = {figure for gpu in gpus for figure in gpu if isinstance(gpu[figure], int | float | bool)}
        found[name] = {
            figure: most_common({str(n): gpu[figure] for n, gpu in enumerate(gpus) if figure in gpu})
            for figure in figures
        }
        links = {str(n): sum(gpu["nvlinks"]) for n, gpu in enumerate(gpus) if "nvlinks" in gpu}
        found[name]["links"] = expected_links(name) or (most_common(links) if links else 0)
    return found


def expected_links(name: str) -> int:
    """The number of NVLinks that a GPU of this name has; 0 where it has none or is not known."""
    if any(part in name for part in KNOWN["without"]):
        return 0
    return next((links for part, links in KNOWN["nvlinks"].items() if part in name), 0)


def with_use(facts: Facts, environment: Mapping[str, str], slots: int) -> Facts:
    """What NVML says of a host, with more of each GPU: used: whether a rank gets it, alone: whether no two of the host are used,
    live: Xids that came right now."""
    mine = used(facts.get("gpus", []), environment.get("CUDA_VISIBLE_DEVICES"), slots)
    live = [(event["index"], event["xid"]) for event in facts.get("xids", [])]
    gpus = [
        gpu
        | {"used": gpu["index"] in mine, "alone": len(mine) < 2}
        | {"live": [number for index, number in live if index == gpu["index"]]}
        for gpu in facts.get("gpus", [])
    ]
    return facts | ({"gpus": gpus} if "gpus" in facts else {})


def used(gpus: list[Facts], visible: str | None, slots: int) -> list[int]:
    """Indices of the GPUs that ranks get: the first of the visible ones. visible: CUDA_VISIBLE_DEVICES, by index, UUID (its
    beginning is enough) or bus address; what stands behind an entry that is no device does not count, as in CUDA."""
    if visible is None:
        return [gpu["index"] for gpu in gpus][:slots]
    found: list[int] = []
    for name in visible.split(",")[:slots]:
        same = [gpu["index"] for gpu in gpus if _is_called(gpu, name.strip().lower())]
        if len(same) != 1:
            break
        found += same
    return found


def _is_called(gpu: Facts, name: str) -> bool:
    if ":" in name:
        return "bus" in gpu and bus(gpu["bus"]) == bus(name)
    return name == str(gpu["index"]) or (name.startswith("gpu-") and gpu.get("uuid", "").lower().startswith(name))


def bus(address: str) -> str:
    """The end that the kernel's 0000:3b:00 and NVML's 00000000:3B:00.0 have in common, in lower case."""
    return (address if "." in address else f"{address}.0").lower()[-10:]


def judged(
    host: str, gpus: Iterable[Facts], kinds: Mapping[str, Mapping[str, Any]], judges: Iterable[Judge], value: str
) -> list[Result]:
    """A result for each thing that is wrong, with the GPUs that have it; one sound result where nothing is."""
    findings: dict[Finding, list[int]] = {}
    for gpu in gpus:
        for judge in judges:
            for finding in judge(gpu, kinds.get(gpu.get("name", "GPU"), {})):
                if not gpu.get("used", True):
                    finding = _aside(finding)
                findings.setdefault(finding, []).append(gpu["index"])
    if not findings:
        return [sound(host, value)]
    results = []
    for finding, numbers in findings.items():
        cure = finding.cure.replace("{host}", host).replace("{gpu}", ",".join(map(str, numbers)))
        results.append(
            Result(host, finding.level, finding.value, None, f"{which(numbers)}: {finding.problem}", finding.why, cure)
        )
    return results


def _aside(finding: Finding) -> Finding:
    """The finding as it counts for a GPU that no rank gets: a warning at most."""
    level: Level = "yellow" if finding.level == "red" else finding.level
    return replace(finding, level=level, problem=f"{finding.problem} (not among this run's)")


def which(numbers: list[int]) -> str:
    """`GPU 3` or `GPUs 3, 5`."""
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


# ---- judges ------------------------------------------------------------------------------------------------------
def lost(gpu: Facts, _: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding where the driver cannot reach the GPU."""
    if gpu.get("lost"):
        why = "ranks on it fail at once"
        yield Finding("red", "lost", "the driver lists it and cannot reach it", why, XIDS["actions"]["reboot"]["cure"])


def divided(gpu: Facts, _: Mapping[str, Any]) -> Iterator[Finding]:
    """NVIDIA's Multi-Instance GPU user guide: a process sees one instance, and there is no peer access."""
    if gpu.get("mig"):
        why = "a process can use only one of them, with its part of the memory, and GPUs exchange nothing directly"
        cure = "ssh {host} sudo nvidia-smi -i {gpu} --multi-instance-gpu=0"
        level: Level = "yellow" if gpu.get("alone") else "red"
        yield Finding(level, "MIG is on", "it is divided into instances (MIG)", why, cure)


def free_memory(gpu: Facts, _: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding where much of the GPU's memory is taken already."""
    if "memory" not in gpu:
        return
    free, total = gpu["memory"]["free"], gpu["memory"]["total"]
    level = thresholds()["gpu_memory_free"].level(free / total)
    if level == "green":
        return
    holders = [_words(holder) for holder in gpu.get("holders", [])]
    problem = (
        f"{free / GIB:.0f} of {total / GIB:.0f} GiB are free; held by {', '.join(holders) or 'nobody who can be seen'}"
    )
    pids = " ".join(str(holder["pid"]) for holder in gpu.get("holders", [])) or "PID"
    why = "the planner counts on nearly all of it, and the run would end out of memory"
    yield Finding(
        level, f"{free / GIB:.0f} GiB free", problem, why, f"wait for it, or `ssh {{host}} kill {pids}` if it is yours"
    )


def _words(holder: Facts) -> str:
    size = f", {holder['memory'] / GIB:.1f} GiB" if holder.get("memory") else ""
    who = f" of {holder['user']}: {holder['command']}" if "user" in holder else ", hidden by the container"
    return f"process {holder['pid']}{who}{size}"


def errors(gpu: Facts, kind: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about errors of the GPU's memory, rows that wait to be replaced, and ECC that is off."""
    reset, replace = XIDS["actions"]["reset"]["cure"], "let GPU {gpu} of {host} be replaced"
    if count := gpu.get("uncorrected"):
        problem = f"{count} errors of its memory since the last reset could not be corrected"
        now = DOUBTFUL & set(gpu.get("live", []))
        why = "what it computes is in doubt" if now else "it may err again; errors that were contained do no more harm"
        yield Finding("red" if now else "yellow", "memory errors", problem, why, reset)
    rows = gpu.get("remapped", {})
    if rows.get("failed"):
        problem = "a faulty row of its memory could not be replaced: no spare one is left"
        yield Finding("red", "no spare rows", problem, "errors will come again in the same place", replace)
    elif rows.get("pending"):
        problem = "a faulty row of its memory waits for a reset to be replaced"
        yield Finding("yellow", "row to be replaced", problem, "until then the row may err again", reset)
    if gpu.get("ecc") is False and kind.get("ecc"):
        why = "flipped bits go unnoticed there, and it has more memory and speed than the others"
        cure = "`ssh {host} sudo nvidia-smi -i {gpu} --ecc-config=1`, then reboot"
        yield Finding("yellow", "ECC off", "ECC is off, and on for others of its kind", why, cure)


def clocks(gpu: Facts, kind: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about clocks that are slowed down, by heat or power for instance."""
    why = "all ranks wait for the slowest GPU in every step"
    reasons = gpu.get("clock_reasons", 0)
    told = 0
    for bit, entry in KNOWN["slowdowns"].items():
        if reasons & bit and not (bit == 8 and told):
            told |= bit
            yield Finding(entry["level"], "throttled", entry["means"], why, entry["cure"])
    limit, most = gpu.get("power_limit"), kind.get("power_limit")
    if limit and most and (level := thresholds()["gpu_power"].level(limit / most)) != "green":
        problem = f"its power limit is {limit:.0f} W, of others of its kind {most:.0f} W"
        cure = f"ssh {{host}} sudo nvidia-smi -i {{gpu}} --power-limit={most:.0f}"
        yield Finding(level, f"{limit:.0f} W", problem, why, cure)
    left = _until_it_slows_down(gpu)
    if (level := thresholds()["gpu_temperature"].level(left)) != "green":
        problem = f"it has {gpu['temperature']} °C and slows down at {gpu['temperature'] + left:g}"
        yield Finding(level, f"{gpu['temperature']} °C", problem, why, KNOWN["slowdowns"][64]["cure"])


def _until_it_slows_down(gpu: Facts) -> float:
    """Degrees Celsius until it slows down, inf where nothing tells. Newer GPUs tell this margin, and of the threshold only a
    difference; older ones the threshold."""
    least, most = KNOWN["slowdown_at"]
    if "temperature" in gpu and "margin" in gpu:
        return float(gpu["margin"])
    known = "temperature" in gpu and least <= gpu.get("slowdown_at", 0) <= most
    return gpu["slowdown_at"] - gpu["temperature"] if known else math.inf


def pcie(gpu: Facts, kind: Mapping[str, Any]) -> Iterator[Finding]:
    """An idle GPU lowers its link's speed, but not its width, to save power. It need not call itself idle: an RTX 5090 in P8
    names its power cap instead (tests/data/nvml/recorded/)."""
    why = "loading, offloading and every exchange that does not go over NVLink pass here"
    cure = "reseat the card or its riser in {host}; `sudo lspci -vv` shows LnkSta"
    width, most = gpu.get("pcie_width"), gpu.get("pcie_width_most")
    if width and most and (level := thresholds()["gpu_pcie"].level(width / most)) != "green":
        yield Finding(level, f"x{width}", f"its PCIe link has {width} lanes of {most}", why, cure)
    speed, best = gpu.get("pcie_generation"), gpu.get("pcie_generation_most")
    computes = not gpu.get("clock_reasons", IDLE) & IDLE and gpu.get("performance", 0) <= COMPUTING
    if speed and best and speed < best and computes:
        problem = f"its PCIe link runs at generation {speed} of {best} under load"
        yield Finding("yellow", f"PCIe {speed}", problem, why, cure)
    for figure, unit in (("pcie_width_most", "lanes"), ("pcie_generation_most", "as generation")):
        mine, others = gpu.get(figure), kind.get(figure)
        if mine and others and mine < others:
            problem = f"its slot allows {mine} {unit}, others of its kind {others}"
            yield Finding(
                "yellow", "slower slot", problem, why, "put it into another slot, or look at the BIOS of {host}"
            )


def nvlink(gpu: Facts, kind: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about NVLinks that are down. A single GPU needs none, and a virtual machine may have none."""
    alone = gpu.get("alone", False)
    up, expected = sum(gpu.get("nvlinks", [])), 0 if alone else kind.get("links", 0)
    why = "NCCL takes PCIe instead, which is about ten times slower, or fails"
    if expected and "nvlinks" not in gpu and not gpu.get("lost"):
        problem = f"NVML says nothing of its {expected} NVLinks"
        yield Finding("yellow", "NVLinks unknown", problem, why, "`ssh {host} nvidia-smi nvlink --status`")
    elif up < expected and not gpu.get("lost"):
        problem = f"{up} of its {expected} NVLinks are up"
        yield Finding("red", f"{up} NVLinks", problem, why, XIDS["actions"]["link"]["cure"])
    fabric = gpu.get("fabric")
    if fabric and (fabric["state"] != COMPLETED or fabric["status"]):
        problem = "it has not joined the NVLink fabric"
        why = "without it no program can use GPUs of this host that are linked by NVSwitch (CUDA error 802)"
        cure = "ssh {host} sudo systemctl restart nvidia-fabricmanager; its version has to be the driver's"
        yield Finding("yellow" if alone else "red", "no fabric", problem, why, cure)


def reached(facts: Facts) -> tuple[int, int]:
    """Count the pairs of GPUs of the run that can read each other's memory, and all pairs of them."""
    mine = {gpu["index"] for gpu in facts["gpus"] if gpu["used"]}
    found = [status for a, b, status in facts["peers"] if {a, b} <= mine]
    return found.count(0), len(found)


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
    """Yield the newest Xid of each number, the gravest first. gpu: with `log`, as with_log() makes it"""
    waits, lost = gpu.get("recovery") in NEEDED, gpu.get("lost", False)
    live = [number for number in gpu["live"] if number != RECOVERY]
    newest: dict[int, tuple[float, bool]] = {}
    for entry in sorted(gpu["log"], key=lambda entry: entry["age"]):
        row = entry["xid"] in OF_MEMORY and bool(gpu.get("remapped", {}).get("pending"))
        newest.setdefault(entry["xid"], (entry["age"], waits or row or lost))
    newest |= dict.fromkeys([*live, *([RECOVERY] if waits else [])], (0, True))
    found = [xid(number, age, now) for number, (age, now) in newest.items()]
    grave = [finding for finding in found if finding.level != "green"]
    yield from sorted(grave, key=lambda finding: LEVELS.index(finding.level), reverse=True)


def with_log(gpus: Sequence[Facts], log: list[Facts]) -> list[Facts]:
    """Each GPU with `log`, its own Xids of the kernel's log since the driver last said that it needs nothing any more. A
    container reads of the other GPUs of its machine too: they are nobody's here. A lost GPU does not tell its address: it is
    one that fell off the bus and that no other has."""
    found, addresses = [], {bus(gpu["bus"]) for gpu in gpus if "bus" in gpu}
    fallen = [entry for entry in log if entry["xid"] == OFF_THE_BUS and bus(entry["bus"]) not in addresses]
    for gpu in gpus:
        own = [entry for entry in log if "bus" in gpu and bus(entry["bus"]) == bus(gpu["bus"])]
        own += fallen if gpu.get("lost") and "bus" not in gpu else []
        cured = min((entry["age"] for entry in own if entry.get("action") == 0), default=math.inf)
        found.append(gpu | {"log": [entry for entry in own if entry["age"] < cured]})
    return found
