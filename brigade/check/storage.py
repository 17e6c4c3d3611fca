"""Whether output, room, rates and clocks are what a run on several hosts needs."""

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from ..errors import UserError
from ..errors.console import figure
from ..hosts.job import Job
from ..plan.choice.job_of_recipe import job_of
from ..plan.costs import host_memory
from .checks import Facts, Hosts, NotHere, Result, check, sound, thresholds, worst
from .findings import compared, fault, level_of

SECONDS, MOST = 2.0, 512 * 2**20  # how long, and how many bytes, the disks are tried for


@check("clock")
async def clock(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads each host's clock between two looks at ours. Threshold: clock_offset of thresholds.yaml, from the hosts' median; what
    may be the way there and back does not count."""

    async def look(host: str) -> tuple[float, float] | None:
        before = time.time()
        facts = await hosts.ask("storage.clock", per_host={host: {}})
        after = time.time()
        return (facts[host]["time"] - (before + after) / 2, (after - before) / 2) if host in facts else None

    looked = await asyncio.gather(*map(look, hosts.hello))
    readings = {host: reading for host, reading in zip(hosts.hello, looked, strict=True) if reading}
    offsets = [offset for offset, _ in readings.values()]
    # Of two hosts the one whose clock is nearer to ours is right.
    middle = statistics.median_low(offsets) if len(offsets) > 2 else min(offsets, key=abs, default=0.0)
    doubt = next((doubt for offset, doubt in readings.values() if offset == middle), 0.0)
    for host, (offset, its_doubt) in readings.items():
        away = max(0.0, abs(offset - middle) - its_doubt - doubt)
        value = f"within {thresholds()['clock_offset'].yellow} s"
        side = "ahead of" if offset > middle else "behind"
        yield compared("clock-off", host, away, value, away, offset=offset - middle, away=figure(away, 1), side=side)


@check("output directory", seconds=40)
async def output(hosts: Hosts) -> AsyncIterator[Result]:
    """Leaves a file of each host in the recipe's output directory for a moment, and looks who sees whose. Threshold: all see all;
    or each only its own, under a strategy that keeps whole checkpoints on each host (distributed/shared_directory.py)."""
    job = _job(hosts)
    directory, token = str(job.output_dir.absolute()), secrets.token_hex(8)
    asked = await _with_missing(hosts, directory)
    async with hosts.hold("storage.note", per_host=asked, directory=directory, token=token) as left:
        wrote = [host for host, facts in left.items() if "error" not in facts]
        seen = await hosts.ask(
            "storage.notes", 15, per_host={h: {} for h in wrote}, directory=directory, token=token, wanted=len(wrote)
        )
    for host in set(left) - set(wrote):
        yield _not_writable(host, directory, left[host])
    sees = {host: set(facts["seen"]) for host, facts in seen.items()}
    if all(others == set(wrote) for others in sees.values()):
        for host in sees:
            yield sound(host, "shared" if len(sees) > 1 else "writable")
        return
    in_parts = job.strategy.writes_in_parts
    if not in_parts and all(others == {host} for host, others in sees.items()):
        for host in sees:
            yield sound(host, "its own: whole checkpoints there")
        return
    main = max(sees.values(), key=len) if max(map(len, sees.values())) > 1 else {next(iter(sees))}
    for host, others in sees.items():
        if others >= main:
            yield sound(host, "shared" if len(main) > 1 else "its own")
            continue
        first = next(name for name in hosts.wanted.slots if name in main)
        finding = "output-in-parts-not-shared" if in_parts else "output-not-shared"
        yield fault(finding, host, directory=directory, first=first, strategy=in_parts)


def _not_writable(host: str, directory: str, left: Facts) -> Result:
    finding = "output-not-writable"
    if left.get("file"):
        finding = "output-is-a-file"
    elif left.get("inodes") == 0:
        finding = "output-without-inodes"
    elif left.get("size") == 0:
        finding = "output-on-no-disk"
    return fault(finding, host, directory=directory, said=left["error"], file=left.get("file"))


async def _rooms(hosts: Hosts) -> dict[str, Facts]:
    """One question for several checks, asked before any of them makes a directory."""
    job = hosts.wanted.job
    output = [str(job.output_dir.absolute())] if job else []
    return await hosts.ask("storage.rooms", directories=output, start=str(Path.cwd()))


async def _with_missing(hosts: Hosts, directory: str) -> dict[str, Facts]:
    """Return host -> its name, and what of a directory's path it lacks, for the probes that write there and leave nothing."""
    rooms = await _rooms(hosts)
    return {host: {"host": host, "missing": found[directory]["missing"]} for host, found in rooms.items()}


@check("room", seconds=30)
async def room(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads how much this user may still write to the disks of the output directory, of the cache (BRIGADE_CACHE) and of
    temporary files (TMPDIR, else /tmp). Threshold: the last can be written; disk_room, cache_room and tmp_room of
    thresholds.yaml; for the output also one checkpoint where one lies there already, else two (a new one is whole before an old
    one goes; their size is the planner's, costs/host_memory.py), and a warning below what the recipe keeps. And how many files
    they still take: inodes. File systems that do not say their size are not judged."""
    job = hosts.wanted.job
    output = str(job.output_dir.absolute()) if job else ""
    answers = await _rooms(hosts)
    need, keeps = (checkpoint_bytes(job), _kept(job)) if job else (None, 1)
    for host, rooms in answers.items():
        results = [_passed_by(host, rooms["tmp"])] if rooms["tmp"].get("passed_by") else []
        results += [_room(host, "tmp-nearly-full", rooms["tmp"]), _room(host, "cache-nearly-full", rooms["cache"])]
        if output:
            results.append(_of_output(host, output, rooms[output], need, keeps))
        results += [_inodes(host, disk.get("path", directory), disk) for directory, disk in rooms.items()]
        yield worst(results) or sound(host, "enough")


def _passed_by(host: str, tmp: Facts) -> Result:
    """A directory for temporary files that cannot be written: with another one Python goes on, not all that it starts does."""
    finding = "tmp-passed-by" if tmp["path"] else "tmp-not-writable"
    return fault(finding, host, directory=tmp["passed_by"], instead=tmp["path"])


def _room(host: str, finding: str, disk: Facts) -> Result:
    if not disk["size"]:
        return sound(host, "enough")
    free = disk["free"] / 2**30
    return compared(finding, host, free, "enough", free, directory=disk["path"], free=gib(disk["free"]))


def _inodes(host: str, directory: str, disk: Facts) -> Result:
    """A disk may have bytes, and no place for one more file."""
    left = disk.get("inodes")
    if left is None or not disk["size"]:
        return sound(host, "enough")
    return compared("few-inodes", host, left, "enough", directory=directory, free=gib(disk["free"]), left=left)


def _of_output(host: str, directory: str, disk: Facts, need: float | None, keeps: int) -> Result:
    free, there = disk["free"], disk.get("checkpoints", 0)
    # the checkpoints that have to fit, and that come to lie there
    least, more = 1 if there else 2, max(1, keeps + 1 - there)
    red, yellow = (least * need, more * need) if need is not None else (0.0, 0.0)
    level = "red" if free < red else "yellow" if free < yellow else level_of("little-room", free / 2**30)
    if level == "green" or not disk["size"]:  # without a size "output directory" says what is there
        return sound(host, "enough")
    of = ""
    if need is not None:
        of = f"; a checkpoint of this recipe takes {gib(need)}, and {there or 'none'} of {keeps + 1} that lie there at a time "
        of += f"{'is' if there == 1 else 'are'} there; room for {least} more ({gib(red)}) is the least that it goes on with"
        of += f", for {more} more ({gib(yellow)}) enough" if more > least else ""
    return fault("little-room", host, level, free / 2**30, directory=directory, free=gib(free), need=of)


def gib(size: float) -> str:
    """Bytes in GiB, with one decimal: `12.3 GiB`."""
    return f"{figure(size / 2**30, 1)} GiB"


def _kept(job: Job) -> int:
    """Checkpoints that a run keeps at its end. Without a limit nobody knows their number, and the default's is taken."""
    return job.settings.recipe.training.save_total_limit or 3


def checkpoint_bytes(job: Job) -> float | None:
    """Bytes of a checkpoint of this recipe by the planner; None where no formula covers it."""
    planned = on_host(job)
    return planned.checkpoint if planned else None


def on_host(job: Job) -> host_memory.Host | None:
    """Ask the planner what a host of this recipe has to hold; None where no formula covers it. A recipe in fp32 is planned as one
    in bf16, for which there are formulas: both write weights and states in fp32."""
    settings, recipe = job.settings, job.settings.recipe
    if not recipe.training.fp16:
        half = recipe.training.model_copy(update={"bf16": True})
        settings = replace(settings, recipe=recipe.model_copy(update={"training": half}))
    try:
        return host_memory.host(job_of(settings, strategy=job.strategy, slots=job.hosts))
    except UserError:
        return None


@check("write and read", size="usual", seconds=60, alone=True)
async def rates(hosts: Hosts) -> AsyncIterator[Result]:
    """Writes a file into the output directory from all hosts at once for two seconds, brings it to the disk and reads it back.
    Threshold: disk_rate of thresholds.yaml, of the median host's; checkpoint_seconds for a checkpoint of this recipe."""
    job = _job(hosts)
    directory = str(job.output_dir.absolute())
    asked = {"directory": directory, "token": secrets.token_hex(8), "duration": SECONDS, "most": MOST}
    answers = await hosts.ask("storage.rate", 40, per_host=await _with_missing(hosts, directory), **asked)
    good = {host: facts for host, facts in answers.items() if "error" not in facts}
    middle = statistics.median(facts["written"] for facts in good.values()) if good else 0.0
    need = checkpoint_bytes(job)
    # Under a strategy that writes in parts all hosts write at the same time; else one host writes the whole.
    together = sum(facts["written"] for facts in good.values()) if job.strategy.writes_in_parts else middle
    seconds = need / together if need is not None and together else None
    for host, facts in answers.items():
        if host in good:
            yield _rated(host, facts, middle, seconds)
        else:
            yield fault("cannot-write", host, directory=directory, said=facts["error"])


def _rated(host: str, facts: Facts, middle: float, seconds: float | None) -> Result:
    rate = facts["written"]
    written, read, median = (f"{figure(amount / 1e9, 2)} GB/s" for amount in (rate, facts["read"], middle))
    takes = "" if seconds is None else f", a checkpoint in {figure(seconds, 1)} s"
    value = f"{written} written, {read} read{'' if facts['direct'] else ' (from memory)'}{takes}"
    result = compared("slow-disk", host, rate / middle, value, rate, written=written, median=median)
    if result.level != "green" or seconds is None:
        return result
    return compared("slow-checkpoint", host, seconds, value, rate, seconds=figure(seconds, 0))


def _job(hosts: Hosts) -> Job:
    """Raise NotHere without a recipe: nobody knows where a run would write."""
    if hosts.wanted.job is None:
        raise NotHere
    return hosts.wanted.job
