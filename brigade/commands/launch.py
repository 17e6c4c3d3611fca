"""`python -m brigade launch RECIPE --hostfile H`: one recipe on all hosts, from any of them."""

import argparse
import asyncio
import os
import shlex
import time
from pathlib import Path

from ..errors import UserError, numeric

PASSES_ON = True  # words that are not ours are train.py's flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..launch.write import WRITERS

    parser.add_argument("recipe", help="what to train, e.g. recipes/qwen3-8b/full.yaml")
    parser.add_argument("--hostfile", help="hosts and slots in DeepSpeed's syntax (default: the recipe's)")
    parser.add_argument(
        "--launcher",
        help="deepspeed, torchrun, accelerate or slurm (default: deepspeed for ZeRO, else "
        "torchrun; slurm inside an allocation)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print each host's exact command, start nothing")
    parser.add_argument(
        "--write", choices=WRITERS, metavar="KIND", help=f"write a job file instead: {', '.join(WRITERS)}"
    )
    parser.add_argument("--to", type=Path, metavar="FILE", help="where --write writes (-: standard output)")
    parser.add_argument(
        "--master_addr", metavar="ADDRESS", help="of the first host (default: one that all others reach)"
    )
    parser.add_argument(
        "--master_port",
        type=numeric("master_port", 1, below=65536),
        metavar="PORT",
        help="default: 29500, or a free one",
    )
    parser.add_argument(
        "--start_timeout",
        type=numeric("start_timeout", 1, float),
        default=300,
        metavar="SECONDS",
        help="how long the last rank may be later than the first (default: 300)",
    )
    parser.add_argument("--log_dir", type=Path, metavar="DIR", help="default: outputs/logs/RECIPE-STRATEGY/TIME")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME",
        help="hand on one more variable of this shell (HF_*, WANDB_*, NCCL_*, ... travel anyway)",
    )


def run(options: argparse.Namespace) -> int:
    from ..launch import environment, launchers
    from ..launch.job import make

    in_slurm = "SLURM_JOB_ID" in os.environ and options.hostfile is None
    hosts = None
    if options.launcher == "slurm" or (options.launcher is None and in_slurm and not options.write):
        from ..cluster import hosts_of_slurm_job

        allocated = hosts_of_slurm_job(os.environ)  # outside of an allocation each srun would queue a job of its own
        hosts = allocated if options.hostfile is None else None
    job = make(options.recipe, options.rest, options.hostfile, hosts)
    if options.write:
        from ..launch.write import write

        write(job, options.write, options.to)
        return 0
    launcher = launchers.choose(job, options.launcher, hosts is not None)
    handed_on = environment.forwarded(os.environ, options.env)
    if options.dry_run:
        print(dry_run(job, launcher, options, sorted(handed_on)))
        return 0
    return _launch(job, launcher, handed_on, options)


def dry_run(job, launcher: str, options: argparse.Namespace, names: list[str]) -> str:
    """Each host's exact command, as a person would type it there."""
    from ..errors.console import counted
    from ..launch import launchers

    first = next(iter(job.hosts))
    address = options.master_addr or ("127.0.0.1" if len(job.hosts) == 1 else first)
    port = options.master_port or launchers.DEFAULT_PORT
    size = f"{counted(job.world_size, 'rank')} on {counted(len(job.hosts), 'host')}"
    what = f"{size}, strategy {job.strategy.name}, launcher {launcher}"
    lines = [
        f"# {what}, in {Path.cwd()}",
        f"# Handed on: {', '.join(names)}",
        "# When the hosts have answered, launch settles the address, the port, and GLOO_/NCCL_SOCKET_IFNAME.",
    ]
    texts = launchers.files(launcher, job)
    known = {"{hostfile}": job.hostfile}  # the user's own file has what the run's copy has
    for name, text in texts.items():
        if f"{{{name}}}" not in known:
            lines += [f"# {{{name}}} is a file with:", *(f"#   {line}" for line in text.splitlines())]
    for number, host in enumerate(job.hosts):
        words = launchers.command(launcher, job, launchers.Place(number, address, port))
        shown = [known.get(word) or word for word in words]
        named = [word if word.strip("{}") in texts else shlex.quote(word) for word in shown]
        lines.append(f"{host}: {' '.join(named)}")
    return "\n".join(lines)


def _launch(job, launcher: str, handed_on: dict[str, str], options: argparse.Namespace) -> int:
    from ..launch.status_and_logs import Board
    from ..launch.supervisor import Launch, Options, allow_open_files

    allow_open_files(len(job.hosts))
    named = options.log_dir or Path("outputs") / "logs" / f"{job.settings.name}-{job.strategy.name}" / time.strftime(
        "%Y%m%d-%H%M%S"
    )
    directory = named if options.log_dir else _unused(named)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("flag --log_dir", f"{directory} is there already", "name a new directory")
    how = Options(launcher, handed_on, directory, options.master_addr, options.master_port, options.start_timeout)

    async def go() -> int:
        with Board(list(job.hosts), directory) as board:
            return await Launch(job, how, board).run()

    return asyncio.run(go())


def _unused(directory: Path) -> Path:
    """The same path, or with a number: two launches may begin in one second."""
    candidates = [directory, *(directory.with_name(f"{directory.name}-{number}") for number in range(2, 100))]
    return next(candidate for candidate in candidates if not candidate.exists())
