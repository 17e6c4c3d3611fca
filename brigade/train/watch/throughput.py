"""Throughput, data waiting, balance between ranks and peak memory, measured between two log lines."""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..data.collate import About
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from .flops import flops_per_token, utilisation
from .slow_ranks import SlowRanks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


STEPS = 10  # after which a run is compared with the planner's estimate
WARM_UP = 4  # of them: kernels are chosen and compiled, the allocator grows
STATES = ("weights", "gradients", "optimizer")  # a model's, in memory
COUNTED = ("tokens", "squared_lengths", "supervised", "slots")  # of About
# What is logged of where a step's time goes -> phases of a rank's heartbeat.
PARTS = {
    "seconds_data": (heartbeat.WINDOW, heartbeat.DATA),
    "seconds_forward": (heartbeat.FORWARD,),
    "seconds_backward": (heartbeat.BACKWARD,),
    "seconds_optimizer": (heartbeat.OPTIMIZER,),
}


class Meter:
    """Counts what happens between two calls of `report`; pauses during evaluation and checkpoints.

    `parameters`, `layers` and `hidden_size` describe the model, `peak_tflops` the device, for MFU (None: no MFU).
    counts: False on ranks that compute with another rank's tokens: one of them counts
    first: (micro-batches, seconds of waiting for them) of the first `first_steps` steps; since the start: seconds paused_ever,
    tokens_ever of this rank, tokens_of_all ranks up to the last report
    tokens_before: of the run, when the checkpoint that it continues from was written
    """

    def __init__(
        self,
        parameters: int,
        layers: int | None,
        hidden_size: int | None,
        peak_tflops: float | None = None,
        counts: bool = True,
    ) -> None:
        self.counts = counts
        self.model_shape = (parameters, layers, hidden_size) if layers and hidden_size else None
        self.peak_tflops = peak_tflops
        self.first: list[tuple[list[About], float]] = []
        self.first_steps, self.paused_ever, self.tokens_ever, self.tokens_of_all = STEPS, 0.0, 0, 0
        self.tokens_before = 0
        self._peak = self._training_peak = self._reserved = 0.0
        self.began: float | None = None
        self.resumed: float | None = time.monotonic()  # when the last pause ended; None in a pause
        self.slow: SlowRanks | None = None  # only of several ranks
        self._reset()

    def _reset(self) -> None:
        self.steps, self.waited, self.paused, self.sums = 0, 0.0, 0.0, dict.fromkeys(COUNTED, 0)
        self.phases = list(this_process.heartbeat.seconds)

    def start(self) -> None:
        """Start the clock with the first step of training; later calls do nothing."""
        if self.began is None:
            self._see_memory(training=False)
            self._reset()
            self.began = time.perf_counter()

    def count(self, micro_batches: list[About], waited: float) -> None:
        """Add one optimizer step's micro-batches of this rank (padding and filler samples do not count)."""
        self.steps += 1
        self.waited += waited
        if len(self.first) < self.first_steps:
            self.first.append((micro_batches, waited))
        for about in micro_batches if self.counts else ():
            self.tokens_ever += about.tokens
            for key in COUNTED:
                self.sums[key] += getattr(about, key)
        this_process.heartbeat.page[heartbeat.TOKENS] = self.tokens_ever

    @contextmanager
    def pause(self):
        """Time spent here is not training."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what it still computes belongs to the steps
        began, self.resumed = time.perf_counter(), None
        self._see_memory(training=True)
        try:
            yield
        finally:
            self.resumed = time.monotonic()
            self._see_memory(training=False)
            self.paused += time.perf_counter() - began
            self.paused_ever += time.perf_counter() - began

    def _see_memory(self, training: bool) -> None:
        """Take down the peak since the last look, and whether it was training's or an evaluation's, and begin anew."""
        now = peak_memory_gib()
        self._peak = max(self._peak, now)
        if training and self.began is not None:
            self._training_peak = max(self._training_peak, now)
        if torch.cuda.is_available():
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved() / 2**30)
            torch.cuda.reset_peak_memory_stats()

    def training_peak_gib(self) -> float:
        """Return peak_memory_gib() of training steps only, in GiB."""
        self._see_memory(training=True)
        return self._training_peak

    def report(self) -> dict[str, float]:
        """Figures since the last report, over all ranks; a collective. Then start anew.

        tokens_per_second: over all ranks, padding excluded; ..._per_gpu: per rank
        supervised_tokens_per_second: those of them that have a label; padding: percent of what was computed
        step_time, data_time: seconds per optimizer step, and how much of it the slowest rank waited for data
        seconds_data, ..._forward, ..._backward, ..._optimizer: of an optimizer step, mean of all ranks, what a rank waits for the
        others included; on a GPU of the host, which runs ahead of it
        token_spread: (most - fewest) / mean tokens of a rank, in percent; tokens_per_second_least, ..._most: of any rank; of
        only of several ranks
        peak_memory_gib: the largest of any rank since the start: allocated on the GPU, or resident in host memory
        reserved_memory_gib: likewise, what the allocator took from the GPU, free blocks included; only on GPUs
        attended_length: mean over tokens of their sample's length
        slowest_rank_score: of several ranks, over the last steps (slow_ranks.py)
        mfu: percent (flops.py states the convention); only where the GPU is known
        """
        now = time.perf_counter()
        seconds, steps = max(now - (self.began or now) - self.paused, 1e-9), max(self.steps, 1)
        self._see_memory(training=True)
        own: dict[str, Any] = {"slow": self.slow.sample()} if self.slow else {}
        own |= {"counts": self.counts, "waited": self.waited, "peak": self._peak, "reserved": self._reserved}
        spent = [after - before for before, after in zip(self.phases, this_process.heartbeat.seconds, strict=True)]
        own["parts"] = [sum(spent[phase] for phase in phases) for phases in PARTS.values()]
        rows = ranks.gather(self.sums | own)
        counting = [row["tokens"] for row in rows if row["counts"]]
        tokens, squared_lengths, supervised, slots = (sum(row[key] for row in rows) for key in COUNTED)
        figures = {
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_gpu": tokens / seconds / len(rows),
            "supervised_tokens_per_second": supervised / seconds,
            "padding": 100 * (1 - tokens / max(slots, 1)),
            "step_time": seconds / steps,
            "data_time": max(row["waited"] for row in rows) / steps,
            "peak_memory_gib": max(row["peak"] for row in rows),
        }
        self.tokens_of_all += tokens
        for key, of_ranks in zip(PARTS, zip(*(row["parts"] for row in rows), strict=True), strict=True):
            figures[key] = sum(of_ranks) / len(rows) / steps
        if len(counting) > 1:
            figures["tokens_per_second_least"] = min(counting) / seconds
            figures["tokens_per_second_most"] = max(counting) / seconds
            figures["token_spread"] = 100 * (max(counting) - min(counting)) * len(counting) / max(tokens, 1)
        if self.slow:
            figures |= self.slow.take([row["slow"] for row in rows], seconds, steps)
        if torch.cuda.is_available():
            figures["reserved_memory_gib"] = max(row["reserved"] for row in rows)
        if tokens:
            figures["attended_length"] = squared_lengths / tokens
        if self.model_shape and tokens and self.peak_tflops:
            needed = flops_per_token(*self.model_shape, attended_length=figures["attended_length"])
            figures["mfu"] = utilisation(figures["tokens_per_second_per_gpu"], needed, self.peak_tflops)
        self._reset()
        self.began = time.perf_counter()
        return figures


def device_name() -> str:
    """Return the GPU's name as its driver has it, or `cpu`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def peak_memory_gib() -> float:
    """GiB: the most that torch's allocator has had on the GPU since the last look, or the process's peak resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def model_shape(config: PreTrainedConfig) -> tuple[int | None, int | None]:
    """(layers, hidden size) of a Hugging Face config, or None where it has no such thing."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "num_hidden_layers", None), getattr(text, "hidden_size", None)
