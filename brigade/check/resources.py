"""Whether a host's cores, memory and limits are what its slots need, and its cores as fast as those of the others."""

import statistics
from collections import Counter
from collections.abc import AsyncIterator, Mapping

from ..errors.console import counted, figure
from ..hosts.job import Job
from .checks import Facts, Hosts, Result, check, sound, thresholds, unknown
from .storage import on_host

GIB = 2**30
PIECES, AGAIN = 3, 6  # of arithmetic, of which the best counts; and of a host that looked slow


async def _host(hosts: Hosts) -> dict[str, Facts]:
    return await hosts.ask("resources.host", 10)


def _limit(name: str, level: str) -> float:
    """Return where a level begins, which is what a figure of that level lacks."""
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
    answers = await _host(hosts)
    whole = {host: facts["cores"] for host, facts in answers.items()}
    for host, facts in answers.items():
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
    """Reads /proc/meminfo and the limits of the control groups, this user's and those above. Threshold: what the planner says
    that the recipe's ranks on GPUs hold (costs/host_memory.py), at least (red) and at most; else memory_per_slot of
    thresholds.yaml, or memory_per_gpu, free for each rank. And like_most against the median host."""
    answers, needs = await _host(hosts), host_memory(hosts.wanted.job)
    whole = {host: facts["memory"]["total"] / GIB for host, facts in answers.items()}
    for host, facts in answers.items():
        free, total, slots = (
            facts["memory"]["available"] / GIB,
            facts["memory"]["total"] / GIB,
            hosts.wanted.slots[host],
        )
        gpus, value = bool(hosts.hello[host].get("gpus")), f"{figure(free, 1)} of {figure(total, 1)} GiB free"
        name = "memory_per_gpu" if gpus else "memory_per_slot"
        level, least = thresholds()[name].level(free / slots), slots * _limit(name, "red")
        if gpus and needs:
            level = "red" if free < max(needs[0], least) else "yellow" if free < needs[1] else level
        if level == "green":
            yield _like_most(host, whole, hosts.wanted.slots, "GiB of memory") or sound(host, value, free)
            continue
        least = max(least, needs[0]) if gpus and needs else slots * _limit(name, level)
        most = f", and {figure(needs[1], 0)} at most" if gpus and needs and needs[1] > least else ""
        why = "the kernel ends a process when memory runs out, and with it the run"
        cure = f"fewer slots for {host} in the hostfile; or end who holds it: `ssh {host} ps aux --sort=-rss | head`"
        problem = f"{figure(free, 1)} of {figure(total, 1)} GiB are free for {counted(slots, 'rank')}, "
        problem += f"which need {figure(least, 1)} GiB at least{most}"
        if limit := facts["memory"].get("limit"):
            problem += f"; {limit} allows no more"
            cure = f"raise that limit: --mem of the batch job, --memory of the container, MemoryMax= of the unit; or {cure}"
        yield Result(host, level, value, free, problem, why, cure)


def host_memory(job: Job | None) -> tuple[float, float] | None:
    """GiB that a host's ranks hold in memory, by the planner: between which four of five runs lie. None where no formula covers
    the recipe."""
    planned = on_host(job) if job else None
    return (planned.fullest[0] / GIB, planned.fullest[1] / GIB) if planned else None


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
    answers = await hosts.ask("resources.core_speed", 60, pieces=PIECES)
    if not answers:
        return
    machines = Counter(_machine(hosts, host) for host in answers)

    def took(host: str, facts: Facts) -> float:
        return facts["computing" if machines[_machine(hosts, host)] > 1 else "seconds"]

    seconds = {host: took(host, facts) for host, facts in answers.items()}
    median, limits = statistics.median_low(seconds.values()), thresholds()["core_speed"]
    slow: dict[str, Facts] = {host: {} for host in seconds if limits.level(median / seconds[host]) != "green"}
    for host, facts in (await hosts.ask("resources.core_speed", 60, each=slow, pieces=AGAIN) if slow else {}).items():
        seconds[host] = min(seconds[host], took(host, facts))
    median = statistics.median_low(seconds.values())
    for host in seconds:
        speed = median / seconds[host]
        level, value = limits.level(speed), f"{speed:.2f} of the median"
        if level == "green":
            yield sound(host, value, speed)
            continue
        problem = f"one core does {speed:.0%} of what the median host's does"
        waits = answers[host]["computing"] < 0.8 * answers[host]["seconds"]
        cause = "it waits for something: another program, a limit, a stolen core" if waits else "it computes slowly"
        cure = f"{cause}: `ssh {host} top`, and its CPU governor (`cpupower frequency-info`)"
        yield Result(host, level, value, speed, problem, "all ranks wait for the slowest host in every step", cure)


def _machine(hosts: Hosts, host: str) -> str:
    """The kernel that a host runs on: containers share it."""
    return hosts.hello[host].get("machine", host).partition(" ")[0]
