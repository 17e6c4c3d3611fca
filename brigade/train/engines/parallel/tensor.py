"""Tensor parallelism: each layer's matrices over the ranks of a group, by the plan that Transformers has for the architecture.

Matrices that come first in a block (queries, keys, values, gate, up) are divided by their outputs, "colwise"; those that end it
(o_proj, down_proj) by their inputs, "rowwise", and a sum over the group follows (Shoeybi et al. 2019, arXiv 1909.08053). Heads
and neurons in between are a rank's own. Whatever stands between blocks is the same on every rank, forward and backward.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from ...model import experts, per_layer
from ...strategy import axis_rules
from ...upstream import autotp
from . import tensor_trial
from .tensor_plan import NORMS, WEIGHTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


BLOCK = 64  # neighbours in a row that bitsandbytes scales together (nn/modules.py: Params4bit.blocksize)
Mistake = tuple[str, str]  # problem, cure
CURE = "remove the key; ZeRO-3 and FSDP2 shard any model"


def check(
    config: PreTrainedConfig,
    size: int,
    besides: Collection[str] = (),
    in_4bit: bool = False,
    shards: int = 1,
    trust_remote_code: bool = False,
) -> Mistake | None:
    """Return why a model of this config cannot be divided over so many ranks: (problem, cure), or None. A tiny one is tried out.

    besides: names in its plan that something else divides; in_4bit: whether matrices are quantised (QLoRA)
    shards: ranks over which FSDP2 shards a part
    """
    text = config.get_text_config()
    plan = {name: style for name, style in (text.base_model_tp_plan or {}).items() if name not in besides}
    if not experts.count(config):  # Gemma 4's plan is also that of its mixtures
        plan = {name: style for name, style in plan.items() if "experts" not in name.split(".")}
    if {*plan.values()} <= {"embedding_rowwise"}:  # which divides no layer
        problem = f"Transformers has no tensor-parallel plan for {text.model_type}"
        return problem, CURE
    odd = sorted(set(plan.values()) - {*WEIGHTS, NORMS})
    if odd:
        problem = f"the plan of {text.model_type} divides parts in ways that train.py has not tried ({', '.join(odd)})"
        beside = experts.plan(config)
        if beside and not besides and check(config, size, beside, in_4bit, shards, trust_remote_code) is None:
            return problem, "divide the experts too (parallelism_config_ep_size, under FSDP2 or DDP), or remove the key"
        return problem, "remove the key; dense models with separate projections can be divided"
    for layer in per_layer.each_layers(text):
        mistake = _check_sizes(layer, size, tied(config), in_4bit, shards)
        if mistake:
            return mistake
    why = tensor_trial.summed(config, trust_remote_code)[1]
    if why:
        problem = f"the plan that Transformers has for {text.model_type} is not to be trusted: {why}"
        return problem, CURE
    return None


def _check_sizes(layer: PreTrainedConfig, size: int, ends_whole: bool, in_4bit: bool, shards: int) -> Mistake | None:
    """Return why sizes of a layer's config do not divide, as check() does. ends_whole: whether embeddings and head stay whole"""
    heads, block = layer.num_attention_heads, BLOCK
    # Gemma 3n has one for each layer, and a mixture without dense layers that of the expert which all tokens visit.
    width = getattr(layer, "intermediate_size", None) or getattr(layer, "shared_expert_intermediate_size", 0)
    width = math.gcd(*width) if isinstance(width, list) else width
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
        "intermediate_size": width,
    }
    if not ends_whole:
        sizes["vocab_size"] = layer.vocab_size
    for name, number in sizes.items():
        if number % size:
            fits = [str(n) for n in range(2, size) if not any(other % n for other in (size, *sizes.values()))]
            cure = f"set it to {' or '.join(fits)}" if fits else "remove the key: no size divides them all"
            return f"{name} {number} of {layer.model_type} does not divide over {size} ranks", cure
    inputs = {
        "num_attention_heads x head_dim": heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads),
        "intermediate_size": width,
    }
    for name, number in inputs.items() if in_4bit else ():
        if number // size % block:
            problem = (
                f"{name} {number} of {layer.model_type} over {size} ranks is {number // size} for each, and in 4 bits"
            )
            return f"{problem} {block} neighbours have one scale", "use a smaller size, or LoRA without load_in_4bit"
    return axis_rules.uneven_parts(axis_rules.outputs(layer.to_dict(), ends_whole), size, shards)


def tied(config: PreTrainedConfig) -> bool:
    """Whether the head's weight is the embedding's; then both stay whole."""
    return bool(
        getattr(config.get_text_config(), "tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False)
    )


def divide(model: torch.nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divide a model in place: all parameters become DTensors of a one-dimensional mesh, even those that stay whole.

    Thus all have the same mesh once FSDP2 has sharded them, and an optimizer steps many of them at once. Parameters must hold the
    same on every rank of the mesh, or nothing (the meta device). Modules that are divided already (experts) stay as they are.
    Matrices in 4 bits become parts that are no DTensors: no optimizer steps them, and no checkpoint has them.

    plan: one of Transformers' styles for each module, by its name in this model
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    divided: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied weights stay tied
    for name, module in list(model.named_modules()):
        style = plan.get(name, "")
        if _is_divided(module):
            continue
        dora = hasattr(module, "get_weight_norm")  # its weight counts outputs, as a bias does
        for key, parameter in list(module.named_parameters(recurse=False)):
            where = _placement(WEIGHTS.get(style), "bias" if dora else key)
            if hasattr(parameter, "quant_state"):
                if isinstance(where, Shard):
                    cut_4bit(module, where, mesh)
                continue
            if parameter not in divided:
                values = distribute_tensor(parameter.detach(), mesh, [where], src_data_rank=None)
                divided[parameter] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
            module.register_parameter(key, divided[parameter])
        if dora:
            compute_dora(module, mesh, columns=WEIGHTS.get(style) == 1)
        elif style in WEIGHTS:
            with _what_multiplies(module):
                ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
        elif module._parameters:
            # A norm of each head sees only its rank's heads, so that a rank's gradient is a part of the sum. Transformers' own
            # style adds up what has accumulated, in every micro-step anew (distributed/tensor_parallel.py:
            # ReplicatedWithGradAllReduce), and hangs on a parameter that FSDP2 replaces.
            # A layer with parameters of its own may read those of a convolution in it, too (Qwen3.5's linear attention).
            own = {name: module}
            for part, child in module.named_children():
                of = f"{name}.{part}" if name else part
                own |= {} if plan.get(of) in WEIGHTS or _is_divided(child) else {of: child}
            summed = {
                part: {key for key in part._parameters if NORMS in (plan.get(of), plan.get(f"{of}.{key}"))}
                for of, part in own.items()
            }
            with _what_multiplies(module):
                _compute_locally(module, summed)


def _is_divided(module: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module._parameters.values())


def _placement(dimension: int | None, key: str) -> Placement:
    """Return how a weight or a bias lies: a bias is divided along with outputs, but added once to what inputs sum up to."""
    if dimension is None or (dimension == 1 and key != "weight"):
        return Replicate()
    return Shard(dimension)


@contextmanager
def _what_multiplies(module: torch.nn.Module) -> Iterator[None]:
    """Let whatever replaces the module's forward method in the body replace the method that the module's class calls `multiplies`
    instead, where it has one: that is called for each tile, and once more in the backward pass."""
    name = getattr(type(module), "multiplies", "forward")
    forward, module.forward = module.forward, getattr(module, name)
    yield
    divided, module.forward = module.forward, forward
    setattr(module, name, divided)


def _compute_locally(module: torch.nn.Module, summed: Mapping[torch.nn.Module, Collection[str]]) -> None:
    """Let a module compute with the local values of its DTensors, and of those in parts of it whose parameters it reads itself.

    summed: the module and these parts -> parameters whose gradient is the sum over ranks
    While it computes, the values are attributes of the instance, which Python finds before a module's parameters.
    """
    forward = module.forward

    def local(*args: object, **options: object) -> object:
        before = []
        for part, in_parts in summed.items():
            for key, value in part._parameters.items():
                if isinstance(value, DTensor):
                    before.append((vars(part), key, vars(part).get(key)))
                    vars(part)[key] = value.to_local(grad_placements=[Partial() if key in in_parts else Replicate()])
        try:
            return forward(*args, **options)
        finally:
            for attributes, key, value in before:
                del attributes[key]
                if value is not None:
                    attributes[key] = value

    module.forward = local  # type: ignore[method-assign]


# ---- what adapters bring to a group: base matrices in 4 bits (QLoRA), and DoRA's norms of whole rows -------------------
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
