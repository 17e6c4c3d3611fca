"""Whether data, output and clocks are what a run on several hosts needs."""

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

from ..errors.console import counted
from ..launch.job import Job
from ..recipe.files import REPOSITORY
from .checkpoint_size import checkpoint_bytes, kept
from .hosts import Facts, Hosts
from .registry import check
from .results import Result, most_common, sound, thresholds, unknown

MEASURED = 256 * 2**20  # bytes that each host writes and reads
PATIENCE = 8.0  # seconds for either, on a slow disk
NO_RECIPE = "no recipe is given, so it is not known where the run will write"


@check("clock")
async def clock(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads each host's clock against the one here: its time less the middle between question and answer. Half of the round trip
    stays unknown, and counts for the host. Threshold: clock_offset of thresholds.yaml, from the time of most hosts."""
    offsets: dict[str, tuple[float, float]] = {}  # and how far that may be off

    async def ask(host: str) -> None:
        before = time.time()
        for found in (await hosts.ask("storage.clock", each={host: {}})).values():
            after = time.time()
            offsets[host] = found["time"] - (before + after) / 2, (after - before) / 2

    await asyncio.gather(*map(ask, hosts.hello))
    usual = _usual([offset for offset, _ in offsets.values()])
    for host, (offset, unsure) in offsets.items():
        away = offset - usual
        certain = max(0.0, abs(away) - unsure)
        level = thresholds()["clock_offset"].level(certain)
        if level == "green":
            yield sound(host, "together", away)
            continue
        problem = f"its clock is {abs(away):.1f} s {'ahead' if away > 0 else 'behind'}"
        why = "logs and time stamps of two hosts cannot be compared, and far from the true time servers refuse tokens"
        cure = f"ssh {host} 'sudo chronyc makestep', or `sudo timedatectl set-ntp true`"
        yield Result(host, level, f"{away:+.1f} s", away, problem, why, cure)


def _usual(offsets: list[float]) -> float:
    """The offset that has most others within the threshold; of two hosts, neither of which has a majority, the one near ours."""
    limit = thresholds()["clock_offset"].yellow or 0.0
    return max(offsets, key=lambda one: (sum(abs(one - other) <= limit for other in offsets), -abs(one)), default=0.0)


# ---- data --------------------------------------------------------------------------------------------------------
@check("data")
async def data(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads which of the recipe's files, patterns and directories are there on each host: train_file, validation_file, local data
    sets, model and tokenizer; how many files and bytes. Threshold: all are there, and as large as on most hosts."""
    job = hosts.wanted.job
    if job is None:
        for host in hosts.hello:
            yield unknown(host, "no recipe is given, so it is not known what it reads")
        return
    names = named(job)
    found = await hosts.ask("storage.files", names=[_meant(name) for name in names]) if names else {}
    for host in hosts.hello if not names else found:
        if not names:
            yield sound(host, "no files of its own")
            continue
        mine = dict(zip(names, found[host]["found"], strict=True))
        away = [name for name, one in mine.items() if one is None]
        usual = {name: most_common({h: found[h]["found"][n] for h in found}) for n, name in enumerate(names)}
        other = [name for name, one in mine.items() if one and usual[name] and one != usual[name]]
        why = "its ranks would end while the others load, or train on other data"
        cure = f"give every host the same files at the same paths: one file system, or `rsync -a FILE {host}:FILE`"
        if away:
            more = f" (and {len(away) - 1} more)" if len(away) > 1 else ""
            yield Result(
                host, "red", "missing", None, f"{away[0]} is not there{more}", why, cure.replace("FILE", away[0])
            )
        elif other:
            is_, was = mine[other[0]] or {}, usual[other[0]] or {}
            problem = (
                f"{other[0]} has {is_['bytes']:,} bytes in {counted(is_['files'], 'file')}, elsewhere {was['bytes']:,}"
            )
            yield Result(host, "red", "other files", None, problem, why, cure.replace("FILE", other[0]))
        else:
            yield sound(host, "all there")


def named(job: Job) -> list[str]:
    """What the recipe names and is, or has to be, on the hosts: a name on the Hub is neither a path nor here."""
    model, sources = job.settings.recipe.model, job.settings.recipe.data.datasets or [job.settings.recipe.data]
    sure = [name for source in sources for name in (source.train_file, source.validation_file) if name]
    maybe = [model.model_name_or_path, model.tokenizer_name_or_path, *(source.dataset_name for source in sources)]
    here = [
        name
        for name in maybe
        if name and (name.startswith(("/", "./", "~")) or any(Path(p).exists() for p in _meant(name)))
    ]
    return list(dict.fromkeys([*sure, *here]))


def _meant(name: str) -> list[str]:
    """The paths that a name in a recipe may mean: from here, where launch starts the ranks, else from the repository's root."""
    path = Path(name).expanduser()
    return list(dict.fromkeys([str(path.absolute()), str(REPOSITORY / path)]))


# ---- output ------------------------------------------------------------------------------------------------------
@check("output", seconds=40)
async def output(hosts: Hosts) -> AsyncIterator[Result]:
    """Each host leaves a note in the output directory, or in the nearest directory above it that all hosts have, and lists those of
    the others. Threshold: all see all, or each its own alone where one host writes whole checkpoints (DDP): what train.py asks
    for (distributed/shared_directory.py)."""
    job = hosts.wanted.job
    if job is None:
        for host in hosts.hello:
            yield unknown(host, NO_RECIPE)
        return
    rooms = await hosts.ask("storage.room", directory=str(job.output_dir.absolute()))
    where = str(
        min((Path(found["there"]) for found in rooms.values()), key=lambda path: len(path.parts), default=Path("/"))
    )
    token = secrets.token_hex(8)
    each = {host: {"host": host} for host in rooms}
    async with hosts.hold("storage.note", 10, each, directory=where, token=token) as left:
        asked = {host: {} for host, facts in left.items() if "error" not in facts}
        answers = await hosts.ask("storage.notes", 15, asked, directory=where, token=token, wanted=len(asked))
    seen = {host: set(facts["seen"]) for host, facts in answers.items()}
    usual = most_common({host: frozenset(names) for host, names in seen.items()}) if seen else frozenset()
    private = all(names == {host} for host, names in seen.items())
    parts, first = job.strategy.writes_in_parts, next(iter(seen), "")
    for host, facts in left.items():
        if "error" in facts:
            why = "train.py ends at once where a host cannot write its output"
            cure = f"ssh {host}, then give the user that directory, or name another --output_dir"
            yield Result(host, "red", "not writable", None, f"{where}: {facts['error']}", why, cure)
        elif host not in seen:
            continue
        elif len(hosts.wanted.slots) == 1:
            yield sound(host, "writable")
        elif seen[host] >= set(seen):
            yield sound(host, "shared")
        elif private and not parts:
            yield sound(host, "each host's own, whole checkpoints on each")
        elif host != first if private else seen[host] != usual:
            others = sorted(set(seen) - seen[host])
            problem = f"it does not see what {others[0]} writes to {where}"
            why = f"{parts} writes a part of each checkpoint from every host: the parts would lie apart, and train.py refuses"
            if not parts:
                why = "train.py refuses an output directory that some hosts share and others do not"
            cure = f"mount it on {host} as on {others[0]}, or give an --output_dir that all hosts share"
            yield Result(host, "red", "not shared", None, problem, why, cure)
        else:
            yield sound(host, "as most hosts see it")


@check("room")
async def room(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the free bytes (statvfs) where the run will write, and of the cache. Threshold: room for what this recipe keeps: the
    planner's bytes of a checkpoint (planner/costs/host_memory.py) times save_total_limit and one, less those that lie there;
    cache_room of thresholds.yaml. What a quota leaves is not known."""
    job = hosts.wanted.job
    size = checkpoint_bytes(job) if job else None
    directory = job.output_dir if job else Path()
    facts = await hosts.ask("storage.room", directory=str(directory.absolute()))
    for host, found in facts.items():
        yield _cache(host, found)
        if job is None:
            continue
        if size is None:
            yield unknown(host, "the planner does not know how large this recipe's checkpoints are")
            continue
        free, number = found["free"] + found["kept"], kept(job)
        if thresholds()["checkpoint_room"].level(free / size) == "red":
            level, value, wanted = "red", "for no checkpoint", f"one checkpoint takes {_bytes(size)}"
        elif thresholds()["checkpoints_room"].level(free / (number * size)) == "yellow":
            level, value, wanted = "yellow", "for few checkpoints", f"{number} checkpoints take {_bytes(number * size)}"
        else:
            yield sound(host, f"{_bytes(found['free'])} free", found["free"])
            continue
        problem = f"{found['there']} has {_bytes(found['free'])} free, and {wanted}"
        why = "the run ends when a checkpoint cannot be written"
        cure = (
            f"ssh {host} df -h {found['there']}, then make room; or a smaller save_total_limit, or another --output_dir"
        )
        yield Result(host, "red" if level == "red" else "yellow", value, None, problem, why, cure)


def _cache(host: str, found: Facts) -> Result:
    level = thresholds()["cache_room"].level(found["cache_free"] / 2**30)
    if level == "green":
        return sound(host, f"cache {_bytes(found['cache_free'])}", found["cache_free"])
    problem = f"{found['cache']}, the cache, has {_bytes(found['cache_free'])} free"
    why = "tokenised rows of the run are kept there"
    return Result(
        host, level, "cache full", None, problem, why, f"ssh {host}, then make room, or export BRIGADE_CACHE=DIRECTORY"
    )


def _bytes(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size / 1e6:,.0f} MB"


@check("disk speed", size="usual", seconds=60, alone=True)
async def disk_speed(hosts: Hosts) -> AsyncIterator[Result]:
    """Each host writes, syncs and reads 256 MiB past the page cache where the run will write, all hosts at once, as they save a
    checkpoint. Threshold: disk_rate and checkpoint_seconds of thresholds.yaml; the seconds are the planner's bytes over the rates,
    of all hosts together where each writes a part, else of the first."""
    job = hosts.wanted.job
    place = str((job.output_dir if job else Path("outputs")).absolute())
    rooms = await hosts.ask("storage.room", directory=place)
    each = {host: {"directory": facts["there"]} for host, facts in rooms.items()}
    facts = await hosts.ask("storage.rates", 2 * PATIENCE + 20, each, size=MEASURED, seconds=PATIENCE)
    rates = {host: found["write"] for host, found in facts.items() if "write" in found}
    middle = statistics.median_high(rates.values()) if rates else 0.0
    size = checkpoint_bytes(job) if job else None
    writing = sum(rates.values()) if job and job.strategy.writes_in_parts else next(iter(rates.values()), 0.0)
    seconds = size / writing if size and writing else 0.0
    for host, found in facts.items():
        if "error" in found:
            yield unknown(host, f"{each[host]['directory']}: {found['error']}")
            continue
        write, read = found["write"], found["read"]
        value = f"writes {write / 1e6:,.0f} MB/s, reads {read / 1e6:,.0f}"
        value += f"; a checkpoint of {_bytes(size)} {seconds:,.1f} s" if size and seconds else ""
        if thresholds()["disk_rate"].level(write / middle) == "yellow":
            problem = (
                f"it writes {write / 1e6:,.0f} MB/s to {each[host]['directory']}, the middle host {middle / 1e6:,.0f}"
            )
            why = "a checkpoint is whole when the slowest host has written its part"
            cure = (
                f"ssh {host} iostat -x 1, or compare how it mounts that directory: findmnt -T {each[host]['directory']}"
            )
            yield Result(host, "yellow", value, write, problem, why, cure)
        elif thresholds()["checkpoint_seconds"].level(seconds) == "yellow":
            problem = f"a checkpoint of {_bytes(size or 0)} takes {seconds:,.0f} s at {writing / 1e6:,.0f} MB/s of all writers"
            why = "the next checkpoint, and the run's end, wait for it"
            yield Result(
                host, "yellow", value, write, problem, why, "give an --output_dir on faster storage, or save less often"
            )
        else:
            yield sound(host, value, write)
