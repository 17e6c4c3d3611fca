"""One run of `check`: reach the hosts, over the lines that `launch` uses too, run all checks, collect what they say."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import UserError, first_line
from ..hosts import rendezvous
from ..hosts.connection import Channel, cure_of, lines_to
from .checks import (
    NO_ANSWER,
    STOP,
    CannotKnow,
    Check,
    Facts,
    Hosts,
    NotHere,
    Result,
    Size,
    Wanted,
    checks,
    sound,
    unknown,
)
from .findings import fault

SPARE = 10.0  # seconds more for an answer than for what is asked, on a busy line
UNREACHED = "the host cannot be reached"
LOGIN = "login"  # the row of whether a host can be reached at all
Told = Callable[[str], None]  # of a check's name, when it begins


class Session:
    """Lines to all hosts. unreached: host -> why; hello: of the others; run: the name of every process that this starts there."""

    def __init__(self, wanted: Wanted, run: str, channels: Iterable[Channel] | None = None) -> None:
        self.wanted, self.run = wanted, run
        given = lines_to(wanted.slots, wanted.launcher) if channels is None else channels
        self.channels = {channel.host: channel for channel in given}
        self.unreached: dict[str, str] = {}
        self._asked: dict[str, asyncio.Task[Facts]] = {}
        self._holds = 0

    async def open(self) -> None:
        """Reach every host that can be reached."""
        try:
            await rendezvous.connect(list(self.channels.values()))
        except rendezvous.HostsFailed as error:
            self.unreached = error.problems

    async def close(self) -> None:
        """Hang up. Each agent ends what it has started on its host."""
        for asked in self._asked.values():
            asked.cancel()
        await asyncio.gather(*(channel.close() for channel in self.channels.values()))

    @property
    def hello(self) -> dict[str, Facts]:
        return {host: channel.hello for host, channel in self.channels.items() if channel.open}

    def question(self, host: str, probe: str, arguments: Facts, seconds: float) -> "asyncio.Task[Facts]":
        """The one answer to a question, however many checks ask it."""
        key = json.dumps([host, probe, arguments], sort_keys=True)
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self.order(host, probe, arguments, seconds))
        return self._asked[key]

    async def order(self, host: str, probe: str, arguments: Facts, seconds: float, hold: str = "") -> Facts:
        words = {"run": self.run, "environment": dict(self.wanted.environment), "seconds": seconds, "hold": hold}
        try:
            return await self.channels[host].ask(
                "probe", timeout=seconds + SPARE, probe=f"check.probes.{probe}", arguments=arguments, **words
            )
        except UserError as error:
            return {"problem": error.problem}

    async def release(self, host: str, hold: str) -> None:
        with suppress(UserError):
            await self.channels[host].ask("release", hold=hold)

    def name_of_hold(self) -> str:
        self._holds += 1
        return str(self._holds)


class View:
    """The hosts as one check sees them: its own record of who did not answer. See hosts.Hosts."""

    def __init__(self, session: Session) -> None:
        self._session, self.wanted, self.hello = session, session.wanted, session.hello
        self.failed: dict[str, str] = {}

    async def ask(
        self, probe: str, seconds: float = 30, per_host: Mapping[str, Facts] | None = None, **arguments: object
    ) -> dict[str, Facts]:
        questions = self._questions(per_host, arguments)
        asked = [self._session.question(host, probe, words, seconds) for host, words in questions.items()]
        return self._facts(questions, await asyncio.gather(*map(asyncio.shield, asked)))

    @asynccontextmanager
    async def hold(
        self, probe: str, seconds: float = 30, per_host: Mapping[str, Facts] | None = None, **arguments: object
    ) -> AsyncIterator[dict[str, Facts]]:
        questions, name = self._questions(per_host, arguments), self._session.name_of_hold()
        order, release = self._session.order, self._session.release
        try:
            asked = (order(host, probe, words, seconds, name) for host, words in questions.items())
            yield self._facts(questions, await asyncio.gather(*asked))
        finally:  # what a probe left for a moment has to be gone before anything else begins
            await asyncio.gather(*(release(host, name) for host in questions))

    def _questions(self, per_host: Mapping[str, Facts] | None, arguments: Facts) -> dict[str, Facts]:
        """host that is asked -> the arguments of its question"""
        hosts = [host for host in self.hello if per_host is None or host in per_host]
        return {host: arguments | (per_host or {}).get(host, {}) for host in hosts}

    def _facts(self, hosts: Iterable[str], answers: list[Facts]) -> dict[str, Facts]:
        by_host = dict(zip(hosts, answers, strict=True))
        self.failed |= {host: answer["problem"] for host, answer in by_host.items() if "facts" not in answer}
        return {host: answer["facts"] for host, answer in by_host.items() if "facts" in answer}


@dataclass
class Row:
    """One check and what it said of each host, in the hostfile's order. seconds: what it took."""

    name: str
    group: str
    results: list[Result]
    seconds: float

    @cached_property
    def by_host(self) -> dict[str, list[Result]]:
        """host -> its results, so that nobody searches those of 1,000 hosts for each"""
        results: dict[str, list[Result]] = {}
        for result in self.results:
            results.setdefault(result.host, []).append(result)
        return results


@dataclass
class Outcome:
    """rows: in the table's order; hosts: host -> slots; seconds: of all checks together

    left_out: names of checks that have nothing to look at on these hosts
    """

    hosts: dict[str, int]
    size: Size
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    left_out: list[str] = field(default_factory=list)

    @property
    def stopping(self) -> list[Result]:
        """The results of the checks whose faults stop a launch."""
        return [result for row in self.rows if row.name in STOP for result in row.results]

    @property
    def results(self) -> list[Result]:
        return [result for row in self.rows for result in row.results]


async def run(
    wanted: Wanted,
    size: Size,
    channels: Iterable[Channel] | None = None,
    name: str = "",
    told: Told = lambda _: None,
    skip: Iterable[str] = (),
) -> Outcome:
    """Check these hosts.

    channels: lines that are open already, and stay open; without them new ones are opened, and closed at the end
    name: of the run to which these lines belong; skip: names of checks that are left out
    """
    began = time.monotonic()
    session = Session(wanted, name or secrets.token_hex(8), channels)
    outcome = Outcome(dict(wanted.slots), size)
    try:
        if channels is None:
            told(LOGIN)
            await session.open()
        outcome.rows.append(Row(LOGIN, "reach", [_login(session, host) for host in wanted.slots], _since(began)))
        wanted_checks = [check for check in checks(size) if check.name not in set(skip)]
        together = [check for check in wanted_checks if not check.alone]
        row_of = dict(zip(together, await asyncio.gather(*(_one(c, session, told) for c in together)), strict=True))
        for check in wanted_checks:
            row = row_of[check] if check in row_of else await _one(check, session, told)
            if row is None:
                outcome.left_out.append(check.name)
            else:
                outcome.rows.append(row)
    finally:
        if channels is None:
            await session.close()
    outcome.seconds = _since(began)
    return outcome


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def _login(session: Session, host: str) -> Result:
    """ssh's own words where it does not let us in, and what helps."""
    problem, forged = session.unreached.get(host), session.channels[host].forged
    if problem is not None:
        return fault("not-reached", host, said=problem, cure=cure_of(problem, host))
    if forged:
        return fault("prints-our-lines", host, line=forged, cure=cure_of(forged, host))
    return sound(host, "answers")


async def _one(check: Check, session: Session, told: Told) -> Row | None:
    began = time.monotonic()
    told(check.name)
    try:
        results = await judge(check, View(session))
    except NotHere:
        return None
    order = {host: number for number, host in enumerate(session.wanted.slots)}
    missing = [unknown(host, UNREACHED) for host in order if host in session.unreached]
    results = sorted([*results, *missing], key=lambda result: order.get(result.host, -1))
    return Row(check.name, check.group, results, _since(began))


async def judge(check: Check, hosts: Hosts) -> list[Result]:
    """Run a check. A host that did not answer is not sound; a check that fails itself is grey for all.

    Raises NotHere."""
    results: list[Result] = []
    try:
        async with asyncio.timeout(check.seconds):
            async for result in check.function(hosts):
                results.append(result)
        why_not = "it says nothing of this host"
    except TimeoutError:
        why_not = f"the check had not ended after {check.seconds:g} s"
    except NotHere:
        raise
    except CannotKnow as reason:
        why_not = str(reason)
    except Exception as error:  # a fault of ours must not hide what the other checks found
        why_not = f"the check failed itself: {type(error).__name__}: {first_line(error)}"
    seen = {result.host for result in results}
    for host in hosts.hello:
        if host in hosts.failed and host not in seen:
            results.append(_unanswered(check, host, hosts.failed[host]))
        elif host not in seen:
            results.append(unknown(host, why_not))
    return results


def _unanswered(check: Check, host: str, problem: str) -> Result:
    why = "a question that hangs or fails here will hang or fail in the run too"
    cure = f"try it there: ssh {host}, then look at what the words name"
    return Result(host, "red", NO_ANSWER, None, f"{check.name}: {problem}", why, cure)
