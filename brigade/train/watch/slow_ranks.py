"""Ranks that keep all others waiting: a score from 1 (keeps nobody) to 0 for each, reported with its host below events.SLOW.

Two things are compared with the other ranks' (their median), over WINDOW steps:
- the time that a rank takes before it meets the others: for data, and on a CPU for the forward pass where the strategy exchanges
  nothing in it (but DDP buffers, at its beginning). Score: the share of the step that does not pass waiting for this rank;
- the speed of its device: a product of two matrices, at most once a minute and for a twentieth of the time. Score: the median's
  seconds / its own. A device that is shared, throttled or without instructions for bf16 may be very slow in it, which is no
  hang: a measurement is a phase of its own (distributed/observer.py).
Under ZeRO-3, FSDP2 and HSDP each layer waits for all ranks, and on a GPU the host runs ahead: there a slow device shows only in
the second. 0 to 1 with a threshold of 0.7 as in NVIDIA's resiliency extension (nvidia-resiliency-ext, straggler detection).
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median, median_low

import torch
from tqdm import tqdm

from ...errors.tables import Fields
from ..distributed import heartbeat
from ..distributed.process import this_process
from ..run import events
from ..run.directory import Run

WINDOW = 20  # steps
PROBE_EVERY = 60.0  # seconds
RARELY = 20  # so many times what a measurement took are between two of them
PROBES = 5  # of which the median counts: one may have met another program
# A product's size, and the largest. On a GPU the size doubles until a product lasts LONG, or starting a kernel would be what is
# measured (25 us for 2,048 on an H100). It begins small: what a device emulates takes a thousand times as long.
GPU, CPU = (128, 8192), (256, 256)
LONG = 1e-3  # seconds
ENOUGH = 0.5  # seconds of measuring after which no larger one is tried
REPEATS = 5  # of which the median counts
AT_ONCE = 3  # products for which the host waits once
ALONE = ("ddp", "zero1", "zero2")  # strategies in whose forward pass each rank is alone
PARTS = {"data loading": (heartbeat.DATA, heartbeat.WINDOW), "forward pass": (heartbeat.FORWARD,)}


class SlowRanks:
    """found: of the last window, (rank, host, score, why) of each rank below events.SLOW."""

    def __init__(self, run: Run) -> None:
        self.run, self.host = run, run.world.host
        alone = run.strategy.kind in ALONE and not run.strategy.axes and not torch.cuda.is_available()
        self.parts = {name: phases for name, phases in PARTS.items() if alone or name == "data loading"}
        self.before = [0.0] * len(heartbeat.PHASES)
        self.due = 0.0  # when the device is measured again
        self.began = False
        self.steps, self.seconds, self.rows = 0, 0.0, []  # type: ignore[var-annotated]
        self.probes: list[deque[float]] = [deque(maxlen=PROBES) for _ in range(run.world.size)]
        self.found: list[tuple[int, str, float, str]] = []
        self.lowest: dict[str, float] = {}

    def sample(self) -> Fields:
        """Return what this rank measured since the last time, for the exchange between all."""
        now = list(this_process.heartbeat.seconds)
        own = [sum(now[phase] - self.before[phase] for phase in phases) for phases in self.parts.values()]
        self.before = now
        device = None
        began = time.monotonic()
        if began >= self.due:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what it still computes belongs to the step
            with this_process.heartbeat.within(heartbeat.MEASURING):
                device = seconds_of_a_product()
            self.due = began + max(PROBE_EVERY, RARELY * (time.monotonic() - began))
        return {"own": own, "device": device, "host": self.host}

    def take(self, rows: list[Fields], seconds: float, steps: int) -> dict[str, float]:
        """Return what is logged. rows: sample() of each rank; seconds, steps: since the last time, pauses aside"""
        if not self.began:  # its steps compiled, and filled caches
            self.began = True
            return self.lowest
        self.steps, self.seconds = self.steps + steps, self.seconds + seconds
        self.rows.append([row["own"] for row in rows])
        for probes, row in zip(self.probes, rows, strict=True):
            if row["device"]:
                probes.append(row["device"])
        if self.steps < WINDOW:
            return self.lowest
        own = [[sum(part) for part in zip(*of_rank, strict=True)] for of_rank in zip(*self.rows, strict=True)]
        devices = [median(probes) if probes else 0.0 for probes in self.probes]
        found = scores(dict(zip(self.parts, zip(*own, strict=True), strict=True)), self.seconds, devices)
        self.lowest = {"slowest_rank_score": min(score for score, _ in found)}
        slow = [(rank, rows[rank]["host"], *one) for rank, one in enumerate(found) if one[0] < events.SLOW]
        if [one[:2] for one in slow] != [one[:2] for one in self.found]:
            self.report(slow)
        self.found = slow
        self.steps, self.seconds, self.rows = 0, 0.0, []
        return self.lowest

    def report(self, slow: list[tuple[int, str, float, str]]) -> None:
        """Say which ranks are slow now, where that has changed."""
        if not self.run.world.is_main_rank:
            return
        for rank, host, score, why in slow:
            tqdm.write(f"rank {rank} on {host} is slow, score {score:.2f}: {why}")
            events.add(self.run.directory, "slow", rank=rank, host=host, score=round(score, 3), why=why)
        if not slow:
            tqdm.write("no rank is slow any more")


def scores(own: Mapping[str, Sequence[float]], seconds: float, devices: list[float]) -> list[tuple[float, str]]:
    """(score, why) of each rank. own: part of a step -> seconds that each rank spent in it, of so many seconds of training;
    devices: seconds of a product, 0: unknown"""
    found = []
    usual = median_low([*filter(None, devices)] or [0.0])
    for rank, device in enumerate(devices):
        speed = min(1.0, usual / device) if device else 1.0
        found.append((speed, f"its device needs {1 / speed:.1f} times as long as others for the same product"))
        for part, of_ranks in own.items():
            late = max(0.0, of_ranks[rank] - median_low(of_ranks)) / max(seconds, 1e-9)
            if 1 - late < found[rank][0]:
                found[rank] = max(0.0, 1 - late), f"the others wait for its {part} {100 * late:.0f} % of the time"
    return found


def seconds_of_a_product() -> float:
    """Return the seconds that this rank's device takes for a product of two matrices of the largest size, as it computes the
    largest for which it needs no longer than a few milliseconds. 0 where memory is short."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, largest = GPU if device == "cuda" else CPU
    dtype, taken, began = torch.float32, 0.0, time.monotonic()
    if device == "cuda":
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    with suppress(torch.OutOfMemoryError):
        taken = measured(device, size, dtype)
        while taken < LONG and size < largest and time.monotonic() - began < ENOUGH:
            taken, size = measured(device, 2 * size, dtype), 2 * size
    return taken * (largest / size) ** 3


def measured(device: str, size: int, dtype: torch.dtype) -> float:
    """Return the seconds of a product of two matrices of size x size: the median of a few measurements, of one where it takes
    long."""
    end = time.monotonic() + ENOUGH
    one = torch.ones(size, size, dtype=dtype, device=device)
    product = torch.mm(one, one)  # which chooses a kernel
    taken: list[float] = []
    while len(taken) < REPEATS and (not taken or time.monotonic() < end):
        if device == "cpu":
            began = time.perf_counter()
            torch.mm(one, one, out=product)
            taken.append(time.perf_counter() - began)
            continue
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(AT_ONCE):
            torch.mm(one, one, out=product)
        ended.record()
        ended.synchronize()
        taken.append(began.elapsed_time(ended) / 1000 / AT_ONCE)
    return median(taken)
