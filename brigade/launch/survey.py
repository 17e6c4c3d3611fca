"""Between two attempts of a run: which hosts can carry the next one."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from ..hosts import rendezvous
from ..hosts.connection import Channel, transport
from .supervisor import Options


@dataclass
class Survey:
    """unsound: host -> why it cannot take part; sound: host -> its hello"""

    unsound: dict[str, str] = field(default_factory=dict)
    sound: dict[str, dict[str, Any]] = field(default_factory=dict)


async def survey(
    hosts: dict[str, int], how: Options, runs: list[str], reference: tuple[str, dict[str, Any]] | None
) -> Survey:
    """Ask every host: does it answer, is nothing of the earlier `runs` left on it, do its devices work?

    reference: a host and its hello, which the others must be like; None: they are compared with each other, and a difference
    raises UserError, as does one that nobody can reach when nobody else can be. Raises UserError where all have other code now.
    """
    found = Survey()
    lines = (transport(host, how.launcher) for host in hosts)
    channels = [
        Channel(host, range(slots), line, asyncio.Queue(), how.silence)
        for (host, slots), line in zip(hosts.items(), lines, strict=True)
    ]
    visible = how.environment.get("CUDA_VISIBLE_DEVICES")
    try:
        try:
            await rendezvous.connect(channels)
        except rendezvous.HostsFailed as error:
            found.unsound = dict(error.problems)
            if len(found.unsound) == len(hosts) and reference is None:
                raise
        channels = [channel for channel in channels if channel.open]
        rendezvous.check_code(channels, how.project)
        if reference is None:
            rendezvous.check_alike(channels, visible)
        await asyncio.gather(*(_examine(channel, runs, found) for channel in channels))
        for channel in channels:
            if reference and (differences := list(rendezvous.differences_of(channel, *reference[::-1], visible))):
                found.unsound.setdefault(channel.host, differences[0][0])
            if channel.host not in found.unsound:
                found.sound[channel.host] = channel.hello
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    return found


async def _examine(channel: Channel, runs: list[str], found: Survey) -> None:
    """Clear a host of earlier runs, and try its devices if there were any: something has failed then."""
    try:
        await channel.ask("clean", runs=runs)
        if runs and channel.hello["gpus"] and (problem := (await channel.ask("check", timeout=150)).get("problem")):
            found.unsound[channel.host] = problem
    except UserError as error:
        found.unsound[channel.host] = error.problem
