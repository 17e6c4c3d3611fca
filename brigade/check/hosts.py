"""The hosts as a check sees them: whom to ask, and what is asked for."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..hosts.job import Job

Facts = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What the hosts are checked for.

    slots: host -> ranks, in the hostfile's order; job: of a recipe, None without one
    environment: variables that the ranks will get; launcher: how hosts are reached, "slurm" or by ssh
    measured: filled by checks: name -> what they measured, for who comes after them
    """

    slots: dict[str, int]
    job: Job | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


class Hosts(Protocol):
    """wanted: see there; hello: host that answers -> what it said of itself (hosts/host_facts.py: look_around)

    failed: host -> why it did not answer a question of this check
    """

    wanted: Wanted
    hello: dict[str, Facts]
    failed: dict[str, str]

    async def ask(
        self, probe: str, seconds: float = 30, each: Mapping[str, Facts] | None = None, **arguments: Any
    ) -> dict[str, Facts]:
        """Run a function of probes/ on hosts at the same time, each with a limit of `seconds`.

        probe: "MODULE.FUNCTION"; each: host -> further arguments, and only these hosts are asked; default: all that answer
        Returns host -> facts of those that answered; of the others `failed` says why. A question that was asked before with the
        same words is not asked again.
        """

    def hold(
        self, probe: str, seconds: float = 30, each: Mapping[str, Facts] | None = None, **arguments: Any
    ) -> AbstractAsyncContextManager[dict[str, Facts]]:
        """As ask(), for a probe that yields its facts and goes on, a listening port for instance, until the block ends."""


@dataclass
class Recorded:
    """Hosts that answer what was recorded: probe -> host -> facts. For tests, and for what somebody else has sent."""

    wanted: Wanted
    answers: Mapping[str, Mapping[str, Facts]]
    hello: dict[str, Facts] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hello = self.hello or {host: {} for host in self.wanted.slots}

    async def ask(
        self, probe: str, seconds: float = 30, each: Mapping[str, Facts] | None = None, **arguments: Any
    ) -> dict[str, Facts]:
        hosts = self.hello if each is None else each
        answers = self.answers.get(probe, {})
        self.failed |= {host: f"no answer within {seconds:g} s" for host in hosts if host not in answers}
        return {host: dict(answers[host]) for host in hosts if host in answers}

    @asynccontextmanager
    async def hold(
        self, probe: str, seconds: float = 30, each: Mapping[str, Facts] | None = None, **arguments: Any
    ) -> AsyncIterator[dict[str, Facts]]:
        yield await self.ask(probe, seconds, each, **arguments)
