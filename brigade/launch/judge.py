"""The judge of a launch: takes in what the hosts tell of their ranks, and keeps what went wrong."""

from dataclasses import dataclass
from typing import Any

from ..errors.console import counted
from ..errors.tables import Fields
from ..hosts.connection import Channel
from ..hosts.hearing import Clock
from ..train.distributed import hang_verdict, stop
from .first_failure import RACE, Failure, signal_name
from .status_and_logs import Output

READY = 300.0  # seconds within which one rank has imported its packages, from the slowest file system
HEARD = 5.0  # seconds to wait after the last rank fell silent: each says then which collective it waits in
SETTLE = 1.0  # seconds to listen on after a failure: its cause may come in after its effect
# Seconds after a run's success within which its ranks and launchers end; rank 0 may write the page for 60.
LEAVE = 120.0
UPLOAD = 600.0  # likewise, where a tracker may still send what it has


@dataclass
class Rank:
    """What is known of one rank. stage: "", "started", "waiting" (at the rendezvous), "joined".

    within: the step in which it ended, 0 where it has begun none or has not said
    asked: by which signals it was asked to stop, in words
    silent: heartbeat.Observer.seen() of a rank that is silent for longer than its steps explain, else None
    waits: the collective that it then waits in (upstream/flight_records.py); None where it has not said
    """

    host: str
    stage: str = ""
    exit: int | None = None
    within: int = 0
    follows: bool = False
    reported: bool = False
    asked: str = ""
    silent: Fields | None = None
    waits: Fields | None = None


def _left(seen: Fields) -> str:
    """Say how a rank left with exit code 0 before train.py was done. seen: heartbeat.Observer.seen()"""
    where = (
        f"at step {seen['step']}, in {hang_verdict.PLACES[seen['phase']]}" if seen["step"] else "before its first step"
    )
    return f"{where}, where train.py had not reached its end: something called sys.exit(0) or os._exit(0)"


class Judge:
    """The judge of one launch.

    ended: hosts whose launcher has ended; reached_end: rank 0 says that train.py did
    stopped: how a rank or all of them were stopped from outside, in words; grace: seconds that saving and ending may take
    stopping: set when the ranks are told to stop, by a failure or the user; what ends from then on is no failure
    clock: of this process, which stands still while it does
    leave_within: seconds after the last word of a run that has ended; late: who has not ended by then, in words
    """

    def __init__(self, channels: list[Channel], program: str, start_timeout: float, output: Output) -> None:
        self.channels, self.program, self.start_timeout, self.output = channels, program, start_timeout, output
        self.ranks = {rank: Rank(channel.host) for channel in channels for rank in channel.ranks}
        self.failures: list[Failure] = []
        self.ended: set[str] = set()
        self.reached_end = self.stopping = False
        self.stopped, self.grace, self._gone = "", stop.SAVES, False
        self.leave_within, self.late, self._spoke = LEAVE, "", 0.0
        self.clock = Clock()
        self.since = self.clock.now()  # of the start; then of the first rank's readiness
        self._one_waits, self._all_wait_since = False, 0.0
        self._silent_since: float | None = None
        self._records = ""  # where ranks keep their stacks and collectives once they are silent

    def log(self, rank: int) -> str:
        """The name of a rank's log."""
        return f"rank-{rank:0{len(str(len(self.ranks) - 1))}d}-{self.ranks[rank].host}"

    def hear(self, channel: Channel, kind: str, fields: Fields) -> None:
        """Take in one message of a host. kind: of hosts/messages.py, or "lost" where the line to it is gone"""
        getattr(self, f"on_{kind}")(channel, **fields)

    def on_rank(self, channel: Channel, rank: int, **news: Any) -> None:
        """Take in something of one rank: pid, out, stage, told (its error), follows, marker, silent, waits or exit."""
        state, self._spoke = self.ranks[rank], self.clock.now()
        if "out" in news:
            self.output.keep(self.log(rank), news["out"])
            if rank == 0:
                self.output.say(news["out"])
        if "pid" in news or "stage" in news:
            state.stage = news.get("stage", "started")
            if state.stage == "waiting" and not self._one_waits:
                self._one_waits, self.since = True, self.clock.now()
        self.reached_end |= rank == 0 and news.get("marker") is True
        self.grace = max(self.grace, news.get("grace", 0.0))
        if "step" in news:  # all ranks agreed, and saved a checkpoint
            self.stopped = f"at step {news['step']}"
            if not self.stopping:  # else it is launch that stopped them, for what had failed before
                # A host that was lost stays the cause: its agent stopped its ranks, and with them all others.
                self.stopping = True
                self.failures = [failure for failure in self.failures if failure.kind == "lost"]
        elif "ended" in news and not (self.stopping or self.failures):
            self.stopped, self.stopping = f"when rank {rank} on {channel.host} was ended by {news['ended']}", True
            self._gone = True
        if not (self.stopping or any(failure.kind != "follows" for failure in self.failures)):
            # Later it is launchers and agents that end what is left.
            state.asked = news.get("asked", state.asked)
        state.follows |= "follows" in news
        state.waits, self._records = news.get("waits", state.waits), news.get("records", self._records)
        if "silent" in news:
            state.silent = news["silent"]
            state.waits = state.waits if state.silent else None
        if "told" in news and not state.follows:
            state.reported = True
            hosts = tuple(map(self._as_launched, news.get("hosts", ())))
            self._fail("reported", channel, news["told"], rank, news.get("code"), said=news.get("whose"), hosts=hosts)
        if "exit" in news:
            code, state.within = news["exit"], news.get("within", 0)
            state.exit = code
            if "left" in news and not state.reported:
                self._fail("exit", channel, _left(news["left"]), rank, 0)
            if code and not state.reported:
                kind = "follows" if state.follows else "signal" if code < 0 else "exit"
                self._fail(kind, channel, "its watching process was killed" if "unwatched" in news else "", rank, code)
        if news.keys() & {"pid", "stage", "exit"}:
            self.output.set(channel.host, self._status(channel))

    def on_launcher(self, channel: Channel, out: str) -> None:
        """Keep output of a host's launcher."""
        self.output.keep(f"launcher-{channel.host}", out)

    def on_ended(self, channel: Channel, code: int) -> None:
        """Note that a host's launcher ended. That is no news after its ranks did; before, it is a failure of its own."""
        self.ended.add(channel.host)
        ranks = {rank: self.ranks[rank] for rank in channel.ranks}
        left = [rank for rank, state in ranks.items() if state.exit is None]
        if any(ranks[rank].stage for rank in left):
            how = f" while rank {', '.join(map(str, left))} went on: it was killed"
        elif left:
            how = " and started no rank"
        elif code and not any(state.exit for state in ranks.values()):
            how = " after its ranks had ended well"
        elif code < 0 and all(failure.kind == "follows" for failure in self.failures):
            how = ", and its ranks with it"
        else:
            return
        ended = f"was ended by {signal_name(code)}" if code < 0 else f"ended with exit code {code}"
        self._fail("launcher", channel, f"{self.program} {ended}{how}", code=code)

    def on_leaving(self, channel: Channel, why: str) -> None:
        """Note that an agent stops its ranks without having been told to."""
        if not self.stopping and channel.host not in self.ended:
            self._lose(channel, why)

    def on_stopped(self, channel: Channel) -> None:
        """Note that no process of the run is left on a host."""
        well = all(self.ranks[rank].exit == 0 for rank in channel.ranks)
        self.output.set(channel.host, "done" if well else "stopped")

    def on_lost(self, channel: Channel, why: str) -> None:
        """Note that the line to a host is gone: expected once it has stopped, else a failure, also while others stop."""
        if not channel.stopped and channel.host not in self.ended:
            self.output.set(channel.host, f"lost: {why}")
            self._lose(channel, why)

    def _lose(self, channel: Channel, why: str) -> None:
        """Keep that a host was lost. Where launch itself stood still for long before, its own silence is the cause: the agents
        gave it up, or a line that nobody served has ended."""
        still = self.clock.stood_still(within=2 * channel.patience)
        if still > channel.patience / 2:
            text = f"launch itself stood still for {still:.0f} s (suspended, or its host slept); {channel.host}: {why}"
            self._fail("lost", channel, text, said="passing")
        else:
            self._fail("lost", channel, f"the host was lost: {why}")

    def check_silence(self) -> None:
        """Give up each host of which nothing is heard any more."""
        self.clock.now()
        for channel in self.channels:
            if channel.open and channel.hearing.seconds() > channel.patience:
                channel.abandon()
                self.on_lost(channel, f"nothing heard of it for {channel.patience:.0f} s (link cut, or switched off)")

    def check_start(self) -> None:
        """Find ranks that hang on their way to the rendezvous, or at it: they would keep all others waiting for ten minutes.

        Late is who is later than the first by start_timeout. Until one is ready, all may be slow, and nobody is to blame.
        """
        self._check_rendezvous()
        limit = self.start_timeout if self._one_waits else max(READY, self.start_timeout)
        late = [rank for rank, state in self.ranks.items() if state.stage in ("", "started") and state.exit is None]
        if self.failures or not late or self.clock.now() - self.since < limit:
            return
        for channel in self.channels:
            channel.tell("stacks", ranks=[rank for rank in late if rank in channel.ranks])
        names, host = f"rank {', '.join(map(str, late[:8]))}", self.ranks[late[0]].host
        text = f"{names} did not get to the rendezvous within {limit:.0f} s (--start_timeout)"
        self._fail("hang", self._channel(late[0]), f"{host}, rank {late[0]} failed first: {text}", late[0])

    def _check_rendezvous(self) -> None:
        """Find ranks that are at the rendezvous, as all are, and do not get through it: they reach the master port, and not each
        other (a firewall)."""
        waiting = [rank for rank, state in self.ranks.items() if state.stage == "waiting" and state.exit is None]
        if not waiting or self.failures or any(state.stage in ("", "started") for state in self.ranks.values()):
            self._all_wait_since = 0.0
            return
        self._all_wait_since = self._all_wait_since or self.clock.now()
        if self.clock.now() - self._all_wait_since < self.start_timeout:
            return
        hosts = list(dict.fromkeys(self.ranks[rank].host for rank in waiting))
        text = f"{counted(len(waiting), 'rank')} on {', '.join(hosts[:4])}{', ...' * (len(hosts) > 4)} met at the rendezvous, "
        text += f"and did not reach each other within {self.start_timeout:.0f} s (--start_timeout)"
        self._fail("rendezvous", self._channel(waiting[0]), text, waiting[0])

    def check_hang(self) -> None:
        """Find out whether the run hangs: when each rank is silent for longer than its own steps explain, or one that is
        stopped is.

        Silence is counted on the ranks' hosts. So a launch that was suspended itself judges by what it reads then, in order.
        """
        alive = {rank: state for rank, state in self.ranks.items() if state.exit is None}
        silent = {rank: state for rank, state in alive.items() if state.silent}
        stopped = {rank for rank, state in silent.items() if state.silent and state.silent["stopped"]}
        if self.failures or self.stopping or not silent or (len(silent) < len(alive) and not stopped):
            self._silent_since = None
            return
        self._silent_since = self._silent_since or self.clock.now()
        told = all(state.silent and (state.waits is not None or rank in stopped) for rank, state in alive.items())
        if not told and self.clock.now() - self._silent_since < HEARD:
            return
        seen = [
            hang_verdict.Silent(
                rank, state.host, answers=state.waits is not None, **(state.silent or {}), **(state.waits or {})
            )
            for rank, state in silent.items()
        ]
        late = hang_verdict.culprits(seen)
        first = min(late or seen, key=lambda state: (state.step, state.rank)).rank
        for channel in self.channels:
            asked = [state.rank for state in late[:8] if state.rank in channel.ranks and not state.stopped]
            channel.tell("stacks", ranks=asked)
        kept = f"stacks and collectives of all ranks: {self._records}" if self._records else ""
        said = None if late else "passing"  # the network's, say: nobody knows which host's
        self._fail("hang", self._channel(first), hang_verdict.sentence(seen), first, kept=kept, said=said)

    def check_end(self) -> None:
        """Name and end a rank or a launcher that hangs at its exit: it would hold a run for ever that has succeeded, or that all
        ranks agreed to stop."""
        if self.reached_end and not self.stopping:
            ended, limit = "has succeeded", self.leave_within
        elif self.stopped:
            ended, limit = f"was stopped {self.stopped}", max(self.leave_within, self.grace)
        else:
            return
        if self.late or self.clock.now() - self._spoke < limit:
            return
        left = {rank: state.host for rank, state in self.ranks.items() if state.exit is None}
        hosts = [channel.host for channel in self.channels if channel.host not in self.ended]
        self.late = hang_verdict.names(left) if left else self.program
        on = ", ".join(dict.fromkeys(left.values()) if left else hosts)
        self.output.say(f"the run {ended}; {self.late} on {on} did not end within {limit:.0f} s: ended now")

    def were_asked(self) -> list[str]:
        """A line where ranks had been asked to stop before something failed."""
        asked = {rank: state.asked for rank, state in self.ranks.items() if state.asked}
        signals = ", ".join(dict.fromkeys(asked.values()))
        return [f"{hang_verdict.names(asked)} had been asked to stop: {signals}"] if asked else []

    def _as_launched(self, host: str) -> str:
        """The name by which the hostfile calls a host, which may have another one for itself."""
        return next((channel.host for channel in self.channels if channel.hello.get("host") == host), host)

    def _channel(self, rank: int) -> Channel:
        return next(channel for channel in self.channels if rank in channel.ranks)

    def decided(self) -> bool:
        """Tell whether nothing is left to wait for: all hosts ended, the run succeeded and some do not end, or something failed
        and its cause had time to come in."""
        now = self.clock.now()
        if self.late:
            return True
        if self.failures:
            causes = [failure.at for failure in self.failures if failure.kind != "follows"]
            return now > self.failures[0].at + RACE or (bool(causes) and now > causes[0] + SETTLE)
        if len(self.ended) < len(self.channels):
            return self._gone
        if not (self.reached_end or self.stopped):
            self.unfinished("all ranks ended with 0, but train.py did not reach its end (no success.json)")
        return True

    def stop_before_start(self, how: str) -> None:
        """Note that somebody wants a stop before any rank was started. how: in words"""
        self.stopped, self.stopping, self._gone = how, True, True

    @property
    def done(self) -> int | None:
        """The last step that was whole, by the ranks' own heartbeats; None where none has ended in a step."""
        within = max((state.within for state in self.ranks.values()), default=0)
        return within - 1 if within else None

    def met(self) -> bool:
        """Tell whether all ranks have been through the rendezvous, after which they may have trained."""
        return all(state.stage == "joined" for state in self.ranks.values())

    def trains(self) -> bool:
        """Tell whether all ranks are there, and can be asked for a checkpoint."""
        return all(state.stage == "joined" and state.exit is None for state in self.ranks.values())

    def unfinished(self, text: str) -> None:
        """Keep as a failure that all ended well, but the run has not succeeded."""
        self._fail("unfinished", self.channels[0], text, 0, 0)

    def _fail(
        self, kind: str, channel: Channel, text: str, rank: int | None = None, code: int | None = None, **more: Any
    ) -> None:
        """Keep a failure, unless it is our own doing: that ranks and launchers end once they are told to stop."""
        if not self.stopping or kind in ("lost", "unfinished"):
            self.failures.append(Failure(self.clock.now(), kind, channel.host, rank, code, text, **more))

    def _status(self, channel: Channel) -> str:
        ranks, all_ranks = [self.ranks[rank] for rank in channel.ranks], counted(channel.slots, "rank")
        ended = [state.exit for state in ranks if state.exit is not None]
        if any(ended):
            return f"{sum(map(bool, ended))} of {all_ranks} {'ended' if self.stopping else 'failed'}"
        if ended:
            return f"{len(ended)} of {all_ranks} ended well"
        if all(state.stage == "joined" for state in ranks):
            return f"running, {all_ranks}"
        return f"{sum(bool(state.stage) for state in ranks)} of {all_ranks} started"
