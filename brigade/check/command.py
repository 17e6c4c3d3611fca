"""`python -m brigade check [RECIPE] --hostfile H`: are the hosts sound, before a run starts on them?"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Coroutine
from pathlib import Path

from ..errors import UserError, did_you_mean
from ..errors.console import console, on_one_line
from ..errors.flags import add_flags
from ..errors.tables import table
from ..hosts.connection import allow_open_files
from ..hosts.job import forwarded, hosts_of_slurm_job, make
from ..train.recipe.files import CALIBRATION, calibration_file, find
from ..train.recipe.hostfile import read_hostfile
from . import fix, result_file, sweep, waiting
from . import run as running
from .checks import Check, Size, Wanted, checks, exit_code
from .collectives import Sweep
from .result_file import Document, changes, compared
from .run import LOGIN, Outcome
from .sweep import figures
from .table import result_lines, result_table

PASSES_ON = True  # words that are not ours are train.py's flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")))


def run(options: argparse.Namespace) -> int:
    """0: sound, 1: with warnings, 3: not sound."""
    size: Size = "quick" if options.quick else "full" if options.full else "usual"
    if "--recipe" in (word.partition("=")[0] for word in options.rest):
        raise UserError(
            "flag --recipe", "check takes the recipe as its first word", "python -m brigade check RECIPE ..."
        )
    if options.schema:
        print(json.dumps(result_file.schema(), indent=2))
        return 0
    if options.list:
        return _list(checks("full" if size == "usual" else size))
    if options.yes and not options.fix:
        raise UserError(
            "flag --yes", "it says yes to nothing", "add --fix, and look first at what --fix prints without it"
        )
    skip = _others(options.only, size)
    if options.calibrate and size == "quick":
        raise UserError("flag --calibrate", "--quick measures no bandwidth", "leave out one of them")
    if options.calibrate and "collectives" in skip:
        raise UserError("flag --calibrate", "--only leaves out the row `collectives`", "leave out --only")
    baseline = result_file.read(options.baseline) if options.baseline else None
    target = Path(options.json) if options.json and options.json != "-" else None
    if target:
        result_file.check_target(target)
    wanted = _wanted(options)
    if options.calibrate:
        if len(wanted.slots) < 2:
            raise UserError("flag --calibrate", "one host has no network to measure", "leave it out")
        _calibration_file()
    if options.dry_run:
        return _dry_run(wanted, size, skip)
    return _check(wanted, size, options, baseline, target, skip)


def _list(checks: list[Check]) -> int:
    """Print each check: from which size on it runs, its limit, and what it reads."""
    sizes = {"quick": "--quick", "usual": "no flag", "full": "--full"}
    width = min(120, shutil.get_terminal_size((120, 24)).columns)
    for check in checks:
        print(f"{check.group}: {check.name} (from {sizes[check.size]} on, at most {check.seconds:g} s)")
        print(textwrap.fill(check.about, width, initial_indent="    ", subsequent_indent="    "))
    print("reach: login always runs.")
    return 0


def _wanted(options: argparse.Namespace) -> Wanted:
    in_slurm = "SLURM_JOB_ID" in os.environ and options.hostfile is None
    slots = hosts_of_slurm_job(os.environ) if in_slurm else None
    job = make(options.recipe, options.rest, options.hostfile, slots) if options.recipe else None
    if job is not None:
        slots = job.hosts
    elif options.rest:
        raise UserError("command line", f"{options.rest[0]!r} is a flag of train.py", "name a recipe before it")
    elif slots is None:
        if options.hostfile is None:
            raise UserError(
                "flag --hostfile", "there is none, and no recipe", "add --hostfile hostfiles/2x8, or your own"
            )
        slots = read_hostfile(find(options.hostfile, "flag --hostfile", "hostfile"))
    return Wanted(slots, job, forwarded(os.environ, options.env), "slurm" if in_slurm else "")


def _dry_run(wanted: Wanted, size: Size, skip: list[str]) -> int:
    # Nobody is asked: hosts with several slots, and those of a recipe that names a GPU, are taken to have GPUs.
    recipe = wanted.job.settings.recipe if wanted.job else None
    gpus = max(wanted.slots.values()) > 1 or bool(recipe and recipe.cluster.gpu)
    stages = [
        stage for stage in sweep.plan(wanted.slots, size, gpus, job=wanted.job is not None) if stage.name not in skip
    ]
    console(highlight=False).print(sweep.table(wanted.slots, size, stages))
    print(*sweep.lines(wanted.slots, stages), sep="\n")
    return 0


def _calibration_file() -> Path:
    file = calibration_file()
    if file is None:
        raise UserError(f"${CALIBRATION}", "it is empty: there is no file to keep factors in", "name one in it")
    return file


def _check(
    wanted: Wanted,
    size: Size,
    options: argparse.Namespace,
    baseline: Document | None,
    target: Path | None,
    skip: list[str],
) -> int:
    allow_open_files(len(wanted.slots))
    outcome = asyncio.run(_until_stopped(running.run(wanted, size, told=_told, skip=skip)))
    if options.yes:
        outcome = _repaired(wanted, outcome)
    on_one_line("")
    code = exit_code(outcome.results)
    found = result_file.document(outcome, options.recipe, code, wanted.measured.get("network"))
    if options.json == "-":
        print(found.model_dump_json(indent=1))
    else:
        _show(outcome)
        _measured(wanted)
    if options.fix and not options.yes:
        print("fixes (--yes runs them):", *fix.printed(outcome), sep="\n  ", file=sys.stderr)
    if target:
        result_file.write(found, target)
        print(f"wrote {target}", file=sys.stderr)
    if baseline:
        _compare(baseline, found, options)
    if options.calibrate:
        try:
            _calibrate(wanted)
        except UserError as error:  # what was found stands, and its exit code
            print(error, file=sys.stderr)
            return code or 1
    return code


def _others(only: list[str] | None, size: Size) -> list[str]:
    """Names of the checks that --only leaves out."""
    sizes = {check.name: check.size for check in checks()}
    here = [check.name for check in checks(size)]
    for name in only or []:
        if name not in (LOGIN, *sizes):
            raise UserError(
                f"flag --only {name}", "there is no such check", did_you_mean(name.lower(), [LOGIN, *sizes])
            )
        if name in sizes and name not in here:
            cure = "add --full" if sizes[name] == "full" else "leave out --quick"
            raise UserError(
                f"flag --only {name}", f"it is no check of {'--quick' if size == 'quick' else 'this size'}", cure
            )
    return [name for name in sizes if only and name not in only]


def _repaired(wanted: Wanted, outcome: Outcome) -> Outcome:
    """Run what cures the hosts, and say what they are like afterwards."""

    def told(done: fix.Done) -> None:
        print(f"{done.host}: {done.problem or 'done'}: {done.line}", *done.said, sep="\n    ", file=sys.stderr)

    print("fixes:", *fix.printed(outcome), sep="\n  ", file=sys.stderr)
    return (
        asyncio.run(_until_stopped(fix.apply(wanted, outcome, told, _told))) if fix.lines(outcome.results) else outcome
    )


async def _until_stopped(work: Coroutine[None, None, Outcome]) -> Outcome:
    """Let a signal cancel the work, which then leaves nothing behind on any host."""
    task = asyncio.ensure_future(work)
    stopped: list[int] = []

    def stop(number: int) -> None:
        stopped.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not stopped:
            raise
        print(f"stopped by {signal.Signals(stopped[0]).name}; nothing is left on the hosts", file=sys.stderr)
        raise SystemExit(128 + stopped[0]) from None


def _told(name: str) -> None:
    on_one_line(f"checking: {name}")


def _show(outcome: Outcome) -> None:
    screen = console(highlight=False)
    screen.print(result_table(outcome))
    for line in result_lines(outcome):
        screen.print(line, soft_wrap=True)


def _measured(wanted: Wanted) -> None:
    """Print what was measured over all hosts together, which no host's cell can hold."""
    measured = wanted.measured.get("network")
    if isinstance(measured, Sweep):
        console(highlight=False).print(figures(measured.rows, measured.ranks, measured.backend, measured.device))
    if "meaning" in wanted.measured:
        print(wanted.measured["meaning"])


def _calibrate(wanted: Wanted) -> None:
    file = _calibration_file()
    print(*waiting.calibrate(wanted, wanted.measured.get("network"), file), sep="\n", file=sys.stderr)
    print(f"Wrote {file}: yours to edit, and to delete.", file=sys.stderr)


def _compare(baseline: Document, found: Document, options: argparse.Namespace) -> None:
    changed = changes(baseline, found)
    since = f"since {options.baseline} ({baseline.time:%Y-%m-%d %H:%M} UTC)"
    out = sys.stderr if options.json == "-" else sys.stdout
    print(f"changed {since}:" if changed else f"nothing changed {since}", *changed, sep="\n  ", file=out)
    print(f"({compared(baseline, found)})", file=out)
