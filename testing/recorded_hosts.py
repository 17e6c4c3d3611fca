"""Hosts that answer a check what was recorded, and what the check says of them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from brigade.check.checks import Function, Result, Wanted, checks
from brigade.check.run import judge
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


def results_of(check: str | Function, hosts: Recorded) -> list[Result]:
    """What a check says: one of the list by its name, or a function by itself."""
    if isinstance(check, str):
        return asyncio.run(judge(next(one for one in checks() if one.name == check), hosts))

    async def run() -> list[Result]:
        return [result async for result in check(hosts)]

    return asyncio.run(run())


def by_host(check: str | Function, hosts: Recorded) -> dict[str, Result]:
    """host -> its only result"""
    return {result.host: result for result in results_of(check, hosts)}


def grouped(results: list[Result]) -> dict[str, list[Result]]:
    """host -> its results"""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.host, []).append(result)
    return found
