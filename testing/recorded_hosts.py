"""Hosts that answer a check what was recorded."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from brigade.check.checks import Wanted
from brigade.hosts import Facts


@dataclass
class Recorded:
    """See brigade/check/checks.py: Hosts. answers: probe -> host -> facts"""

    wanted: Wanted
    answers: Mapping[str, Mapping[str, Facts]]
    hello: dict[str, Facts] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hello = self.hello or {host: {} for host in self.wanted.slots}

    async def ask(
        self, probe: str, seconds: float = 30, per_host: Mapping[str, Facts] | None = None, **arguments: Any
    ) -> dict[str, Facts]:
        hosts = self.hello if per_host is None else per_host
        answers = self.answers.get(probe, {})
        self.failed |= {host: f"no answer within {seconds:g} s" for host in hosts if host not in answers}
        return {host: dict(answers[host]) for host in hosts if host in answers}

    @asynccontextmanager
    async def hold(
        self, probe: str, seconds: float = 30, per_host: Mapping[str, Facts] | None = None, **arguments: Any
    ) -> AsyncIterator[dict[str, Facts]]:
        yield await self.ask(probe, seconds, per_host, **arguments)
