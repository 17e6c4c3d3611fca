"""Before anything starts: reach every host, hold them against each other, and find the way to the first one."""

import asyncio
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..errors.console import counted
from .connection import Channel, is_here
from .launchers import DEFAULT_PORT

# Connections that are made at a time. A bastion drops them at random from ten that have not logged in (MaxStartups): those
# are made again, ever fewer at a time. Other hosts do not mind: at 16 at a time 1,000 hosts took 46 s.
AT_ONCE = (100, 8, 4)
_DROPPED = re.compile("kex_exchange|Connection (closed|reset)")
# Interfaces that exist on every host under the same address and lead nowhere.
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "lo")


@dataclass(frozen=True)
class Way:
    """How the hosts meet. address, port: where rank 0 waits; interfaces: host -> its interface that leads there, or ""."""

    address: str
    port: int
    interfaces: dict[str, str]


async def connect(channels: list[Channel]) -> None:
    """Reach every host. Raises UserError that names each one that cannot be reached, with the first one's cure."""
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
    _raise_all("cannot be reached", failed)


async def _connect(channel: Channel, few: asyncio.Semaphore) -> None:
    async with few:
        await channel.connect()


def check_alike(channels: list[Channel], visible_devices: str | None) -> None:
    """Hosts must be different machines with the same software, and have the devices that their slots ask for.

    visible_devices: CUDA_VISIBLE_DEVICES as it is handed on. Raises UserError.
    """
    first = channels[0]
    found: list[UserError] = []
    machines: dict[str, str] = {}
    for channel in channels:
        hello, host = channel.hello, channel.host
        twin = machines.setdefault(hello["machine"], host)
        if twin != host:
            found.append(
                UserError(host, f"it is the same machine as {twin}", "keep one of the two lines, with all its slots")
            )
        for name, version in hello["versions"].items():
            theirs = first.hello["versions"].get(name)
            if version != theirs:
                found.append(
                    UserError(
                        host,
                        f"{name} {version}, but {theirs} on {first.host}",
                        "install requirements.txt on both: `make setup`",
                    )
                )
        if hello["project"] != first.hello["project"]:
            found.append(
                UserError(
                    host,
                    f"another clone than on {first.host} ({hello['project']}, {first.hello['project']})",
                    "bring both to the same commit: train.py or brigade/ differ",
                )
            )
        if hello["gpus"] is None:
            found.append(UserError(host, "its nvidia-smi fails or does not answer", "mend the driver there"))
            continue
        gpus = _usable(hello["gpus"], visible_devices)
        if bool(gpus) != bool(_usable(first.hello["gpus"], visible_devices)):
            found.append(
                UserError(
                    host, f"{gpus} GPUs, but {first.hello['gpus']} on {first.host}", "does `nvidia-smi` work on both?"
                )
            )
        elif gpus and channel.slots > gpus:
            found.append(
                UserError(
                    host,
                    f"slots={channel.slots} in the hostfile, but it has {gpus} GPUs",
                    f"write `{host} slots={gpus}`",
                )
            )
    _raise_all("do not fit together", found)


def _usable(gpus: int | None, visible_devices: str | None) -> int:
    gpus = gpus or 0
    if visible_devices is None:
        return gpus
    return min(gpus, len([device for device in visible_devices.split(",") if device.strip()]))


async def check_files(channels: list[Channel], paths: list[str]) -> None:
    """Every host must have these files and programs. Raises UserError."""
    answers = await asyncio.gather(*(channel.ask("files", paths=paths) for channel in channels))
    found = [
        UserError(
            channel.host,
            f"there is no {answer['missing'][0]} on it",
            "give every host the same files at the same paths: one file system, or copies",
        )
        for channel, answer in zip(channels, answers, strict=True)
        if answer["missing"]
    ]
    _raise_all("lack files", found)


async def find_way(channels: list[Channel], address: str | None, port: int | None) -> Way:
    """The address and port of the first host that all others reach, tried by connecting to it.

    address, port: the user's own wish. Raises UserError: port in use, with its holder; hosts that cannot reach it.
    """
    first, *others = channels
    wanted = port or DEFAULT_PORT
    taken = (await first.ask("port", port=wanted)).get("taken")
    if taken and port:
        raise UserError(f"port {port} on {first.host}", f"in use by {taken}", "end it, or give another --master_port")
    if not others:
        wanted = 0 if taken else wanted
        listening = await first.ask("listen", port=wanted, nonce="")
        return Way(address or "127.0.0.1", listening["port"], {first.host: "lo"})
    nonce = secrets.token_hex(8)
    listening = await first.ask("listen", port=0 if taken else wanted, nonce=nonce)
    own: dict[str, str] = first.hello["addresses"]
    real = sorted(own, key=lambda candidate: own[candidate].startswith(_VIRTUAL))
    names = [] if is_here(first.host) and first.host in ("localhost", "127.0.0.1", "::1") else [first.host]
    candidates = [address] if address else [*names, *real]
    asked = (other.ask("reach", addresses=candidates, port=listening["port"], nonce=nonce) for other in others)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    _raise_all("do not answer", answers)
    ways = [answer["ways"] for answer in answers if isinstance(answer, dict)]
    for candidate in candidates:
        peers = {way.get(candidate, {}).get("peer") for way in ways}
        if len(peers) == 1 and None not in peers:
            found = peers.pop()
            seen = {other.host: way[candidate].get("interface", "") for other, way in zip(others, ways, strict=True)}
            return Way(found, listening["port"], {first.host: own.get(found, ""), **seen})
    raise _no_way(first, others, ways, listening["port"])


def _no_way(first: Channel, others: list[Channel], ways: list[dict[str, Any]], port: int) -> UserError:
    """Which hosts do not reach the first one, and what each of its addresses answered."""
    cut_off = [
        (other.host, way)
        for other, way in zip(others, ways, strict=True)
        if all("error" in attempt for attempt in way.values())
    ]
    if not cut_off:
        return UserError(
            first.host,
            "each of its addresses is reached by some hosts only",
            "give the one that is meant with --master_addr",
        )
    host, way = cut_off[0]
    tried = ", ".join(f"{address}: {attempt['error']}" for address, attempt in way.items())
    more = f" (and {counted(len(cut_off) - 1, 'more host')})" if len(cut_off) > 1 else ""
    return UserError(
        f"{host}{more}",
        f"it cannot reach {first.host} on port {port} ({tried})",
        "open all ports between the hosts (ranks use several), or give the right --master_addr",
    )


def _raise_all(what: str, results: Iterable[Any]) -> None:
    """Raise the UserErrors among `results` as one; anything else that was raised goes first."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, UserError):
            raise error
    if not errors:
        return
    told = [error for error in errors if isinstance(error, UserError)]
    if len(told) == 1:
        raise told[0]
    lines = "; ".join(f"{error.place}: {error.problem}" for error in told[:8])
    more = f"; and {len(told) - 8} more" if len(told) > 8 else ""
    places = {error.place for error in told}
    place = told[0].place if len(places) == 1 else f"{len(places)} hosts {what}"
    raise UserError(place, lines + more, f"for {told[0].place}: {told[0].cure}")
