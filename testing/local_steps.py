"""The cases of replicas that synchronise every H steps: each kind of replica, compared with DDP on as many ranks."""

from typing import Any

from . import parity, resume
from .command_line import as_flags

HSDP = "hsdp"  # its groups are the replicas
# What works together in a replica of two ranks, two of which make four ranks on two "hosts".
INSIDE = ("ddp", "zero1", "zero2", "zero3", "zero2_offload", "fsdp2", HSDP)
STREAM = ["--sync_every", "4", "--sync_fragments", "2", "--outer_optim", "nesterov"]
DILOCO = ["--sync_every", "4", "--outer_optim", "nesterov"]
STOPS, STEPS = (4, 8), 10  # the run ends in the middle of a round


def every_step(world_size: int, strategy: str, accumulation: int) -> list[dict[str, Any]]:
    """Two cases on so many ranks: DDP, and replicas of this strategy that average after every step of plain SGD."""
    cases = {case["strategy"]: case for case in parity.cases(world_size, (accumulation,))}
    ddp, own = cases["ddp"], cases[strategy]
    name = f"{strategy}-w{world_size}-k{accumulation}"
    replicas = own | {"name": f"{name}, replicas", "flags": [*own["flags"], "--sync_every", "1"]}
    if world_size > 2 and strategy != HSDP:
        replicas["per_host"] = 2
    return [ddp | {"name": f"{name}, reference"}, replicas]


def exact(world_size: int, strategy: str, how: list[str]) -> list[dict[str, Any]]:
    """Two cases with AdamW: undisturbed, and one that dies after each of STOPS and goes on."""
    shorter = as_flags(max_steps=STEPS, eval_steps=STEPS // 2, per_device_train_batch_size=4)
    flags = [*resume.SHARED, *shorter, *parity.STRATEGIES[strategy], *how]
    name = f"{strategy}-w{world_size}"
    whole = {"name": name, "flags": flags} | ({"per_host": 2} if world_size > 2 and strategy != HSDP else {})
    return [whole, whole | {"name": f"{name}, stopped", "stops": STOPS}]
