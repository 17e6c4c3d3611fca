"""Whether GPUs, cores, memory and limits are what the slots need."""

import statistics
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping

from ..errors.console import counted
from ..launch.rendezvous import usable_gpus
from . import gpus as of_gpus
from .hosts import Facts, Hosts
from .registry import check
from .results import NotHere, Result, sound, thresholds, unknown

GIB = 2**30
SOCKETS = 4  # of a rank for each other one: two groups with two sockets each way
PIECES = 5  # of arithmetic, of which the median counts


# ---- GPUs --------------------------------------------------------------------------------------------------------
async def _gpus(hosts: Hosts) -> dict[str, Facts]:
    """Host -> what NVML says, of the hosts that have GPUs and whose NVML answers. Raises NotHere without any."""
    asked = {host: Facts() for host, hello in hosts.hello.items() if hello.get("gpus")}
    if not asked:
        raise NotHere
    found = await hosts.ask("nvml.gpus", 20, each=asked)
    if not any("gpus" in facts for facts in found.values()):
        raise NotHere
    return found


async def _judged(hosts: Hosts, judges: Iterable[of_gpus.Judge], value: str) -> list[Result]:
    """Each GPU of each host, judged. Hosts without GPUs, or without NVML, are unknown. value: of the sound ones."""
    found = await _gpus(hosts)
    kinds, results = of_gpus.usual(found), []
    for host in hosts.hello:
        if "gpus" in found.get(host, {}):
            results += of_gpus.judged(host, found[host]["gpus"], kinds, judges, value)
        elif host not in hosts.failed:
            results.append(unknown(host, "NVML says nothing there; see the row gpus"))
    return results


@check("gpus", seconds=40)
async def gpus(hosts: Hosts) -> AsyncIterator[Result]:
    """Counts GPUs by nvidia-smi and compares them with the slots; reads their kind, their memory and who holds it by NVML.
    Threshold: as many as slots (fewer: red, more: a warning), of one kind, and gpu_memory_free of thresholds.yaml."""
    visible = hosts.wanted.environment.get("CUDA_VISIBLE_DEVICES")
    counts = {host: hello.get("gpus", 0) for host, hello in hosts.hello.items()}
    if not any(counts[host] is None or counts[host] for host in counts):
        for host in counts:
            yield unknown(
                host, "no GPU and no nvidia-smi: ranks compute on the CPU, and no other row says anything of GPUs"
            )
        return
    asked = {host: Facts() for host, count in counts.items() if count}
    found = await hosts.ask("nvml.gpus", 20, each=asked) if asked else {}
    kinds = {host: of_gpus.kinds(facts["gpus"]) for host, facts in found.items() if "gpus" in facts}
    usual = Counter(name for kind in kinds.values() for name in kind).most_common(1)
    for host, count in counts.items():
        seen, slots, said = usable_gpus(count, visible), hosts.wanted.slots[host], []
        if wrong := of_gpus.count_wrong(host, count, seen, slots):
            said.append(wrong)
        for name in kinds.get(host, {}):
            if name != usual[0][0]:
                why = "all ranks wait for the slowest kind, and the smallest memory is the limit"
                cure = f"leave {host} out, or run on its kind alone"
                said.append(Result(host, "yellow", name, None, f"{name}, elsewhere {usual[0][0]}", why, cure))
        facts = found.get(host, {})
        judges = (of_gpus.lost, of_gpus.free_memory)
        said += [r for r in of_gpus.judged(host, facts.get("gpus", []), {}, judges, "") if r.level != "green"]
        if "problem" in facts:
            why = "no program can use the GPUs then"
            cure = f"ssh {host} nvidia-smi; a reboot loads a driver that was updated while it ran"
            said.append(Result(host, "red", "NVML fails", None, f"NVML: {facts['problem']}", why, cure))
        if "absent" in facts and not said:
            said.append(unknown(host, f"{counted(count or 0, 'GPU')}, and nothing more: {facts['absent']}"))
        if said:
            for result in said:
                yield result
        elif host in kinds or not count:
            yield sound(host, ", ".join(f"{number} x {name}" for name, number in kinds.get(host, {}).items()) or "none")


@check("gpu memory errors", seconds=40)
async def gpu_errors(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads ECC mode, uncorrected errors since the last reset, and remapped rows by NVML. Threshold: no uncorrected error and no
    failed row (red), no row that waits for a reset, ECC as on others of the kind; NVIDIA's "GPU Memory Error Management"."""
    for result in await _judged(hosts, (of_gpus.errors,), "no errors"):
        yield result


@check("gpu clocks", seconds=40)
async def gpu_clocks(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads NVML's reasons for lower clocks, the power limit and the temperature. Threshold: none of the slowdowns of gpus.yaml,
    gpu_power and gpu_temperature of thresholds.yaml; Azure's node health checks look at the same codes."""
    for result in await _judged(hosts, (of_gpus.clocks,), "not throttled"):
        yield result


@check("gpu links", seconds=40)
async def gpu_links(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads width and speed of PCIe, state of each NVLink, the NVLink fabric and peer access by NVML. Threshold: gpu_pcie of
    thresholds.yaml; all NVLinks of the kind (gpus.yaml, else as most have); fabric joined; peers as on most hosts of the kind."""
    found = {host: facts for host, facts in (await _gpus(hosts)).items() if "gpus" in facts}
    for result in await _judged(hosts, (of_gpus.pcie, of_gpus.nvlink), "full width"):
        yield result
    peers = {
        host: (tuple(sorted(of_gpus.kinds(facts["gpus"]).items())), _reached(facts)) for host, facts in found.items()
    }
    for host, (kind, (reached, pairs)) in peers.items():
        most = max(others[0] for other, others in peers.values() if other == kind)
        linked = any(of_gpus.expected_links(name) for name, _ in kind)
        if reached < (pairs if linked else most):
            problem = f"{reached} of {pairs} pairs of its GPUs reach each other's memory"
            why = "NCCL copies through the host's memory between the others"
            cure = f"`ssh {host} nvidia-smi topo -p2p r` names them; ACS in the BIOS, or a missing fabric manager"
            yield Result(host, "red" if linked else "yellow", "no peer access", None, problem, why, cure)
        facts = found[host]
        if facts.get("nvswitches") and not facts["fabric_manager"] and not any("fabric" in g for g in facts["gpus"]):
            yield unknown(
                host,
                "NVSwitch without a fabric manager that can be seen from here: it may run outside of the container",
            )


def _reached(facts: Facts) -> tuple[int, int]:
    """Pairs of GPUs that can read each other's memory, and pairs."""
    return sum(status == 0 for _, _, status in facts["peers"]), len(facts["peers"])


@check("gpu Xid errors", seconds=40)
async def gpu_xids(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads NVIDIA's Xid errors: live ones by NVML for a tenth of a second, past ones from the kernel's log where this user may
    read it. Threshold: none of the last day whose action in xids.yaml is red; NVIDIA's Xid catalog, grouped as AWS does."""
    found = await _gpus(hosts)
    logs = await hosts.ask("devices.kernel_log", 15, each={host: Facts() for host in found})
    for host, facts in found.items():
        log, by_gpu = (
            logs.get(host, {}),
            {gpu.get("bus", "").lower()[-10:]: gpu["index"] for gpu in facts.get("gpus", [])},
        )
        said: dict[str, list[Mapping[str, float]]] = {}
        for one in facts.get("xids", []):
            said.setdefault(f"GPU {one['index']}", []).append({**one, "age": 0})
        for one in log.get("xids", []):
            number = by_gpu.get(_bus(one["bus"]))
            said.setdefault(f"GPU {one['bus']}" if number is None else f"GPU {number}", []).append(one)
        grave = [(gpu, xid) for gpu, xids in said.items() for xid in of_gpus.xids(xids) if xid.level != "green"]  # type: ignore[arg-type]
        for gpu, xid in grave:
            cure = xid.cure.replace("{host}", host).replace("{gpu}", gpu.removeprefix("GPU "))
            yield Result(host, xid.level, xid.value, None, f"{gpu}: {xid.problem}", xid.why, cure)
        if not grave and "unreadable" in log:
            yield unknown(host, f"past ones: {log['unreadable']}; `ssh {host} sudo dmesg | grep Xid` shows them")
        elif not grave and log:
            yield sound(host, "none")


def _bus(address: str) -> str:
    """Of the kernel's 0000:3b:00 and NVML's 00000000:3B:00.0 the same end."""
    return (address if "." in address else f"{address}.0").lower()[-10:]


# ---- the host ----------------------------------------------------------------------------------------------------
async def _host(hosts: Hosts) -> dict[str, Facts]:
    return await hosts.ask("devices.host", 10)


@check("cores")
async def cores(hosts: Hosts) -> AsyncIterator[Result]:
    """Counts the cores that a process may use: its affinity and its control groups. Threshold: cores_per_slot of
    thresholds.yaml."""
    for host, facts in (await _host(hosts)).items():
        slots = hosts.wanted.slots[host]
        level = thresholds()["cores_per_slot"].level(facts["cores"] / slots)
        value = f"{facts['cores']:g} for {counted(slots, 'rank')}"
        if level == "green":
            yield sound(host, value)
            continue
        problem = f"{counted(slots, 'rank')} on {facts['cores']:g} cores"
        why = "ranks take turns, and all others wait for them"
        cure = f"`ssh {host} nproc`: ask for more with --cpus-per-task, or of the container with --cpus"
        yield Result(host, level, value, None, problem, why, cure)


@check("memory")
async def memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads /proc/meminfo and the control groups' limits. Threshold: memory_per_slot of thresholds.yaml, free for each rank; what
    offloading needs besides, the planner says."""
    for host, facts in (await _host(hosts)).items():
        free, total, slots = (
            facts["memory"]["available"] / GIB,
            facts["memory"]["total"] / GIB,
            hosts.wanted.slots[host],
        )
        level, value = thresholds()["memory_per_slot"].level(free / slots), f"{free:.0f} of {total:.0f} GiB free"
        if level == "green":
            yield sound(host, value, free)
            continue
        why = "the kernel ends a process when memory runs out, and with it the run"
        cure = f"`ssh {host} ps aux --sort=-rss | head` shows who holds it"
        problem = f"{free:.1f} of {total:.1f} GiB are free for {counted(slots, 'rank')}"
        yield Result(host, level, value, free, problem, why, cure)


@check("/dev/shm")
async def shared_memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the room in /dev/shm, through which ranks of one host and workers of a data loader exchange data. Threshold:
    shared_memory of thresholds.yaml."""
    for host, facts in (await _host(hosts)).items():
        if facts["shm"] is None:
            yield unknown(host, "/dev/shm is no file system of its own")
            continue
        free = facts["shm"]["free"] / GIB
        level, value = thresholds()["shared_memory"].level(free), f"{free:.1f} GiB free"
        if level == "green":
            yield sound(host, value, free)
            continue
        problem = f"{free:.2f} of {facts['shm']['total'] / GIB:.2f} GiB are free in /dev/shm"
        why = "NCCL and data loaders end with 'bus error' or 'no space left' when it is full"
        cure = f"`docker run --shm-size=1g` or --ipc=host; on {host} itself: sudo mount -o remount,size=50% /dev/shm"
        yield Result(host, level, value, free, problem, why, cure)


@check("open files")
async def open_files(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the limit of open files that a login, and so each rank, gets there. Threshold: what open_files of thresholds.yaml
    leaves besides four sockets for each rank of the run."""
    ranks = sum(hosts.wanted.slots.values())
    for host, facts in (await _host(hosts)).items():
        soft, hard = facts["open_files"]
        level = thresholds()["open_files"].level(soft - SOCKETS * ranks)
        if level == "green":
            yield sound(host, f"{soft:,}")
            continue
        problem = f"a process may open {soft:,} files there; {counted(ranks, 'rank')} need {SOCKETS * ranks} sockets each besides"
        why = "ranks end with 'too many open files' once they have met, or when data are read"
        cure = (
            f"on {host}, `* - nofile 65536` in /etc/security/limits.conf, and log in again (its hard limit is {hard:,})"
        )
        yield Result(host, level, f"{soft:,}", None, problem, why, cure)


@check("locked memory")
async def locked_memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the limit of locked memory, and whether the host has InfiniBand or RoCE adapters, which need it. Threshold:
    locked_memory of thresholds.yaml where there are adapters."""
    for host, facts in (await _host(hosts)).items():
        limit = facts["locked_memory"]
        size = "unlimited" if limit is None else f"{limit / 2**20:,.0f} MiB"
        if limit is None or not facts["infiniband"] or thresholds()["locked_memory"].level(limit / GIB) == "green":
            yield sound(host, size if facts["infiniband"] else f"{size}, no InfiniBand")
            continue
        problem = f"a process may lock {size}, and {', '.join(facts['infiniband'][:4])} need more"
        why = "NCCL fails with 'unhandled system error' (ibv_reg_mr: cannot allocate memory), or takes TCP"
        cure = f"on {host}, `* - memlock unlimited` in /etc/security/limits.conf; of a container --ulimit memlock=-1"
        yield Result(host, "red", size, None, problem, why, cure)


@check("core speed", size="usual", seconds=180, alone=True)
async def core_speed(hosts: Hosts) -> AsyncIterator[Result]:
    """Times the same arithmetic on one core of each host. Threshold: core_speed of thresholds.yaml, against the median host; one
    that looks slow is asked again, and its better time counts."""
    seconds = await _arithmetic(hosts, list(hosts.hello), PIECES)
    if not seconds:
        return
    median = statistics.median_low(found["seconds"] for found in seconds.values())
    limits = thresholds()["core_speed"]
    slow = [host for host, found in seconds.items() if limits.level(median / found["seconds"]) != "green"]
    for host, again in (await _arithmetic(hosts, slow, PIECES + 2)).items():
        seconds[host] = min(again, seconds[host], key=lambda found: found["seconds"])
    median = statistics.median_low(found["seconds"] for found in seconds.values())
    for host, found in seconds.items():
        speed = median / found["seconds"]
        level, value = limits.level(speed), f"{speed:.2f} of the median"
        if level == "green":
            yield sound(host, value, speed)
            continue
        problem = f"one core does {speed:.0%} of what the median host's does"
        waits = found["computing"] < 0.8 * found["seconds"]
        cause = (
            "it waits: another program, a limit of its container or a stolen core" if waits else "its clock is lower"
        )
        cure = f"`ssh {host} top` and its CPU governor; {cause}"
        yield Result(host, level, value, speed, problem, "all ranks wait for the slowest host in every step", cure)


async def _arithmetic(hosts: Hosts, names: list[str], pieces: int) -> dict[str, Facts]:
    """Ask these hosts; those that share a machine (containers) one after the other, for they would take each other's cores."""
    turns: dict[str, list[str]] = {}
    for host in names:
        machine = hosts.hello[host].get("machine", host).partition(" ")[0]
        turns.setdefault(machine, []).append(host)
    found: dict[str, Facts] = {}
    while any(turns.values()):
        now = {waiting.pop(0): Facts() for waiting in turns.values() if waiting}
        found |= await hosts.ask("devices.core_speed", 60, each=now, pieces=pieces)
    return found
