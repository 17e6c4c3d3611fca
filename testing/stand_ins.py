"""Stand-ins for kernels that a trace cannot run: they compute nothing, and save and allocate what the kernels do.

FlashAttention keeps queries, keys, values, its output and an fp32 log-sum-exp per head and token, as the signature of its
backward pass says (aten::_flash_attention_backward). SDPA on a CPU keeps the same, but where a window or a batch asks for a
mask it takes another kernel and repeated keys and values. Liger's norms and gated MLPs keep what their autograd functions save
(liger_kernel/ops/rms_norm.py, swiglu.py); its rotary embedding keeps nothing of the activations, as Transformers' does not.
A hybrid's gated delta rule, short convolution and state space keep what those of flash-linear-attention, causal-conv1d and
mamba-ssm do.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from brigade.plan.shape.built import FLASH_WIDTH
from brigade.train.model.per_layer import widest_head

SCANNED = 2048  # tokens of a chunk of the selective scan (csrc/selective_scan/selective_scan.cpp)
FLASH = "brigade_traced"  # no name with flash in it, which Transformers would look for among its kernels


class _Flash(torch.autograd.Function):
    """What FlashAttention allocates. query: (rows, tokens, heads, size), key and value with fewer heads."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        rows, tokens, heads, _ = query.shape
        out = query.new_empty(rows, tokens, heads, value.shape[-1])
        sums = query.new_empty(rows, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        # Its workspace: an fp32 accumulator for the queries, and keys' and values' gradients for every query head.
        space = [torch.empty_like(query, dtype=torch.float32), torch.empty_like(sums)]
        if key.shape[2] != query.shape[2]:
            space += [torch.empty_like(query), torch.empty_like(out)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _Masked(torch.autograd.Function):
    """What SDPA keeps besides where it is given a mask."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def flash(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
    """FlashAttention as Transformers calls it: (rows, heads, tokens, size) in, (rows, tokens, heads, size) out."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    # SDPA then, with repeated keys and values, and a mask for a window.
    if module is not None and widest_head(module.config) > FLASH_WIDTH:
        tokens, window = query.shape[2], kwargs.get("sliding_window")
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
        if window and tokens > window:
            query = _Masked.apply(query, query.new_empty(tokens, tokens))
    return _Flash.apply(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


class _SavesInput(torch.autograd.Function):
    """A norm in one kernel: its input, and a number per token."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


class _GatedInPlace(torch.autograd.Function):
    """silu(gate) * up in one kernel, which computes silu again and writes gradients over its inputs (Liger)."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.saved_tensors


class _DeltaRule(torch.autograd.Function):
    """What fla/ops/gated_delta_rule/chunk.py saves, with chunks of 64 tokens. query, key, value: (rows, tokens, heads, size)"""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        rows, tokens, heads = g.shape
        ctx.save_for_backward(
            torch.empty_like(query, memory_format=torch.contiguous_format),  # normalised, in l2norm_fwd
            query.new_empty(query.shape[:-1], dtype=torch.float32),
            torch.empty_like(key, memory_format=torch.contiguous_format),
            key.new_empty(key.shape[:-1], dtype=torch.float32),
            value.contiguous(),
            torch.empty_like(g),  # summed up within chunks
            beta,
            query.new_empty(rows, tokens, heads, 64),
        )
        return torch.empty_like(value, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, _, key, _, value, g, beta, _ = ctx.saved_tensors
        rows, tokens, heads = g.shape
        # States at the borders of chunks and what goes into them are computed again.
        again = [query.new_empty(rows, tokens // 64 + 1, heads, key.shape[-1], value.shape[-1]) for _ in range(2)]
        again += [torch.empty_like(value), value.new_empty(rows, tokens, heads, key.shape[-1])]
        return tuple(torch.empty_like(each) for each in (query, key, value, g, beta))


def _delta_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return _DeltaRule.apply(query, key, value, g, beta), None


class _ChannelRule(torch.autograd.Function):
    """What fla/ops/kda/chunk.py saves, where the gate is computed before it. query, key, value, g: (rows, tokens, heads, size)"""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        rows, tokens, heads, _ = g.shape
        normalised = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (query, key)]
        sizes = [query.new_empty(rows, tokens, heads, dtype=torch.float32) for _ in range(2)]
        pairs = [query.new_empty(rows, tokens, heads, 64) for _ in range(2)]
        summed = torch.empty_like(g, dtype=torch.float32)  # within chunks
        ctx.save_for_backward(*normalised, *sizes, value.contiguous(), summed, g, beta, *pairs)
        return torch.empty_like(value, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, _, _, value, summed, g, beta, _, _ = ctx.saved_tensors
        rows, tokens, heads, size = g.shape
        # What goes into states and comes out, the states at the borders of chunks and their gradients (chunk_bwd.py).
        again = [torch.empty_like(query) for _ in range(6)]
        again += [query.new_empty(rows, tokens // 64 + 1, heads, size, value.shape[-1]) for _ in range(2)]
        again += [
            torch.empty_like(summed) for _ in range(4)
        ]  # in fp32: gradients of queries, keys, and twice of the gate
        again += [query.new_empty(rows, tokens, heads, 64, dtype=torch.float32) for _ in range(2)]
        found = [torch.empty_like(each) for each in (query, key, value)]
        del again
        return *found, torch.empty_like(g), torch.empty_like(beta)


def _channel_rule(query: Any, key: Any, value: Any, g: Any, beta: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return _ChannelRule.apply(query, key, value, g, beta), None


class _Convolution(torch.autograd.Function):
    """A causal convolution in one kernel, with its activation: it saves its input (causal_conv1d_interface.py)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


def _convolution(hidden: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any) -> torch.Tensor:
    return _Convolution.apply(hidden, weight)


class _StateSpace(torch.autograd.Function):
    """What mamba_ssm/ops/triton/ssd_combined.py saves of a layer after its first product: MambaSplitConv1dScanCombinedFn.

    projected: (rows, tokens, width), gate, values, B, C and steps side by side; out: the last product's weight, (outer, inner)
    """

    @staticmethod
    def forward(
        ctx: Any, projected: torch.Tensor, out: torch.Tensor, groups: int, heads: int, chunk: int
    ) -> torch.Tensor:
        rows, tokens, width = projected.shape
        scanned = projected.new_empty(rows, tokens, out.shape[1])
        ctx.save_for_backward(projected, scanned, out, projected.new_empty(rows * groups, tokens, dtype=torch.float32))
        ctx.heads = heads
        state = (width - 2 * out.shape[1] - heads) // (2 * groups)
        ctx.states = (rows, tokens // chunk + 1, out.shape[1], state)
        return projected.new_empty(rows, tokens, out.shape[0], dtype=out.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        projected, scanned, out, _ = ctx.saved_tensors
        rows, tokens, inner = scanned.shape
        # Values, B and C after the convolution, the gated and normed result and its gradient, and in fp32 steps, the states at
        # the borders of chunks and their gradients, once more.
        again = [projected.new_empty(rows, tokens, projected.shape[-1] - inner - ctx.heads)]
        again += [torch.empty_like(scanned) for _ in range(3)]
        again += [projected.new_empty(rows, tokens, ctx.heads, dtype=torch.float32) for _ in range(3)]
        again += [projected.new_empty(ctx.states, dtype=torch.float32) for _ in range(2)]
        return torch.empty_like(projected), torch.empty_like(out), None, None, None


def _state_space(
    projected: Any,
    weight: Any,
    bias: Any,
    steps: Any,
    decay: Any,
    chunk_size: int,
    outproj_weight: Any,
    ngroups: int,
    **kwargs: Any,
) -> torch.Tensor:
    half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else outproj_weight.dtype
    return _StateSpace.apply(projected, outproj_weight.to(half), ngroups, steps.shape[0], chunk_size)


class _SelectiveScan(torch.autograd.Function):
    """What SelectiveScanFn of mamba_ssm/ops/selective_scan_interface.py saves: its inputs, with tokens next to each other in
    memory, the states at the borders of its chunks, and what it gives before the gate.

    hidden, steps, gate: (rows, inner, tokens); decay: (inner, state); into, out_of: (rows, state, tokens), B and C
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        steps: torch.Tensor,
        decay: torch.Tensor,
        into: torch.Tensor,
        out_of: torch.Tensor,
        gate: torch.Tensor,
    ) -> torch.Tensor:
        rows, inner, tokens = hidden.shape
        inputs = [one if one.stride(-1) == 1 else one.contiguous() for one in (hidden, steps, into, out_of, gate)]
        borders = hidden.new_empty(rows, inner, -(-tokens // SCANNED), 2 * decay.shape[1], dtype=torch.float32)
        ctx.save_for_backward(decay, *inputs, borders, torch.empty_like(inputs[1]))
        return torch.empty_like(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        decay, hidden, steps, into, out_of, gate, _, _ = ctx.saved_tensors
        gradient = gradients[0] if gradients[0].stride(-1) == 1 else gradients[0].contiguous()
        sums = [torch.empty_like(one, dtype=torch.float32) for one in (into, out_of)]  # over channels, in fp32
        found = [torch.empty_like(one) for one in (hidden, steps, decay, into, out_of, gate)]
        del gradient, sums
        return tuple(found)


def _selective_scan(hidden: Any, steps: Any, decay: Any, into: Any, out_of: Any, z: Any, **kwargs: Any) -> torch.Tensor:
    return _SelectiveScan.apply(hidden, steps, decay, into, out_of, z)


@contextmanager
def mixers(model: torch.nn.Module) -> Iterator[None]:
    """While it lasts, the recurrences of a hybrid are stand-ins for their kernels."""
    rooms = {sys.modules[type(module).__module__] for module in model.modules()}
    stand_ins = {
        "torch_chunk_gated_delta_rule": _delta_rule,
        "chunk_kimi_delta_attention": _channel_rule,
        "causal_conv1d_fn": _convolution,
        "mamba2_split_conv1d_scan_combined": _state_space,
        "mamba_selective_scan": _selective_scan,
    }
    replaced = [(room, name, getattr(room, name)) for room in rooms for name in stand_ins if hasattr(room, name)]
    for room, name, _ in replaced:
        setattr(room, name, stand_ins[name])
    try:
        yield
    finally:
        for room, name, own in replaced:
            setattr(room, name, own)


def fuse(model: torch.nn.Module, kernels: frozenset[str]) -> None:
    """Norms and gated MLPs of `model`, in place, as kernels of their own save. Rotary embeddings save nothing either way."""
    for module in model.modules():
        kind, names = type(module).__name__, dict(module.named_children())
        if "norm" in kernels and kind.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            module.forward = lambda hidden, module=module: _SavesInput.apply(hidden, module.weight)
        if "mlp" in kernels and {"gate_proj", "up_proj", "down_proj"} <= set(names):
            module.forward = lambda x, m=module: m.down_proj(_GatedInPlace.apply(m.gate_proj(x), m.up_proj(x)))
        elif "mlp" in kernels and {"gate_up_proj", "down_proj"} <= set(names):
            module.forward = lambda x, m=module: m.down_proj(_GatedInPlace.apply(*m.gate_up_proj(x).chunk(2, dim=-1)))
        elif "mlp" in kernels:
            _replace_gate(module, lambda both: _GatedInPlace.apply(*both.chunk(2, dim=-1)))


def _replace_gate(experts: torch.nn.Module, gate: torch.nn.Module) -> None:
    """Fused experts compute `gate(both)`, where they have no gate of their own as gpt-oss has (integrations/moe.py)."""
    from transformers.integrations.moe import _default_apply_gate

    if getattr(type(experts), "_apply_gate", None) is _default_apply_gate:
        experts._apply_gate = gate


def register_flash() -> None:
    """`flash` under a name that Transformers knows, without a mask."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(FLASH, flash)
    ALL_MASK_ATTENTION_FUNCTIONS.register(FLASH, lambda *args, **kwargs: None)
