"""What has to hold where a strategy divides more than the data: sizes that fit the ranks, and groups that stay inside a host."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import UserError, versions
from ...errors.tables import Document
from ..host.cluster import World
from ..recipe.settings import Settings
from .axes import NONE, Axes
from .axis_keys import DS_KEYS, DS_SCHEDULE, MESH_KEYS, MESH_SCHEDULE

# Schedule -> how many stages a rank may have.
SCHEDULES = {
    "1f1b": range(1, 2),
    "gpipe": range(1, 2),
    "interleaved1f1b": range(2, 1025),
    "interleavedzerobubble": range(2, 1025),
    "zbv": range(2, 3),
}


def check(axes: Axes, source: str, settings: Settings, world: World) -> None:
    """Raise UserError where the axes do not go over the ranks that there are. Before anything is loaded."""
    mistake = next(filter(None, map(versions.lacks, axes.used)), None)
    if settings.rehearse and not mistake:  # it takes the sizes that its ranks allow
        return
    mistake = mistake or problem(axes, world.size)
    if mistake:
        raise UserError(source, *mistake)
    if crosses_hosts(axes, world.local_size) and not settings.recipe.cluster.tensor_across_hosts:
        raise UserError(
            source,
            f"tensor groups of {axes.tensor} ranks would cross hosts of {world.local_size}: each layer waits for the network, "
            "twice forward and twice backward",
            f"set a tensor size that divides {world.local_size}, or give --tensor_across_hosts true",
        )


def joined(ours: Axes, mesh: Axes, source: str) -> Axes:
    """The axes of a ds_config and of accelerate's parallelism_config beside it.

    Raise UserError where the two say different sizes, or schedules of a pipeline.
    """
    mesh_keys, ds_keys = MESH_KEYS | MESH_SCHEDULE, DS_KEYS | DS_SCHEDULE
    said: dict[str, Any] = {name: value for name, value in vars(mesh).items() if value != getattr(NONE, name)}
    for name, value in said.items():
        if getattr(ours, name) not in (value, getattr(NONE, name)):
            key = f"parallelism_config_{mesh_keys[name]}"
            problem = f"{key} is {value}, but {ds_keys[name]} of its ds_config is {getattr(ours, name)}"
            raise UserError(source, problem, "keep one of them")
    return replace(ours, **said)


def problem(axes: Axes, world_size: int) -> tuple[str, str] | None:
    """Why these axes do not go over so many ranks: (problem, cure), or None."""
    mistake = _of_schedule(axes)
    if mistake:
        return mistake
    if not world_size % axes.unit:
        return None
    near = [
        ranks for ranks in (world_size // axes.unit * axes.unit, (world_size // axes.unit + 1) * axes.unit) if ranks
    ]
    return (
        f"{axes} needs a multiple of {axes.unit} ranks, and there are {world_size}",
        f"start {' or '.join(map(str, near))} ranks, or set sizes whose product divides {world_size}",
    )


def outputs(config: Document, tied: bool) -> dict[str, int]:
    """How many columns those matrices have that a tensor group divides by columns, by the keys of config.json that say so."""
    number = {key: value for key, value in config.items() if type(value) is int}
    heads = number.get("num_attention_heads", 0)
    each = number.get("head_dim") or number.get("hidden_size", 0) // max(1, heads)
    columns_of = {
        "num_attention_heads x head_dim": heads * each,
        "num_key_value_heads x head_dim": (number.get("num_key_value_heads") or heads) * each,
        "intermediate_size": number.get("intermediate_size", 0),
        "vocab_size": 0 if tied else number.get("vocab_size", 0),
    }
    return {name: columns for name, columns in columns_of.items() if columns}


def uneven_parts(outputs: Mapping[str, int], tensor: int, shards: int) -> tuple[str, str] | None:
    """Why FSDP2 cannot shard over so many ranks what a rank of a tensor group has of such columns: (problem, cure), or None.

    torch divides no dimension twice unevenly (placement_types.py: _StridedShard._shard_tensor).
    """
    for name, number in outputs.items():
        if tensor > 1 and number // tensor % shards:
            problem = (
                f"of {name} {number} each rank of a tensor group of {tensor} has {number // tensor}, which FSDP2 cannot shard "
                f"evenly over {shards} ranks"
            )
            fits = next(size for size in range(shards - 1, 0, -1) if not shards % size and not number // tensor % size)
            hsdp = f"HSDP (dp_replicate_size {shards // fits}, dp_shard_size {fits}), " if fits > 1 else ""
            return problem, f"use {hsdp}DDP, ZeRO (ds_configs/zero1_tp2.json), or no tensor size"
    return None


def _of_schedule(axes: Axes) -> tuple[str, str] | None:
    name, each = axes.chosen_schedule, SCHEDULES.get(axes.chosen_schedule)
    if each is None:
        return f"{name!r} is no schedule of a pipeline", f"use one of: {', '.join(SCHEDULES)}"
    if axes.stages == 1 and (axes.schedule or axes.virtual > 1):
        what = f"the schedule {name}" if axes.schedule else f"virtual_stages {axes.virtual}"
        return f"it names {what} of a pipeline with one stage", "set the number of stages too, or leave this out"
    if axes.virtual not in each:
        takes = f"{each.start}" if len(each) == 1 else f"{each.start} or more"
        problem = f"{name} takes {takes} of the pipeline's stages on each rank, and virtual_stages is {axes.virtual}"
        other = "interleaved1f1b" if axes.virtual > 1 else "1f1b"
        return problem, f"set virtual_stages to {each.start}, or use schedule {other}"
    return None


def crosses_hosts(axes: Axes, local_size: int) -> bool:
    """Whether a tensor group would have ranks on two hosts."""
    return axes.tensor > 1 and bool(local_size % axes.tensor)
