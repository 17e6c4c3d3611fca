"""A line to one host's agent, over the user's own ssh (or srun, or no network at all for the launching host)."""

import asyncio
import json
import os
import re
import resource
import shlex
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import UserError
from ..errors.console import counted, printable
from ..errors.tables import Fields, table
from ..train.recipe.files import REPOSITORY
from . import Facts, ssh
from .agent import MARK
from .hearing import BEAT, SILENCE, Hearing
from .host_facts import of_session, send
from .messages import ANSWERS, KINDS, checked
from .probing import LINE

CURES = table(Path(__file__).with_name("cures.yaml"))
DESCRIPTORS, OTHERS = 4, 128  # open files for each host (three pipes, and a pidfd in newer Pythons), and for all else
SLOW = 12.0  # seconds of a login, after which the way to the host is looked at
LOGIN = 60.0  # seconds for a login, an interpreter's start and its hello, in which a driver may wake up
_ORDER = re.compile(r'\{"?do"?:')  # one of ours, in what a shell says of it
News = tuple["Channel", str, Fields]  # who says something, its kind (messages.KINDS, "lost"), its fields


class Channel:
    """One host's agent.

    ranks: those that the host runs, slots: how many; transport: the command that starts the agent
    events: of all channels; what the agent answers to a question does not go there
    hello: what the agent said of its host; hearing: since when it is silent; stopped: none of its ranks is left
    patience: seconds of silence after which either end gives the other up
    forged: a line that began as the agent's do, before the agent said anything; "" for none
    """

    def __init__(
        self, host: str, ranks: range, transport: list[str], events: asyncio.Queue[News], patience: float = SILENCE
    ) -> None:
        self.host, self.ranks, self.slots, self.transport, self.events = host, ranks, len(ranks), transport, events
        self.hello: Facts = {}
        self.hearing, self.patience = Hearing(), patience
        self.process: asyncio.subprocess.Process | None = None
        self.open, self.stopped, self.forged = False, False, ""
        self._answers: dict[int | str, asyncio.Future[Facts]] = {}  # "hello" is one too
        self._tasks: list[asyncio.Task[None]] = []
        self._errors: list[str] = []
        self._noise: list[str] = []  # of a shell's start-up files

    async def connect(self, timeout: float = LOGIN) -> None:
        """Start the agent and wait for its hello. Raises UserError with ssh's own words."""
        greeted = asyncio.get_running_loop().create_future()
        self._answers, self._errors, self._noise = {"hello": greeted}, [], []
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Ctrl-C is ours to handle, and ssh must live to carry the order to stop.
        options: Fields = {"cwd": REPOSITORY, "start_new_session": True, "limit": 64 * LINE}
        try:
            self.process = await asyncio.create_subprocess_exec(
                *self.transport, stdin=pipe, stdout=pipe, stderr=pipe, **options
            )
        except OSError as error:
            problem = f"{self.transport[0]} cannot be started here: {error.strerror}"
            raise self._fault(problem, cure_of(problem, self.host)) from None
        self._tasks = [asyncio.ensure_future(work) for work in (self._read(), self._read_errors(), self._beat())]
        try:
            async with asyncio.timeout(timeout):
                self.hello = await self._greeting(greeted)
        except (TimeoutError, ConnectionError) as error:
            problem = str(error)
            if isinstance(error, TimeoutError):
                said = self._said()
                problem = f"did not answer within {timeout:.0f} s" + (f"; it said: {said}" if said else "")
            self.abandon()
            by_ssh = self.transport[0] == "ssh"
            fault = await ssh.fault_on_the_way(self.host) if by_ssh and ssh.LIKELY.search(problem) else ""
            problem = f"{fault} ({problem})" if fault else problem
            raise self._fault(problem, cure_of(problem, self.host)) from None
        self.open = True

    async def _greeting(self, greeted: "asyncio.Future[Facts]") -> Facts:
        """The agent's hello. Raises ConnectionError, also where the way to a host that is slow to answer loses packets."""
        done, _ = await asyncio.wait([greeted], timeout=SLOW)
        if not done and self.transport[0] == "ssh":
            fault = await ssh.fault_on_the_way(self.host, hopeless=True)
            if fault and not greeted.done():
                raise ConnectionError(fault)
        return await greeted

    def _said(self) -> str:
        """Its last words, in one line: on stderr, else what came before the agent's own."""
        told = [line for line in self._errors if not line.startswith("Warning: Permanently added")]
        return " / ".join(told[-3:] or self._noise[-3:])

    async def ask(self, do: str, timeout: float = 20, **fields: object) -> Facts:
        """Give an order and wait for its answer. Raises UserError when none comes, or the agent could not obey."""
        number = len(self._answers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self.tell(do, id=number, **fields)
        try:
            async with asyncio.timeout(timeout):
                answer = await future
            if "error" in answer:
                raise self._fault(printable(str(answer["error"])), "fix that on the host, then start again")
            return checked(ANSWERS[do], answer)
        except (TimeoutError, ConnectionError) as error:
            problem = f"no answer to {do!r}: {error or f'{timeout:.0f} s are over'}"
            raise self._fault(problem, f"does `ssh {self.host} hostname` answer?") from None
        except ValueError as error:
            problem = f"its answer to {do!r} makes no sense: {error}"
            raise self._fault(problem, "does it have the same clone?") from None

    def _fault(self, problem: str, cure: str) -> UserError:
        return UserError(self.host, problem, cure, "host", (self.host,))

    def tell(self, do: str, **fields: object) -> None:
        """Give an order without waiting."""
        if self.process and self.process.stdin and not self.process.stdin.is_closing():
            self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")

    async def close(self) -> None:
        """Hang up, and wait a moment for the far end to end."""
        if not self.process:
            return
        if self.process.stdin:
            self.process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(5 if self.open else 0.1):
                # Not wait(): that may wait for the end of the output too, which somebody else may hold open.
                while self.process.returncode is None:
                    await asyncio.sleep(0.02)
        self.abandon()

    def abandon(self) -> None:
        """Drop the line at once; the agent, if it lives, finds that nobody is there any more."""
        self.open = False
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._kill()
        if self.process:
            # Else its pipes are closed when the loop is gone, with a traceback, where somebody holds the other ends. asyncio's
            # Process has no public method for it.
            self.process._transport.close()  # type: ignore[attr-defined]

    def _kill(self) -> None:
        """End the transport, and what it has started: a ProxyCommand, or a background process of a start-up file, which holds our
        pipes open."""
        if not self.process:
            return
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        elif self.process.stdout and not self.process.stdout.at_eof():
            send(of_session(self.process.pid), signal.SIGKILL)

    async def _read(self) -> None:
        assert self.process and self.process.stdout
        try:
            while line := await self.process.stdout.readline():
                self.hearing.hear()
                before, mark, text = line.decode(errors="replace").partition(MARK)
                if mark:
                    self._hear(text)
                elif before.strip():
                    self._noise.append(printable(before.strip()))
                    self._notice(self._noise[-1])
        except (ValueError, RecursionError) as error:  # a line that is none of ours, or longer than any of ours
            self._errors.append(f"it said what nobody understands: {error}")
            self._kill()
        while self.process.returncode is None:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # the last words on stderr
        self._lose(f"{self._said() or 'its channel closed'} ({self.transport[0]} ended with {self.process.returncode})")

    def _hear(self, text: str) -> None:
        """Take a line of the agent's. Raises ValueError; not before the hello: then a start-up file has printed it."""
        try:
            self._take(json.loads(text))
        except (ValueError, RecursionError):
            if self._answers["hello"].done():
                raise
            self.forged = printable(f"{MARK}{text}".strip())[:80]
            self._noise.append(self.forged)

    def _notice(self, text: str) -> None:
        """Give up a host on which a shell, and not the agent, reads our orders: it quotes them."""
        greeted = self._answers["hello"]
        if _ORDER.search(text) and not greeted.done():
            greeted.set_exception(ConnectionError(f"a shell reads what is meant for the agent: {text[:200]}"))

    def _take(self, line: object) -> None:
        """Hand one message to whoever waits for it. Raises ValueError for what no agent of this host may say."""
        kind = line.get("is") if isinstance(line, dict) else None
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"no kind of message: {str(kind)[:20]!r}")
        if (kind == "hello") == self._answers["hello"].done():
            raise ValueError(
                f"{kind!r} {'twice: a start-up file prints one' if kind == 'hello' else 'before its hello'}"
            )
        message = checked(KINDS[kind], line)
        if kind == "rank" and message["rank"] not in self.ranks:
            raise ValueError(f"rank {message['rank']} is not on this host")
        if kind in ("hello", "answer"):
            future = self._answers.get(message.pop("id") if kind == "answer" else kind)
            if future and not future.done():
                future.set_result(message)
        elif kind != "beat":
            self.stopped |= kind == "stopped"
            self.events.put_nowait((self, kind, message))

    def _lose(self, why: str) -> None:
        was_open, self.open = self.open, False
        for future in self._answers.values():
            if not future.done():
                future.set_exception(ConnectionError(why))
                future.exception()  # it is nobody's fault if nobody waits for it
        if was_open:  # else connect() says it
            self.events.put_nowait((self, "lost", {"why": why}))

    async def _read_errors(self) -> None:
        assert self.process and self.process.stderr
        while line := await self.process.stderr.readline():
            text = line.decode(errors="replace").strip()
            if text:
                self._errors = [*self._errors[-20:], printable(text)]
                self._notice(self._errors[-1])

    async def _beat(self) -> None:
        """Beat, but not while the host is silent: soon after we give it up it must give us up, or two runs would meet in one
        directory."""
        while True:
            if self.hearing.seconds() < 2 * BEAT or not self.hello:
                self.tell("beat", patience=self.patience)
            if self.process and self.process.returncode is not None:
                self._kill()  # what still holds its output open: else nobody learns that it has ended
            await asyncio.sleep(BEAT)


def cure_of(problem: str, host: str) -> str:
    """The cure for what ssh said of a host."""
    key = ssh.locked_key(host) if "Permission denied" in problem else ""
    if key:
        return str(CURES["locked key"]).replace("KEY", key).replace("HOST", host)
    cure: str = next(cure for pattern, cure in CURES["ssh"].items() if re.search(pattern, problem))
    words = {"HOST": host, "PROJECT": str(REPOSITORY), "PYTHON": sys.executable}
    return re.sub(rf"\b({'|'.join(words)})\b", lambda word: words[word[0]], cure)


def transport(host: str, launcher: str) -> list[str]:
    """The command that starts the agent of a host."""
    agent = [sys.executable, "-m", "brigade.hosts.agent"]
    if launcher == "slurm":
        step = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", f"--chdir={REPOSITORY}"]
        return [*step, "--unbuffered", "--kill-on-bad-exit=0", *agent]
    if is_here(host):
        return agent
    # An environment's interpreter finds its modules by itself, and its `activate` unsets PYTHONHOME, too.
    agent = ["env", "-u", "PYTHONHOME", "-u", "PYTHONSAFEPATH", *agent]
    remote = f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(agent)}"
    # Without "--" a host that is called -oProxyCommand=... would be an option.
    return ["ssh", *ssh.options(), "--", host, remote]


def lines_to(hosts: Mapping[str, int], launcher: str, patience: float = SILENCE) -> list[Channel]:
    """A line to each host, to ask it something. hosts: host -> slots"""
    queue: asyncio.Queue[News] = asyncio.Queue()  # which nobody reads
    return [Channel(host, range(slots), transport(host, launcher), queue, patience) for host, slots in hosts.items()]


def is_here(host: str) -> bool:
    """Tell whether a name means the launching host itself, which needs no ssh."""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().partition(".")[0])


def allow_open_files(hosts: int) -> None:
    """Raise this process's limit of open files as far as it may. Raises UserError when that is too low for the hosts."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    enough_for = (most - OTHERS) // DESCRIPTORS
    if hosts > enough_for and most != resource.RLIM_INFINITY:
        needed = hosts * DESCRIPTORS + OTHERS
        problem = f"they need {needed} open files, and the hard limit here, {most}, is enough for {max(0, enough_for)}"
        cure = f"as root `ulimit -n {needed}`; for good: nofile in /etc/security/limits.conf, LimitNOFILE= of a service"
        raise UserError(counted(hosts, "host"), problem, cure)
