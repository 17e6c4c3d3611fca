"""Prove the paths that a host has, and time those that agree (docs/gpu.md).

Paths are tried in a process of their own (worker.py), which is started again without the path that ended it.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from typing import IO

from ..train.recipe.files import REPOSITORY
from ..train.recipe.settings import Settings
from . import models, paths, proofs
from .judging import answered, judge, may_be_timed, taken_by_auto, tried_with_another, unjudged
from .paths import ABSENT, ATTENTION, FAILED, OPTIMIZER, PROVEN, SLOWER, WITH_ATTENTION, Row

QUICK = {"seconds": 15.0, "path": 8.0, "rounds": 5}  # for a first run, which waits for the proof
READY = 180.0  # seconds for a worker's imports, on a file system that all hosts share
FULL = {"seconds": 1200.0, "path": 180.0, "rounds": 20}  # flex attention and compiled layers wait for a compiler
NOT_FOR_A_CHILD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def shapes_of(settings: Settings) -> Row:
    """The parts of a recipe that decide a kernel's speed, beside the model: {"dtype", "max_length", "micro_batch", "packing"}."""
    training, data = settings.recipe.training, settings.recipe.data
    micro = training.per_device_train_batch_size
    return {
        "dtype": "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32",
        "max_length": data.max_length,
        "micro_batch": 1 if micro == "auto" else micro,  # one row is enough to see which is faster
        "packing": data.packing,
    }


def on_this_host(
    config: Row,
    shapes: Row,
    quick: bool = False,
    rows: dict[str, Row] | None = None,
    index: int = 0,
    limits: Row | None = None,
    known: Row | None = None,
    kinds: Collection[str] = (ATTENTION,),
    attention: str = "auto",
) -> Row:
    """Prove and time all paths on one device of this host. Nothing is written; proofs.write() does that.

    config: the text part of the model's config.json (models.as_json of a config object); shapes: as from shapes_of()
    quick: only what `auto` chooses among, of these kinds, within QUICK["seconds"]; rows: another table; index: of the GPU
    limits: instead of QUICK or FULL: seconds in all, seconds for one call of a path, rounds of timing
    known: an earlier proof of this key, whose answers hold; what ran out of time in it is tried again
    attention: the recipe's, with which sets of kernels are tried; auto: the fastest that agrees

    Returns, for JSON: {"key": what it holds for, "quick", "seconds", "made": seconds since 1970, "fastest": {kind: path},
    "paths": {path: {"kind", "status", "why", "errors", "allowed", "form", "ms", "forward_only", "timeouts", "attention"}}}, where
    a path has only those keys that apply.
    status: proven (agrees, and none of its kind is faster), slower (agrees, but another is faster), wrong (its errors are beyond
    what is allowed), failed (it crashed, hung or raised), absent (this host cannot run it)
    ms: milliseconds of a forward and backward pass, or of an optimizer's step; None: not timed
    timeouts: how often a path ran out of time that failed only for that; attention: with which one a set was tried
    """
    began = time.monotonic()
    device = proofs.device(index)
    rows = {
        name: row
        for name, row in (rows or paths.table()).items()
        if not quick or (row.get("quick") and row["kind"] in kinds)
    }
    results: dict[str, Row] = {}
    no_model = models.unprovable(config)
    for name, row in rows.items():
        why = paths.lacking(row, device, shapes["dtype"])
        if row["kind"] != OPTIMIZER:
            why = why or no_model or models.unsupported(config, name, row)
        earlier = known["paths"].get(name, {}) if known else {}
        if why:
            results[name] = {"kind": row["kind"], "status": ABSENT, "why": why}
        elif answered(earlier):
            results[name] = unjudged(earlier)
        else:
            results[name] = {"kind": row["kind"]}
    job: Row = {
        "config": config,
        "shapes": shapes,
        "rows": rows,
        "device": f"cuda:{index}" if device["type"] == "cuda" else "cpu",
    }
    limits = limits or (QUICK if quick else FULL)
    singles = {name: row for name, row in results.items() if row["kind"] not in WITH_ATTENTION}
    clock = Clock(limits["seconds"])
    _drive(job, singles, limits, clock)
    if len(singles) < len(results):
        job["attention"] = taken_by_auto(rows, singles) if attention == "auto" else attention
        _drive(job, _with_attention(rows, results, job["attention"]), limits, clock)
    for name, row in results.items():
        if "timeouts" in row and known:
            row["timeouts"] += known["paths"].get(name, {}).get("timeouts", 0)
    return {
        "key": proofs.key(config, shapes, device),
        "quick": quick,
        "seconds": round(time.monotonic() - began, 1),
        "made": int(time.time()),
        "fastest": judge(rows, results),
        "paths": results,
    }


def _with_attention(rows: dict[str, Row], results: dict[str, Row], attention: str) -> dict[str, Row]:
    """Return the paths to be tried with this attention. A path of which a part is not proven is marked absent, and an answer with
    another attention counts no more."""
    for name, row in results.items():
        if tried_with_another(row, attention):
            results[name] = {"kind": row["kind"]}
    sets = {name: row for name, row in results.items() if row["kind"] in WITH_ATTENTION}
    for name, row in sets.items():
        missing = [part for part in rows[name]["uses"] if results.get(part, {}).get("status") not in (PROVEN, SLOWER)]
        if missing and "status" not in row:
            row |= {"status": ABSENT, "why": f"{missing[0]} is not proven here"}
        row.setdefault("attention", attention)
    return sets


def proven_times(proof: Row, kind: str = ATTENTION) -> dict[str, float]:
    """{path: milliseconds} of paths that agree and `auto` may take, in the table's order; infinite where one was not timed."""
    rows = paths.table()
    return {
        name: row["ms"] if row.get("ms") is not None else float("inf")
        for name, row in proof["paths"].items()
        if row["kind"] == kind
        and row["status"] in (PROVEN, SLOWER)
        and may_be_timed(row)
        and rows.get(name, {}).get("auto")
    }


# ---- the process in which it happens -----------------------------------------------------------------------------------
class Clock:
    """What is left of a proof's seconds. They pass while a worker tries paths: its imports may take as long again."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.runs_since = seconds, 0.0

    def start(self) -> None:
        self.runs_since = time.monotonic()

    def stop(self) -> None:
        self.seconds, self.runs_since = self.left, 0.0

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.runs_since if self.runs_since else 0.0)


def _drive(job: Row, results: dict[str, Row], limits: Row, clock: Clock) -> None:
    """Start workers until every path has an answer or time is up."""
    for _ in range(2 * len(results) + 2):  # each ends one path at least
        if clock.left <= 0:
            break
        todo = [name for name, row in results.items() if "status" not in row]
        agreed = [name for name, row in results.items() if row.get("status") == PROVEN and may_be_timed(row)]
        if not todo and not agreed:
            break
        if _work(job | {"prove": todo, "time": agreed, "rounds": limits["rounds"]}, results, limits["path"], clock):
            break
    for row in results.values():
        if "status" not in row:
            _timed_out(row, f"not reached within {limits['seconds']:.0f} s")


def _timed_out(row: Row, why: str) -> None:
    row |= {"status": FAILED, "why": why, "ms": None, "timeouts": 1}


def _work(job: Row, results: dict[str, Row], patience: float, clock: Clock) -> bool:
    """Run one worker until it ends or has to be ended. Returns whether nothing is left to do."""
    began = time.monotonic()
    environment = {key: value for key, value in os.environ.items() if key not in NOT_FOR_A_CHILD}
    worker = subprocess.Popen(
        [sys.executable, "-m", "brigade.kernels.worker"],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    events: queue.Queue[Row | None] = queue.Queue()
    stderr: list[str] = []
    threads = [threading.Thread(target=_listen, args=(worker.stdout, events), daemon=True)]
    threads.append(threading.Thread(target=lambda: stderr.extend(worker.stderr or []), daemon=True))
    for thread in threads:
        thread.start()
    current, ready = None, False
    try:
        assert worker.stdin
        try:
            worker.stdin.write(json.dumps(job))
            worker.stdin.close()
        except BrokenPipeError:
            pass  # it is gone, and its last words tell why
        while True:
            left = clock.left if ready else READY - (time.monotonic() - began)
            try:
                event = events.get(timeout=max(0.0, min(left, patience) if ready else left))
            except queue.Empty:
                if not ready:
                    _not_started(results, f"it was not ready within {READY:.0f} s")
                    return True  # the next one would keep all ranks waiting as long
                if current and left > 0:
                    _timed_out(results[current], f"no answer within {min(left, patience):.0f} s")
                return left <= 0
            if event is None:
                break
            if "ready" in event:
                ready = True
                clock.start()
            if "end" in event:
                return True
            if "begin" in event:
                current = event["begin"]
            elif "path" in event:
                current = None
                results[event["path"]] |= {key: value for key, value in event.items() if key not in ("path", "stage")}
                if results[event["path"]]["status"] == FAILED:
                    results[event["path"]].pop("ms", None)
    finally:
        clock.stop()
        worker.kill()
        worker.wait()
        for thread in threads:
            thread.join()
    last = next((line.strip() for line in reversed(stderr) if line.strip()), "")[:160]
    if current:  # it died in the middle of it
        code = worker.returncode
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        results[current] |= {
            "status": FAILED,
            "why": f"the process ended {how}" + (f": {last}" if last else ""),
            "ms": None,
        }
        return False
    if not ready:  # no path's fault: the next worker would end in the same way
        _not_started(results, last)
        return True
    return False


def _not_started(results: dict[str, Row], why: str) -> None:
    for row in results.values():
        if "status" not in row:
            row |= {"status": FAILED, "why": f"the process that tries it does not start: {why}"}


def _listen(stream: IO[str], events: "queue.Queue[Row | None]") -> None:
    for line in stream:
        try:
            events.put(json.loads(line))
        except ValueError:
            continue
    events.put(None)
