"""Over how many ranks each axis of a strategy goes, which ranks work together along it, and which share of the data each has.

Ranks are numbered with the tensor axis innermost (inside a host), then sequence, then data, and pipeline stages outermost: what
talks most lies closest, and what talks least crosses hosts (Narayanan et al. 2021, arXiv 2104.04473, section 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .ds_keys import value_at

# Keys of a ds_config by axis. What they say is no part of a run's identity: another division of the same model computes the same.
DS_KEYS = {
    "tensor": "tensor_parallel.autotp_size",
    "sequence": "sequence_parallel_size",
    "stages": "pipeline.stages",
    "experts": "expert_parallel.autoep_size",
}
# Keys of an accelerate config's parallelism_config. The last two are Brigade's own: accelerate has no word for them.
MESH_KEYS = {"tensor": "tp_size", "sequence": "sp_size", "stages": "pp_size", "experts": "ep_size"}
DS_BLOCKS = ("tensor_parallel", "sequence_parallel_size", "pipeline", "expert_parallel")
# Of a pipeline, beside its stages. Brigade's own words too: DeepSpeed and accelerate know no schedules.
DS_SCHEDULE = {"schedule": "pipeline.schedule", "virtual": "pipeline.virtual_stages"}
MESH_SCHEDULE = {"schedule": "pp_schedule", "virtual": "pp_virtual_stages"}
# Of each schedule, how many stages a rank may have.
SCHEDULES = {
    "1f1b": range(1, 2),
    "gpipe": range(1, 2),
    "interleaved1f1b": range(2, 1025),
    "interleavedzerobubble": range(2, 1025),
    "zbv": range(2, 3),
}
NAMES = {"tensor": "tensor", "sequence": "sequence", "stages": "pipeline", "experts": "expert"}  # ... parallelism


@dataclass(frozen=True)
class Place:
    """A rank's coordinates: its number along each axis."""

    tensor: int
    sequence: int
    data: int
    stage: int

    @property
    def speaks_for_its_data(self) -> bool:
        """Whether it is the one rank, of those that compute with the same tokens, whose figures count."""
        return self.tensor == 0 and self.stage == 0


@dataclass(frozen=True)
class Axes:
    """Sizes of the axes besides data parallelism.

    tensor: ranks that each layer's matrices are divided over; sequence: ranks that a row's tokens are; stages: of the pipeline
    experts: ranks that the experts of a layer are divided over; these are data-parallel ranks too, and all else is theirs
    schedule: of the pipeline (engines/pipeline_schedule.py), "" for its first choice; virtual: stages on each of its ranks
    """

    tensor: int = 1
    sequence: int = 1
    stages: int = 1
    experts: int = 1
    schedule: str = ""
    virtual: int = 1

    @property
    def model(self) -> int:
        """Ranks that together compute one micro-batch; the world is that times the data-parallel size."""
        return self.tensor * self.sequence * self.stages

    @property
    def used(self) -> dict[str, int]:
        """The axes that go over more than one rank."""
        return {axis: size for axis in NAMES if (size := getattr(self, axis)) > 1}

    @property
    def chosen_schedule(self) -> str:
        """The pipeline's schedule, also where nobody has named one."""
        return self.schedule or ("1f1b" if self.virtual == 1 else "interleaved1f1b")

    @property
    def every_stage(self) -> int:
        """Of the pipeline, on all its ranks."""
        return self.stages * self.virtual

    def __bool__(self) -> bool:
        return bool(self.used)

    def __str__(self) -> str:
        return " x ".join(f"{NAMES[axis]} {size}" for axis, size in self.used.items())

    def data(self, world_size: int) -> int:
        """The data-parallel size: how many ranks, or groups of them, get different rows."""
        return max(1, world_size // self.model)

    def place(self, rank: int, world_size: int) -> Place:
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.sequence)
        stage, data = divmod(rest, self.data(world_size))
        return Place(tensor, sequence, data, stage)

    def groups(self, axis: str, world_size: int) -> list[list[int]]:
        """The ranks that work together along an axis (tensor, sequence, data or stage), every group in order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(world_size):
            place = vars(self.place(rank, world_size))
            found.setdefault(tuple(number for name, number in place.items() if name != axis), []).append(rank)
        return list(found.values())

    def as_mesh(self) -> dict[str, Any]:
        """As values of an accelerate config's parallelism_config."""
        return {MESH_KEYS[axis]: size for axis, size in self.used.items()} | self._schedule(MESH_SCHEDULE)

    def _schedule(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """What it says of the pipeline's schedule besides the default, under these keys."""
        return {keys[name]: value for name in keys if (value := getattr(self, name)) not in ("", 1)}


NONE = Axes()


def of_ds_config(config: Mapping[str, Any]) -> Axes:
    """What a ds_config without findings says of the axes."""
    experts = value_at(config, DS_KEYS["experts"]) if value_at(config, "expert_parallel.enabled") else 1
    sizes = {axis: value_at(config, key) for axis, key in DS_KEYS.items()} | {"experts": experts}
    found: dict[str, Any] = {axis: int(size) for axis, size in sizes.items() if isinstance(size, int) and size > 1}
    return Axes(**found, **_schedule_of({name: value_at(config, key) for name, key in DS_SCHEDULE.items()}))


def of_mesh(mesh: Mapping[str, Any]) -> Axes:
    """What a parallelism_config without findings says of them. mesh: by short names (accelerate_config.mesh_sizes)"""
    sizes: dict[str, Any] = {axis: max(1, int(mesh.get(key) or 1)) for axis, key in MESH_KEYS.items()}
    return Axes(**sizes, **_schedule_of({name: mesh.get(key) for name, key in MESH_SCHEDULE.items()}))


def _schedule_of(said: Mapping[str, Any]) -> dict[str, Any]:
    """A name in small letters, and stages per rank as a number."""
    each = said["virtual"]
    return {"schedule": str(said["schedule"] or "").lower(), "virtual": max(1, int(each)) if str(each).isdigit() else 1}


def with_axes(ds_config: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """A copy of a ds_config that says these axes."""
    said = dict(without(ds_config) or {})
    for axis, size in axes.used.items():
        block, _, key = DS_KEYS[axis].rpartition(".")
        said[block or key] = {**(ds_config.get(block) or {}), key: size} if block else size
    for path, value in axes._schedule(DS_SCHEDULE).items():
        block, _, key = path.rpartition(".")
        said[block] = {**said.get(block, {}), key: value}
    if axes.experts > 1:
        said["expert_parallel"]["enabled"] = True
    return said


def without(ds_config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A ds_config less its axes."""
    if ds_config is None:
        return None
    return {key: value for key, value in ds_config.items() if key not in DS_BLOCKS}
