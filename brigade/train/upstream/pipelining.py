"""torch.distributed.pipelining with micro-batches of different lengths, and without a first pass that looks for shapes.

torch takes one shape for all micro-batches of a pipeline, and its public step() cuts one batch into them
(distributed/pipelining/schedules.py: step, _split_inputs). Ours are ready-made, and each stage knows their shapes from its own
batches. Buffers are made when something is about to be received, and let go after its backward pass; torch keeps all of them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

Schedule: TypeAlias = PipelineScheduleSingle | PipelineScheduleMulti


class Stage(PipelineStage):
    """shapes: of the activation before and after this stage, for each micro-batch"""

    def __init__(
        self, part: nn.Module, index: int, stages: int, device: torch.device, dtype: torch.dtype, group: ProcessGroup
    ) -> None:
        # With an example on either side the first pass that infers them is left out (stage.py: _warmup_forward_vote).
        example = torch.empty(1, dtype=dtype, device="meta", requires_grad=True)
        super().__init__(
            part, index, stages, device, input_args=example if index else (), output_args=example, group=group
        )
        self.dtype, self.shapes = dtype, list[tuple[int, ...]]()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        self._hold(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        if self.has_backward and not self.is_last:
            self._hold(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _hold(self, received: Any, number: int) -> None:
        for info in received:
            if not info.is_root_arg:
                info.buffer = torch.empty(self.shapes[number], dtype=self.dtype, device=self.device)
                if hasattr(info, "allocate_buffer"):
                    # Newer torch makes it by this description, where there is none yet.
                    changed = {"shape": info.buffer.shape, "stride": info.buffer.stride()}
                    info.buffer, info.tensor_meta = None, replace(info.tensor_meta, **changed)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: object, **options: object) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None


def step(
    schedule: Schedule, stages: list[Stage], count: int, micro_batch: Callable[[int], dict[str, object]]
) -> list[torch.Tensor]:
    """All of a step's `count` micro-batches forward and backward; gradients are added up in the parameters.

    micro_batch: keyword arguments of each stage's part for a number; returns the losses on the last stage, elsewhere nothing.
    """
    losses: list[torch.Tensor] = []
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    inputs, none = [micro_batch(number) for number in range(count)], [()] * count
    schedule._step_microbatches(none, inputs, [None] * count, losses, return_outputs=False)
    return losses
