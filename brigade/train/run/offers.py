"""What a run takes from the rooms around the hall, where they are there. train.py hands it in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CURE = "; set per_device_train_batch_size"


@dataclass(frozen=True)
class Proofs:
    """What is proven on every GPU of a run; nothing where there is none.

    attention: implementations that agree with eager -> milliseconds, the fastest first
    values: of the recipe's keys that are left to proofs (Settings.by_proof), those that something is proven for
    no_sharing: why the attention that the run takes is not proven where pairs share their prompt; "" where it is
    """

    attention: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    no_sharing: str = "nobody has proven it on these GPUs"


@dataclass(frozen=True)
class Remedies:
    """What the planner says of a run whose GPU's memory was not enough.

    counted: what it counts for the run, in words; fits: whether the run fits by that count
    ways: what would fit, the best first: flags for the same command, with the memory that they take; None where it cannot tell
    """

    counted: str
    fits: bool = False
    ways: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Offers:
    """What other rooms do for a run. Without them it goes on with the defaults.

    prove_kernels: (settings, strategy, world, the model's config, whether this host has a compiler) -> what is proven on the
        GPUs. A collective
    rows_that_fit: (the recipe with the kernels of this host, strategy, batch, the replica's world, the model's config) -> the
        largest micro-batch, and in words why it is this one
    fastest_that_fits: (recipe, keys, strategy, batch, the replica's world, the model's config) -> the values of those keys
        with which this rank's GPU trains fastest of those that it has the memory for, and in words why
    peak_tflops: a device's name -> its dense bf16 peak, None for an unknown one
    what_fits: (run, the model's config, bytes that its GPU would have had to hold) -> what the planner would change
        after an out-of-memory error
    fails_to_load: (run, the model's config) -> why this host or this rank's GPU cannot hold the model while it loads, and a
        cure; None where it can
    callbacks: (run, meter, the model's config, how many parameters are trained) -> further TrainerCallbacks
    """

    prove_kernels: Callable[[Any, Any, Any, Any, bool], Proofs] = lambda *_: Proofs()
    rows_that_fit: Callable[[Any, Any, Any, Any, Any], tuple[int, str]] = lambda *_: (1, f"no planner is here{CURE}")
    fastest_that_fits: Callable[..., tuple[dict[str, Any], str]] = lambda *_: ({}, "no planner is here")
    peak_tflops: Callable[[str], float | None] = lambda _: None
    what_fits: Callable[[Any, Any, float], Remedies] = lambda *_: Remedies("no planner is here")
    fails_to_load: Callable[[Any, Any], tuple[str, str] | None] = lambda *_: None
    callbacks: Callable[[Any, Any, Any, int], list[Any]] = lambda *_: []
