"""Liger's kernels on a host without a GPU: the package itself, by Triton's interpreter, with TRITON_INTERPRET=1 where both are
installed (pip install --target FOLDER liger-kernel triton, and PYTHONPATH=FOLDER). Else they are the same functions in plain
torch, put into the same places of a model. As Liger's do, they compute their gradients themselves, write them over what they were
given, and want weights that are plain and whole."""

import functools
import importlib
import importlib.util
import os
import sys
from collections import Counter
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

CALLS: Counter[str] = Counter()  # of each kernel in this process


@functools.cache
def install() -> None:
    """Let this process train with Liger's kernels. They stay: Liger changes functions of a model's module."""
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("liger_kernel"):
        _interpret()  # it was said before Triton was imported, as it has to be: torch's build for CUDA imports it
        return
    os.environ["TRITON_INTERPRET"] = "1"
    from transformers.integrations import liger

    package, inner = (ModuleType(name) for name in ("liger_kernel", "liger_kernel.transformers"))
    package.__spec__ = ModuleSpec("liger_kernel", None)
    inner._apply_liger_kernel_to_instance = _apply  # type: ignore[attr-defined]
    sys.modules |= {"liger_kernel": package, "liger_kernel.transformers": inner}
    liger.is_liger_kernel_available = lambda: True


# ---- the package ---------------------------------------------------------------------------------------------------------
def _interpret() -> None:
    import liger_kernel.ops as ops
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:  # Triton 3.9 leaves a number as it is, and Liger asks it for its `to`
        if not isinstance(value, float):
            return convert(value)
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = with_floats
    # A function of CUDA's library, of which the interpreter makes nothing.
    norms: Any = importlib.import_module("liger_kernel.ops.rms_norm")
    norms.rsqrt = lambda value: tl.math.rsqrt(value)
    for name, kernel in (("norm", ops.LigerRMSNormFunction), ("gated", ops.LigerSiLUMulFunction)):
        kernel.forward = staticmethod(_counted(name, kernel.forward))
    kernel = importlib.import_module("liger_kernel.ops.rope").LigerRopeFunction
    kernel.forward = staticmethod(_counted("rotary", kernel.forward))


def _counted(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        CALLS[name] += 1
        return function(*args, **options)

    return call


# ---- what stands in for it -------------------------------------------------------------------------------------------
class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        CALLS["norm"] += 1
        assert not isinstance(weight, DTensor) and weight.shape == hidden.shape[-1:]
        inverse = (hidden.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(hidden, weight, inverse)
        return weight * (hidden.float() * inverse).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight, inverse = ctx.saved_tensors
        (gradient,) = gradients
        normed, of_normed = hidden.float() * inverse, gradient.float() * weight.float()
        of_weight = (gradient.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gradient.copy_((of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)) * inverse)
        return gradient, of_weight, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        CALLS["gated"] += 1
        assert not isinstance(gate, DTensor)
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gate, up = (tensor.detach() for tensor in ctx.saved_tensors)
        sigmoid = gate.sigmoid()
        of_gate = gradients[0] * up * sigmoid * (1 + gate * (1 - sigmoid))
        up.copy_(gradients[0] * gate * sigmoid)
        return gate.copy_(of_gate), up


def _norm(module: Any, hidden: torch.Tensor) -> Any:
    return _Norm.apply(hidden, module.weight, module.variance_epsilon)


def _gated(mlp: Any, hidden: torch.Tensor) -> Any:
    return mlp.down_proj(_Gated.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


def _apply(model: Any, fused_linear_cross_entropy: bool = True, swiglu: bool = True, **_: Any) -> None:
    """What Liger's function of this name does to a Llama or a Qwen3. Its loss, which is on by default, is not here."""
    assert not fused_linear_cross_entropy
    modeling = sys.modules[type(model.get_decoder()).__module__]
    plain = modeling.apply_rotary_pos_emb

    def rotary(query: torch.Tensor, *args: Any, **options: Any) -> Any:
        assert query.dtype != torch.float64  # Triton's interpreter and GPUs say no to tiny models of trials
        return plain(query, *args, **options)

    modeling.apply_rotary_pos_emb = _counted("rotary", rotary)  # type: ignore[attr-defined]
    norms = [model.model.norm]
    for layer in model.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(layer.self_attn, name) for name in ("q_norm", "k_norm") if hasattr(layer.self_attn, name)]
        if swiglu:
            layer.mlp.forward = MethodType(_gated, layer.mlp)
    for norm in norms:
        norm.forward = MethodType(_norm, norm)
