"""A dress rehearsal: a few steps of the recipe's strategy with tiny shapes over all hosts, by the same launch as the run."""

import asyncio
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from ..hosts.job import Job
from .checks import CannotKnow, Hosts, Result, check, sound, unknown
from .findings import fault

GRACE = 30.0  # seconds that launch has to stop all ranks when the check is interrupted


@check("dress rehearsal", size="usual", seconds=900, alone=True)
async def rehearsal(hosts: Hosts) -> AsyncIterator[Result]:
    """Runs `launch RECIPE --rehearse` over all hosts: the recipe's strategy trains six steps of a tiny model of the same
    architecture, saves a checkpoint, is stopped, reads the checkpoint and repeats the last three steps. Threshold: it ends well:
    the repeated losses are equal, and each rank holds what the strategy's formula says (step/rehearse.py)."""
    job = hosts.wanted.job
    if job is None:
        raise CannotKnow("it needs a recipe")
    if job.settings.recipe.data.images:
        raise CannotKnow("no recipe with images is rehearsed: train recipes/tiny-vision/full.yaml on these hosts")
    if len(hosts.hello) < len(hosts.wanted.slots):
        raise CannotKnow("it needs all hosts")
    with tempfile.TemporaryDirectory(prefix="brigade-check-") as logs:
        try:
            code, said = await _launch(job, hosts, logs)
        finally:
            await hosts.ask("actions.remove", directory=str(directory(job).absolute()))
    if code == 0:
        for host in hosts.hello:
            yield sound(host, "trained, saved, resumed")
        return
    failed = re.search(r"^error: (\S+?)(?:,| \(|$)", said, re.MULTILINE)
    at_fault = failed[1] if failed and failed[1] in hosts.hello else next(iter(hosts.hello))
    for host in hosts.hello:
        if host == at_fault:
            command = " ".join(["python", *_words(job)])
            yield fault("rehearsal-failed", host, said=_verdict(said) or f"it ended with {code}", command=command)
        else:
            yield unknown(host, f"the rehearsal ended on {at_fault}")


def directory(job: Job) -> Path:
    """The output directory of the rehearsal, beside the run's own."""
    where = job.output_dir
    return where.parent / f"rehearsal-{where.name}"


def _words(job: Job) -> list[str]:
    hostfile = ["--hostfile", job.hostfile] if job.hostfile else []
    flags = [*job.flags, "--rehearse", "--output_dir", str(job.output_dir)]
    return ["-m", "brigade", "launch", job.recipe, *hostfile, "--no_check", *flags]


async def _launch(job: Job, hosts: Hosts, logs: str) -> tuple[int, str]:
    """Exit code and output of the launch. Stops it in good order when the check itself is stopped."""
    words = [sys.executable, *_words(job), "--log_dir", f"{logs}/logs"]
    words += [word for name in hosts.wanted.environment for word in ("--env", name)]  # those of check's own --env, too
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = await process.communicate()
    except BaseException:
        with suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            async with asyncio.timeout(GRACE):
                await process.wait()
        raise
    return process.returncode or 0, out.decode(errors="replace")


def _verdict(said: str) -> str:
    """The first error in what launch printed, in one line."""
    lines = said.splitlines()
    begins = next((number for number, line in enumerate(lines) if line.startswith("error: ")), None)
    if begins is None:
        return " / ".join(line.strip() for line in lines[-3:])
    return " ".join(line.strip() for line in lines[begins : begins + 4])[7:600]
