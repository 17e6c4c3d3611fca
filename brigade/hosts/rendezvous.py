"""The rendezvous: reach every host, compare them, and find an address of the first one that all others reach."""

import asyncio
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import UserError, Whose
from ..errors.console import counted
from ..train.distributed.visible import entries
from . import Facts
from .connection import Channel

DEFAULT_PORT = 29500  # at which rank 0 waits, as with torchrun and deepspeed
# Connections that are made at a time. A bastion drops them at random from ten that have not logged in (MaxStartups): those
# are made again, ever fewer at a time. Other hosts do not mind: at 16 at a time 1,000 hosts took 46 s.
AT_ONCE = (100, 8, 4)
_DROPPED = re.compile("kex_exchange|Connection (closed|reset)")
# Interfaces of bridges and containers, which exist on every host under the same address and lead nowhere.
VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "lxd")


@dataclass(frozen=True)
class Rendezvous:
    """address, port: where rank 0 waits; interfaces: host -> its interface that leads there, or ""."""

    address: str
    port: int
    interfaces: dict[str, str]


@dataclass
class HostsFailed(UserError):
    """Hosts that cannot be reached. problems: host -> why"""

    problems: dict[str, str] = field(default_factory=dict)


def check_code(channels: list[Channel], project: str | None) -> None:
    """Raise UserError where no host has the code of the run's first attempt any more: a `git pull`, say. A host that differs
    from others is check_alike()'s. project: its hash then; None: this is the first attempt"""
    if project is None or not channels or any(channel.hello["project"] == project for channel in channels):
        return
    place = "the clones of all hosts" if len(channels) > 1 else f"the clone on {channels[0].host}"
    problem = f"train.py or brigade/ changed while the run went on ({project}, now {channels[0].hello['project']})"
    cure = "the same command goes on from the newest checkpoint with the code that is there now; or bring the old code back first"
    raise UserError(place, problem, cure)


async def connect(channels: list[Channel]) -> None:
    """Reach every host. Raises HostsFailed that names each one that cannot be reached, with the first one's cure."""
    left, failed = channels, []
    for at_once in AT_ONCE:
        few = asyncio.Semaphore(at_once)
        results = await asyncio.gather(*(_connect(channel, few) for channel in left), return_exceptions=True)
        errors = {channel: result for channel, result in zip(left, results, strict=True) if result}
        left = [channel for channel in errors if at_once != AT_ONCE[-1] and _DROPPED.search(str(errors[channel]))]
        failed += [error for channel, error in errors.items() if channel not in left]
        if not left:
            break
        await asyncio.sleep(1)
    if failed:
        try:
            _raise_all("cannot be reached", failed)
        except UserError as error:
            problems = {fault.place: fault.problem for fault in failed if isinstance(fault, UserError)}
            raise HostsFailed(error.place, error.problem, error.cure, error.whose, error.hosts, problems) from None


async def _connect(channel: Channel, few: asyncio.Semaphore) -> None:
    async with few:
        await channel.connect()


def check_alike(channels: list[Channel], visible_devices: str | None) -> None:
    """Check that hosts are different machines with the same software, and have the devices that their slots ask for.

    visible_devices: CUDA_VISIBLE_DEVICES as it is handed on. Raises UserError.
    """
    machines: dict[str, str] = {}
    mistakes: list[UserError] = []
    for channel in channels:
        twin = machines.setdefault(channel.hello["machine"], channel.host)
        if twin != channel.host:
            cure = "keep one of the two lines, with all its slots"
            mistakes.append(UserError(channel.host, f"it is the same machine as {twin}", cure))
        differences = differences_of(channel, channels[0].hello, channels[0].host, visible_devices)
        mistakes += [UserError(channel.host, problem, cure) for problem, cure in differences]
    _raise_all("do not fit together", mistakes)


def differences_of(
    channel: Channel, theirs: Facts, first: str, visible_devices: str | None
) -> Iterator[tuple[str, str]]:
    """Yield what on a host does not fit the first one (its name and hello) or its slots, each with its cure."""
    hello = channel.hello
    for name, version in hello["versions"].items():
        other = theirs["versions"].get(name)
        if version != other:
            yield f"{name} {version}, but {other} on {first}", "install requirements.txt on both: `make setup`"
    if hello["project"] != theirs["project"]:
        problem = f"another clone than on {first} ({hello['project']}, {theirs['project']})"
        yield problem, "bring both to the same commit: train.py or brigade/ differ"
    if hello["gpus"] is None:
        yield "its nvidia-smi fails or does not answer", "fix the driver there"
        return
    gpus = usable_gpus(hello["gpus"], visible_devices)
    if bool(gpus) != bool(usable_gpus(theirs["gpus"], visible_devices)):
        yield f"{gpus} GPUs, but {theirs['gpus']} on {first}", "does `nvidia-smi` work on both?"
    elif gpus and channel.slots > gpus:
        yield f"slots={channel.slots} in the hostfile, but it has {gpus} GPUs", f"write `{channel.host} slots={gpus}`"


def usable_gpus(gpus: int | None, visible_devices: str | None) -> int:
    """GPUs that ranks will see. gpus: of the host, as in its hello; visible_devices: CUDA_VISIBLE_DEVICES as it is handed on"""
    gpus = gpus or 0
    return gpus if visible_devices is None else min(gpus, len(entries(visible_devices)))


async def check_files(channels: list[Channel], paths: list[str]) -> None:
    """Check that every host has these files and programs. Raises UserError."""
    answers = await asyncio.gather(*(channel.ask("files", paths=paths) for channel in channels))
    cure = "give every host the same files at the same paths: one file system, or copies"
    missing = [(channel.host, answer["missing"]) for channel, answer in zip(channels, answers, strict=True)]
    lack = [(host, paths[0]) for host, paths in missing if paths]
    whose: Whose = "host" if len(lack) < len(channels) else "user"
    _raise_all(
        "lack files", [UserError(host, f"there is no {path} on it", cure, whose, (host,)) for host, path in lack]
    )


async def find(channels: list[Channel], address: str | None, port: int | None, usual: int = DEFAULT_PORT) -> Rendezvous:
    """The address and port of the first host that all others reach, tried by connecting to it.

    address, port: the user's own wish; usual: the port to try first without one
    Raises UserError: port in use, with its holder; hosts that cannot reach it.
    """
    first, *others = channels
    nonce = secrets.token_hex(8)
    listening = await first.ask("listen", port=port or usual, nonce=nonce)
    if port and "taken" in listening:
        problem = f"in use by {listening['taken']}"
        raise UserError(f"port {port} on {first.host}", problem, "end it, or give another --master_port", "passing")
    if "taken" in listening:
        listening = await first.ask("listen", port=0, nonce=nonce)
    port = listening["port"]
    if not others:
        return Rendezvous(address or "127.0.0.1", port, {first.host: "lo"})
    own: dict[str, str] = first.hello["addresses"]
    tries = [address] if address else candidates(first.host, own)
    asked = (other.ask("reach", addresses=tries, port=port, nonce=nonce) for other in others)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    _raise_all("do not answer", answers)
    reached = {
        other.host: answer["reached"]
        for other, answer in zip(others, answers, strict=True)
        if not isinstance(answer, BaseException)
    }
    for candidate in tries:
        peers = {tried.get(candidate, {}).get("peer") for tried in reached.values()}
        if len(peers) == 1 and None not in peers:
            found = peers.pop()
            seen = {host: tried[candidate].get("interface", "") for host, tried in reached.items()}
            return Rendezvous(found, port, {first.host: own.get(found, ""), **seen})
    raise _unreachable(first.host, port, reached)


def candidates(host: str, own: Mapping[str, str]) -> list[str]:
    """The names by which others may reach a host: its name, then its addresses, those of bridges last. own: address ->
    interface"""
    plain = host.rpartition("@")[2]  # of user@host, which only ssh understands
    names = [] if plain in ("localhost", "127.0.0.1", "::1") else [plain]
    return [*names, *sorted(own, key=lambda address: own[address].startswith((*VIRTUAL, "lo")))]


def _unreachable(first: str, port: int, reached: dict[str, Facts]) -> UserError:
    """The error that names the hosts that do not reach the first one, and what each of its addresses answered."""
    cut_off = [host for host, tried in reached.items() if all("error" in attempt for attempt in tried.values())]
    if not cut_off:
        problem = "each of its addresses is reached by some hosts only"
        return UserError(first, problem, "give the one that is meant with --master_addr")
    tried = ", ".join(f"{address}: {attempt['error']}" for address, attempt in reached[cut_off[0]].items())
    more = f" (and {counted(len(cut_off) - 1, 'more host')})" if len(cut_off) > 1 else ""
    at_fault = [first] if len(cut_off) == len(reached) > 1 else cut_off
    return UserError(
        f"{cut_off[0]}{more}",
        f"it cannot reach {first} on port {port} ({tried})",
        "open all ports between the hosts (ranks use several), or give the right --master_addr",
        "host",
        tuple(at_fault),
    )


def _raise_all(fault: str, results: Iterable[object]) -> None:
    """Raise the UserErrors among `results` as one; anything else that was raised goes first."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, UserError):
            raise error
    together = as_one(fault, [error for error in errors if isinstance(error, UserError)])
    if together:
        raise together


def as_one(fault: str, mistakes: list[UserError]) -> UserError | None:
    """One error that says what several say of hosts, with the first one's cure; None without any. fault: what the hosts do"""
    if len(mistakes) < 2:
        return next(iter(mistakes), None)
    lines = "; ".join(f"{error.place}: {error.problem}" for error in mistakes[:8])
    more = f"; and {len(mistakes) - 8} more" if len(mistakes) > 8 else ""
    places = {error.place for error in mistakes}
    place = mistakes[0].place if len(places) == 1 else f"{len(places)} hosts {fault}"
    whose: Whose = "host" if all(error.whose == "host" for error in mistakes) else "user"
    hosts = tuple(host for error in mistakes for host in error.hosts)
    return UserError(place, lines + more, f"for {mistakes[0].place}: {mistakes[0].cure}", whose, hosts)
