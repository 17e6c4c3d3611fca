"""Runs of trainers: a job for each question, in the trainer's own environment, all of one number of ranks one after the other."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import REPOSITORY
from testing.train_command import free_port

from . import materials
from .questions import HERE, Question

Result = dict[str, Any]
START, EACH = 60, 30  # seconds that a process may take, and each of its jobs


class Peer(NamedTuple):
    """A trainer. requirements: a name of requirements/, None where it runs in this environment; only: the questions that are put
    to it, where not all are"""

    name: str
    title: str
    requirements: str | None = None
    only: tuple[str, ...] = ()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("brigade", "Brigade"),
        Peer("transformers", "Transformers", "trl"),
        Peer("trl", "TRL", "trl"),
        Peer("llamafactory", "LLaMA-Factory", "llamafactory"),
        Peer("ms_swift", "ms-swift", "ms_swift"),
        Peer("axolotl", "axolotl", "axolotl"),
        Peer("unsloth", "Unsloth", "unsloth"),
        Peer("torchtune", "torchtune", "torchtune"),
        Peer("litgpt", "LitGPT", "litgpt"),
        Peer("xtuner", "XTuner", "xtuner"),
        Peer("automodel", "NeMo Automodel", "automodel"),
        Peer("deepspeed_0_18", "DeepSpeed 0.18.2", "deepspeed_0_18", ("zero2", "zero3")),
    )
}


def python_of(peer: Peer, environments: Path | None) -> str | None:
    """Return the Python that has a peer, or None where its environment is not there."""
    if peer.requirements is None:
        return sys.executable
    path = (environments or Path("missing")) / peer.requirements / "bin/python"
    return str(path) if path.exists() else None


def install(peer: Peer, environments: Path) -> None:
    """Make a peer's environment. Raises subprocess.CalledProcessError where pip fails."""
    folder = environments / str(peer.requirements)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = HERE / "requirements" / f"{peer.requirements}.txt"
    subprocess.run([str(folder / "bin/pip"), "install", "--no-deps", "-r", str(wanted)], check=True)


def job_of(question: Question, peer: Peer, folder: Path) -> Result:
    """Write what a question needs below `folder`, and return its job for a peer."""
    model, file = materials.model_of(question, folder), materials.write_rows(question, folder)
    return question._asdict() | {
        "question": question.name,
        "learning_rate": question.learning_rate,
        "model_path": str(model),
        "file": str(file),
        "held_out": str(file.with_suffix(".heldout.jsonl")),
        "tokens": str(materials.write_tokens(question, model, file)),
        "output": str(folder / peer.name / question.name),
        "result": str(folder / peer.name / f"{question.name}.result"),
    }


def run(peer: Peer, questions: Iterable[Question], folder: Path, python: str) -> None:
    """Let a peer answer questions. Those that it dies of leave {"failed"}."""
    jobs = {question: job_of(question, peer, folder) for question in questions}
    (folder / peer.name).mkdir(exist_ok=True)
    for job in jobs.values():
        shutil.rmtree(job["output"], ignore_errors=True)
        for path in (*_files(job), *_files(job, ".died.json")):
            path.unlink(missing_ok=True)
    # Ranks are new for each question: engines leave traces.
    groups = [[question for question in jobs if question.ranks == 1], *([one] for one in jobs if one.ranks > 1)]
    for group in filter(None, groups):
        _start(peer, [jobs[question] for question in group], folder, python)


def _start(peer: Peer, jobs: list[Result], folder: Path, python: str) -> None:
    """Run jobs. What a process dies of has failed, and the next ones are started again; one that is to die is continued."""
    while jobs:
        file = folder / peer.name / "jobs.json"
        file.write_text(json.dumps(jobs))
        ranks = jobs[0]["ranks"]
        module = ["-m", "benchmarks.court.peers", peer.name, str(file)]
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
        command = [python, *module] if ranks == 1 else [python, *launcher, *module]
        log = folder / peer.name / f"{jobs[0]['question']}.log"
        # With ACCELERATE_USE_CPU Accelerate makes DDP of ZeRO, without a word.
        on_cpu = {} if jobs[0]["strategy"].startswith("zero") else {"ACCELERATE_USE_CPU": "true"}
        _run(command, log, START + EACH * len(jobs), on_cpu)
        jobs = [job for job in jobs if not has_answered(job)]
        if not jobs:
            return
        first = jobs[0]
        if any(path.exists() for path in _files(first, ".died.json")) and not first.get("again"):
            first["again"] = True
            continue
        words = log.read_text(errors="replace").strip().splitlines()
        for path in _files(first):
            if not path.exists():
                path.write_text(json.dumps({"failed": "\n".join(words[-3:]) or "it ended without a word"}))
        jobs = jobs[1:]


def _run(command: list[str], log: Path, timeout: float, more: dict[str, str]) -> None:
    named = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"} | more
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=os.environ | named, stdout=out, stderr=out, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            out.write(f"\nkilled after {timeout:.0f} s\n")
        finally:
            # torchrun's ranks have groups of their own, which it ends where it is asked to end.
            for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(patience)
            process.wait()


def _files(job: Result, suffix: str = ".json") -> list[Path]:
    return [Path(f"{job['result']}.{rank}{suffix}") for rank in range(job["ranks"])]


def has_answered(job: Result) -> bool:
    return all(path.exists() for path in _files(job))


def results_of(job: Result) -> list[Result]:
    return [json.loads(path.read_text()) for path in _files(job)]
