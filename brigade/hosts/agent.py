"""The far end of `launch` on one host: looks around, starts the host's own launcher, hands on what its ranks say, and
stops everything when it is told to, or when nobody is there any more to tell it.

Run as `python -m brigade.hosts.agent` with only the standard library, so that a host with a broken environment can say so.
It speaks JSON lines on stdin and stdout, each after a mark, for a shell's start-up files may print too. What a run needs to
know, secrets included, comes in over stdin: never on a command line, never in a file.
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors.tables import Fields
from ..train.distributed.launched import owner
from ..train.host import cpu_threads
from . import Facts
from .hearing import BEAT, SILENCE, Hearing
from .held_port import HeldPort, ways_to
from .host_facts import devices_fail, holder, look_around, of_session, processes, progress, send
from .probing import LINE, Probes, process_environment
from .usage import sample

MARK = "brigade> "

Handler = Callable[..., Coroutine[None, None, Facts | None]]  # of an order


class Agent(Probes):
    """Runs on each host, for as long as a command needs it: starts, watches and ends processes, and answers probes."""

    def __init__(self) -> None:
        super().__init__()
        self.hearing, self.patience = Hearing(), SILENCE
        self.listener: asyncio.Server | None = None
        self.port: HeldPort | None = None
        self.ranks: dict[int, int] = {}  # rank -> pid of its training process
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.orders: asyncio.ReadTransport | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.deadline = float("inf")  # after it, what has not stopped is killed
        self.stopping: asyncio.Task[None] | None = None
        self.tasks: set[asyncio.Task[Any]] = set()
        self.talking = 0  # ranks whose last word has not been handed on
        self.why = ""  # it leaves by itself

    async def serve(self) -> None:
        """Obey until the channel closes or falls silent; then leave nothing behind."""
        reader = asyncio.StreamReader(limit=64 * LINE)
        loop = asyncio.get_running_loop()
        self.orders, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        # Never blocks: when the other end hangs, this one must still notice and stop the ranks.
        protocol = asyncio.streams.FlowControlMixin(loop=loop)
        transport, _ = await loop.connect_write_pipe(lambda: protocol, sys.stdout)
        self.writer = asyncio.StreamWriter(transport, protocol, None, loop)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._leave, reader, f"its agent got {number.name}")
        self._background(self._beat(reader))
        self.writer.write(b"\n")  # a start-up file may have printed without a line's end
        self.say("hello", **look_around())
        try:
            while line := await reader.readline():
                self.hearing.hear()
                order = json.loads(line)
                handler = getattr(self, f"do_{order.pop('do')}")
                self._background(self._answer(handler, order.pop("id", None), order))
        finally:
            if self.why:
                self.say("leaving", why=self.why)
            await self.do_stop(grace=5)
            with suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await self._drain()
            # As a terminal that closes: what the login's start-up files left in the background holds the line open, and stays.
            send(of_session(os.getpid()), signal.SIGHUP)

    def say(self, kind: str, /, **fields: object) -> None:
        """One message to the other end; dropped when there is none."""
        if self.writer and not self.writer.is_closing():
            self.writer.write((MARK + json.dumps({**fields, "is": kind}) + "\n").encode())

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, handler: Handler, number: int | None, order: Facts) -> None:
        try:
            answer = await handler(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        if number is not None:
            self.say("answer", id=number, **(answer or {}))

    async def _beat(self, reader: asyncio.StreamReader) -> None:
        while self.hearing.seconds() < self.patience:
            self.say("beat")
            await asyncio.sleep(BEAT)
        # Whoever launched is gone, though the connection does not know it yet.
        self._leave(reader, f"its agent heard nothing from launch for {self.patience:.0f} s")

    def _leave(self, reader: asyncio.StreamReader, why: str) -> None:
        self.why = self.why or why
        if self.orders:
            self.orders.pause_reading()  # asyncio's reader may be given nothing more after its end
        reader.feed_eof()

    # ---- orders, do_NAME for the order NAME --------------------------------------------------------------------
    async def do_beat(self, patience: float) -> None:
        """Note that the other end is there, and allows so many seconds of its own silence from now on."""
        self.patience = patience

    async def do_files(self, paths: list[str]) -> Facts:
        """Answer which of these paths this host does not have."""
        return {"missing": [path for path in paths if not Path(path).exists()]}

    async def do_progress(self, directory: str) -> Facts:
        """Answer how far the run in this output directory is."""
        return progress(Path(directory))

    async def do_usage(self, directory: str) -> Facts:
        """Answer what this host, and the ranks on it of the run in this output directory, use right now."""
        return {"facts": await asyncio.to_thread(sample, directory)}

    async def do_clean(self, runs: list[str]) -> None:
        """Kill what earlier runs left on this host; answer when nothing of them is left."""
        while left := [pid for run in runs for pid in processes(run)]:
            send(left, signal.SIGKILL)
            await asyncio.sleep(0.1)

    async def do_check(self, visible: str | None) -> Facts:
        """Try whether every device that ranks may use here computes. The answer is what goes wrong, if anything does."""
        problem = await asyncio.to_thread(devices_fail, visible)
        return {"problem": problem} if problem else {}

    async def do_listen(self, port: int, nonce: str) -> Facts:
        """Hold a port (0: any) and greet whoever connects, so that the others can find the way to this host. The answer is
        the port, or who has it already."""
        try:
            self.port = HeldPort(port)
        except OSError as error:
            return {"taken": holder(port) or error.strerror}

        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(nonce.encode())
            writer.close()

        self.listener = await asyncio.start_server(greet, sock=self.port.listening)
        return {"port": self.port.number}

    async def do_reach(self, addresses: list[str], port: int, nonce: str) -> Facts:
        """Try to reach a listening host under each of its addresses: address -> our interface, or what went wrong."""
        return {"reached": await ways_to(addresses, port, nonce, 5)}

    async def do_start(
        self, run: str, command: list[str], cwd: str, environment: dict[str, str], files: dict[str, str], ranks: int
    ) -> None:
        """Start the host's launcher, which starts so many ranks. {name} in `command` or `environment` stands for a file of
        `files`, which lives as long as the run."""
        if self.listener and self.port:
            self.listener.close()
            self.port.release()
        self.run = run
        self.folder = tempfile.TemporaryDirectory(prefix="brigade-")
        places = {f"{{{name}}}": str(Path(self.folder.name) / name) for name in files}
        for name, text in files.items():
            Path(self.folder.name, name).write_text(text)
        door = f"brigade-{run}-{os.getpid()}"
        await asyncio.start_unix_server(self._rank, path="\0" + door, limit=LINE)
        environment = {name: places.get(value, value) for name, value in environment.items()}
        ours = process_environment(environment, run) | {"BRIGADE_DOOR": door}
        ours["PET_RDZV_ID"] = run  # torchrun's --rdzv_id
        # Else torchrun and accelerate set 1, and torchrun warns of it.
        ours.setdefault(cpu_threads.VARIABLE, str(cpu_threads.share(ranks)))
        words = [places.get(word, word) for word in command]
        streams: Fields = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        launcher = await asyncio.create_subprocess_exec(
            *words, cwd=cwd, env=ours, start_new_session=True, limit=64 * LINE, **streams
        )
        self._background(self._read_launcher(launcher))
        self._background(self._await_launcher(launcher))

    async def do_stacks(self, ranks: list[int]) -> None:
        """Let these ranks print what they are doing."""
        for rank in ranks:
            with suppress(OSError, KeyError):
                os.kill(self.ranks[rank], signal.SIGQUIT)

    # ---- the run -----------------------------------------------------------------------------------------------
    async def _await_launcher(self, launcher: asyncio.subprocess.Process) -> None:
        # Not wait(): that may wait for the end of the output too, and ranks that outlive their launcher hold it open.
        while launcher.returncode is None:
            await asyncio.sleep(0.1)
        await self._last_words()
        self.say("ended", code=launcher.returncode)

    async def _read_launcher(self, launcher: asyncio.subprocess.Process) -> None:
        while launcher.stdout and (chunk := await launcher.stdout.read(LINE)):
            self.say("launcher", out=chunk.decode(errors="replace").rstrip("\n"))
            await self._drain()

    async def _rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hand on what one rank says. Only this user's processes are listened to."""
        ours = owner(writer.get_extra_info("socket")) == os.getuid()
        rank, ended = None, False
        self.talking += 1
        try:
            while ours and (line := await reader.readline()):
                message = json.loads(line)
                rank, ended = message["rank"], "exit" in message
                if "pid" in message:
                    self.ranks[rank] = message["pid"]
                self.say("rank", **message)
                await self._drain()
        except ValueError:  # half a line
            pass
        finally:
            if rank is not None and not ended:  # its watching process was killed, and took the training one along
                self.say("rank", rank=rank, exit=-signal.SIGKILL, unwatched=True)
            self.talking -= 1
            writer.close()

    async def _last_words(self) -> None:
        """Wait until all that the ranks said is handed on, but not for ranks that outlive their launcher."""
        deadline = time.monotonic() + 2
        await asyncio.sleep(0.2)
        while self.talking and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _drain(self) -> None:
        """Wait until the other end has read most of what was said."""
        if self.writer:
            with suppress(OSError):
                await self.writer.drain()

    async def do_finish(self, number: int) -> None:
        """Ask all ranks, by this signal, to save a checkpoint and end. Their launchers are not asked: they would kill them after
        30 s."""
        for pid in self.ranks.values():
            with suppress(OSError):
                os.kill(pid, number)

    async def do_stop(self, grace: float) -> None:
        """Stop every process of the run: SIGTERM, and after `grace` seconds SIGKILL. Returns when none is left."""
        self.deadline = min(self.deadline, time.monotonic() + grace)
        if self.run and not self.stopping:
            self.stopping = asyncio.ensure_future(self._stop())
        if self.stopping:
            await asyncio.shield(self.stopping)

    async def _stop(self) -> None:
        send(processes(self.run), signal.SIGTERM)
        while left := processes(self.run):
            if time.monotonic() > self.deadline:
                send(left, signal.SIGKILL)
            await asyncio.sleep(0.1)
        if self.folder:
            self.folder.cleanup()
        await self._last_words()
        self.say("stopped")


def allow_open_files() -> None:
    """Raise the soft limit of open files, 1,024 on most systems, towards the hard one: ranks inherit it, and need sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not beyond a million: where containers have no limit, programs that close all they might have open would take minutes.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**20)), hard))


if __name__ == "__main__":
    allow_open_files()
    asyncio.run(Agent().serve())
