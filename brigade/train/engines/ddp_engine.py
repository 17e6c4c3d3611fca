"""DDP, and torch's communication hooks that compress its gradients, with PowerSGD's memory in checkpoints.

A hook works where DDP reduces, that is in the last micro-batch of a step: it compresses accumulated gradients.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ...errors import UserError
from ...errors.console import counted
from ..host.cluster import World
from ..upstream import unpickling
from .engine import Engine, Keywords, StepContext

# PowerSGD (Vogels et al. 2019, arXiv 1905.13727) sends a matrix of n x m as n x r and r x m, and adds what that left out
# to the next step's gradient (error feedback). torch's documentation calls r = 1 to 4 typical, and advises plain
# reductions for the first tenth of all steps; DDP needs two of them.
RANK, PLAIN_STEPS, FEWEST_PLAIN_STEPS = 4, 0.1, 2
# What differs between steps; P and Q are kept because the next step begins with this one's Q (warm start).
_MEMORY = ("iter", "error_dict", "p_memory_dict", "q_memory_dict")


class DDP(Engine):
    """DDP, with or without compressed gradients."""

    def arguments(self) -> Keywords:
        # PowerSGD's memory belongs to buckets, and only with True are they the same in every process.
        return super().arguments() | {
            "ddp_backend": "gloo" if self.cpu else None,
            "ddp_find_unused_parameters": self.training.ddp_comm_hook == "power_sgd",
        }

    def begin(self, trainer: StepContext, checkpoint: Path | None, steps: int) -> None:
        super().begin(trainer, checkpoint, steps)
        if self.training.ddp_comm_hook != "none":
            self.power_sgd = register(trainer.model_wrapped, self.training.ddp_comm_hook, steps)
            if self.power_sgd and checkpoint:
                restore(self.power_sgd, checkpoint, self.run.world)

    def drop_step(self, trainer: StepContext) -> None:
        super().drop_step(trainer)
        if self.power_sgd:
            forget(self.power_sgd)

    def save_states(self, folder: Path) -> None:
        if self.power_sgd:
            save(self.power_sgd, folder, self.run.world)


def register(model: torch.nn.Module, name: str, steps: int) -> PowerSGDState | None:
    """Let a model that is wrapped in DDP compress what it sends: "fp16", "bf16" or "power_sgd".

    steps: optimizer steps of the whole run. Returns PowerSGD's state: 4 bytes per parameter on each rank, and as much
    once more for the bucket on its way.
    """
    ddp = getattr(model, "_orig_mod", model)  # torch.compile wraps once more
    if name == "power_sgd":
        plain = max(FEWEST_PLAIN_STEPS, round(PLAIN_STEPS * steps))
        state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=plain)
        ddp.register_comm_hook(state, _power_sgd)
        return state
    ddp.register_comm_hook(None, {"fp16": default_hooks.fp16_compress_hook, "bf16": _bf16}[name])
    return None


def _bf16(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # DDP refuses torch's hook, by its name, where torch was built without CUDA (nn/parallel/distributed.py,
    # _check_comm_hook). Gloo adds bf16 as well as NCCL does.
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


def _power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    # Its second and third reduction start in callbacks. Gloo calls them back from several threads, so that with two
    # buckets the ranks reduce in different orders: "Received data size doesn't match expected size" (seen), or, where
    # sizes are equal, wrong sums. One bucket after the other is the same order everywhere.
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def forget(state: PowerSGDState) -> None:
    """Start over with the next step: a gradient that is not finite stays in the errors and factors, and would ruin all later
    gradients."""
    for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
        memory.clear()


# ---- checkpoints -------------------------------------------------------------------------------------------------
def save(state: PowerSGDState, folder: Path, world: World) -> None:
    """Write this rank's errors and factors beside its optimizer states. Without them a resumed run forgets the errors
    and sends whole gradients for its first steps: its losses differ (pytorch #75666)."""
    kept = {key: getattr(state, key) for key in _MEMORY}
    torch.save(kept, folder / f"power_sgd_{world.rank}_of_{world.size}.pt")


def restore(state: PowerSGDState, folder: Path, world: World) -> None:
    """Read what save() wrote. With another world size each rank takes the mean of all errors: what counts is their mean
    over ranks, and that stays. A checkpoint of one process has none: it sent nothing.

    Buckets must hold the same parameters in every process, hence DDP with find_unused_parameters (arguments()): without
    it, DDP reorders them after a process's first backward pass.

    Raises UserError when errors of some ranks are missing.
    """
    files = sorted(folder.glob("power_sgd_*.pt"))
    own = folder / f"power_sgd_{world.rank}_of_{world.size}.pt"
    if not files:
        return
    wanted = [own] if own.exists() else files
    size = 1 if own.exists() else int(files[0].stem.rpartition("_")[2])
    if len(wanted) != size:
        raise UserError(
            str(folder),
            f"it holds PowerSGD's errors of {counted(len(files), 'rank')}, but was saved by {size}",
            "give all hosts one file system for the output directory, or continue on as many ranks",
        )
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    mean: dict[int, torch.Tensor] = {}
    for file in wanted:
        saved = unpickling.load(file, map_location=device)
        for bucket, error in saved["error_dict"].items():
            mean[bucket] = mean[bucket] + error / size if bucket in mean else error / size
    for key, value in (saved | {"error_dict": mean}).items():
        setattr(state, key, value)
