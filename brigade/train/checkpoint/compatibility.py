"""Whether a run's engine reads a checkpoint itself, whether it has to be resharded (engines/resharding.py), or neither."""

from pathlib import Path

from ...errors.console import counted
from ...errors.tables import Fields
from ..run import directory as runs
from ..strategy.accelerate_config import mesh_sizes
from ..strategy.axes import NONE, Axes
from ..strategy.axis_keys import of_ds_config, of_mesh
from ..strategy.deepspeed_config import swaps_to_nvme
from ..strategy.ds_keys import value_at
from .manifest import ONE, engine_of, recorded

# The states of these have one value for each element of a parameter, under torch's names.
BY_ELEMENT = ("adamw_torch", "adamw_torch_fused", "sgd", "lamb", "lars", "muon", "schedule_free_adamw")
_QUANTISES = "quantises its states in blocks of what one rank has"
_NOT_BY_ELEMENT = {
    "adafactor": "keeps sums over a matrix's rows and columns",
    **dict.fromkeys(("paged_adamw_32bit", "lion_32bit", "paged_lion_32bit"), "keeps its states in bitsandbytes' form"),
}
# Keys with which DeepSpeed itself divides states anew.
_DIVIDES_ANEW = ("zero_optimization.elastic_checkpoint", "checkpoint.load_universal")


def is_native(folder: Path, run: runs.Run) -> bool:
    """Whether the engine itself loads the checkpoint exactly: its files are whole, torch divides them again, or ZeRO is divided
    as before."""
    before, now = axes_of(folder), run.strategy.axes
    if engine_of(folder) != _engine(run) or before.stages > 1 or now.stages > 1:
        return False  # a pipeline's checkpoint goes by names, as FSDP2's does, and each rank reads its own part
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
        return f"{problem}ZeRO-3's states of a divided model can only be read in the same division", as_before
    if run.strategy.is_deepspeed and now_axes.tensor > 1 and now_axes.stages == 1:
        why = "what DeepSpeed has divided over tensor groups takes only states of the same division"
        return f"{problem}{why}", f"{as_before}, or under FSDP2, with tensor groups or without"
    if optim not in BY_ELEMENT:
        return f"{problem}{optim} {_NOT_BY_ELEMENT.get(optim, _QUANTISES)}", as_before
    if any(swaps_to_nvme(config) for config in (_ds_config(folder), run.strategy.ds_config) if config):
        return f"{problem}states on NVMe lie in each rank's own swap files", as_before
    return None


def ranks_of(folder: Path) -> int | None:
    """How many ranks wrote the checkpoint; None where that is not known."""
    ranks = _run(folder).get("run", {}).get("ranks")
    if ranks:
        return int(ranks)
    return len(list(folder.glob("global_step*/*_optim_states.pt"))) or len(list(folder.glob("rng_state*.pth"))) or None


def is_divided_otherwise(folder: Path, run: runs.Run) -> bool:
    """Whether another number of ranks wrote the checkpoint, or as many ranks along other axes."""
    return ranks_of(folder) != run.replica.size or axes_of(folder) != run.strategy.axes


def axes_of(folder: Path) -> Axes:
    """The axes of the run that wrote the checkpoint."""
    cluster = _run(folder).get("cluster") or {}
    config, mesh = _ds_config(folder), cluster.get("accelerate_config")
    if isinstance(mesh, dict):
        return of_mesh(mesh_sizes(mesh.get("parallelism_config") or {}))
    return of_ds_config(config) if config else NONE


def written_by(folder: Path) -> str:
    """The strategy and the ranks that wrote the checkpoint, in words."""
    name, ranks, axes = _run(folder).get("run", {}).get("strategy", {}).get("name"), ranks_of(folder), axes_of(folder)
    who = " x ".join(filter(None, (name or engine_of(folder), str(axes))))
    return f"{who} on {counted(ranks, 'rank')}" if ranks else who


def _engine(run: runs.Run) -> str:
    by_fsdp = run.strategy.is_fsdp or run.strategy.axes.divides_layers  # which runs DDP's groups too
    return "DeepSpeed" if run.strategy.is_deepspeed else "FSDP2" if by_fsdp else ONE


def _run(folder: Path) -> Fields:
    return recorded(folder).get("run") or {}


def _stage(folder: Path) -> int | None:
    """The stage of ZeRO, if that wrote the checkpoint."""
    return (_ds_config(folder) or {}).get("zero_optimization", {}).get("stage")


def _ds_config(folder: Path) -> Fields | None:
    """The ds_config of the run that wrote the checkpoint, with its "auto"s, or None."""
    config = (_run(folder).get("cluster") or {}).get("ds_config")
    return config if isinstance(config, dict) else None
