"""What adapters bring to a tensor group: base matrices in 4 bits (QLoRA), and DoRA's norms of whole rows."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...upstream import autotp

BLOCK = 64  # neighbours in a row that bitsandbytes scales together (nn/modules.py: Params4bit.blocksize)


def cut_4bit(linear: torch.nn.Module, where: Shard, mesh: DeviceMesh) -> None:
    """Leave a Linear4bit only its rank's rows or columns, in place, with the values that they have in the whole matrix.

    These are read in fp32 and quantised again, in the same blocks. The largest value of a block is its scale times 1 or -1, so
    scales and codes come out as they were. The scales themselves are not quantised (use_bnb_nested_quant), for their blocks would
    be different ones: 0.5 bits per weight instead of 0.13.
    """
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    weight, state = linear.weight, copy.copy(linear.weight.quant_state)
    dtype, state.dtype = state.dtype, torch.float32
    part = dequantize_4bit(weight.data, state).chunk(mesh.size(), where.dim)[mesh.get_local_rank()]
    how = {"compress_statistics": False, "quant_type": weight.quant_type, "quant_storage": weight.quant_storage}
    linear.weight = Params4bit(part.contiguous(), module=linear, **how).to(weight.device)
    linear.weight.quant_state.dtype = dtype
    autotp.compute_locally(linear)


def compute_dora(dora: torch.nn.Module, mesh: DeviceMesh, columns: bool) -> None:
    """Let PEFT's DoraLinearLayer compute with parts of a matrix, in place (peft/tuners/lora/dora.py does it with whole ones).

    Norms are no part of the gradient (arXiv 2402.09353, section 4.3). columns: whether ranks divide columns rather than rows
    """

    def forward(
        x: torch.Tensor,
        *,
        lora_A: torch.nn.Module,
        lora_B: torch.nn.Module,
        scaling: float,
        base_layer: torch.nn.Module,
        base_result: torch.Tensor = None,
        **_: object,
    ) -> torch.Tensor:
        with torch.no_grad():
            weight = _values(base_layer).to(x.dtype) + scaling * (_local(lora_B.weight) @ _local(lora_A.weight))
            squares = weight.square().sum(1)
            if columns:
                dist.all_reduce(squares, group=mesh.get_group())
        scale = (_local(dora.weight) / squares.sqrt()).view(1, -1)
        base_result = base_layer(x) if base_result is None else base_result  # with dropout x is another one
        if base_layer.bias is not None:
            base_result = base_result - _local(base_layer.bias)
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling

    dora.forward = forward


def _values(linear: torch.nn.Module) -> torch.Tensor:
    from peft.utils.integrations import dequantize_module_weight

    return _local(dequantize_module_weight(linear))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part. Ranks that have the whole compute the same with it, so that its gradient is whole too."""
    return tensor.to_local(grad_placements=tensor.placements) if isinstance(tensor, DTensor) else tensor
