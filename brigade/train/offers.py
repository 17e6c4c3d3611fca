"""What a run takes from the rooms around the hall, where they are there. train.py hands it in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CURE = "; set per_device_train_batch_size"


@dataclass(frozen=True)
class Offers:
    """A run without those rooms goes on with the defaults.

    settle_kernels: (run, the model's config, whether this host has a compiler) decides on GPUs what the recipe leaves to proofs.
        A collective
    rows_that_fit: (run, the recipe with the kernels of this host, the model's config) -> the largest micro-batch, and in words
        why it is this one
    peak_tflops: a device's name -> its dense bf16 peak, None for an unknown one
    callbacks: (run, meter, the model's config, how many parameters are trained) -> further TrainerCallbacks
    """

    settle_kernels: Callable[[Any, Any, bool], None] = lambda *_: None
    rows_that_fit: Callable[[Any, Any, Any], tuple[int, str]] = lambda *_: (1, f"no planner is here{CURE}")
    peak_tflops: Callable[[str], float | None] = lambda _: None
    callbacks: Callable[[Any, Any, Any, int], list[Any]] = lambda *_: []
