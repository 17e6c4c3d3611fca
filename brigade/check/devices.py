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
PIECES, AGAIN = 3, 6  # of arithmetic, of which the best counts; and of a host that looked slow


# ---- GPUs --------------------------------------------------------------------------------------------------------
async def _gpus(hosts: Hosts) -> dict[str, Facts]:
    """Host -> what NVML says, of the hosts that have GPUs and whose NVML answers. Raises NotHere without any."""
    asked = {host: Facts() for host, hello in hosts.hello.items() if hello.get("gpus")}
    if not asked:
        raise NotHere
    found = await hosts.ask("nvml.gpus", 20, each=asked)
    if not any("gpus" in facts for facts in found.values()):
        raise NotHere
    return _with_use(hosts, found)


def _with_use(hosts: Hosts, found: Mapping[str, Facts]) -> dict[str, Facts]:
    wanted = hosts.wanted
    return {host: of_gpus.with_use(facts, wanted.environment, wanted.slots[host]) for host, facts in found.items()}


async def _judged(hosts: Hosts, judges: Iterable[of_gpus.Judge], value: str) -> list[Result]:
    """Each GPU of each host, judged; one that no rank gets is a warning at most. Hosts without GPUs or NVML are unknown.
    value: of the sound ones."""
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
    found = _with_use(hosts, await hosts.ask("nvml.gpus", 20, each=asked) if asked else {})
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
    """Reads ECC mode, uncorrected errors since the last reset, and remapped rows by NVML. Threshold: no failed row and no Xid 48
    or 95 right now (red); no uncorrected error, no row that waits for a reset, ECC as on others of the kind; NVIDIA's "GPU Memory
    Error Management"."""
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
    thresholds.yaml; all NVLinks of the kind (gpus.yaml, else as most have) where ranks use two GPUs of the host; fabric joined;
    peers as on most hosts of the kind."""
    found = {host: facts for host, facts in (await _gpus(hosts)).items() if "gpus" in facts}
    for result in await _judged(hosts, (of_gpus.pcie, of_gpus.nvlink), "full width"):
        yield result
    peers = {
        host: (
            tuple(sorted(of_gpus.kinds([gpu for gpu in facts["gpus"] if gpu["used"]]).items())),
            of_gpus.reached(facts),
        )
        for host, facts in found.items()
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


@check("gpu Xid errors", seconds=40)
async def gpu_xids(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads NVIDIA's Xid errors: live ones by NVML for a tenth of a second, past ones of these GPUs from the kernel's log where
    this user may read it. Threshold: none whose action in xids.yaml is red that comes now or that NVML confirms (it wants a
    reset, or a row of memory waits for it); none of the last day (a warning); NVIDIA's Xid catalog, grouped as AWS does."""
    found = await _gpus(hosts)
    logs = await hosts.ask("devices.kernel_log", 15, each={host: Facts() for host in found})
    for host, facts in found.items():
        if "gpus" not in facts:
            yield unknown(host, "NVML says nothing there; see the row gpus")
            continue
        log = logs.get(host, {})
        results = of_gpus.judged(
            host, of_gpus.with_log(facts["gpus"], log.get("xids", [])), {}, (of_gpus.xids,), "none"
        )
        if results[0].level == "green" and "unreadable" in log:
            yield unknown(host, f"past ones: {log['unreadable']}; `ssh {host} sudo dmesg | grep Xid` shows them")
        elif results[0].level != "green" or log:
            for result in results:
                yield result


# ---- the host ----------------------------------------------------------------------------------------------------
async def _host(hosts: Hosts) -> dict[str, Facts]:
    return await hosts.ask("devices.host", 10)


def _limit(name: str, level: str) -> float:
    """What a figure of that level lacks: where the level begins."""
    limits = thresholds()[name]
    return (limits.red if level == "red" else limits.yellow) or 0.0


def _like_most(host: str, amounts: Mapping[str, float], slots: Mapping[str, int], unit: str) -> Result | None:
    """A warning where a host has less than the median one, in all and for each of its ranks: hosts may be of several sizes."""
    each = {one: amount / slots[one] for one, amount in amounts.items()}
    shares = [of[host] / statistics.median_high(of.values()) for of in (amounts, each)]
    if (level := thresholds()["like_most"].level(max(shares))) == "green":
        return None
    problem = f"{amounts[host]:.3g} {unit}, the median host has {statistics.median_high(amounts.values()):.3g}"
    why = "what fits on the others may not fit there, and all wait for the slowest"
    cure = f"`ssh {host} 'lscpu; free -g'`: a limit of its container or batch job, or a module that is out of order"
    return Result(host, level, f"{amounts[host]:.3g} {unit}", None, problem, why, cure)


@check("cores")
async def cores(hosts: Hosts) -> AsyncIterator[Result]:
    """Counts the cores that a process may use: its affinity and its control groups. Threshold: cores_per_slot of
    thresholds.yaml, and like_most against the median host."""
    found = await _host(hosts)
    whole = {host: facts["cores"] for host, facts in found.items()}
    for host, facts in found.items():
        slots = hosts.wanted.slots[host]
        level = thresholds()["cores_per_slot"].level(whole[host] / slots)
        value = f"{facts['cores']:g} for {counted(slots, 'rank')}"
        if level == "green":
            yield _like_most(host, whole, hosts.wanted.slots, "cores") or sound(host, value)
            continue
        least = slots * _limit("cores_per_slot", level)
        problem = f"{counted(slots, 'rank')} on {facts['cores']:g} cores; they need {least:g} at least"
        why = "ranks take turns, and all others wait for them"
        cure = f"fewer slots for {host} in the hostfile; or more cores: --cpus-per-task of the batch job, --cpus of the container"
        yield Result(host, level, value, None, problem, why, cure)


@check("memory")
async def memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads /proc/meminfo and the control groups' limits. Threshold: memory_per_slot of thresholds.yaml, free for each rank, and
    like_most against the median host; what offloading needs besides, the planner says."""
    found = await _host(hosts)
    whole = {host: facts["memory"]["total"] / GIB for host, facts in found.items()}
    for host, facts in found.items():
        free, total, slots = (
            facts["memory"]["available"] / GIB,
            facts["memory"]["total"] / GIB,
            hosts.wanted.slots[host],
        )
        level, value = thresholds()["memory_per_slot"].level(free / slots), f"{free:.0f} of {total:.0f} GiB free"
        if level == "green":
            yield _like_most(host, whole, hosts.wanted.slots, "GiB of memory") or sound(host, value, free)
            continue
        why = "the kernel ends a process when memory runs out, and with it the run"
        cure = f"fewer slots for {host} in the hostfile; or end who holds it: `ssh {host} ps aux --sort=-rss | head`"
        each = _limit("memory_per_slot", level)
        problem = f"{free:.1f} of {total:.1f} GiB are free for {counted(slots, 'rank')}, which need {slots * each:g} GiB at least"
        yield Result(host, level, value, free, problem, why, cure)


@check("/dev/shm")
async def shared_memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the room in /dev/shm, through which ranks of one host and workers of a data loader exchange data. Threshold:
    shared_memory of thresholds.yaml, and shared_memory_gpus where several ranks of a host have GPUs."""
    for host, facts in (await _host(hosts)).items():
        if facts["shm"] is None:
            yield unknown(host, "/dev/shm is no file system of its own")
            continue
        free, together = facts["shm"]["free"] / GIB, hosts.hello[host].get("gpus") and hosts.wanted.slots[host] > 1
        limit = thresholds()["shared_memory_gpus" if together else "shared_memory"]
        level, value = limit.level(free), f"{free:.1f} GiB free"
        if level == "green":
            yield sound(host, value, free)
            continue
        problem = f"{free:.2f} of {facts['shm']['total'] / GIB:.2f} GiB are free in /dev/shm"
        why = "NCCL and data loaders end with 'bus error' or 'no space left' when it is full"
        cure = f"`docker run --shm-size=1g` or --ipc=host; on {host} itself: sudo mount -o remount,size=50% /dev/shm"
        yield Result(host, level, value, free, problem, why, cure)


@check("open files")
async def open_files(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the hard limit of open files that a login gets there; `launch` raises the soft one of its ranks to it. Threshold:
    what open_files of thresholds.yaml leaves besides a socket for each rank of the run."""
    ranks = sum(hosts.wanted.slots.values())
    for host, facts in (await _host(hosts)).items():
        _, most = facts["open_files"]
        level = thresholds()["open_files"].level(most - ranks)
        if level == "green":
            yield sound(host, f"{most:,}")
            continue
        needed = ranks + _limit("open_files", level)
        problem = (
            f"a process may open {most:,} files there; with a socket for each of {ranks} ranks it needs {needed:g}"
        )
        why = "ranks end with 'too many open files' once they have met, or when data are read"
        cure = f"on {host}, `* - nofile 65536` in /etc/security/limits.conf, and log in again"
        yield Result(host, level, f"{most:,}", None, problem, why, cure)


@check("locked memory")
async def locked_memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the limit of locked memory, and whether NCCL would use InfiniBand or RoCE adapters there, which need it: ranks have
    GPUs, programs may use the adapters (/dev/infiniband/uverbs*), NCCL_IB_DISABLE and NCCL_NET leave them to NCCL, and the
    limit holds (no CAP_IPC_LOCK). Threshold: locked_memory of thresholds.yaml."""
    own = hosts.wanted.environment
    off = own.get("NCCL_IB_DISABLE", "0") != "0" or own.get("NCCL_NET") == "Socket"
    for host, facts in (await _host(hosts)).items():
        limit, gpus = facts["locked_memory"], hosts.hello[host].get("gpus")
        size = "unlimited" if limit is None else f"{limit / 2**20:,.0f} MiB"
        needed = gpus and facts["infiniband"] and facts["verbs"] and not (off or facts["ib_off"])
        if limit is None or not needed or thresholds()["locked_memory"].level(limit / GIB) == "green":
            yield sound(host, size if needed else f"{size}, and NCCL uses no InfiniBand")
            continue
        problem = f"a process may lock {size}, and {', '.join(facts['infiniband'][:4])} need more"
        why = "NCCL fails with 'unhandled system error' (ibv_reg_mr: cannot allocate memory), or takes TCP"
        cure = (
            f"on {host}, `* - memlock unlimited` in /etc/security/limits.conf; of a container --ulimit memlock=-1; "
            "or NCCL_IB_DISABLE=1 for TCP"
        )
        yield Result(host, "red", size, None, problem, why, cure)


@check("core speed", size="usual", seconds=180, alone=True)
async def core_speed(hosts: Hosts) -> AsyncIterator[Result]:
    """Times the same arithmetic on one core of each host. Threshold: core_speed of thresholds.yaml, against the median host; of
    several pieces the best counts, and a host that looks slow is asked for more of them. Hosts that are containers of one machine
    wait for one another: of them the processor's own time counts, elsewhere the clock's."""
    found = await hosts.ask("devices.core_speed", 60, pieces=PIECES)
    if not found:
        return
    machines = Counter(_machine(hosts, host) for host in found)

    def took(host: str, facts: Facts) -> float:
        return facts["computing" if machines[_machine(hosts, host)] > 1 else "seconds"]

    seconds = {host: took(host, facts) for host, facts in found.items()}
    median, limits = statistics.median_low(seconds.values()), thresholds()["core_speed"]
    slow: dict[str, Facts] = {host: {} for host in seconds if limits.level(median / seconds[host]) != "green"}
    for host, facts in (await hosts.ask("devices.core_speed", 60, each=slow, pieces=AGAIN) if slow else {}).items():
        seconds[host] = min(seconds[host], took(host, facts))
    median = statistics.median_low(seconds.values())
    for host in seconds:
        speed = median / seconds[host]
        level, value = limits.level(speed), f"{speed:.2f} of the median"
        if level == "green":
            yield sound(host, value, speed)
            continue
        problem = f"one core does {speed:.0%} of what the median host's does"
        waits = found[host]["computing"] < 0.8 * found[host]["seconds"]
        cause = "it waits for something: another program, a limit, a stolen core" if waits else "it computes slowly"
        cure = f"{cause}: `ssh {host} top`, and its CPU governor (`cpupower frequency-info`)"
        yield Result(host, level, value, speed, problem, "all ranks wait for the slowest host in every step", cure)


def _machine(hosts: Hosts, host: str) -> str:
    """The kernel that a host runs on: containers share it."""
    return hosts.hello[host].get("machine", host).partition(" ")[0]
