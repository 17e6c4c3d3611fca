"""Launches that go on without a terminal (`launch --detach`), which launches there are, and how to follow one (`attach`).

Of each launch the cache keeps a record: {"output", "logs", "host", "pid", "started", "code" once it has ended}.
"""

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..data.cache import cache_directory
from ..errors import UserError
from ..run.directory import now, write_whole
from .status_and_logs import LAUNCH_LOG

TAIL = 2**16  # bytes that `attach` shows of what was there before


def run(work: Callable[[], int], logs: Path, output: Path, detach: bool) -> int:
    """Do the work of a launch under a record; with `detach` in a process of its own, while this one says how to follow it."""
    output, logs = output.resolve(), logs.resolve()
    record: dict[str, Any] = {"output": str(output), "logs": str(logs), "host": socket.gethostname(), "started": now()}
    path = _path(output)
    if detach:
        logs.mkdir(0o700, parents=True, exist_ok=True)
        if child := os.fork():
            words = f"{sys.executable} -m brigade"
            print(f"launch goes on as process {child} on {record['host']}; what it prints is in {logs / LAUNCH_LOG}.")
            print(f"Follow it (Ctrl-C leaves it running): {words} attach {output}")
            print(f"How far it is: {words} status {output}\nStop it, with a checkpoint: kill {child}", flush=True)
            return 0
        _leave_the_terminal(logs / LAUNCH_LOG)
    with suppress(OSError):  # without a record it can be followed by its logs alone
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(record | {"pid": os.getpid()}))
    code = 1
    try:
        code = work()
    except UserError as error:
        code = 2
        if not detach:
            raise
        print(error, file=sys.stderr)
    finally:
        with suppress(OSError, ValueError):  # a later launch may have its own record by now
            if json.loads(path.read_text()).get("pid") == os.getpid():
                write_whole(path, json.dumps(record | {"pid": os.getpid(), "code": code}))
    return code


def _leave_the_terminal(log: Path) -> None:
    """From here on this process has no terminal and belongs to no shell; what it prints goes to the log."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in ((0, nothing), (1, file), (2, file)):
        os.dup2(source, number)
    for source in (nothing, file):
        os.close(source)


def find(named: Path) -> dict[str, Any]:
    """The record of the last launch with this output or log directory. Raises UserError where there is none."""
    wanted = str(named.resolve())
    for path in sorted((cache_directory() / "launches").glob("*.json")):
        with suppress(OSError, ValueError):
            record = json.loads(path.read_text())
            if wanted in (record["output"], record["logs"]):
                return record
    problem = "no launch of it is known here"
    raise UserError(str(named), problem, "name the output or log directory of a `launch`, on the host that launched")


def alive(record: dict[str, Any]) -> bool:
    """Whether a launch still goes on, as far as it can be seen from this host."""
    if "code" in record:
        return False
    return record["host"] != socket.gethostname() or Path(f"/proc/{record['pid']}").exists()


def follow(record: dict[str, Any], seconds: float = 0.5) -> int:
    """Print what a launch has printed lately, and go on until it ends; returns its exit code. Of one with a terminal of its own
    it prints rank 0's output."""
    logs, position, shown = Path(record["logs"]), -1, None
    while True:
        going = alive(record)
        if log := _log(logs):
            with log.open("rb") as file:
                number, size = os.fstat(file.fileno()).st_ino, os.fstat(file.fileno()).st_size
                if number != shown or size < position:  # a new part was begun
                    position = max(0, size - TAIL) if shown is None else 0
                    shown = number
                file.seek(position)
                text = file.read()
                position += len(text)
            sys.stdout.write(text.decode(errors="replace"))
            sys.stdout.flush()
        if not going:
            return int(record.get("code", 1))
        time.sleep(seconds)
        with suppress(UserError, OSError, ValueError):
            record = json.loads(_path(Path(record["output"])).read_text())


def _log(logs: Path) -> Path | None:
    newest = sorted(logs.rglob("rank-0*.log"), key=lambda path: path.stat().st_mtime)
    whole = [path for path in newest if not path.stem.endswith((".first", ".before"))]
    return logs / LAUNCH_LOG if (logs / LAUNCH_LOG).exists() else whole[-1] if whole else None


def _path(output: Path) -> Path:
    return cache_directory() / "launches" / f"{hashlib.sha256(str(output).encode()).hexdigest()[:16]}.json"
