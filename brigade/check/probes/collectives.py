"""What collectives take, with torch and the backend of training. torch is imported once on each host for all of them."""

import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ...hosts import Facts

if TYPE_CHECKING:
    import torch

TIMES = 7  # of which the median counts; fewer where one takes long
PAIR_TIMES = 3  # of which the best counts: a pair that is slow is slow each time
SPENT = 0.6  # seconds at most for the repetitions of one payload
MEET = 90.0  # seconds that ranks wait for each other at first: torch is imported from slow file systems too
SETTLE, EACH = 20.0, 0.05  # seconds that an operation, or the group's start, may take then, and more for each rank
HERE, MET = "here", "met"  # what a rank says before it waits for the others, and then
GRACE = 5.0  # seconds for a rank to say that it has timed out, and for a process to end that was killed
STAGES = ("", HERE, MET)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # of _operations(), in this order

Figure = tuple[str, int, float]  # collective, bytes, seconds


@dataclass(frozen=True)
class How:
    """What all ranks of a sweep do alike.

    longest: seconds that one operation is expected to take at most; larger payloads are left out
    games: rounds of pairs of hosts, each with `per_host` ranks, that afterwards send to each other, one direction after the other
    """

    world: int
    address: str
    port: int
    interface: str
    backend: str
    payloads: list[int]
    longest: float
    per_host: int
    games: list[list[list[int]]] | None = None

    @property
    def patience(self) -> float:
        """Seconds that one operation may take, and the group's start once all ranks are there."""
        return SETTLE + EACH * self.world


def sweep(first: int, ranks: int, limit: float, **how: Any) -> Facts:
    """Time all collectives over `world` ranks, of which first, first + 1, ... (`ranks` of them) are on this host, each with
    the GPU of its number under "nccl". limit: seconds after which ranks that still run are ended; how: of How

    Returns figures: [collective, bytes, seconds] of the slowest of this host's ranks; device: what they ran on; error: why it
    ended early, or ""; ended: which of this host's ranks died or hung, and so ended the sweep for the others, or "";
    received: [number of a host, Gbit/s from it to all of this host's ranks together].
    """
    alike = How(per_host=ranks, **how)
    if ranks == 1 and alike.backend == "gloo":
        answers = [_rank(first, 0, alike)]
        ended, error = "", answers[0]["error"]
    else:
        workers = [_Worker(first + local, local, alike) for local in range(ranks)]
        ended, error = _watch(workers, limit, alike.patience)
        answers = [worker.answer for worker in workers]
    slowest = [
        [*rows[0][:2], max(row[2] for row in rows)]
        for rows in zip(*(answer["figures"] for answer in answers), strict=False)
    ]
    received = [
        [rows[0][0], sum(row[1] for row in rows)]
        for rows in zip(*(answer["received"] for answer in answers), strict=False)
    ]
    return {"figures": slowest, "device": answers[0]["device"], "error": error, "ended": ended, "received": received}


class _Worker:
    """The process of one rank. answer: of _rank(), or what is left of one that gave none; stage: the last it said; met: when that
    was MET, on this process's clock"""

    def __init__(self, rank: int, local: int, how: How) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = f"GPU {local}" if how.backend == "nccl" else f"process {local}"
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_tell_rank, args=(theirs, rank, local, how), daemon=True)
        self.process.start()
        theirs.close()
        self.answer: Facts = {"figures": [], "received": [], "device": "", "error": ""}
        self.stage, self.met, self.died = "", math.inf, False

    def hear(self) -> bool:
        """Take what it says next. Return whether it goes on."""
        try:
            said = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(GRACE)
            self.died, code = True, self.process.exitcode
            how = "is ending and does not end" if code is None else f"ended with code {code}"
            if code is not None and code < 0:
                how = f"was ended by {signal.Signals(-code).name}"
            self.fail(f"its process {how}")
            return False
        if isinstance(said, str):
            self.stage, self.met = said, time.monotonic() if said == MET else self.met
            return True
        self.answer = said
        if said["error"]:
            self.fail(said["error"])
        return False

    def fail(self, problem: str) -> None:
        self.answer["error"] = f"{self.name}: {problem}"


def _watch(workers: list[_Worker], limit: float, patience: float) -> tuple[str, str]:
    """Wait until all have answered, died, or had their time. Return which died or hung, and so ended the others, or ""; and
    that, else what the first that failed said, or "".

    A rank that dies or hangs ends the others by the time-outs of gloo and NCCL, which may end their processes too. So the first
    death counts if it came before any time-out; after one, the rank that still runs. Once one has failed, the others have
    `patience` and GRACE seconds to find out. A process that the kernel does not let go (a GPU fell off the bus) is left behind.
    """
    end, running, first = time.monotonic() + limit, {worker.pipe: worker for worker in workers}, None
    early, problem = False, f"it did not end within {limit:.0f} s"
    while running and (left := end - time.monotonic()) > 0:
        ready = wait(list(running), timeout=left)
        for pipe in [pipe for pipe in running if pipe in ready]:
            worker = running[pipe]
            if worker.hear():
                continue
            del running[pipe]
            if worker.answer["error"] and first is None:
                first, early = worker, time.monotonic() < worker.met + 0.9 * patience
                end = min(end, time.monotonic() + patience + GRACE)
                problem = f"it still ran {max(0.0, end - time.monotonic()):.0f} s after {worker.name} had failed"
    for worker in workers:
        worker.process.kill()  # those that have answered too: NCCL's destructors may hang
    killed = time.monotonic()
    for worker in workers:
        worker.process.join(max(0.0, killed + GRACE - time.monotonic()))
    for worker in running.values():
        worker.fail(problem)
    if first is not None and early:
        return first.answer["error"] if first.died else "", first.answer["error"]
    latest = max((STAGES.index(worker.stage) for worker in workers), default=0)
    late = [worker for worker in running.values() if first is not None or STAGES.index(worker.stage) < latest]
    ended = "; ".join(worker.answer["error"] for worker in late)
    failed = running.values() if first is None else [first]
    return ended, ended or next((worker.answer["error"] for worker in failed), "")


def _tell_rank(pipe: Connection, rank: int, local: int, how: How) -> None:
    pipe.send(_rank(rank, local, how, pipe.send))


def _rank(rank: int, local: int, how: How, tell: Callable[[str], None] = lambda stage: None) -> Facts:
    for name in ("GLOO_SOCKET_IFNAME",) if how.interface == "lo" else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if how.interface:
            os.environ.setdefault(name, how.interface)  # as launch does: the user's own choice goes first
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    figures: list[Figure] = []
    received: list[list[float]] = []
    told = {"figures": figures, "device": "CPU", "received": received}
    try:
        if how.backend == "nccl":
            torch.cuda.set_device(local)
            device, told["device"] = torch.device("cuda", local), torch.cuda.get_device_name(local)
        patience = timedelta(seconds=how.patience)
        store = dist.TCPStore(
            how.address, how.port, how.world, rank == 0, timedelta(seconds=MEET), wait_for_workers=False
        )
        store.set(f"rank {rank}", "here")
        tell(HERE)
        store.wait([f"rank {other}" for other in range(how.world)])
        tell(MET)
        store.set_timeout(patience)
        dist.init_process_group(how.backend, store=store, rank=rank, world_size=how.world, timeout=patience)
        for name in COLLECTIVES:
            _sweep_one(name, how, device, figures)
        if how.games:
            _play(how, divmod(rank, how.per_host), _payload(figures, how.longest, device), device, received)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # whatever torch, gloo or NCCL say
        words = " ".join(str(error).split())
        return told | {"error": f"{type(error).__name__}: {words}"[:400]}
    return told | {"error": ""}


def _payload(figures: list[Figure], longest: float, device: "torch.device") -> int:
    """The largest payload that, from each rank to all others, took the slowest rank a quarter of `longest` at most."""
    import torch
    import torch.distributed as dist

    own = [[payload, seconds] for name, payload, seconds in figures if name == "all_to_all"]
    times = torch.tensor([seconds for _, seconds in own], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    short = [payload for (payload, _), seconds in zip(own, times.tolist(), strict=True) if seconds <= longest / 4]
    return int(max(short, default=own[0][0]))


def _play(how: How, place: tuple[int, int], payload: int, device: "torch.device", received: list[list[float]]) -> None:
    """Let each rank of a host send to the rank of the same number on the host's partner, all pairs of a round at the same time.
    Adds [partner, Gbit/s] to `received`, the best of a few times. place: (host, number of the rank on it)"""
    import torch
    import torch.distributed as dist

    host, local = place
    buffer = torch.ones(payload // 4, device=device)
    for pairs in how.games or []:
        partner = next((a + b - host for a, b in pairs if host in (a, b)), None)
        for lower_sends in (True, False):
            dist.barrier()
            if partner is None:
                continue
            sends, other = (host < partner) == lower_sends, partner * how.per_host + local
            move = (lambda: dist.send(buffer, other)) if sends else (lambda: dist.recv(buffer, other))  # noqa: B023
            _timed(move, device)  # the first one connects
            best = min(_timed(move, device) for _ in range(PAIR_TIMES))
            if not sends:
                received.append([partner, payload * 8e-9 / best])


def _sweep_one(name: str, how: How, device: "torch.device", figures: list[Figure]) -> None:
    """Add one collective's rows to `figures`. All ranks take the same decisions: by the slowest one's time."""
    import torch
    import torch.distributed as dist

    def slowest(seconds: float) -> float:
        found = torch.tensor([seconds], device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found.item())

    before: tuple[int, float] | None = None
    for payload in how.payloads:
        if before and before[1] * payload / before[0] > how.longest:
            break
        once = _operations(payload, how.world, device)[name]
        once()  # the first one connects
        first = slowest(_timed(once, device))
        times = [_timed(once, device) for _ in range(max(1, min(TIMES, int(SPENT / first))))]
        median = statistics.median(times)
        before = (payload, slowest(median))
        figures.append((name, payload, median))


def _timed(once: Callable[[], object], device: "torch.device") -> float:
    import torch

    began = time.perf_counter()
    once()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _operations(payload: int, world: int, device: "torch.device") -> dict[str, Callable[[], object]]:
    """Each collective over `payload` bytes of fp32, rounded to parts of equal size: what its larger end holds on one rank."""
    import torch
    import torch.distributed as dist

    whole = torch.ones(max(1, payload // 4 // world) * world, device=device)
    part, other = whole[: len(whole) // world].clone(), torch.empty_like(whole)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),  # its sum grows, and nobody reads it
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
    }
