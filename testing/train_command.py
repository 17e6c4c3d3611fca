"""train.py as a command under each launcher, in processes of its own: how it ended, what its ranks said, what it left behind."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .ranks import REPOSITORY

FAULTS = REPOSITORY / "tests/ranks/bad_input"
BIN = Path(sys.executable).parent
HOST = socket.gethostname()
MESSAGE_LINES = 4
GOOD = ["--dataset_name=", "--train_file", "good.jsonl", "--max_length", "32", "--report_page", "false"]


@dataclass
class Ended:
    """How a command ended. told: what its ranks, not their launcher, wrote to stderr; seconds: it took; at: when."""

    code: int
    stdout: str
    stderr: str
    told: list[str]
    seconds: float
    at: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launched(launcher: str) -> list[str]:
    """The words before `train.py`, for two ranks on this host."""
    ddp = REPOSITORY / "accelerate_configs" / "ddp_1x2.yaml"
    return {
        "python": [sys.executable],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2"],
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())],
        "accelerate": [
            str(BIN / "accelerate"),
            *f"launch --config_file {ddp} --main_process_port {free_port()}".split(),
        ],
    }[launcher]


@contextmanager
def nothing_left(patience: float) -> Iterator[str]:
    """Yield a mark for BRIGADE_TEST_MARK of a command's environment. Fails where the command leaves a process behind, and ends
    such processes in any case."""
    mark = uuid.uuid4().hex
    try:
        yield mark
        left = surviving(mark, patience)
        assert not left, f"left behind: {left}"
    finally:
        for survivor in marked(mark):
            survivor.kill()


def train(launcher: str, folder: Path, *flags: str, fault: str = "") -> Ended:
    """Run train.py in `folder`; fails when it leaves a process behind."""
    variables = {"BRIGADE_TEST_FAULT": fault, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FAULTS)}
    variables |= {"PATH": f"{BIN}:{os.environ['PATH']}"}
    command = [*launched(launcher), str(REPOSITORY / "train.py"), "--output_dir", str(folder / "run"), *flags]
    with nothing_left(patience=2) as mark:
        environment = os.environ | variables | {"BRIGADE_TEST_MARK": mark}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=environment, **pipes)
        stdout, stderr = process.communicate(timeout=300)
        seconds, at = time.monotonic() - began, time.time()
    return Ended(process.returncode, stdout, stderr, ranks_part(stderr), seconds, at)


def ranks_part(stderr: str) -> list[str]:
    """The lines before those of torchrun's and accelerate's own, and without what a busy machine adds: that a rank waits."""
    launcher = re.compile(r"^[WE]\d{4} .*torch/distributed/(elastic|run)")
    lines = [line for line in stderr.rstrip().splitlines() if " is waiting for " not in line]
    return lines[: next((n for n, line in enumerate(lines) if launcher.match(line)), len(lines))]


def marked(mark: str) -> list[psutil.Process]:
    """The running processes that descend from a command that had BRIGADE_TEST_MARK, whatever session they moved to."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BRIGADE_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def surviving(mark: str, patience: float) -> list[str]:
    deadline = time.monotonic() + patience
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [str(process) for process in left]


def assert_one_message(ended: Ended, launcher: str, rank: int, *words: str) -> None:
    """The ranks wrote the message of one of them to stderr and nothing else anywhere; the exit code fits."""
    told = "\n".join(ended.told)
    assert ended.code == (1 if launcher in ("torchrun", "accelerate") else 2), ended.stderr
    assert len(ended.told) <= MESSAGE_LINES, told
    size = 1 if launcher == "python" else 2
    assert ended.told[0].startswith(f"error on {HOST}, rank {rank} of {size}: "), told
    assert ended.told[-1].startswith("  cure: "), told
    assert ended.stderr.count("error on ") == ended.stderr.count("cure: ") == 1, ended.stderr
    for word in words:
        assert word in told
    aside = [line for line in ended.stdout.splitlines() if not re.match(r"^\[.*\] \[(INFO|WARNING|ERROR)\] \[", line)]
    assert not aside, ended.stdout
    if launcher in ("torchrun", "accelerate"):  # their last words quote ours
        root = ended.stderr.partition("Root Cause")[2]
        assert f"rank      : {rank} " in root and "(reported above)" in root and words[0] in root, root


def chats(path: Path, count: int = 40) -> Path:
    lines = []
    for n in range(count):
        answer = {"role": "assistant", "content": f"{n + 1} follows {n}."}
        lines.append(json.dumps({"messages": [{"role": "user", "content": f"What follows {n}?"}, answer]}) + "\n")
    path.write_text("".join(lines))
    return path


def broken(path: Path) -> Path:
    lines = chats(path).read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:30], *lines[3:]]))
    return path
