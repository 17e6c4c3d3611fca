"""`launch --elastic`: each host trains as a replica of its own, in a launch of its own, and may leave and come back.

The replicas meet by a coordinator (local/coordinator.py), a process on this host that is started again when it dies. A
replica that ends is started again as well, and joins the others at the beginning of a round.
"""

import asyncio
import ctypes
import json
import os
import re
import secrets
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError, shortened
from ..errors.tables import Fields
from ..hosts.host_facts import addresses
from ..hosts.job import Job
from ..hosts.rendezvous import candidates
from ..train.checkpoint.compatibility import BY_ELEMENT
from ..train.distributed import stop
from ..train.distributed.launched import PR_SET_PDEATHSIG
from ..train.host import files
from ..train.host.cluster import ELASTIC
from ..train.run.directory import STOPPED
from ..train.run.success import SUCCESS
from .policy import NOT_TWICE, SHOWN
from .status_and_logs import LAUNCH_LOG
from .supervisor import TRY_LATER, listen

RESTARTS = 10  # of each replica, unless the user gives another number
ENDING = 120.0  # seconds that the others have when the first has finished the run
LONGEST_PAUSE = 60.0
TAIL = 5  # lines of a failed replica's launch that are shown


def check(job: Job) -> None:
    """Raise UserError for a job that cannot be elastic."""
    training, slots = job.settings.recipe.training, set(job.hosts.values())
    place = job.settings.place
    if training.sync_every is None:
        problem = "replicas that come and go are those that synchronise every sync_every steps, and it is not set"
        raise UserError("flag --elastic", problem, "add --sync_every 50, or use --restarts")
    if len(job.hosts) < 2:
        raise UserError("flag --elastic", "each host is a replica, and there is only one host", "name more hosts")
    if len(slots) > 1:
        raise UserError(
            f"{job.hostfile}", "hosts have different numbers of slots", "give all the same: they are replicas"
        )
    if training.optim not in BY_ELEMENT:
        problem = f"{training.optim} quantises its states, and who joins takes them over in full"
        raise UserError(place("optim"), problem, "use adamw_torch, or launch without --elastic")
    for flag, why in NOT_TWICE.items():
        if getattr(job.settings, flag):
            raise UserError(
                f"flag --{flag}", f"{why} (--elastic)", "leave it out; --output_dir names a new run's place"
            )


class Elastic:
    """One elastic run. words: of each replica's launch, without what differs between them

    directory: of the logs
    """

    def __init__(self, job: Job, words: list[str], directory: Path, restarts: int, pause: float, how: dict[str, float]):
        self.job, self.words, self.directory = job, words, directory
        self.restarts, self.pause = restarts, pause
        self.count = len(job.hosts)
        self.meeting: Fields = {"token": secrets.token_hex(16), "port": 0, **how}
        self.children: dict[int, asyncio.subprocess.Process] = {}
        self.codes: dict[int, int] = {}  # of each replica's last attempt
        self.mistaken: set[int] = set()  # replicas whose first attempt ended by a user's mistake before it trained
        self.stopped = False  # somebody asked all of them to stop
        self.left_over = any((self._output(number) / stop.FILE).exists() for number in range(self.count))
        self.story: list[str] = []
        self.signal = 0
        self.up = asyncio.Event()
        self.over = asyncio.Event()  # the run has ended, or is to end

    async def run(self) -> int:
        """The exit code: 0 when a replica has reached the run's end, else as `launch` has it."""
        self.directory.mkdir(0o700, parents=True, exist_ok=True)
        listen(self._on_signal)
        coordinator = asyncio.ensure_future(self._coordinate())
        await self.up.wait()
        replicas = [asyncio.ensure_future(self._replica(number)) for number in range(self.count)]
        while not all(task.done() for task in replicas):
            await asyncio.wait(replicas, timeout=1.0)
            if 0 in self.codes.values() and not self.over.is_set():
                self.over.set()
                await asyncio.wait(replicas, timeout=ENDING)
                self._tell_children(signal.SIGTERM)
        await asyncio.gather(*replicas)
        coordinator.cancel()
        with suppress(asyncio.CancelledError):
            await coordinator
        return self._conclude()

    # ---- one replica -----------------------------------------------------------------------------------------------
    async def _replica(self, number: int) -> None:
        host, pause = list(self.job.hosts)[number], self.pause
        for attempt in range(1, self.restarts + 2):
            code = await self._attempt(number, host, attempt)
            self.codes[number] = code
            if code == 0 or self.over.is_set():
                return
            trained = self._has_trained(number, attempt)
            if self._all_stopped(number):
                self._note("all replicas were asked to stop")
                self.stopped = True
                self.over.set()
                return
            self.mistaken |= {number} if code == 2 and attempt == 1 and not trained else set()
            if len(self.mistaken) == self.count:
                self._note("no replica can begin")
                self.over.set()
                return
            longer = min(2 * pause, max(LONGEST_PAUSE, self.pause))
            pause = self.pause if trained else longer
            if attempt > self.restarts:
                self._note(f"replica {number} ({host}) ended with exit code {code}, and has been started often enough")
                return
            left = f"attempt {attempt + 1} of {self.restarts + 1}"
            self._note(f"replica {number} ({host}) ended with exit code {code}; {left} in {pause:.0f} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self.over.wait()
                    return

    def _has_trained(self, number: int, attempt: int) -> bool:
        """Tell whether an attempt got as far as a logged step: what ended it then need not be there the next time."""
        logs = (self.directory / f"replica-{number}" / f"attempt-{attempt}").glob("rank-0*.log")
        return any(re.search(r"^step \d+/", log.read_text(errors="replace"), re.MULTILINE) for log in logs)

    def _all_stopped(self, number: int) -> bool:
        """Tell whether this one's end was the end of all: they were stopped, or whoever wrote the file `stop` wants that."""
        with suppress(OSError, ValueError):
            if (self._output(number) / stop.FILE).exists():  # it came while this replica did not train
                self._tell_children(signal.SIGTERM)
                return True
            by = json.loads(files.read(self._output(number) / STOPPED))["by"]
            if self.codes[number] == TRY_LATER and by.startswith(stop.name(0)):
                return True
        codes = [self.codes.get(each) for each in range(self.count)]
        return codes == [TRY_LATER] * self.count and not self.children

    async def _attempt(self, number: int, host: str, attempt: int) -> int:
        """Launch this replica once, and return its exit code."""
        folder = self.directory / f"replica-{number}"
        folder.mkdir(0o700, parents=True, exist_ok=True)
        files.write(folder / "hostfile", f"{host} slots={self.job.hosts[host]}\n")
        logs, told = folder / f"attempt-{attempt}", {"replica": number, "replicas": self.count, **self.meeting}
        words = [sys.executable, "-m", "brigade", "launch", self.job.recipe, "--hostfile", str(folder / "hostfile")]
        words += ["--log_dir", str(logs), "--env", ELASTIC, *self.words]
        words += ["--output_dir", str(self._output(number))]  # the last one counts
        shown: Any = None  # the first replica's goes where ours goes
        with files.append(folder / LAUNCH_LOG, secret=True) as log:
            if number:
                shown = log
            child = await asyncio.create_subprocess_exec(
                *words,
                env=os.environ | {ELASTIC: json.dumps(told)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=shown,
                stderr=shown,
                start_new_session=True,  # a terminal's Ctrl-C is ours, and we hand it on
                preexec_fn=_end_with_us,
            )
        self.children[number] = child
        if self.signal:
            child.send_signal(self.signal)
        code = await child.wait()
        del self.children[number]
        if code and number and not self.over.is_set():
            lines = (folder / LAUNCH_LOG).read_text(errors="replace").strip().splitlines()[-TAIL:]
            for line in lines:
                print(f"  replica {number}: {shortened(line, SHOWN)}", file=sys.stderr, flush=True)
        return code

    def _output(self, number: int) -> Path:
        return self.job.output_dir / f"replica-{number}" if number else self.job.output_dir

    # ---- the coordinator -------------------------------------------------------------------------------------------
    async def _coordinate(self) -> None:
        """Keep a coordinator running, on the same port whenever it has to be started again."""
        own = addresses()
        self.meeting["meet"] = [*candidates("localhost", own)] or ["127.0.0.1"]
        if all(host in ("localhost", "127.0.0.1", "::1") for host in self.job.hosts):
            self.meeting["meet"] = ["127.0.0.1"]
        while True:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "brigade.train.local.coordinator"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_end_with_us,
            )
            assert child.stdin and child.stdout
            try:
                asked = {key: self.meeting[key] for key in ("port", "token", "patience", "start_timeout")}
                only = self.meeting["meet"][0] if self.meeting["meet"] == ["127.0.0.1"] else ""
                child.stdin.write(json.dumps(asked | {"replicas": self.count, "address": only}).encode() + b"\n")
                line = (await child.stdout.readline()).decode()
                if line:
                    self.meeting["port"] = int(line.split()[1])
                    self.up.set()
                code = await child.wait()
                self._note(f"the coordinator ended ({code}) and is started again: the replicas find it by themselves")
                await asyncio.sleep(0.2)
            finally:
                if child.returncode is None:
                    child.kill()
                    await child.wait()

    # ---- the end -----------------------------------------------------------------------------------------------------
    def _on_signal(self, number: int) -> None:
        self.signal = self.signal or number
        self.over.set()
        self._tell_children(number)

    def _tell_children(self, number: int) -> None:
        for child in self.children.values():
            with suppress(ProcessLookupError):
                child.send_signal(number)

    def _conclude(self) -> int:
        if len(self.story) > 0:
            print("time line:", *self.story, sep="\n  ", file=sys.stderr)
        if 0 in self.codes.values():
            for number in (number for number, code in self.codes.items() if code == 0):
                with suppress(OSError, ValueError):
                    saved = json.loads(files.read(self._output(number) / SUCCESS)).get("saved_by_replica")
                    if saved is not None:
                        where = self._output(saved)
                        print(f"replica {saved} saved the model, on {list(self.job.hosts)[saved]}: {where}", flush=True)
                        break
            return 0
        if self.signal:
            return 128 + self.signal
        if self.stopped and not self.left_over:  # else it was refused, as by any launch
            return TRY_LATER
        return max(self.codes.values(), key=lambda code: (code == TRY_LATER, code), default=1)

    def _note(self, line: str) -> None:
        self.story.append(f"{time.strftime('%H:%M:%S')}  {line}")
        print(self.story[-1], file=sys.stderr, flush=True)


def _end_with_us() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
