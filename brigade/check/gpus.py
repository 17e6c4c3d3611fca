"""What is wrong with one GPU, from what NVML says of it (probes/gpus.py). Everything here judges one device; devices.py asks."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..errors.tables import table
from .checks import LEVELS, Facts, Level, Result, most_common, sound
from .findings import Finding, findings, level_of

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
# nvmlClocksEventReason*: of the hardware's slowdowns one, and the one that stands for its causes.
TOO_HOT, UMBRELLA = 64, 8
OF_MEMORY = {48, 64, 95, 140}  # Xids of errors that leave a row to be replaced
DAY = 86_400


Judge = Callable[[Facts, Facts], Iterator[Finding]]  # a GPU's figures, and what most of its kind have


def usual(hosts: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return name of a kind of GPU -> figure -> what most GPUs of that kind have."""
    kinds: dict[str, list[Facts]] = {}
    for facts in hosts.values():
        for gpu in facts.get("gpus", []):
            kinds.setdefault(gpu.get("name", "GPU"), []).append(gpu)
    usual_of: dict[str, Facts] = {}
    for name, gpus in kinds.items():
        figures = {figure for gpu in gpus for figure in gpu if isinstance(gpu[figure], int | float | bool)}
        usual_of[name] = {
            figure: most_common({str(n): gpu[figure] for n, gpu in enumerate(gpus) if figure in gpu})
            for figure in figures
        }
        links = {str(n): sum(gpu["nvlinks"]) for n, gpu in enumerate(gpus) if "nvlinks" in gpu}
        usual_of[name]["links"] = expected_links(name) or (most_common(links) if links else 0)
    return usual_of


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
    beginning is enough), bus address, or the name of a part of a GPU (MIG). As in CUDA, the first entry that is no device ends
    the list."""
    if visible is None:
        return [gpu["index"] for gpu in gpus][:slots]
    indices: list[int] = []
    for name in visible.split(",")[:slots]:
        same = [gpu["index"] for gpu in gpus if _is_called(gpu, name.strip().lower())]
        if len(same) != 1:
            break
        indices += same
    return indices


def _is_called(gpu: Facts, name: str) -> bool:
    if ":" in name:
        return "bus" in gpu and bus(gpu["bus"]) == bus(name)
    if name.startswith("mig-gpu-"):  # of drivers before R470: MIG-GPU-UUID/GPU instance/compute instance
        return gpu.get("uuid", "").lower() == name.removeprefix("mig-").partition("/")[0]
    names = [gpu.get("uuid", ""), *gpu.get("instances", [])]
    return name == str(gpu["index"]) or (
        name.startswith(("gpu-", "mig-")) and any(each.lower().startswith(name) for each in names)
    )


def bus(address: str) -> str:
    """The end that the kernel's 0000:3b:00 and NVML's 00000000:3B:00.0 have in common, in lower case."""
    return (address if "." in address else f"{address}.0").lower()[-10:]


def judged(
    host: str, gpus: Iterable[Facts], kinds: Mapping[str, Facts], judges: Iterable[Judge], value: str
) -> list[Result]:
    """A result for each thing that is wrong, with the GPUs that have it; one sound result where nothing is."""
    numbers_by_finding: dict[Finding, list[int]] = {}
    for gpu in gpus:
        for judge in judges:
            for finding in judge(gpu, kinds.get(gpu.get("name", "GPU"), {})):
                if not gpu.get("used", True):
                    finding = _aside(finding)
                numbers_by_finding.setdefault(finding, []).append(gpu["index"])
    if not numbers_by_finding:
        return [sound(host, value)]
    results = []
    for finding, numbers in numbers_by_finding.items():
        cure = finding.cure.replace("{host}", host).replace("{gpu}", ",".join(map(str, numbers)))
        problem = f"{which(numbers)}: {finding.problem}"
        results.append(Result(host, finding.level, finding.value, None, problem, finding.why, cure))
    return results


def _aside(finding: Finding) -> Finding:
    """The finding as it counts for a GPU that no rank gets: a warning at most."""
    level: Level = "yellow" if finding.level == "red" else finding.level
    return replace(finding, level=level, problem=f"{finding.problem} (not among this run's)")


def which(numbers: list[int]) -> str:
    """`GPU 3` or `GPUs 3, 5`."""
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


# ---- judges ------------------------------------------------------------------------------------------------------
def _finding(name: str, level: Level | None = None, /, **values: object) -> Finding:
    """The finding of that name, in whose cure the host's name and the GPUs' numbers are still open: see judged()."""
    return findings()[name].worded(level, {"host": "{host}", "gpu": "{gpu}", **values})


def _compared(name: str, figure: float, /, **values: object) -> Iterator[Finding]:
    """The finding where its threshold does not let the figure pass."""
    level = level_of(name, figure)
    if level != "green":
        yield _finding(name, level, **values)


def _cure(action: str) -> str:
    cure: str = XIDS["actions"][action]["cure"]
    return cure


def lost(gpu: Facts, _: Facts) -> Iterator[Finding]:
    """A finding where the driver cannot reach the GPU."""
    if gpu.get("lost"):
        yield _finding("lost-gpu", cure=_cure("reboot"))


def divided(gpu: Facts, _: Facts) -> Iterator[Finding]:
    """NVIDIA's Multi-Instance GPU user guide: a process sees one instance, and there is no peer access."""
    if gpu.get("mig"):
        yield _finding("divided-gpu", "yellow" if gpu.get("alone") else "red")


def free_memory(gpu: Facts, _: Facts) -> Iterator[Finding]:
    """A finding where much of the GPU's memory is taken already."""
    if "memory" in gpu:
        free, total, holders = gpu["memory"]["free"], gpu["memory"]["total"], gpu.get("holders", [])
        held_by = ", ".join(map(_words, holders)) or "nobody who can be seen"
        pids = " ".join(str(holder["pid"]) for holder in holders) or "PID"
        yield from _compared(
            "held-gpu-memory", free / total, free=free / GIB, total=total / GIB, holders=held_by, pids=pids
        )


def _words(holder: Facts) -> str:
    size = f", {holder['memory'] / GIB:.1f} GiB" if holder.get("memory") else ""
    who = f" of {holder['user']}: {holder['command']}" if "user" in holder else ", hidden by the container"
    return f"process {holder['pid']}{who}{size}"


def errors(gpu: Facts, kind: Facts) -> Iterator[Finding]:
    """Findings about errors of the GPU's memory, rows that wait to be replaced, and ECC that is off."""
    if gpu.get("uncorrected"):
        now = DOUBTFUL & set(gpu.get("live", []))
        why = "what it computes is in doubt" if now else "it may err again; errors that were contained do no more harm"
        level: Level = "red" if now else "yellow"
        yield _finding("uncorrected-errors", level, count=gpu["uncorrected"], why=why, cure=_cure("reset"))
    rows = gpu.get("remapped", {})
    if rows.get("failed"):
        yield _finding("no-spare-rows")
    elif rows.get("pending"):
        yield _finding("row-to-be-replaced", cure=_cure("reset"))
    if gpu.get("ecc") is False and kind.get("ecc"):
        yield _finding("ecc-off")


def clocks(gpu: Facts, kind: Facts) -> Iterator[Finding]:
    """Findings about clocks that are slowed down, by heat or power for instance."""
    reasons = gpu.get("clock_reasons", 0)
    causes = [bit for bit in KNOWN["slowdowns"] if reasons & bit]
    for bit in causes:
        if bit != UMBRELLA or bit == causes[0]:
            slowdown = KNOWN["slowdowns"][bit]
            yield _finding("throttled", slowdown["level"], means=slowdown["means"], cure=slowdown["cure"])
    limit, usual = gpu.get("power_limit"), kind.get("power_limit")
    if limit and usual:
        yield from _compared("low-power-limit", limit / usual, limit=limit, usual=usual)
    left, temperature = _until_it_slows_down(gpu), gpu.get("temperature", 0)
    cure = KNOWN["slowdowns"][TOO_HOT]["cure"]
    yield from _compared("hot", left, temperature=temperature, limit=temperature + left, cure=cure)


def _until_it_slows_down(gpu: Facts) -> float:
    """Degrees Celsius until it slows down, inf where nothing tells. Newer GPUs tell this margin, and of the threshold only a
    difference; older ones the threshold."""
    least, most = KNOWN["slowdown_at"]
    if "temperature" in gpu and "margin" in gpu:
        return float(gpu["margin"])
    known = "temperature" in gpu and least <= gpu.get("slowdown_at", 0) <= most
    return gpu["slowdown_at"] - gpu["temperature"] if known else math.inf


def pcie(gpu: Facts, kind: Facts) -> Iterator[Finding]:
    """An idle GPU lowers its link's speed, but not its width, to save power. It need not call itself idle: an RTX 5090 in P8
    names its power cap instead (tests/data/nvml/recorded/)."""
    width, most = gpu.get("pcie_width"), gpu.get("pcie_width_most")
    if width and most:
        yield from _compared("few-lanes", width / most, width=width, most=most)
    generation, best = gpu.get("pcie_generation"), gpu.get("pcie_generation_most")
    computes = not gpu.get("clock_reasons", IDLE) & IDLE and gpu.get("performance", 0) <= COMPUTING
    if generation and best and generation < best and computes:
        yield _finding("old-pcie-generation", generation=generation, most=best)
    for figure, unit in (("pcie_width_most", "lanes"), ("pcie_generation_most", "as generation")):
        allowed, usual = gpu.get(figure), kind.get(figure)
        if allowed and usual and allowed < usual:
            yield _finding("slower-slot", allowed=allowed, unit=unit, usual=usual)


def nvlink(gpu: Facts, kind: Facts) -> Iterator[Finding]:
    """Findings about NVLinks that are down. A single GPU needs none, and a virtual machine may have none."""
    alone = gpu.get("alone", False)
    up, expected = sum(gpu.get("nvlinks", [])), 0 if alone else kind.get("links", 0)
    if expected and "nvlinks" not in gpu and not gpu.get("lost"):
        yield _finding("nvlinks-unknown", expected=expected)
    elif up < expected and not gpu.get("lost"):
        yield _finding("nvlinks-down", up=up, expected=expected, cure=_cure("link"))
    fabric = gpu.get("fabric")
    if fabric and (fabric["state"] != COMPLETED or fabric["status"]):
        yield _finding("no-fabric", "yellow" if alone else "red")


def reached(facts: Facts) -> tuple[int, int]:
    """Count the pairs of GPUs of the run that can read each other's memory, and all pairs of them."""
    mine = {gpu["index"] for gpu in facts["gpus"] if gpu["used"]}
    statuses = [status for a, b, status in facts["peers"] if {a, b} <= mine]
    return statuses.count(0), len(statuses)


def xid(number: int, age: float, now: bool) -> Finding:
    """One Xid error. age: seconds; now: it comes right now, or NVML still says so; else only the log tells of it"""
    entry = XIDS["xids"].get(number, {"means": "it is not in Brigade's table", "action": "watch"})
    action = XIDS["actions"][entry["action"]]
    level: Level = action["level"] if now else "green" if age > DAY else "yellow"
    when = "now" if age < 1 else f"{age / 3600:.0f} h ago" if age >= 3600 else f"{age / 60:.0f} min ago"
    return _finding("xid", level, number=number, when=when, means=entry["means"], cure=action["cure"])


def xids(gpu: Facts, _: Facts) -> Iterator[Finding]:
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
    container also reads about the other GPUs of its machine: these entries are left out. A lost GPU does not tell its address: it
    gets the entries of a GPU that fell off the bus and whose address no other GPU has."""
    logged, addresses = [], {bus(gpu["bus"]) for gpu in gpus if "bus" in gpu}
    fallen = [entry for entry in log if entry["xid"] == OFF_THE_BUS and bus(entry["bus"]) not in addresses]
    for gpu in gpus:
        own = [entry for entry in log if "bus" in gpu and bus(entry["bus"]) == bus(gpu["bus"])]
        own += fallen if gpu.get("lost") and "bus" not in gpu else []
        cured = min((entry["age"] for entry in own if entry.get("action") == 0), default=math.inf)
        logged.append(gpu | {"log": [entry for entry in own if entry["age"] < cured]})
    return logged
