"""The keys by which a ds_config and an accelerate config say axes, read and written; and the groups of ranks along an axis."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import shown
from ...errors.findings import Finding
from ...errors.tables import Document, Fields
from .axes import Axes, without
from .ds_keys import as_json, value_at

# Keys of a ds_config, by axis.
DS_KEYS = {
    "tensor": "tensor_parallel.autotp_size",
    "sequence": "sequence_parallel_size",
    "stages": "pipeline.stages",
    "experts": "expert_parallel.autoep_size",
}
# Keys of an accelerate config's parallelism_config. The last two are Brigade's own: accelerate has no word for them.
MESH_KEYS = {"tensor": "tp_size", "sequence": "sp_size", "stages": "pp_size", "experts": "ep_size"}
# A pipeline's keys beside its stages. Brigade's own words too: DeepSpeed and accelerate know no schedules.
DS_SCHEDULE = {"schedule": "pipeline.schedule", "virtual": "pipeline.virtual_stages"}
MESH_SCHEDULE = {"schedule": "pp_schedule", "virtual": "pp_virtual_stages"}


def of_ds_config(config: Document) -> Axes:
    """What a ds_config without findings says of the axes."""
    experts = value_at(config, DS_KEYS["experts"]) if value_at(config, "expert_parallel.enabled") else 1
    sizes = {axis: value_at(config, key) for axis, key in DS_KEYS.items()} | {"experts": experts}
    divided: dict[str, Any] = {axis: int(size) for axis, size in sizes.items() if isinstance(size, int) and size > 1}
    return Axes(**divided, **_schedule_of({name: value_at(config, key) for name, key in DS_SCHEDULE.items()}))


def of_mesh(mesh: Document) -> Axes:
    """What a parallelism_config without findings says of them. mesh: by short names (accelerate_config.mesh_sizes)"""
    sizes: dict[str, Any] = {axis: max(1, int(mesh.get(key) or 1)) for axis, key in MESH_KEYS.items()}
    return Axes(**sizes, **_schedule_of({name: mesh.get(key) for name, key in MESH_SCHEDULE.items()}))


def _schedule_of(said: Document) -> Fields:
    """A name in small letters, and stages per rank as a number."""
    each = said["virtual"]
    return {
        "schedule": str(said["schedule"] or "").lower(),
        "virtual": max(1, int(each)) if str(each).isdecimal() else 1,
    }


def with_axes(ds_config: Document, axes: Axes) -> Fields:
    """Return a copy of a ds_config that says these axes."""
    document = dict(without(ds_config) or {})
    for axis, size in axes.used.items():
        block, _, key = DS_KEYS[axis].rpartition(".")
        document[block or key] = {**(ds_config.get(block) or {}), key: size} if block else size
    for path, value in _schedule(axes, DS_SCHEDULE).items():
        block, _, key = path.rpartition(".")
        document[block] = {**document.get(block, {}), key: value}
    if axes.experts > 1:
        document["expert_parallel"]["enabled"] = True
    return document


def as_mesh(axes: Axes) -> Fields:
    """Return axes as values of an accelerate config's parallelism_config."""
    return {MESH_KEYS[axis]: size for axis, size in axes.used.items()} | _schedule(axes, MESH_SCHEDULE)


def _schedule(axes: Axes, keys: Mapping[str, str]) -> Fields:
    """What they say of the pipeline's schedule besides the default, under these keys."""
    return {keys[name]: value for name in keys if (value := getattr(axes, name)) not in ("", 1)}


def groups(axes: Axes, world_size: int, *along: str) -> list[list[int]]:
    """The ranks that work together along some of tensor, sequence, data and stage, every group in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        place = vars(axes.place(rank, world_size))
        found.setdefault(tuple(number for name, number in place.items() if name not in along), []).append(rank)
    return list(found.values())


def wrong_sizes(config: Document, name: str) -> Iterator[Finding]:
    """Sizes in a ds_config that are no number of ranks. 0 is off, by DeepSpeed's own word."""
    for axis, path in DS_KEYS.items():
        size = value_at(config, path)
        if size is not None and (type(size) is not int or size < 0):
            yield Finding.of("ds-axis-size", name, path, value=shown(size, as_json), axis=axis)
