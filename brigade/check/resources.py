"""Whether a host's cores, memory and limits are what its slots need, and its cores as fast as those of the others."""

import statistics
from collections import Counter
from collections.abc import AsyncIterator, Mapping

from ..errors.console import counted, figure
from ..hosts.job import Job
from .checks import Facts, Hosts, Level, Result, Wanted, check, sound, thresholds, unknown, worst
from .findings import compared, fault, level_of
from .storage import checkpoint_bytes, on_host

GIB = 2**30
# Letter of `ulimit` -> its unit, and how much of the kernel's one is.
LIMITS = {"f": ("GiB", GIB), "v": ("GiB", GIB), "d": ("GiB", GIB), "u": ("processes", 1), "t": ("s", 1)}
PIECES, AGAIN = 3, 6  # of arithmetic, of which the best counts; and of a host that looked slow


async def _host(hosts: Hosts) -> dict[str, Facts]:
    return await hosts.ask("resources.host", 10)


def _limit(threshold: str, level: Level) -> float:
    """Return where a level begins, which is what a figure of that level lacks."""
    limits = thresholds()[threshold]
    return (limits.red if level == "red" else limits.yellow) or 0.0


def _like_most(
    host: str, amounts: Mapping[str, float], slots: Mapping[str, int], unit: str, otherwise: Result
) -> Result:
    """A warning where a host has less than the median one, in all and for each of its ranks: hosts may be of several sizes."""
    per_rank = {name: amount / slots[name] for name, amount in amounts.items()}
    share = max(of[host] / statistics.median_high(of.values()) for of in (amounts, per_rank))
    level = level_of("less-than-most", share)
    if level == "green":
        return otherwise
    median = statistics.median_high(amounts.values())
    return fault("less-than-most", host, level, size=amounts[host], unit=unit, median=median)


@check("cores")
async def cores(hosts: Hosts) -> AsyncIterator[Result]:
    """Counts the cores that a process may use: its affinity and its control groups. Threshold: cores_per_slot of
    thresholds.yaml, and like_most against the median host."""
    counts = {host: facts["cores"] for host, facts in (await _host(hosts)).items()}
    for host, count in counts.items():
        slots = hosts.wanted.slots[host]
        ranks, level = counted(slots, "rank"), level_of("few-cores", count / slots)
        value = f"{count:g} for {ranks}"
        if level == "green":
            yield _like_most(host, counts, hosts.wanted.slots, "cores", sound(host, value))
        else:
            least = slots * _limit("cores_per_slot", level)
            yield fault("few-cores", host, level, value=value, ranks=ranks, cores=count, least=least)


@check("memory")
async def memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads /proc/meminfo and the limits of the control groups, this user's and those above. Threshold: what the planner says
    that the recipe's ranks on GPUs hold (costs/host_memory.py), at least (red) and at most; else memory_per_slot of
    thresholds.yaml, or memory_per_gpu, free for each rank. And like_most against the median host."""
    answers, needs = await _host(hosts), host_memory(hosts.wanted.job)
    totals = {host: facts["memory"]["total"] / GIB for host, facts in answers.items()}
    for host, facts in answers.items():
        free, slots = facts["memory"]["available"] / GIB, hosts.wanted.slots[host]
        gpus = bool(hosts.hello[host].get("gpus"))
        threshold = "memory_per_gpu" if gpus else "memory_per_slot"
        level, least, most = thresholds()[threshold].level(free / slots), slots * _limit(threshold, "red"), 0.0
        if gpus and needs:
            least, most = max(needs[0], least), needs[1]
            level = "red" if free < least else "yellow" if free < most else level
        value = f"{figure(free, 1)} of {figure(totals[host], 1)} GiB free"
        if level == "green":
            yield _like_most(host, totals, hosts.wanted.slots, "GiB of memory", sound(host, value, free))
            continue
        if not (gpus and needs):
            least = slots * _limit(threshold, level)
        limit = facts["memory"].get("limit")
        yield fault(
            "limited-memory" if limit else "little-memory",
            host,
            level,
            free,
            value=value,
            free=figure(free, 1),
            total=figure(totals[host], 1),
            ranks=counted(slots, "rank"),
            least=figure(least, 1),
            most=f", and {figure(most, 0)} at most" if most > least else "",
            limit=limit,
        )


def host_memory(job: Job | None) -> tuple[float, float] | None:
    """GiB that a host's ranks hold in memory, by the planner: between which four of five runs lie. None where no formula covers
    the recipe."""
    planned = on_host(job) if job else None
    return (planned.fullest[0] / GIB, planned.fullest[1] / GIB) if planned else None


@check("/dev/shm")
async def shared_memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Makes a file in /dev/shm and reads its room: through it ranks of one host and workers of a data loader exchange data.
    Threshold: it goes well; shared_memory of thresholds.yaml, and shared_memory_gpus where several ranks of a host have GPUs."""
    for host, facts in (await _host(hosts)).items():
        if facts["shm_fails"]:
            yield fault("shm-not-usable", host, said=facts["shm_fails"])
        elif facts["shm"] is None:
            yield unknown(host, "/dev/shm is no file system of its own")
        else:
            free, together = facts["shm"]["free"] / GIB, hosts.hello[host].get("gpus") and hosts.wanted.slots[host] > 1
            finding = "shm-nearly-full-gpus" if together else "shm-nearly-full"
            yield compared(
                finding, host, free, f"{free:.1f} GiB free", free, free=free, total=facts["shm"]["total"] / GIB
            )


@check("limits")
async def limits(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads what `ulimit` allows a login's processes there. Threshold: file_size of thresholds.yaml (-f), address_space (-v),
    data_segment (-d), process_count for each rank (-u) and cpu_seconds (-t); and red for -f where a checkpoint of the recipe is
    larger (the planner's size)."""
    for host, facts in (await _host(hosts)).items():
        letters = [letter for letter in LIMITS if letter in facts["limits"]]
        value = f"{', '.join(f'-{letter}' for letter in facts['limits'])} allow enough" if facts["limits"] else "none"
        results = [_limited(host, letter, facts["limits"][letter], hosts.wanted) for letter in letters]
        yield worst(results) or sound(host, value)


def _limited(host: str, letter: str, soft: int, wanted: Wanted) -> Result:
    """What one limit of a host's processes means for a run."""
    unit, size = LIMITS[letter]
    level = level_of(f"ulimit-{letter}", soft / size / (wanted.slots[host] if letter == "u" else 1))
    checkpoint = checkpoint_bytes(wanted.job) if letter == "f" and wanted.job else None
    more = ""
    if checkpoint is not None and soft < checkpoint:
        level, more = "red", f"; one of this recipe takes {checkpoint / GIB:.3g} GiB"
    if level == "green":
        return sound(host, "enough")
    allowed = f"{figure(soft / size, 1 if size > 1 else 0)} {unit}"
    return fault(f"ulimit-{letter}", host, level, letter=letter, allowed=allowed, more=more)


@check("open files")
async def open_files(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the hard limit of open files that a login gets there; `launch` raises the soft one of its ranks to it. Threshold:
    what open_files of thresholds.yaml leaves besides a socket for each rank of the run."""
    ranks = sum(hosts.wanted.slots.values())
    for host, facts in (await _host(hosts)).items():
        _, most = facts["open_files"]
        needed = ranks + _limit("open_files", level_of("few-open-files", most - ranks))
        yield compared("few-open-files", host, most - ranks, f"{most:,}", most=most, ranks=ranks, needed=needed)


@check("locked memory")
async def locked_memory(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the limit of locked memory, and whether NCCL would use InfiniBand or RoCE adapters there, which need it: ranks have
    GPUs, programs may use the adapters (/dev/infiniband/uverbs*), NCCL_IB_DISABLE and NCCL_NET leave them to NCCL, and the
    limit holds (no CAP_IPC_LOCK). Threshold: locked_memory of thresholds.yaml."""
    variables = hosts.wanted.environment
    off = variables.get("NCCL_IB_DISABLE", "0") != "0" or variables.get("NCCL_NET") == "Socket"
    for host, facts in (await _host(hosts)).items():
        limit, gpus = facts["locked_memory"], hosts.hello[host].get("gpus")
        size = "unlimited" if limit is None else f"{limit / 2**20:,.0f} MiB"
        needed = gpus and facts["infiniband"] and facts["verbs"] and not (off or facts["ib_off"])
        if limit is None or not needed:
            yield sound(host, size if needed else f"{size}, and NCCL uses no InfiniBand")
        else:
            cards = ", ".join(facts["infiniband"][:4])
            yield compared("little-locked-memory", host, limit / GIB, size, cards=cards)


@check("core speed", size="usual", seconds=180, alone=True)
async def core_speed(hosts: Hosts) -> AsyncIterator[Result]:
    """Times the same arithmetic on one core of each host. Threshold: core_speed of thresholds.yaml, against the median host; of
    several pieces the best counts, and a host that looks slow is asked for more, with those of its machine. Hosts that are
    containers of one machine wait for one another: of them the processor's own time counts, elsewhere the clock's."""
    answers = await hosts.ask("resources.core_speed", 60, pieces=PIECES)
    if not answers:
        return
    machines = Counter(_machine(hosts, host) for host in answers)

    def took(host: str, facts: Facts) -> float:
        return facts["computing" if machines[_machine(hosts, host)] > 1 else "seconds"]

    seconds = {host: took(host, facts) for host, facts in answers.items()}
    median = statistics.median_low(seconds.values())
    slow = {_machine(hosts, host) for host, one in seconds.items() if level_of("slow-core", median / one) != "green"}
    # With those that share its machine: together they are slower than one of them alone.
    once_more = {host: Facts() for host in seconds if _machine(hosts, host) in slow}
    again = await hosts.ask("resources.core_speed", 60, per_host=once_more, pieces=AGAIN)
    for host, facts in again.items():
        seconds[host] = min(seconds[host], took(host, facts))
    median = statistics.median_low(seconds.values())
    for host in seconds:
        speed = median / seconds[host]
        waits = answers[host]["computing"] < 0.8 * answers[host]["seconds"]
        cause = "it waits for something: another program, a limit, a stolen core" if waits else "it computes slowly"
        yield compared("slow-core", host, speed, f"{speed:.2f} of the median", speed, speed=speed, cause=cause)


def _machine(hosts: Hosts, host: str) -> str:
    """The kernel that a host runs on: containers share it."""
    return hosts.hello[host].get("machine", host).partition(" ")[0]
