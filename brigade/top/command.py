"""`python -m brigade top [OUTPUT | --hostfile H]`: hosts and ranks while they train, in a terminal."""

import argparse
import asyncio
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError
from ..errors.console import console
from ..errors.flags import add_flags
from ..errors.tables import table
from ..hosts import launches
from ..hosts.connection import is_here
from ..hosts.usage import heartbeats
from ..train.recipe.files import find, read_yaml
from ..train.recipe.hostfile import read_hostfile
from ..train.run import typed
from ..train.run.directory import RECORD, check_exists
from .table import render
from .watching import Watching

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 20.0  # seconds that a single look waits for hosts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")))


def run(options: argparse.Namespace) -> int:
    """Watch runs or hosts until they end or the user leaves. Returns the exit code."""
    directory = options.directory
    if directory is None and options.hostfile is None:
        directory = _newest()
    hosts = list(read_hostfile(find(options.hostfile, "flag --hostfile", "hostfile"))) if options.hostfile else []
    hosts = hosts or _trusted(_hosts_of(directory), options.ask_all)
    once = options.once or not (sys.stdout.isatty() and sys.stdin.isatty())
    return asyncio.run(_watch(hosts, directory, options.every, once))


def _newest() -> Path:
    found = sorted(Path("outputs").glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        problem = "there is no run in outputs/ that has begun to train"
        raise UserError("command line", problem, "name an output directory, or --hostfile FILE for the hosts only")
    return found[-1].parent


def _hosts_of(directory: Path) -> list[str]:
    """Hosts of a run, by run.yaml and by its ranks' heartbeats."""
    check_exists(directory, "name the output directory of a run, or --hostfile FILE")
    record = read_yaml(directory / RECORD).get("run") if (directory / RECORD).is_file() else None
    hosts = typed.kept(record, typed.RUN).get("hosts") or []
    hosts += [says["host"] for says in heartbeats(directory).values()]
    if not hosts:
        problem = f"it is not the output directory of a run: neither {RECORD} nor heartbeats/ names a host"
        raise UserError(str(directory), problem, "name the output directory of a run, or --hostfile FILE")
    return list(dict.fromkeys(hosts))


def _trusted(hosts: list[str], all_of_them: bool) -> list[str]:
    """The hosts to connect to: a run's files may be a stranger's and name any host. Says which are left out."""
    known = launches.hosts()
    asked = [host for host in hosts if all_of_them or host in known or is_here(host) or "SLURM_JOB_ID" in os.environ]
    left = [host for host in hosts if host not in asked]
    if left:
        cure = "--hostfile FILE names yours, --ask_all asks them all"
        names = f"{', '.join(left[:5])}{' ...' * (len(left) > 5)}"
        print(f"Not asked, for only the run's files name them: {names}; {cure}.", file=sys.stderr)
    return asked


async def _watch(hosts: list[str], directory: Path | None, every: float, once: bool) -> int:
    watching, screen = Watching(hosts, directory, every), console()
    await watching.begin()
    try:
        if once:
            deadline = time.monotonic() + PATIENCE
            while not watching.ready() and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            screen.print(render(watching))
            return 0
        await _live(watching, screen, every)
    finally:
        await watching.end()
    return 0


async def _live(watching: Watching, screen: "Console", every: float) -> None:
    """Draw the table again and again until q, Ctrl-C or the end of the terminal."""
    from rich.live import Live

    left = asyncio.Event()
    with _keys(left), Live(console=screen, screen=True, auto_refresh=False) as live:
        while not left.is_set():
            live.update(render(watching, screen.size.height), refresh=True)
            try:
                async with asyncio.timeout(min(every, 1.0)):
                    await left.wait()
            except TimeoutError:
                continue


@contextmanager
def _keys(left: asyncio.Event) -> Iterator[None]:
    """While this lasts, a q on the terminal sets `left`; so does the terminal's end."""

    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        try:
            pressed = os.read(number, 64)
        except OSError:
            pressed = b""
        if not pressed or pressed[:1] in (b"q", b"Q", b"\x03", b"\x1b"):
            left.set()

    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        loop.add_reader(number, read)
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
