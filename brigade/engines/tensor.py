"""Tensor parallelism: each layer's matrices over the ranks of a group, by the plan that Transformers has for the architecture.

Matrices that come first in a block (queries, keys, values, gate, up) are divided by their outputs, "colwise"; those that end it
(o_proj, down_proj) by their inputs, "rowwise", and a sum over the group follows (Shoeybi et al. 2019, arXiv 1909.08053). Heads
and neurons in between are a rank's own. What stands between blocks is on every rank the same, forward and backward.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from . import tensor_adapters

# Transformers' words for how a module is divided, and which dimension of its weight and bias that is; None: they stay whole.
WEIGHTS = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "colwise_rep": 0,
    "embedding_rowwise": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "rowwise_rep": 1,
}
NORMS = "replicated_with_grad_allreduce"  # a norm of each head, on a rank's own heads
Mistake = tuple[str, str]  # problem, cure


def check(config: Any, size: int, besides: Collection[str] = (), in_4bit: bool = False) -> Mistake | None:
    """Why a model of this config cannot be divided over so many ranks: (problem, cure), or None. Nothing is built for it.

    besides: names in its plan that something else divides; in_4bit: whether matrices are quantised (QLoRA)
    """
    text = config.get_text_config()
    plan = {name: style for name, style in (text.base_model_tp_plan or {}).items() if name not in besides}
    if not plan:
        problem = f"Transformers has no tensor-parallel plan for {text.model_type}"
        return problem, "remove the key; ZeRO-3 and FSDP2 shard any model"
    if odd := sorted(set(plan.values()) - {*WEIGHTS, NORMS}):
        problem = f"the plan of {text.model_type} divides parts in ways that train.py has not tried ({', '.join(odd)})"
        return problem, "remove the key; dense models with separate projections can be divided"
    sizes = {
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "intermediate_size": text.intermediate_size,
    }
    if not tied(config):
        sizes["vocab_size"] = text.vocab_size
    for name, number in sizes.items():
        if number % size:
            fits = [str(n) for n in range(2, size) if not any(other % n for other in sizes.values())]
            cure = f"set it to {' or '.join(fits)}" if fits else "remove the key: no size divides them all"
            return f"{name} {number} of {text.model_type} does not divide over {size} ranks", cure
    heads, block = text.num_attention_heads, tensor_adapters.BLOCK
    inputs = {
        "num_attention_heads x head_dim": heads * (getattr(text, "head_dim", None) or text.hidden_size // heads),
        "intermediate_size": text.intermediate_size,
    }
    for name, number in inputs.items() if in_4bit else ():
        if number // size % block:
            problem = (
                f"{name} {number} of {text.model_type} over {size} ranks is {number // size} for each, and in 4 bits"
            )
            return f"{problem} {block} neighbours have one scale", "use a smaller size, or LoRA without load_in_4bit"
    return None


def tied(config: Any) -> bool:
    """Whether the head's weight is the embedding's: both then stay whole."""
    return bool(
        getattr(config.get_text_config(), "tie_word_embeddings", False) or getattr(config, "tie_word_embeddings", False)
    )


def divide(model: torch.nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divide a model in place: all parameters become DTensors of a one-dimensional mesh, whole ones on the meta device too.

    Those of no plan are whole on every rank, and DTensors all the same: so all have one mesh once FSDP2 has sharded them, and
    an optimizer steps many of them at once. plan: of each module, by its name in this model, a style among Transformers'.
    Parameters must hold the same on every rank of the mesh, or nothing. Modules that are divided already (experts) stay so.
    Matrices in 4 bits become parts that are no DTensors: no optimizer steps them, and no checkpoint has them.
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    divided: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied weights stay tied
    for name, module in list(model.named_modules()):
        style = plan.get(name, "")
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            continue
        dora = hasattr(module, "get_weight_norm")  # its weight counts outputs, as a bias does
        for key, parameter in list(module.named_parameters(recurse=False)):
            where = _placement(WEIGHTS.get(style), "bias" if dora else key)
            if hasattr(parameter, "quant_state"):
                if isinstance(where, Shard):
                    tensor_adapters.cut_4bit(module, where, mesh)
                continue
            if parameter not in divided:
                values = distribute_tensor(parameter.detach(), mesh, [where], src_data_rank=None)
                divided[parameter] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
            module.register_parameter(key, divided[parameter])
        if dora:
            tensor_adapters.compute_dora(module, mesh, columns=WEIGHTS.get(style) == 1)
        elif style in WEIGHTS:
            ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
        elif module._parameters:
            # A norm of each head sees its rank's heads alone, so that a rank's gradient is a part of the sum. Transformers' own
            # style adds up what has accumulated, in every micro-step anew (distributed/tensor_parallel.py:
            # ReplicatedWithGradAllReduce), and hangs on a parameter that FSDP2 replaces.
            _compute_locally(module, Partial() if style == NORMS else Replicate())


def _placement(dimension: int | None, key: str) -> Placement:
    """Of a weight, and of a bias: that of outputs is divided with them, and what inputs are summed up to gets it once."""
    if dimension is None or (dimension == 1 and key != "weight"):
        return Replicate()
    return Shard(dimension)


def _compute_locally(module: torch.nn.Module, gradient: Placement) -> None:
    """Let a module compute with the values of its DTensors. gradient: how what reaches them relates to the whole gradient.

    An instance's attribute is found before a module's parameter, and goes again after the forward pass.
    """
    forward = module.forward

    def local(*args: Any, **options: Any) -> Any:
        own = {key: value for key, value in module._parameters.items() if isinstance(value, DTensor)}
        vars(module).update({key: value.to_local(grad_placements=[gradient]) for key, value in own.items()})
        try:
            return forward(*args, **options)
        finally:
            for key in own:
                del vars(module)[key]

    module.forward = local  # type: ignore[method-assign]


def plan_of(model: Any) -> dict[str, str]:
    """Style of each module that is divided, by its name in this model, which may be wrapped by adapters.

    Of an adapter's two small matrices the one that has the divided side is divided like its base: B of a colwise base, A of a
    rowwise one. The other is whole, and what it computes is on every rank the same.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    styles = dict(base.tp_plan)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    found: dict[str, str] = {}
    for name, module in base.named_modules():
        parts = (part for part in name.split(".") if part != "_checkpoint_wrapped_module")
        general = ".".join("*" if part.isdigit() else part for part in parts)
        style = styles.get(general)
        if style not in (*WEIGHTS, NORMS) or (
            head is not None and head.weight is embedding.weight and module in (head, embedding)
        ):
            continue
        if hasattr(module, "modules_to_save"):  # PEFT keeps the module beside the copy that it trains whole
            found |= {
                f"{name}.{part}": style
                for part in ("original_module", *(f"modules_to_save.{key}" for key in module.modules_to_save))
            }
        elif hasattr(module, "base_layer"):
            found[f"{name}.base_layer"] = style
            found |= {f"{name}.lora_magnitude_vector.{key}": style for key in module.lora_magnitude_vector}
            divided = module.lora_B if WEIGHTS[style] == 0 else module.lora_A
            found |= {f"{name}.{'lora_B' if WEIGHTS[style] == 0 else 'lora_A'}.{key}": style for key in divided}
        else:
            found[name] = style
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    return {prefix + name: style for name, style in found.items()}
