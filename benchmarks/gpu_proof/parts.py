"""The parts of the proof, and how one runs: a process with a time limit, whose rows count as they come."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from brigade.errors.versions import ANYWAY

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = (
    "gpu-proof-work"  # in the output directory, which may be one that has folders of a user's: only this one is emptied
)
LEAST = 40  # seconds that a part needs to be begun at all
GRACE = 5.0  # seconds from SIGTERM to SIGKILL
ENDING = 20.0  # seconds in which a part ends what its time was too short for (twice GRACE), and says what that was
NOT_BEGUN = "not begun: the time was over"
MARK = "BRIGADE_GPU_PROOF"  # an environment variable


class Part(NamedTuple):
    """A subject of the proof: the module benchmarks/gpu_proof/NAME.py, with so many seconds where all parts run in 20 minutes."""

    name: str
    about: str
    limit: float


# In the order of their worth: who has less than 20 minutes leaves the last ones out.
PARTS = (
    Part("machine", "GPUs, driver and libraries", 90),
    Part("strategies", "every strategy and method against one process, in each precision", 330),
    Part("kernels", "every kernel against eager attention in fp32", 240),
    Part("shapes", "tokens per second, MFU, and memory against the plan", 420),
    Part("checkpoints", "seconds of a checkpoint, and a run that continues from it", 180),
    Part("waits", "how often the host waits for the device in a step", 150),
)


def seconds_of(parts: Sequence[Part], seconds: float) -> dict[str, float]:
    """Return each part's limit, by name, where these parts share so many seconds: its own at least, and more where few parts run.

    The sum may exceed `seconds`, for not every part takes all that it may.
    """
    longer = max(1.0, seconds / sum(part.limit for part in parts))
    return {part.name: part.limit * longer for part in parts}


def run_part(part: Part, python: str, output: Path, limit: float, small: bool, gpus: int) -> dict[str, Any]:
    """Run a part within so many seconds.

    Returns {"rows", "seconds", "command", "fell_short", "left_out"}; a row is {"what", "figures", "fell_short", "left_out",
    "command"}. fell_short: why it is not as it should be; "" where it is
    left_out: why it was not tried, or not to its end, which is no failure: no time, no disk, or no memory by the plan
    """
    folder, rows = output / WORK / part.name, output / f"{part.name}.jsonl"
    rows.unlink(missing_ok=True)
    words = ["-m", f"benchmarks.gpu_proof.{part.name}", "--rows", str(rows), "--work", str(folder)]
    words += ["--gpus", str(gpus), "--longer", f"{max(1.0, limit / part.limit):.2f}", *(["--small"] if small else [])]
    result: dict[str, Any] = {
        "rows": [],
        "seconds": 0.0,
        "command": again(part.name, small),
        "fell_short": "",
        "left_out": "",
    }
    if limit < LEAST:
        return result | {"left_out": NOT_BEGUN}
    shutil.rmtree(folder, ignore_errors=True)  # what an earlier proof has left there is no result of this one
    folder.mkdir(parents=True)
    began, log = time.monotonic(), output / f"{part.name}.log"
    with log.open("w") as out:
        # A reading of the clock that all processes share: imports take a part of the time, too.
        words += ["--until", str(began + limit - ENDING)]
        process, mark = start([python, *words], out, HF_HUB_OFFLINE="1", PYTHONPATH=path_with(str(REPOSITORY)))
        try:
            code = process.wait(timeout=limit)
            result["fell_short"] = f"ended with exit code {code}: {why_it_ended(log)}" if code else ""
        except subprocess.TimeoutExpired:
            result["fell_short"] = f"stopped after {limit:.0f} seconds; its last line: {last_line(log)}"
        finally:
            end(mark)
    result["rows"] = read_rows(rows)
    if not result["rows"] and not result["fell_short"]:
        result["fell_short"] = f"left no result: {why_it_ended(log)}"
    return result | {"seconds": round(time.monotonic() - began, 1)}


def again(part: str, small: bool) -> str:
    """Return the command that runs one part again."""
    return f"python3 -m benchmarks.gpu_proof --small --only {part}" if small else f"make test-gpu ONLY={part}"


def start(command: list[str], log: Any, **variables: str) -> tuple["subprocess.Popen[Any]", str]:
    """Start a command that writes into an open file. Returns it, and the mark by which end() finds all that it starts."""
    mark = os.environ.get(MARK, "") + f"{uuid.uuid4().hex}/"
    environment = os.environ | variables | {MARK: mark, ANYWAY: "1"}  # which versions are here, the report says
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    return process, mark


def end(mark: str) -> None:
    """End a command and all that it has started. torchrun's ranks have sessions of their own, and one that hangs in NCCL ignores
    SIGTERM."""
    for signum, patience in (signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0):
        deadline = time.monotonic() + patience
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Return the processes that have a mark in their environment; those that have ended have none."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(wanted) for variable in variables):
                found.append(int(entry.name))
    return found


def path_with(first: str) -> str:
    """Return PYTHONPATH with this folder before what it names already."""
    return os.pathsep.join(filter(None, (first, os.environ.get("PYTHONPATH"))))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole rows of a part; the last line of one that was killed may be a piece."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def last_line(log: Path) -> str:
    """Return the last line of a process that was stopped."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines[-1] if lines else "it wrote nothing")[:300]


def why_it_ended(log: Path) -> str:
    """Return why a process ended: its last error, or what it refused, or its last line. What torchrun adds is left out."""
    text = log.read_text(errors="replace")
    own = re.split(r"^.*torch[./]distributed[./]elastic", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.strip() for line in (own.strip() or text).splitlines() if line.strip()]
    errors = [
        line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) and " rank " not in line
    ]
    refused = [" ".join(told.split()) for told in re.findall(r"^error\b.*\n(?:  .*(?:\n|$))+", own, re.MULTILINE)]
    return ((errors or refused or lines)[-1] if lines else "it wrote nothing")[:300]
