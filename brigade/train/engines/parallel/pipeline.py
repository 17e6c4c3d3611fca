"""A rank's stages of a pipeline, and what it exchanges with the other ranks: activations, gradients, losses, sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...data.collate import MicroBatch
from ...distributed.process_group import COLLECTIVE_TIMEOUT
from ...strategy.axes import Axes
from ...strategy.axis_keys import groups
from ...upstream import pipelining
from ..shares import local_part
from . import pipeline_schedule as schedules
from .pipeline_split import Decoder, Part

BUCKET = 25 * 2**20  # bytes that are reduced at once, as in DDP

# (stage, micro-batch, supervised tokens of the step, what the stage before returned) -> what this stage returns, or the loss
Compute = Callable[[Part, dict[str, Any], Any, Tensor | None], Tensor]


class Groups:
    """Process groups of this rank. Making them is a collective: every rank makes all of them, in the same order.

    stages: the ranks that together hold a model, first to last; data: those that hold the same parts of the same stages
    ends: the first and the last rank of a pipeline, which have a tied embedding each (None elsewhere)
    tensor: the ranks that divide the matrices of the same stages, or, with experts, only this one (None: nobody divides layers)
    experts: how the ranks of a stage divide its experts (experts.py); same: the ranks with the same ones. Whoever divides them
        sets both.
    """

    experts: Any = None
    same: Any = None

    def __init__(self, axes: Axes, rank: int, world_size: int) -> None:
        pipelines = groups(axes, world_size, "stage")
        self.ranks = next(ranks for ranks in pipelines if rank in ranks)
        self.stages = _own(pipelines, rank)
        self.data = _own(groups(axes, world_size, "data", "sequence"), rank)
        ends = [[ranks[schedules.rank_of(axes, stage)] for stage in (0, -1 % axes.every_stage)] for ranks in pipelines]
        self.ends = _own(ends, rank) if len(set(ends[0])) > 1 else None
        self.tensor = _own(groups(axes, world_size, "tensor"), rank) if axes.divides_layers else None

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the mesh of the ranks over which each layer's matrices are divided."""
        return DeviceMesh.from_group(self.tensor, device.type, mesh_dim_names=("tp",))

    def is_expert(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this parameter is divided over ranks of this stage as experts are."""
        return self.experts is not None and self.experts.owns(parameter)


def _own(groups: Sequence[Sequence[int]], rank: int) -> ProcessGroup | None:
    made = {tuple(ranks): dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT) for ranks in groups}
    return next((group for ranks, group in made.items() if rank in ranks), None)


class Pipeline(nn.Module):
    """The model as a Trainer sees it: the parameters of this rank's stages, and a step of all micro-batches."""

    def __init__(
        self,
        model: PreTrainedModel,
        axes: Axes,
        layers: Sequence[range],
        groups: Groups,
        device: torch.device,
        compute: Compute,
    ) -> None:
        super().__init__()
        self.model, self.axes, self.groups, self.device, self.compute = model, axes, groups, device, compute
        self.tied_keys = Decoder(model).whole.all_tied_weights_keys
        self.rank, self.last = dist.get_rank(groups.stages), len(layers) - 1
        self.hidden_size = model.config.get_text_config().hidden_size
        own = schedules.stages_of(axes, self.rank)
        self.parts = {stage: Part(model, layers[stage], stage == 0, stage == self.last) for stage in own}
        # of activations: residuals have that of the weights, under autocast too
        self.dtype = next(model.parameters()).dtype
        self.stages = [
            pipelining.Stage(_Called(self, part), stage, len(layers), device, self.dtype, groups.stages)
            for stage, part in self.parts.items()
        ]
        self.micro_batches: list[dict[str, Any]] = []
        self.supervised: Any = None
        self.schedule: tuple[int, Any] = (0, None)

    # ---- training ----------------------------------------------------------------------------------------------------
    def step(self, micro_batches: list[MicroBatch], supervised: torch.Tensor | int | None) -> list[Tensor]:
        """Return each micro-batch's loss, on every rank of the pipeline. Gradients become means over the data-parallel ranks."""
        count = len(micro_batches)
        self.micro_batches, self.supervised = micro_batches, supervised
        if self.schedule[0] != count:
            self.schedule = count, schedules.make(self.axes, self.stages, count)
        for stage in self.stages:
            stage.shapes = [self._shape(each) for each in micro_batches]
        losses = pipelining.step(self.schedule[1], self.stages, count, lambda number: {"number": number})
        self.micro_batches = []
        self._reduce()
        known = torch.zeros(count, device=self.device)
        if losses:
            known = torch.stack([loss.detach().float() for loss in losses])
        dist.broadcast(known, self.last_rank, group=self.groups.stages)
        return list(known)

    @property
    def last_rank(self) -> int:
        """Return the rank of the whole world that has the last stage."""
        return int(self.groups.ranks[schedules.rank_of(self.axes, self.last)])

    def computed(self, part: Part, number: int, hidden: Tensor | None) -> Tensor:
        """Return what a stage of this rank makes of one of the step's micro-batches."""
        output = self.compute(part, self.micro_batches[number], self.supervised, hidden)
        if not part.last and output.dtype != self.dtype:  # the next stage waits for that many bytes
            raise RuntimeError(f"a stage returned {output.dtype}, and {self.dtype} was expected")
        return output

    def _shape(self, micro_batch: MicroBatch) -> tuple[int, ...]:
        return (*micro_batch["input_ids"].shape, self.hidden_size)

    # ---- only forward ------------------------------------------------------------------------------------------------
    def forward_alone(
        self, micro_batch: MicroBatch, supervised: torch.Tensor | int | None, compute: Compute | None = None
    ) -> Tensor | None:
        """Compute a forward pass through all stages. Returns what the last one returns, on its rank, and None elsewhere."""
        compute = compute or self.compute
        hidden: Tensor | None = None
        for stage, part in self.parts.items():
            before = schedules.rank_of(self.axes, stage - 1) if stage else self.rank
            if before != self.rank:
                hidden = torch.empty(self._shape(micro_batch), dtype=self.dtype, device=self.device)
                dist.recv(hidden, self.groups.ranks[before], group=self.groups.stages)
            hidden = compute(part, micro_batch, supervised, hidden)
            after = schedules.rank_of(self.axes, stage + 1) if stage != self.last else self.rank
            if after != self.rank:
                dist.send(hidden.contiguous(), self.groups.ranks[after], group=self.groups.stages)
        return hidden if self.last in self.parts else None

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def _reduce(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is None:  # an expert that met no token, perhaps only on this rank
                parameter.grad = torch.zeros_like(parameter)
            if isinstance(parameter.grad, DTensor):  # each rank of a tensor group has a part of some norms' gradients
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        size, experts = dist.get_world_size(self.groups.data), list(filter(self.groups.is_expert, trained))
        mean_([local_part(each.grad) for each in trained if not self.groups.is_expert(each)], self.groups.data, size)
        # They are already sums over the batches of the ranks that divide them, and in tensor groups over parts of batches.
        if experts:
            mean_([local_part(each.grad) for each in experts], self.groups.same, size)
        tied = self.tied() if self.groups.ends is not None else None
        if tied is not None and tied.requires_grad:
            dist.all_reduce(local_part(tied.grad), group=self.groups.ends)

    def tied(self) -> nn.Parameter | None:
        """Return the embedding that is also the head's weight, where another rank has it as well; else None."""
        if not self.tied_keys or self.groups.ends is None:
            return None
        return self.model.get_input_embeddings().weight

    def counted(self) -> list[nn.Parameter]:
        """Return this rank's parameters without those that an earlier rank of the pipeline has too."""
        again = None if 0 in self.parts else self.tied()
        return [parameter for parameter in self.model.parameters() if parameter is not again]

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks of the pipeline, on each of them."""
        dist.all_reduce(value, group=self.groups.stages)
        return value


class _Called(nn.Module):
    """What torch calls for a stage, with a micro-batch's number: torch would look for gradients in whatever else it hands on."""

    def __init__(self, pipeline: Pipeline, part: Part) -> None:
        super().__init__()
        self.part, self._pipeline = part, (pipeline,)

    def forward(self, hidden: Tensor | None = None, *, number: int) -> Tensor:
        return self._pipeline[0].computed(self.part, number, hidden)


def mean_(tensors: list[Tensor], group: ProcessGroup, size: int) -> None:
    """Make each tensor its sum over the group, divided by `size`. All ranks of the group give the same tensors, in order."""
    if size == 1 and dist.get_world_size(group) == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        for bucket in in_buckets([tensor for tensor in tensors if tensor.dtype == dtype]):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).div_(size)
            dist.all_reduce(flat, group=group)
            spread_(flat, bucket)


def in_buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbouring tensors together, up to BUCKET bytes, or one that is larger."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def spread_(flat: Tensor, tensors: list[Tensor]) -> None:
    """Set tensors to the parts of `flat`, where they lie end to end."""
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
