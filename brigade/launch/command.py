"""`python -m brigade launch RECIPE --hostfile H`: one recipe on all hosts, from any of them."""

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from ..check import run as checks
from ..check.checks import Wanted, refusal
from ..check.table import result_lines
from ..errors import UserError
from ..errors.console import counted, never_end_by_writing, one_line
from ..errors.flags import add_flags
from ..errors.tables import table
from ..hosts.connection import Channel, allow_open_files
from ..hosts.job import Job, forwarded, hosts_of_slurm_job, make
from ..hosts.rendezvous import DEFAULT_PORT
from ..train.host.cluster import ELASTIC
from ..train.recipe.program import RUNNER
from . import background, elastic, launchers, policy, write
from .policy import Policy, check_memory
from .restarts import Restarts
from .supervisor import Options
from .write import SUFFIXES

PASSES_ON = True  # words that are not ours are train.py's flags
FLAGS = Path(__file__).with_suffix(".yaml")
# What --write reads, or refuses with a cure of its own.
OF_JOB_FILES = ("recipe", "script", "hostfile", "write", "to", "restarts", "elastic", "min_hosts", "spare")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(FLAGS), SUFFIXES=SUFFIXES)


def run(options: argparse.Namespace) -> int:
    """Launch a recipe, or write its job file. Returns the exit code."""
    _check_unread(options)
    in_slurm = "SLURM_JOB_ID" in os.environ and options.hostfile is None
    hosts = None
    if options.launcher == "slurm" or (options.launcher is None and in_slurm and not options.write):
        allocated = hosts_of_slurm_job(os.environ)  # outside of an allocation each srun would queue a job of its own
        hosts = allocated if options.hostfile is None else None
    if hosts is not None and options.spare:
        hosts = {host: slots for host, slots in hosts.items() if host not in options.spare}
    if options.script is not None:
        _check_script(options)
    job = make(options.recipe, options.rest, options.hostfile, hosts, options.script)
    restarts = policy.Policy(options.restarts or 0, options.min_hosts, tuple(options.spare), options.restart_pause)
    if options.elastic:
        return _launch_elastic(job, "slurm" if hosts is not None else options.launcher, options)
    policy.check(job, restarts)
    if options.write:
        write.write(job, options.write, options.to, policy.for_slurm(restarts, options.write))
        return 0
    launcher = launchers.choose(job, options.launcher, hosts is not None)
    handed_on = forwarded(os.environ, options.env)
    if options.dry_run:
        print(dry_run(job, launcher, options, sorted(handed_on)))
        return 0
    return _launch(job, launcher, handed_on, restarts, options)


def _check_unread(options: argparse.Namespace) -> None:
    """Raise UserError for a flag of which a written job file would hold nothing, and for --to without one."""
    if options.to is not None and not options.write:
        raise UserError("flag --to", "it says where --write writes, which is not given", "add --write KIND")
    for flag, takes in table(FLAGS).items() if options.write else ():
        unset = (None, takes.get("default", False))
        if flag not in OF_JOB_FILES and getattr(options, flag.replace("-", "_")) not in unset:
            problem = "it is about a launch from here, and a written job file does not hold it"
            raise UserError(f"flag --{flag}", problem, "leave it out")


def _check_script(options: argparse.Namespace) -> None:
    """Raise UserError for a file that is not there, and for a job file, which starts train.py."""
    if not Path(options.script).is_file():
        problem = f"there is no file {options.script}"
        raise UserError("flag --script", problem, "give the path of a Python file, from the working directory")
    if options.write:
        problem = "a written job file starts train.py"
        cure = f"write it without --script, and put {RUNNER} {options.script} in the place of train.py there"
        raise UserError("flag --script", problem, cure)


def dry_run(job: Job, launcher: str, options: argparse.Namespace, names: list[str]) -> str:
    """Each host's exact command, as a person would type it there."""
    address = options.master_addr or ("127.0.0.1" if len(job.hosts) == 1 else next(iter(job.hosts)))
    port = options.master_port or DEFAULT_PORT
    size = f"{counted(job.world_size, 'rank')} on {counted(len(job.hosts), 'host')}"
    lines = [
        one_line(f"# {size}, strategy {job.strategy.name}, launcher {launcher}, in {Path.cwd()}"),
        f"# Handed on: {', '.join(names)}",
        "# When the hosts have answered, launch settles the address, the port, and GLOO_/NCCL_SOCKET_IFNAME.",
    ]
    shown = {}
    for name, text in launchers.files(launcher, job).items():
        word = f"{{{name}}}"
        shown[word] = shlex.quote(job.hostfile) if name == "hostfile" and job.hostfile else word
        if shown[word] == word:  # else the user's own file has what the run's copy has
            lines += [f"# {word} is a file with:", *(f"#   {line}" for line in text.splitlines())]
    for number, host in enumerate(job.hosts):
        words = launchers.command(launcher, job, launchers.Place(number, address, port))
        lines.append(f"{host}: {' '.join(shown.get(word) or shlex.quote(word) for word in words)}")
    return "\n".join(lines)


def checking(job: Job, handed_on: dict[str, str], replaceable: bool) -> Callable[[list[Channel], str], Awaitable[None]]:
    """The quick checks, over the connections that launch has open. What they find is told.

    A fault with which no run can begin (check/checks.py: STOP) ends the launch, unless hosts are replaceable: then the launch
    finds out by itself which ones it can do without.
    """

    async def check(channels: list[Channel], run: str) -> None:
        outcome = await checks.run(Wanted(job.hosts, job, handed_on), "quick", channels, run)
        error = refusal(outcome.stopping)
        if error and not replaceable:
            raise error
        for line in result_lines(outcome, least="yellow"):
            print(line, file=sys.stderr)

    return check


def _launch_elastic(job: Job, launcher: str | None, options: argparse.Namespace) -> int:
    never_end_by_writing()
    elastic.check(job)
    for flag in ("write", "dry_run", "spare", "min_hosts", "master_addr", "master_port"):
        if getattr(options, flag):
            problem = "of an elastic run each host has a launch of its own"
            raise UserError(f"flag --{flag}", problem, "leave it out, or launch without --elastic")
    names = ("start_timeout", "silence", "log_limit")
    words = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    words += ["--launcher", launcher] if launcher else []
    words += ["--script", options.script] if options.script else []
    words += ["--no_check"] if options.no_check else []
    words += [word for name in options.env for word in ("--env", name)]
    words += options.rest
    directory = _log_directory(job, options.log_dir)
    restarts = elastic.RESTARTS if options.restarts is None else options.restarts
    how = {"patience": options.silence, "start_timeout": options.start_timeout}

    async def work() -> int:
        return await elastic.Elastic(job, words, directory, restarts, options.restart_pause, how).run()

    return background.run(lambda: asyncio.run(work()), directory, job, options.detach)


def _log_directory(job: Job, named: Path | None) -> Path:
    """The log directory of a new launch. Raises UserError where the one that was named is there already."""
    if named is None:
        of_job = Path("outputs") / "logs" / f"{job.settings.name}-{job.strategy.name}"
        now = time.strftime("%Y%m%d-%H%M%S")
        names = (now, *(f"{now}-{number}" for number in range(2, 100)))  # two launches may begin in one second
        return next(path for path in map(of_job.joinpath, names) if not path.exists())
    if named.exists() and (not named.is_dir() or any(named.iterdir())):
        raise UserError("flag --log_dir", f"{named} is there already", "name a new directory")
    return named


def _launch(job: Job, launcher: str, handed_on: dict[str, str], restarts: Policy, options: argparse.Namespace) -> int:
    never_end_by_writing()
    allow_open_files(len(job.hosts) + len(options.spare))
    directory = _log_directory(job, options.log_dir)
    address, port = options.master_addr, options.master_port
    how = Options(launcher, handed_on, address, port, options.start_timeout, options.silence, options.log_limit)
    if not options.no_check:
        how.check = checking(job, handed_on, bool(restarts.restarts and (restarts.spares or restarts.min_hosts)))

    def remake(hosts: dict[str, int]) -> Job:
        again = make(options.recipe, options.rest, options.hostfile, hosts, options.script)
        launchers.choose(again, launcher, False)
        if again.world_size < job.world_size:
            check_memory(again)
        return again

    work = lambda: asyncio.run(Restarts(job, how, directory, restarts, remake).run())  # noqa: E731
    if ELASTIC in os.environ:  # of one replica: the launch of all has the record
        return work()
    return background.run(work, directory, job, options.detach)
