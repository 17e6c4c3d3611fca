"""`python -m brigade check [RECIPE] --hostfile H`: are the hosts sound, before a run starts on them?"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError

if TYPE_CHECKING:
    from ..check.hosts import Wanted
    from ..check.registry import Size
    from ..check.result_file import Document
    from ..check.run import Outcome

PASSES_ON = True  # words that are not ours are train.py's flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", nargs="?", help="what will be trained; without one, only what holds for every run is checked")
    add("--hostfile", metavar="FILE", help="hosts and slots (default: the recipe's, or the Slurm allocation)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="what takes seconds: reach, sameness, devices, storage")
    sizes.add_argument("--full", action="store_true", help="also what takes minutes: every pair of hosts, long sweeps")
    add("--json", metavar="FILE", help="write what was found; -: to standard output, instead of the table")
    add("--baseline", type=Path, metavar="FILE", help="say what changed since this earlier result of --json")
    add(
        "--only",
        action="append",
        metavar="CHECK",
        help="this check alone, by its name in the table; may be given again",
    )
    add("--fix", action="store_true", help="print the lines that make the hosts equal, where there are some")
    add("--yes", action="store_true", help="with --fix: run these lines on the hosts, and check again what they cure")
    add("--schema", action="store_true", help="print the JSON schema of --json, check nothing")
    add(
        "--list",
        action="store_true",
        help="say what each check reads and where its threshold comes from, check nothing",
    )
    add(
        "--dry-run",
        action="store_true",
        help="say what would be run on these hosts and how long it takes, start nothing",
    )
    more = "take the measured bandwidth between hosts into the planner's calibration file, beside what is in it"
    add("--calibrate", action="store_true", help=more)
    add("--env", action="append", default=[], metavar="NAME", help="as for launch: one more variable for the ranks")


def run(options: argparse.Namespace) -> int:
    """0: sound, 1: with warnings, 3: not sound."""
    from ..check import result_file
    from ..check.registry import checks

    size: Size = "quick" if options.quick else "full" if options.full else "usual"
    if options.schema:
        print(json.dumps(result_file.schema(), indent=2))
        return 0
    if options.list:
        for check in checks(size):
            print(f"{check.group}: {check.name} ({check.size}, {check.seconds:g} s)\n    {check.about}")
        return 0
    if options.yes and not options.fix:
        raise UserError("flag --yes", "it says yes to nothing", "add --fix, and look first at what that prints alone")
    if options.dry_run:
        return _dry_run(_wanted(options), size)
    if options.calibrate:
        _calibration_file(size)
    baseline = result_file.read(options.baseline) if options.baseline else None
    target = Path(options.json) if options.json and options.json != "-" else None
    if target and target.exists() and not result_file.is_ours(target):
        raise UserError(f"flag --json {target}", "it is there already, and is no result of check", "name a new file")
    return _check(_wanted(options), size, options, baseline, target)


def _wanted(options: argparse.Namespace) -> "Wanted":
    from ..check.hosts import Wanted
    from ..cluster import read_hostfile
    from ..launch.environment import forwarded
    from ..launch.job import hosts_of_slurm_job, make
    from ..recipe.files import find

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


def _dry_run(wanted: "Wanted", size: "Size") -> int:
    from ..check import sweep
    from ..errors.console import console

    # Nobody is asked: hosts with several slots, and those of a recipe that names a GPU, are taken to have GPUs.
    recipe = wanted.job.settings.recipe if wanted.job else None
    gpus = max(wanted.slots.values()) > 1 or bool(recipe and recipe.cluster.gpu)
    stages = list(sweep.plan(wanted.slots, size, gpus))
    console(highlight=False).print(sweep.table(wanted.slots, size, stages))
    print(*sweep.lines(wanted.slots, stages), sep="\n")
    return 0


def _calibration_file(size: "Size") -> Path:
    from ..recipe.files import CALIBRATION, calibration_file

    if size == "quick":
        raise UserError("flag --calibrate", "--quick measures no bandwidth", "leave out one of them")
    if (file := calibration_file()) is None:
        raise UserError(f"${CALIBRATION}", "it is empty: there is no file to keep factors in", "name one in it")
    return file


def _check(
    wanted: "Wanted", size: "Size", options: argparse.Namespace, baseline: "Document | None", target: Path | None
) -> int:
    from ..check import result_file
    from ..check.results import exit_code
    from ..check.run import run
    from ..launch.supervisor import allow_open_files

    allow_open_files(len(wanted.slots))
    skip = _others(options.only)
    outcome = asyncio.run(_until_stopped(run(wanted, size, told=_told, skip=skip)))
    if options.yes:
        outcome = _repaired(wanted, outcome)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    code = exit_code(outcome.results)
    found = result_file.document(outcome, options.recipe, code)
    if options.json == "-":
        print(found.model_dump_json(indent=1))
    else:
        _show(outcome)
        _measured(wanted)
    if options.fix and not options.yes:
        from ..check import fix

        print("fixes (--yes runs them):", *fix.printed(outcome), sep="\n  ", file=sys.stderr)
    if target:
        result_file.write(found, target)
    if options.calibrate:
        _calibrate(wanted, size)
    if baseline:
        _compare(baseline, found, options)
    return code


def _others(only: list[str] | None) -> list[str]:
    """Names of the checks that --only leaves out."""
    from ..check.registry import checks

    names = [check.name for check in checks()]
    for name in only or []:
        if name not in names:
            raise UserError(f"flag --only {name}", "there is no such check", f"one of: {', '.join(names)}")
    return [name for name in names if only and name not in only]


def _repaired(wanted: "Wanted", outcome: "Outcome") -> "Outcome":
    """Run what cures the hosts, and say what they are like afterwards."""
    from ..check import fix

    def told(done: fix.Done) -> None:
        print(f"{done.host}: {done.problem or 'done'}: {done.line}", *done.said, sep="\n    ", file=sys.stderr)

    print("fixes:", *fix.printed(outcome), sep="\n  ", file=sys.stderr)
    return (
        asyncio.run(_until_stopped(fix.apply(wanted, outcome, told, _told))) if fix.lines(outcome.results) else outcome
    )


async def _until_stopped(work: Coroutine[Any, Any, "Outcome"]) -> "Outcome":
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
    if sys.stderr.isatty():
        print(f"\r\x1b[Kchecking: {name}", end="", file=sys.stderr, flush=True)


def _show(outcome: "Outcome") -> None:
    from ..check.table import lines, table
    from ..errors.console import console

    screen = console(highlight=False)
    screen.print(table(outcome))
    for line in lines(outcome):
        screen.print(line, soft_wrap=True)


def _measured(wanted: "Wanted") -> None:
    """What was measured over all hosts together, which no host's cell can hold."""
    from ..check.bandwidth import Sweep
    from ..check.sweep import figures
    from ..errors.console import console

    if isinstance(found := wanted.measured.get("network"), Sweep):
        console(highlight=False).print(figures(found.rows, found.ranks, found.backend, found.device))
    if said := wanted.measured.get("meaning"):
        print(said)


def _calibrate(wanted: "Wanted", size: "Size") -> None:
    from ..check import meaning

    file = _calibration_file(size)
    print(*meaning.calibrate(wanted, wanted.measured.get("network"), file), sep="\n", file=sys.stderr)
    print(f"Wrote {file}: yours to edit, and to delete.", file=sys.stderr)


def _compare(baseline: "Document", found: "Document", options: argparse.Namespace) -> None:
    from ..check.result_file import changes

    changed = changes(baseline, found)
    since = f"since {options.baseline} ({baseline.time:%Y-%m-%d %H:%M} UTC)"
    out = sys.stderr if options.json == "-" else sys.stdout
    print(f"changed {since}:" if changed else f"nothing changed {since}", *changed, sep="\n  ", file=out)
