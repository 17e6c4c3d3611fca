"""Ctrl-C, SIGTERM, SIGUSR1, SIGHUP and a file `stop` in the output directory stop a training run: while it trains, all ranks end
their step and save a checkpoint (watch/stopping.py); before that, or at a second signal, the process ends at once. No tracebacks.
"""

import atexit
import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from .supervised import Agent

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # the last: the terminal is gone
FILE = "stop"  # in the output directory; it is removed when it has been obeyed
LONGEST = 86400.0  # seconds: who has nobody to wait for may finish a step of any length
SAVES = 120.0  # seconds that ranks have to save a checkpoint, where they have not measured it
AGAIN = 2.0  # seconds of quiet between two wishes: a launcher passes on a signal that its ranks have too, and some send many


def name(number: int) -> str:
    """`SIGTERM`, `Ctrl-C`, `the file stop`."""
    return {0: f"the file {FILE}", signal.SIGINT: "Ctrl-C"}.get(number) or signal.Signals(number).name


def refusal(file: Path) -> UserError:
    """The error where FILE is there before a run starts: it was left from before, or somebody wants no run here."""
    return UserError(str(file), "this file stops the run as soon as it trains", "remove it, and start again")


class Signals:
    """What this process does when it is asked to stop. There is one (process.py), as there is one set of handlers.

    agent: who hears of it under `launch`
    leaving: who holds it says why this process ends: an error that a stop brings about is none
    asked: the signal that asks for a stop at the end of a step, 0 for the file; None: nobody asks
    finished: the signal, or 0, that stopped this run in good order
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.leaving = threading.RLock()
        self.asked: int | None = None
        self.finished: int | None = None
        self.received: Counter[int] = Counter()  # how often each signal came
        self._deadline: Callable[[float, int], float] | None = None
        self._agreed = threading.Event()  # the ranks have: what is left may take as long as a checkpoint takes
        self._parted = False
        self._where: Callable[[], str] = lambda: "before its first step; the same command begins again"
        self._tell_others: Callable[[str], None] | None = None

    # ---- what a run says ---------------------------------------------------------------------------------------
    def begin_run(self) -> None:
        """Forget what an earlier run of this process was asked for."""
        self.asked = self.finished = self._deadline = None
        self._agreed.clear()

    def begin_training(self, deadline: Callable[[float, int], float]) -> None:
        """Steps are trained from here on: a signal asks for a stop at the end of one.

        deadline: of a time.monotonic() at which a signal asks for a stop, and of its number: the time until which the ranks must
        have agreed, math.inf where this process has nobody to agree with
        """
        self._deadline = deadline

    def end_training(self) -> None:
        """The last step's checkpoint is there: what follows may end at once."""
        self._deadline = None

    def agree(self) -> None:
        """All ranks know that they stop."""
        self._agreed.set()

    def finish(self, number: int) -> None:
        """The run has stopped in good order, as signal `number` has asked, or 0, the file."""
        self.finished = number

    @property
    def trains(self) -> bool:
        """Whether steps are trained."""
        return self._deadline is not None

    @property
    def waits_for_a_wish(self) -> bool:
        """Whether steps are trained, and nobody has asked for a stop yet."""
        return self.trains and self.asked is None and not self._agreed.is_set()

    def describe_by(self, where: Callable[[], str]) -> None:
        """Let `where` say where the run stands, and how it continues, when this process ends."""
        self._where = where

    def where(self) -> str:
        """Say where the run stands and how it continues."""
        return self._where()

    # ---- what ranks say ----------------------------------------------------------------------------------------
    def join(self, tell_others: Callable[[str], None]) -> None:
        """This rank is in a group. tell_others: what tells the others that it ends at once, and by what"""
        self._tell_others = tell_others

    def part(self) -> None:
        """The ranks leave their group together, at a common end or mistake, and have said why."""
        self._parted = True

    # ---- signals -----------------------------------------------------------------------------------------------
    def ask(self, number: int) -> None:
        """Ask this run to stop at the end of its step."""
        self.asked = number if self.asked is None else self.asked

    def name_and_times(self, number: int) -> str:
        """`SIGTERM`, or `SIGTERM (41 times)`: who sends so many is a program, and means one thing by them."""
        return name(number) + (f" ({self.received[number]} times)" if self.received[number] > 2 else "")

    def listen(self, is_main_rank: bool, launched: bool) -> None:
        """Obey signals whatever the main thread does: that may wait in C for ranks that are gone, where no handler of Python's
        runs. Data readers that it forks leave them to it.

        is_main_rank: whether this rank tells where(); launched: whether a launcher may hand on signals
        """
        numbers = {n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}  # nohup
        heard, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=leave_it_to_the_parent)
        threading.Thread(target=self._obey, args=(heard, numbers, is_main_rank, launched), daemon=True).start()

    def _obey(self, heard: int, numbers: set[int], is_main_rank: bool, launched: bool) -> None:
        number, deadline = self._next(heard, numbers), self._deadline  # the main thread may take it away at any moment
        if deadline:
            self.ask(number)
            first = last = time.monotonic()
            patience = min(deadline(first, number) - first, LONGEST)
            more = {"grace": patience + SAVES} if number == signal.SIGINT else {}  # launch knows what others may take
            self.agent.note(asked=self.name_and_times(number), **more)
            # Somebody sits there, and a step may take long. Launch says so itself.
            if is_main_rank and number == signal.SIGINT and not self.agent.watches:
                at_most = f" if it ends within {patience:.0f} s" if patience < LONGEST else ""
                print(
                    f"\nCtrl-C: this step is finished and a checkpoint saved{at_most}; once more ends the run at once.",
                    file=sys.stderr,
                )
            while self._agreed.is_set() or self._deadline is None or time.monotonic() < deadline(first, number):
                again = self._next(heard, numbers, timeout=1.0)
                if again:
                    if not (launched and time.monotonic() < last + AGAIN):
                        number = again
                        break
                    last = time.monotonic()
                    self.agent.note(asked=self.name_and_times(again))
        self._end(number, numbers, is_main_rank)

    def _next(self, heard: int, numbers: set[int], timeout: float | None = None) -> int:
        """The next signal of these; 0 when none came within `timeout` seconds."""
        while select.select([heard], [], [], timeout)[0]:
            number = os.read(heard, 1)[0]
            if number in numbers:  # else SIGCHLD, for one
                self.received[number] += 1
                return number
        return 0

    def _end(self, number: int, numbers: set[int], is_main_rank: bool) -> None:
        """End at once."""
        self.leaving.acquire()
        by = self.name_and_times(number)
        self.agent.note(ended=by)
        if self.finished is None and not self._parted:
            if self._tell_others:
                farewell = threading.Thread(target=self._tell_others, args=(by,), daemon=True)
                farewell.start()
                farewell.join(1)  # the main thread may hold the store
            if is_main_rank:
                sys.stdout.flush()  # on a terminal below a bar
                print(f"{chr(10) * sys.stderr.isatty()}Stopped by {by} {self.where()}", file=sys.stderr, flush=True)
            else:
                # The rank that prints has the signal too by now; it would take this one's end for a failure.
                time.sleep(0.5)
        # The end of a reader is no error from here on, as torch's own handler of SIGCHLD would have it.
        default(numbers | {signal.SIGCHLD})
        for child in multiprocessing.active_children():
            child.kill()  # else the next line waits for them
        atexit._run_exitfuncs()  # as at any end: wandb's last upload, for one
        end_by(number)


def leave_it_to_the_parent() -> None:
    """Let this process, which reads data, end when its parent says so, and not when somebody signals all processes of a job, as
    Slurm does: the parent needs it until the step is finished."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_wait_for_the_parent, args=(os.getppid(),), daemon=True).start()


def _wait_for_the_parent(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def default(numbers: set[int]) -> None:
    """Let a signal end this process from here on. Only the main thread may call Python's own function for that."""
    for number in numbers:
        ctypes.CDLL(None).signal(number, 0)


def end_by(number: int) -> None:
    """End this process by a signal, so that shell, launcher and Kubernetes see that it is not done; well for 0, the file: who
    wrote it does not want the job to come back."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    if number:
        default({number})
        os.kill(os.getpid(), number)
    os._exit(128 + number if number else 0)
