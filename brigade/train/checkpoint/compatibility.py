"""Whether a run's engine reads a checkpoint by itself, whether it has to be resharded (loop/resharding.py), or neither."""

from pathlib import Path
from typing import Any

from ...errors.console import counted
from ..run import directory as runs
from ..strategy.accelerate_config import mesh_sizes
from ..strategy.axes import NONE, Axes
from ..strategy.axis_keys import of_ds_config, of_mesh
from ..strategy.deepspeed_config import swaps_to_nvme
from ..strategy.ds_keys import value_at
from .manifest import ONE, engine_of, recorded

# What these keep has a value for each element of a parameter, and no more. bitsandbytes quantises in blocks of what one rank has.
BY_ELEMENT = ("adamw_torch", "adamw_torch_fused", "sgd", "lamb", "lars")
# Where DeepSpeed itself divides states anew, or is asked to.
_DIVIDES_ANEW = ("zero_optimization.elastic_checkpoint", "checkpoint.load_universal")


def is_native(folder: Path, run: runs.Run) -> bool:
    """Whether the engine loads it exactly: files are whole, or torch divides them anew, or ZeRO is divided as it was."""
    before, now = axes_of(folder), run.strategy.axes
    if engine_of(folder) != _engine(run) or before.stages > 1 or now.stages > 1:
        return False  # a pipeline's checkpoint is by names, as FSDP2's, and each rank reads its own
    if not run.strategy.is_deepspeed:
        return True
    if before.tensor != now.tensor:
        return False
    if any(value_at(run.strategy.ds_config, key) for key in _DIVIDES_ANEW):
        return True
    wrote = _ds_config(folder)
    same = wrote is None or wrote.get("zero_optimization") == (run.strategy.ds_config or {})["zero_optimization"]
    return same and ranks_of(folder) == run.replica.size


def refusal(folder: Path, run: runs.Run) -> tuple[str, str] | None:
    """Why a checkpoint can neither be read by the run's engine nor be resharded: (problem, cure)."""
    if is_native(folder, run):
        return None
    optim, now = run.settings.recipe.training.optim, f"{run.strategy.name} on {counted(run.replica.size, 'rank')}"
    as_before = f"continue with {written_by(folder)}"
    problem = f"{folder.name} was written by {written_by(folder)}, and this run is {now}: "
    before, now_axes = axes_of(folder), run.strategy.axes
    if engine_of(folder) == "DeepSpeed" and before.tensor > 1 and _stage(folder) == 3:
        # What no group has divided lies there in parts of the world, and the rest in parts of the data-parallel ranks.
        return f"{problem}ZeRO-3's states of a divided model are read in the same division alone", as_before
    if run.strategy.is_deepspeed and now_axes.tensor > 1 and now_axes.stages == 1:
        why = "what DeepSpeed has divided over tensor groups takes states of the same division alone"
        return f"{problem}{why}", f"{as_before}, or under FSDP2, with tensor groups or without"
    if optim not in BY_ELEMENT:
        return f"{problem}{optim} quantises its states in blocks of what one rank has", as_before
    if any(swaps_to_nvme(config) for config in (_ds_config(folder), run.strategy.ds_config) if config):
        return f"{problem}states on NVMe lie in each rank's own swap files", as_before
    if any(folder.glob("pytorch_model_fsdp*.bin")):
        return f"{problem}only a SHARDED_STATE_DICT of FSDP2 can be resharded", as_before
    return None


def ranks_of(folder: Path) -> int | None:
    """How many ranks wrote it, where that is known."""
    if ranks := _run(folder).get("run", {}).get("ranks"):
        return int(ranks)
    return len(list(folder.glob("global_step*/*_optim_states.pt"))) or len(list(folder.glob("rng_state*.pth"))) or None


def is_divided_otherwise(folder: Path, run: runs.Run) -> bool:
    """Whether other ranks wrote it, or as many with other data each."""
    return ranks_of(folder) != run.replica.size or axes_of(folder) != run.strategy.axes


def axes_of(folder: Path) -> Axes:
    """Over what the run that wrote it divided more than its data."""
    cluster = _run(folder).get("cluster") or {}
    config, mesh = _ds_config(folder), cluster.get("accelerate_config")
    found = of_ds_config(config) if config else NONE
    if isinstance(mesh, dict):
        found = of_mesh(mesh_sizes(mesh.get("parallelism_config") or {}))
    return found


def written_by(folder: Path) -> str:
    """The strategy and the ranks in words."""
    name, ranks, axes = _run(folder).get("run", {}).get("strategy", {}).get("name"), ranks_of(folder), axes_of(folder)
    who = " x ".join(filter(None, (name or engine_of(folder), str(axes))))
    return f"{who} on {counted(ranks, 'rank')}" if ranks else who


def _engine(run: runs.Run) -> str:
    by_fsdp = run.strategy.is_fsdp or run.strategy.axes.divides_layers  # which runs DDP's groups too
    return "DeepSpeed" if run.strategy.is_deepspeed else "FSDP2" if by_fsdp else ONE


def _run(folder: Path) -> dict[str, Any]:
    return recorded(folder).get("run") or {}


def _stage(folder: Path) -> int | None:
    """Of ZeRO, where that wrote it."""
    return (_ds_config(folder) or {}).get("zero_optimization", {}).get("stage")


def _ds_config(folder: Path) -> dict[str, Any] | None:
    """The ds_config that wrote it, with its "auto"s, or None."""
    found = (_run(folder).get("cluster") or {}).get("ds_config")
    return found if isinstance(found, dict) else None
