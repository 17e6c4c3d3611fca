"""Over how many ranks each axis of a strategy goes, which ranks work together along it, and which share of the data each has.

Ranks are numbered with the tensor axis innermost (inside a host), then sequence, then data, and pipeline stages outermost: what
talks most lies closest, and what talks least crosses hosts (Narayanan et al. 2021, arXiv 2104.04473, section 3).
"""

import math
from dataclasses import dataclass

from ...errors.tables import Document, Fields

# What a ds_config says of its axes. It is no part of a run's identity: another division of the same model computes the same.
DS_BLOCKS = ("tensor_parallel", "sequence_parallel_size", "pipeline", "expert_parallel")
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

    tensor: ranks that each layer's matrices are divided over; sequence: ranks that the tokens of a sequence are divided over
    stages: of the pipeline
    experts: neighbouring ranks of a stage that the experts of a layer are divided over; all else is divided over them as without
    schedule: of the pipeline (engines/parallel/pipeline_schedule.py), "" for its first choice; virtual: stages on each of its
    ranks
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
    def unit(self) -> int:
        """What the number of ranks has to be a multiple of: experts go over ranks that other axes divide too."""
        return self.stages * math.lcm(self.tensor * self.sequence, self.experts)

    @property
    def divides_layers(self) -> bool:
        """Whether a rank has a part of a layer's own: what DDP would need FSDP2 for."""
        return self.tensor > 1 or self.experts > 1

    @property
    def used(self) -> dict[str, int]:
        """The axes that go over more than one rank."""
        return {axis: getattr(self, axis) for axis in NAMES if getattr(self, axis) > 1}

    @property
    def chosen_schedule(self) -> str:
        """The pipeline's schedule, also where nobody has named one."""
        return self.schedule or ("1f1b" if self.virtual == 1 else "interleaved1f1b")

    @property
    def every_stage(self) -> int:
        """How many stages the pipeline has on all its ranks."""
        return self.stages * self.virtual

    def __bool__(self) -> bool:
        return bool(self.used)

    def __str__(self) -> str:
        return " x ".join(f"{NAMES[axis]} {size}" for axis, size in self.used.items())

    def data(self, world_size: int) -> int:
        """The data-parallel size: how many ranks, or groups of them, get different sequences."""
        return max(1, world_size // self.model)

    def place(self, rank: int, world_size: int) -> Place:
        rest, tensor = divmod(rank, self.tensor)
        rest, sequence = divmod(rest, self.sequence)
        stage, data = divmod(rest, self.data(world_size))
        return Place(tensor, sequence, data, stage)


NONE = Axes()


def without(ds_config: Document | None) -> Fields | None:
    """Return a ds_config without its axes."""
    if ds_config is None:
        return None
    return {key: value for key, value in ds_config.items() if key not in DS_BLOCKS}
