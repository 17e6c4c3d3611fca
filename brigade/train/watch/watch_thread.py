"""A thread of each rank that watches its heartbeat, and those of all others where no `launch` does.

    OUTPUT/heartbeats/rank-R.json             phase, step, silence; written every few seconds, and at once when it hangs
    OUTPUT/heartbeats/rank-R.stacks           once it hangs: what each of its threads does
    OUTPUT/heartbeats/rank-R.collectives      torch's flight record of its collectives (JSON)

The lowest rank that still runs judges: when each rank is silent for longer than its own steps explain, it says who all others
wait for, and ends; so do the others when they read that. A stopped process runs no thread: its file does not change any more.
What is compared is never a time of two hosts: each counts how often it has looked. Where hosts do not share the output
directory, each judges by its own ranks.
"""

import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ...errors.console import counted
from ..distributed import hang_verdict, heartbeat, ranks, tell
from ..distributed.observer import LOOK, Observer, limit, may_be_stopped, stopped_by
from ..distributed.process import this_process
from ..host import files
from ..run import events
from ..run.directory import Run
from ..upstream import flight_records

SAID = 3.0  # seconds of silence after which it says how long that may last
SAID_OF = {heartbeat.EVALUATION: "this evaluation", heartbeat.CHECKPOINT: "this save"}
EVERY = 5.0  # seconds between two writings of a file; more for many ranks, that all of them together make ten a second


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Watch a run from the loading of its model to its end. A collective where no `launch` watches."""
    training = run.settings.recipe.training
    this_process.heartbeat.begin(training.hang_timeout, training.torch_compile or training.reports_elsewhere)
    # A process for which nobody waits may wait as long as it likes.
    watch = _begin(run) if run.world.launcher != "python" else None
    try:
        yield
    finally:
        if watch:
            watch.end()
        this_process.heartbeat.end()


def _begin(run: Run) -> "Watch":
    watch = Watch(run)
    if not this_process.agent.watches:
        first, all_ranks = run.world.number - run.world.rank, ranks.gather((run.world.host, os.getpid()))
        watch.beside = {first + rank: pid for rank, (host, pid) in enumerate(all_ranks) if host == run.world.host}
    watch.start()
    return watch


class Watch(threading.Thread):
    """The thread that looks whether all ranks go on, and ends a run that hangs with a verdict."""

    def __init__(self, run: Run) -> None:
        super().__init__(name="watch", daemon=True)
        self.watched, self.world, self.number = run, run.world, run.world.number
        self.run_directory = run.directory.parent if run.world.replica else run.directory  # of all replicas
        self.folder = self.run_directory / heartbeat.FOLDER
        with suppress(OSError):  # never later: a directory that is unmounted meanwhile is not made anew
            files.make_folder(self.folder)
        self.ended = threading.Event()
        self.observer = Observer(os.getpid())
        self.every = max(EVERY, run.world.size * run.strategy.replicas / 10)
        self.written, self.writings = 0.0, 0
        self.waits: dict[str, Any] | None = None  # once it hangs: in which collective
        self.peers: dict[int, Peer] = {}
        self.beside: dict[int, int] = {}  # process of each rank of this host, where they watch over each other
        self.stopped_looks = 0  # since a rank beside this one was stopped
        self.told: set[int] = set()  # phases whose limit was said
        # This rank's GPU, which the main thread has taken; a replica's world does not give its number on the host.
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def end(self) -> None:
        self.ended.set()
        self.join(timeout=2 * LOOK)

    def run(self) -> None:
        if self.device is not None:  # NCCL's records ask a device, and a thread begins with the first one
            with suppress(Exception):
                torch.cuda.set_device(self.device)
        self.write()  # at once: a rank that is stopped before the first look could not be named
        while not self.ended.wait(LOOK):
            with suppress(Exception):  # who watches a run must not be what ends it
                self.look()

    def look(self) -> None:
        silent, knew = self.observer.look(), self.waits is not None
        if silent and not knew:
            try:
                records = flight_records.records()
                self.waits = flight_records.waits_in(records)
            except Exception as error:
                # torch promises no format: a hang is one also where nothing is known of collectives
                records, self.waits = {"error": f"{type(error).__name__}: {error}"}, {}
            self.record(records)
            this_process.agent.note(waits=self.waits, records=str(self.folder.absolute()))
        elif not silent:
            self.waits, self.peers = None, {}
        if silent != knew or time.monotonic() - self.written > self.every:
            self.write()
        if self.world.is_main_rank and self.observer.silent >= SAID:
            self.say_limit(int(this_process.heartbeat.page[heartbeat.PHASE]))
        if this_process.agent.watches:  # launch judges
            return
        if silent:
            self.judge()
        elif self.is_one_stopped_beside():
            self.judge(at_once=True)

    def say_limit(self, phase: int) -> None:
        """Say of a save or an evaluation that takes its time from when on it counts as a hang."""
        if phase in SAID_OF and phase not in self.told and math.isfinite(seconds := limit(phase)):
            self.told.add(phase)
            moves = "no byte is read or written" if phase == heartbeat.CHECKPOINT else "no batch ends"
            tqdm.write(f"{SAID_OF[phase]} counts as a hang once {moves} for {seconds:,.0f} s (--hang_timeout)")

    def is_one_stopped_beside(self) -> bool:
        """Whether another rank of this host has been stopped for too long; for the lowest that is not to say, at once."""
        states = {rank: stopped_by(pid) for rank, pid in self.beside.items() if rank != self.number}
        stopped = [state for state in states.values() if state]
        self.stopped_looks = self.stopped_looks + 1 if stopped else 0
        lowest = all(state for rank, state in states.items() if rank < self.number)
        return bool(stopped) and lowest and self.stopped_looks * LOOK > min(map(may_be_stopped, stopped))

    def record(self, collectives: dict[str, Any]) -> None:
        """Keep what this rank's threads do, and its collectives; what a full disk takes."""
        with suppress(OSError):
            files.write(self.folder / f"rank-{self.number}.collectives", json.dumps(collectives))
            with files.replacing(self.folder / f"rank-{self.number}.stacks") as file:
                faulthandler.dump_traceback(file, all_threads=True)

    def write(self, **more: object) -> None:
        """This rank's file; replaced, so that nobody reads half of it."""
        self.written, self.writings = time.monotonic(), self.writings + 1
        time_ = datetime.now(UTC).isoformat(timespec="seconds")
        says = {"rank": self.number, "host": self.world.host, "pid": os.getpid(), "writings": self.writings}
        says |= {"time": time_, **self.observer.seen(), "waits": self.waits, **more}
        tokens = this_process.heartbeat.page[heartbeat.TOKENS]
        if tokens:  # for `top`, which makes a rate of it
            says |= {"at": round(self.written, 3), "tokens": int(tokens)}
        with suppress(OSError):
            files.write(self.folder / f"rank-{self.number}.json", json.dumps(says))

    # ---- without launch ------------------------------------------------------------------------------------------
    def judge(self, at_once: bool = False) -> None:
        """End the run if all ranks hang, and this is the lowest that still runs; or if another has done so; or `at_once`."""
        me, first = self.number, self.number - self.world.rank
        for rank in range(first, first + self.world.size):
            if rank == me:
                continue
            peer = self.peers.setdefault(rank, Peer(self.world.host, 2 * self.every + LOOK))
            peer.read(self.folder / f"rank-{rank}.json")
            verdict = peer.says.get("verdict")
            if verdict:
                self.leave(f"rank {me} on {self.world.host} stops: {verdict}")
            if not at_once and not peer.gone and (rank < me or peer.says.get("waits") is None):
                return  # that rank judges; or it moves on, or may stay longer where it is
        own = hang_verdict.Silent(me, self.world.host, **self.observer.seen(), **(self.waits or {}))  # type: ignore[arg-type]
        known = [own, *(peer.silent(rank, own.step) for rank, peer in self.peers.items() if peer.says)]
        unseen = self.world.size - len(known)
        verdict = hang_verdict.sentence(sorted(known, key=lambda one: one.rank))
        if unseen:
            verdict += f"; of {counted(unseen, 'other rank')} nothing is seen in {self.folder} of {self.world.host}"
        self.write(verdict=verdict)
        events.add(self.run_directory, "fault", kind="hang", step=own.step, text=verdict)
        with suppress(Exception):
            self.watched.note_failure(verdict)
        self.leave(f"error: {verdict}\n  stacks and collectives of all ranks: {self.folder}")

    def leave(self, message: str) -> None:
        """End this process; and those of this host that are stopped, for they hear no launcher's SIGTERM."""
        print(message, file=sys.stderr, flush=True)
        tell.tell_launcher(message.removeprefix("error: ").splitlines()[0])
        for pid in {*self.beside.values(), *(peer.says["pid"] for peer in self.peers.values() if peer.state)}:
            if stopped_by(pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        os._exit(1)


class Peer:
    """Another rank, by what its file says; this process's host is `host`. unchanged, halted: seconds since the file changed, and
    for which its process has been stopped, as far as this rank saw; patience: after how many nothing runs there any more."""

    def __init__(self, host: str, patience: float) -> None:
        self.host, self.patience, self.says = host, patience, {}  # type: ignore[var-annotated]
        self.unchanged, self.halted, self.looked = 0.0, 0.0, time.monotonic()

    def read(self, file: Path) -> None:
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, 2 * LOOK), now
        self.unchanged += passed
        self.halted = self.halted + passed if self.state else 0.0
        with suppress(OSError, ValueError):
            says = json.loads(files.read(file))
            if (says["pid"], says["writings"]) != (self.says.get("pid"), self.says.get("writings")):
                self.says, self.unchanged = says, 0.0

    @property
    def state(self) -> str:
        """What observer.stopped_by() says of the rank's process; nothing where that is another host's."""
        return stopped_by(self.says["pid"]) if self.says and self.says["host"] == self.host else ""

    @property
    def gone(self) -> bool:
        return self.unchanged >= self.patience or bool(self.state and self.halted > may_be_stopped(self.state))

    def silent(self, rank: int, step: int) -> hang_verdict.Silent:
        """step: that the others wait in; a file of a process that is stopped is some seconds older"""
        says, seen = self.says, {key: self.says[key] for key in ("phase", "seconds")}
        stopped = bool(self.state)
        seen |= {"step": max(says["step"], step) if self.gone or stopped else says["step"], "stopped": stopped}
        return hang_verdict.Silent(rank, says["host"], answers=not self.gone, **seen, **(says["waits"] or {}))
