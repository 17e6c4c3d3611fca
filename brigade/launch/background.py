"""Launches that go on without a terminal (`launch --detach`), and how to follow one (`attach`)."""

import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..errors import UserError
from ..errors.tables import Fields
from ..hosts import launches
from ..hosts.job import Job
from ..train.host import files
from ..train.host.cache import private_folder
from ..train.recipe.files import LAUNCHED
from ..train.run.versions import now
from .status_and_logs import LAUNCH_LOG

TAIL = 2**16  # bytes that `attach` shows of what was there before


def run(work: Callable[[], int], logs: Path, job: Job, detach: bool) -> int:
    """Do the work of a launch under a record; with `detach` in a process of its own, while this one says how to follow it. All
    its attempts, and an elastic run's replicas, run what the job's files say now."""
    output, logs, texts = job.output_dir.resolve(), logs.resolve(), job.texts()
    record: Fields = {"output": str(output), "logs": str(logs), "host": socket.gethostname(), "started": now()}
    record["hosts"] = list(job.hosts)
    path = launches.path_of(output)
    for other in launches.records():
        if other["host"] == record["host"] and other["output"] == record["output"] and launches.alive(other):
            problem = f"a launch is at work there already: process {other['pid']} on {other['host']}, since {other['started']}"
            cure = f"follow it (`python -m brigade attach {output}`), or let it save and stop (`touch {output}/stop`)"
            raise UserError(str(output), problem, cure)
    if detach:
        logs.mkdir(0o700, parents=True, exist_ok=True)
        child = os.fork()
        if child:
            words = f"{sys.executable} -m brigade"
            print(f"launch goes on as process {child} on {record['host']}; what it prints is in {logs / LAUNCH_LOG}.")
            print(f"Follow it (Ctrl-C leaves it running): {words} attach {output}")
            print(f"How far it is: {words} status {output}\nStop it, with a checkpoint: kill {child}", flush=True)
            return 0
        _leave_the_terminal(logs / LAUNCH_LOG)
    with suppress(OSError):  # without a record it can still be followed, by its logs
        private_folder(path.parent)
        record |= {"pid": os.getpid(), "born": launches.born(os.getpid())}
        files.write(path, json.dumps(record))
    code = 1
    try:
        with tempfile.TemporaryDirectory(prefix="brigade-") as folder:
            os.environ[LAUNCHED] = str(Path(folder) / "launched.json")
            files.write(Path(os.environ[LAUNCHED]), json.dumps(texts), secret=True)
            code = work()
    except UserError as error:
        code = 2
        if not detach:
            raise
        print(error, file=sys.stderr)
    finally:
        os.environ.pop(LAUNCHED, None)
        with suppress(OSError, ValueError, RecursionError):  # a later launch may have its own record by now
            if json.loads(files.read(path)).get("pid") == os.getpid():
                files.write(path, json.dumps(record | {"code": code}))
    return code


def _leave_the_terminal(log: Path) -> None:
    """Leave the terminal and the shell; what this process prints from here on goes to the log."""
    os.setsid()
    with files.append(log, secret=True) as file, Path(os.devnull).open("rb") as nothing:
        for number, source in enumerate((nothing, file, file)):
            os.dup2(source.fileno(), number)


def find(named: Path) -> Fields:
    """The record of the launch with this output or log directory that goes on, else of the last one. Raises UserError where
    there is none."""
    wanted = str(named.resolve())
    found = [record for record in launches.records() if wanted in (record["output"], record["logs"])]
    if found:
        return max(found, key=lambda record: (launches.alive(record), record["started"]))
    problem = "no launch of it is known here"
    raise UserError(str(named), problem, "name the output or log directory of a `launch`, on the host that launched")


def follow(record: Fields, seconds: float = 0.5) -> int:
    """Print what a launch has printed lately, and go on until it ends; returns its exit code. Of one with a terminal of its own
    it prints rank 0's output. Raises UserError for one of another host that has not ended: nobody here sees its end."""
    if record["host"] != socket.gethostname() and "code" not in record:
        problem = f"its launch was started on {record['host']}"
        raise UserError(record["output"], problem, f"attach there; or read its logs: {record['logs']}")
    logs, position, shown = Path(record["logs"]), -1, None
    while True:
        going = launches.alive(record)
        log = _log(logs)
        if log:
            with files.opened(log) as file:
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
            if "code" not in record:
                print(f"The launch (process {record['pid']}) was killed. The same command goes on.", file=sys.stderr)
            return int(record.get("code", 1))
        time.sleep(seconds)
        with suppress(UserError, OSError, ValueError, RecursionError):
            record = json.loads(files.read(launches.path_of(Path(record["output"]))))


def _log(logs: Path) -> Path | None:
    newest = sorted(logs.rglob("rank-0*.log"), key=lambda path: path.stat().st_mtime)
    # Of many ranks the first one's is rank-00-HOST.log, beside rank-01-HOST.log.
    whole = [
        path for path in newest if re.match("rank-0+-", path.name) and not path.stem.endswith((".first", ".before"))
    ]
    return logs / LAUNCH_LOG if (logs / LAUNCH_LOG).exists() else whole[-1] if whole else None
