"""Estimate one configuration: memory, time and what follows from them, with their intervals."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors.tables import Fields, table
from ...train.watch.flops import flops_per_token, utilisation
from ..constants import CONSTANTS
from ..hardware import Gpu, gpu
from ..hardware.network import is_measured, joined, unproven_cards
from .comparing import looks_before_training
from .job import Job
from .memory import GIB, Memory, gaps, moments, reserved_with_room, stream_pool
from .step_time import StepTime, driven, looking_seconds, step_time

SLOW = 0.1  # share of a step that computes, below which a configuration is possible and slow


@dataclass(frozen=True)
class Estimate:
    """The memory and time that a configuration takes.

    Memory is one count by parts, in bytes.

    memory: what torch allocates at its peak; gaps: what its allocator leaves where activations lie between states
    streams: the pools of ZeRO-3's streams; context: CUDA's, and NCCL's buffers
    """

    job: Job
    gpu: Gpu
    memory: Memory
    gaps: float
    streams: float
    context: float

    @functools.cached_property
    def cache(self) -> float:
        """Bytes that the allocator keeps while the card has room, additional to what it has to hold."""
        room = self.spare_gib * GIB
        needed = self.memory.allocated + self.gaps + self.streams
        return max(0.0, min(reserved_with_room(self.job) - needed, room))

    @functools.cached_property
    def time(self) -> StepTime:
        """The time of a step by formula."""
        return step_time(self.job, self.gpu)

    def hours_before(self, tokens: float) -> float:
        """Return the hours before training in which the reference looks at so many tokens of data; 0 where it does not."""
        seconds = looking_seconds(looks_before_training(self.job), driven(self.job, self.gpu))
        return seconds * tokens / self.job.tokens_per_step / 3600

    @property
    def least_seconds(self) -> float:
        """Seconds of a step in which the GPU computes as fast as in its best matrix product: no step takes less.

        0 with adapters. Of attention the visible half counts, of recomputation and of looking up embeddings nothing.
        """
        s = self.job.shape
        if self.job.method != "full":
            return 0.0
        rate = product_flops(self.job, self.gpu) * max(1.0, self.gpu.efficiency)
        multiplied = s.active - s.embedding * (not s.tied)
        needed = flops_per_token(multiplied, s.layers, s.query_width, s.attended(self.job.length) / 2)
        return self.job.tokens_per_step * needed / (self.job.gpus * rate)

    @functools.cached_property
    def one_card_seconds(self) -> float:
        """Seconds of a step if one of each node's network cards does all the work; the expected ones where they cannot differ."""
        crosses = self.job.gpus > joined(self.job.link, self.job.node_size)
        cards = unproven_cards(self.gpu, self.job.link, self.job.node_size) if crosses else 1
        if cards == 1:
            return self.time.total
        return replace(self, gpu=replace(self.gpu, network=self.gpu.network / cards)).time.total

    @property
    def allocated_gib(self) -> float:
        """torch.cuda.max_memory_allocated"""
        return self.memory.allocated / GIB

    @property
    def device_gib(self) -> float:
        """GiB that the card has to hold."""
        return (self.memory.allocated + self.gaps + self.streams + self.context) / GIB

    @property
    def spare_gib(self) -> float:
        """GiB that are left of the card; below 0, the configuration does not even fit by the expected figure."""
        return self.gpu.memory_gib - self.device_gib

    @property
    def shown_gib(self) -> float:
        """GiB that nvidia-smi shows as used."""
        return self.device_gib + self.cache / GIB

    @property
    def may_fit(self) -> bool:
        """Whether the card has room for what is expected."""
        return self.spare_gib >= 0

    @property
    def most_gib(self) -> float:
        """GiB that the card has to hold at the upper end of the interval, where ZeRO-3's streams keep what they take."""
        besides = CONSTANTS.pools_at_most * self.streams + self.context
        return max(self.device_gib, self.memory_interval()[1] + besides / GIB)

    @property
    def fits(self) -> bool:
        """Whether the card has room at the upper end, too."""
        return self.most_gib <= self.gpu.memory_gib

    @property
    def crowded(self) -> bool:
        """Whether published runs like it took far longer than predicted (arXiv 2311.00257: docs/evidence/planner-accuracy.md).

        They ran ZeRO-3 over hundreds of ranks, each with so little to compute that most of a step waits.
        """
        job, time = self.job, self.time
        waits = time.across + time.launches > time.total / 2
        return job.deepspeed and job.stage == 3 and job.shard_ranks >= 128 and waits

    @property
    def slow(self) -> bool:
        """Whether it is possible and no more: its states go through disks, or better hardware would be ten times as fast."""
        time = self.time
        waits = time.across + time.inside + time.bubble + time.offload
        return self.job.offload == "nvme" or time.total - waits < SLOW * time.total

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.job.tokens_per_step / self.time.total / self.job.gpus

    @property
    def mfu(self) -> float:
        """Percent of the card's dense bf16 peak, 6 N + 12 L h s per token, N the parameters that a token meets."""
        s = self.job.shape
        needed = flops_per_token(s.active, s.layers, s.query_width, s.attended(self.job.length))
        return utilisation(self.tokens_per_second_per_gpu, needed, self.gpu.bf16_tflops)

    def hours(self, tokens: float) -> float:
        """Return the hours that so many tokens take on all GPUs."""
        return tokens / (self.tokens_per_second_per_gpu * self.job.gpus) / 3600

    def memory_interval(self) -> tuple[float, float]:
        """Return the 80 % interval of the GiB allocated."""
        low, high = factors("memory", memory_group(self.job))
        return self.allocated_gib * low, self.allocated_gib * high

    def shown_interval(self) -> tuple[float, float]:
        """Return the 80 % interval of the GiB that nvidia-smi shows, at most what the card has."""
        low, high = factors("device", memory_group(self.job))
        return self.shown_gib * low, max(self.shown_gib, min(self.shown_gib * high, self.gpu.memory_gib))

    def time_interval(self) -> tuple[float, float]:
        """Return the 80 % interval of the seconds of a step, with those that a network takes which is only named.

        No end is faster than the GPU's best product, and what is expected lies within.
        """
        low, high = factors("time", time_group(self.job, self.gpu))
        fast = max(self.time.total * low, self.least_seconds)
        return min(fast, self.time.total), self.one_card_seconds * high


def parts(of: Mapping[str, float], unit: float, least: float) -> str:
    """Return the figures from `least` up, in units of `unit`: `weights 15.26, gradients 0.93`."""
    return ", ".join(f"{name} {value / unit:.2f}" for name, value in of.items() if value / unit >= least)


def memory_group(job: Job) -> str:
    """Return the runs that a job's memory is judged by."""
    return "offload" if job.offload else "on the GPU"


@functools.singledispatch
def time_group(job: Job, gpu: Gpu) -> str:
    """Return the runs that a job's time is judged by: those of its engine and network, unless something says more of it."""
    if gpu.kind not in intervals()["best"][job.driver]:
        return f"{job.driver} code on {gpu.kind}"
    if job.offload and not job.deepspeed:
        return f"{job.engine} with offload"
    if job.stage and job.shard_ranks > CONSTANTS.many_ranks:
        return f"{job.engine} over more than {CONSTANTS.many_ranks} ranks"
    if job.shape.experts:
        return "experts"
    inside = job.gpus <= joined(job.link, job.node_size)
    network = "inside a host" if inside else "measured" if is_measured(gpu, job.link) else "named"
    return f"{'adapters' if job.method != 'full' and job.pipeline == 1 else job.engine}, {network}"


@functools.singledispatch
def product_flops(job: Job, gpu: Gpu) -> float:
    """Return FLOPs per second of a GPU's best matrix product in 16 bits."""
    return gpu.matmul_tflops * 1e12


def unseen(what: str, group: str) -> bool:
    """Return whether fewer than five sources have published such runs: then theirs is the interval of what is seen first."""
    return group not in intervals()[what]


def factors(what: str, group: str) -> tuple[float, float]:
    """Return the factors on a prediction between which 80 % of a group's measured runs lie.

    what: "memory", what torch allocates; "device", what it reserves, or nvidia-smi shows; "time"
    """
    known = intervals()[what]
    low, high = known.get(group, known["unseen"])
    return low, high


@functools.cache
def intervals() -> Fields:
    """Return the factors between which 80 % of measured runs lie, and under `best` the share of its dense peak that the best run
    on each kind of GPU reached, by what drives it. benchmarks/planner.py writes them, from sources left out of every fit."""
    return table(Path(__file__).with_name("intervals.yaml"))


def estimate(job: Job, device: Gpu | None = None) -> Estimate:
    """Return an estimate by formula, made in milliseconds, for `device` or the catalogue's GPU of the job's kind.

    With the factors that the user's own runs gave. Raises UserError for an unknown GPU.
    """
    device = device or gpu(job.gpu)
    peaks, context = moments(job), context_bytes(job.gpus // job.replicas.count)
    peak, streams = max(peaks, key=lambda moment: moment.allocated), stream_pool(job)
    needed = max(moment.allocated + gaps(job, moment) for moment in peaks) + streams
    return Estimate(job, device, peak, needed - peak.allocated - streams, streams, context)


def context_bytes(ranks: int) -> float:
    """Return the bytes of CUDA's context, and of NCCL's buffers where several ranks train together."""
    collectives = CONSTANTS.collectives_gib * (1 + math.log(ranks, 8)) if ranks > 1 else 0.0
    return (CONSTANTS.context_gib + collectives) * GIB
