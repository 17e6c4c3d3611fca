"""What collectives take, with torch and the backend of training. torch is imported once on each host for all of them."""

import os
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

TIMES = 7  # of which the median counts; fewer where one takes long
PAIR_TIMES = 3  # of which the best counts: a pair that is slow is slow each time
SPENT = 0.6  # seconds at most for the repetitions of one payload
MEET = 90.0  # seconds that ranks wait for each other at first: torch is imported from slow file systems too
SETTLE, EACH = 20.0, 0.05  # seconds that an operation, or the group's start, may take then, and more for each rank


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


def sweep(first: int, ranks: int, **how: Any) -> dict[str, Any]:
    """Time all collectives over `world` ranks, of which first, first + 1, ... (`ranks` of them) are on this host, each with
    the GPU of its number under "nccl". how: of How

    Returns figures: [collective, bytes, seconds] of the slowest of this host's ranks; device: what they ran on; error: why it
    ended early, or ""; received: [number of a host, Gbit/s from it to all of this host's ranks together].
    """
    alike = How(per_host=ranks, **how)
    if ranks == 1:
        answers = [_rank(first, 0, alike)]
    else:
        import multiprocessing

        with multiprocessing.get_context("spawn").Pool(ranks) as pool:
            answers = pool.starmap(_rank, [(first + local, local, alike) for local in range(ranks)], chunksize=1)
    error = next((answer["error"] for answer in answers if answer["error"]), "")
    slowest = [
        [*rows[0][:2], max(row[2] for row in rows)]
        for rows in zip(*(answer["figures"] for answer in answers), strict=False)
    ]
    received = [
        [rows[0][0], sum(row[1] for row in rows)]
        for rows in zip(*(answer["received"] for answer in answers), strict=False)
    ]
    return {"figures": slowest, "device": answers[0]["device"], "error": error, "received": received}


def _rank(rank: int, local: int, how: How) -> dict[str, Any]:
    for name in ("GLOO_SOCKET_IFNAME",) if how.interface == "lo" else ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if how.interface:
            os.environ.setdefault(name, how.interface)  # as launch does: the user's own choice goes first
    import torch
    import torch.distributed as dist

    device, named = torch.device("cpu"), "CPU"
    if how.backend == "nccl":
        torch.cuda.set_device(local)
        device, named = torch.device("cuda", local), torch.cuda.get_device_name(local)
    figures: list[list[Any]] = []
    received: list[list[Any]] = []
    told = {"figures": figures, "device": named, "received": received}
    try:
        patience = timedelta(seconds=SETTLE + EACH * how.world)
        store = dist.TCPStore(
            how.address, how.port, how.world, rank == 0, timedelta(seconds=MEET), wait_for_workers=False
        )
        store.set(f"rank {rank}", "here")
        store.wait([f"rank {other}" for other in range(how.world)])
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


def _payload(figures: list[list[Any]], longest: float, device: Any) -> int:
    """The largest payload that, from each rank to all others, took the slowest rank a quarter of `longest` at most."""
    import torch
    import torch.distributed as dist

    own = [[payload, seconds] for name, payload, seconds in figures if name == "all_to_all"]
    times = torch.tensor([seconds for _, seconds in own], device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    short = [payload for (payload, _), seconds in zip(own, times.tolist(), strict=True) if seconds <= longest / 4]
    return int(max(short, default=own[0][0]))


def _play(how: How, place: tuple[int, int], payload: int, device: Any, received: list[list[Any]]) -> None:
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


def _sweep_one(name: str, how: How, device: Any, figures: list[list[Any]]) -> None:
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
        once = COLLECTIVES[name](payload, how.world, device)
        once()  # the first one connects
        first = slowest(_timed(once, device))
        times = [_timed(once, device) for _ in range(max(1, min(TIMES, int(SPENT / first))))]
        median = statistics.median(times)
        before = (payload, slowest(median))
        figures.append([name, payload, median])


def _timed(once: Any, device: Any) -> float:
    import torch

    began = time.perf_counter()
    once()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _whole(payload: int, world: int, device: Any) -> Any:
    """`payload` bytes of fp32, rounded to parts of equal size."""
    import torch

    return torch.ones(max(1, payload // 4 // world) * world, device=device)


def _all_reduce(payload: int, world: int, device: Any) -> Any:
    import torch.distributed as dist

    whole = _whole(payload, world, device)
    return lambda: dist.all_reduce(whole)  # its sum grows, and nobody reads it


def _all_gather(payload: int, world: int, device: Any) -> Any:
    import torch.distributed as dist

    whole = _whole(payload, world, device)
    part = whole[: len(whole) // world].clone()
    return lambda: dist.all_gather_single(whole, part)


def _reduce_scatter(payload: int, world: int, device: Any) -> Any:
    import torch.distributed as dist

    whole = _whole(payload, world, device)
    part = whole[: len(whole) // world].clone()
    return lambda: dist.reduce_scatter_single(part, whole)


def _all_to_all(payload: int, world: int, device: Any) -> Any:
    import torch.distributed as dist

    whole = _whole(payload, world, device)
    other = whole.clone()
    return lambda: dist.all_to_all_single(other, whole)


COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
