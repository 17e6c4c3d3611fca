"""The operations whose Triton kernels are judged: each beside eager code of Transformers or torch, and which models take it.

Imported where the packages of benchmarks/triton-requirements.txt are, after triton_interpreter.correct() or
triton_compiler.pretend().
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from liger_kernel.ops import (
    LigerFusedMoEFunction,
    LigerGELUMulFunction,
    LigerLayerNormFunction,
    LigerRMSNormFunction,
    LigerSiLUMulFunction,
)
from liger_kernel.transformers.model.loss_utils import fixed_fused_linear_cross_entropy
from liger_kernel.transformers.rope import liger_rotary_pos_emb, liger_rotary_pos_emb_gpt_oss
from torch.func import functional_call
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_moe import modeling_qwen3_moe

EPSILON = 1e-6
Tensors = dict[str, torch.Tensor]
LIGER, FLA = "liger-kernel", "flash-linear-attention"


@dataclass(frozen=True)
class Case:
    """One operation. inputs(**sizes) gives its tensors in fp32; eager and fused take them by name and return a tensor or several.

    small: sizes to compare numbers at; large: name to sizes to compile for; constant: inputs without a gradient; single: inputs
    that stay in fp32; halves: compiled for bf16 only
    """

    package: str
    models: str
    inputs: Callable[..., Tensors]
    eager: Callable[..., Any]
    fused: Callable[..., Any]
    small: dict[str, int]
    large: dict[str, dict[str, int]]
    constant: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    halves: bool = False


def widths(*those: int, rows: int = 64) -> dict[str, dict[str, int]]:
    return {f"width {width}": {"rows": rows, "width": width} for width in those}


# ---- norms ---------------------------------------------------------------------------------------------------------------
def rows_of(*names: str, weights: tuple[str, ...] = ()) -> Callable[..., Tensors]:
    def inputs(rows: int, width: int) -> Tensors:
        tensors = {name: torch.randn(rows, width) for name in names}
        return tensors | {name: 1 + 0.1 * torch.randn(width) for name in weights}

    return inputs


def norm_of(module: Any) -> Callable[..., torch.Tensor]:
    return lambda x, weight: functional_call(module(len(weight), EPSILON), {"weight": weight}, (x,))


def rms_norm(mode: str, offset: float, in_place: bool) -> Callable[..., torch.Tensor]:
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPSILON, offset, mode, in_place, None)


# ---- rotary --------------------------------------------------------------------------------------------------------------
def heads(half_width: bool = False) -> Callable[..., Tensors]:
    def inputs(tokens: int, queries: int, keys: int, width: int) -> Tensors:
        angles = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
        angles = angles if half_width else torch.cat((angles, angles), -1)
        q, k = torch.randn(1, queries, tokens, width), torch.randn(1, keys, tokens, width)
        return {"q": q, "k": k, "cos": angles.cos()[None], "sin": angles.sin()[None]}

    return inputs


def copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel writes into its inputs: it gets results of other operations, as in a model."""
    return lambda q, k, cos, sin: function(q * 1, k * 1, cos, sin)


# ---- loss ----------------------------------------------------------------------------------------------------------------
def hidden_states(tokens: int, width: int, vocabulary: int) -> Tensors:
    target = torch.randint(0, vocabulary, (tokens,))
    target[:: max(2, tokens // 8)] = -100
    return {"x": torch.randn(tokens, width), "weight": torch.randn(vocabulary, width) / width**0.5, "target": target}


def loss(softcap: float | None = None) -> Callable[..., torch.Tensor]:
    def eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = x @ weight.T
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        return F.cross_entropy(logits.float(), target, reduction="sum") / int((target != -100).sum())

    return eager


def fused_loss(softcap: float | None = None) -> Callable[..., torch.Tensor]:
    def fused(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        counted = int((target != -100).sum())
        return fixed_fused_linear_cross_entropy(x, weight, target, counted, final_logit_softcapping=softcap)

    return fused


# ---- experts -------------------------------------------------------------------------------------------------------------
def routed(tokens: int, width: int, inner: int, experts: int, chosen: int) -> Tensors:
    index = torch.rand(tokens, experts).topk(chosen).indices
    up, down = torch.randn(experts, 2 * inner, width) / width**0.5, torch.randn(experts, width, inner) / inner**0.5
    weights = torch.rand(tokens, chosen).softmax(-1)
    return {"x": torch.randn(tokens, width), "up": up, "down": down, "index": index, "weights": weights}


def experts(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
    module = SimpleNamespace(num_experts=len(up), gate_up_proj=up, down_proj=down, act_fn=F.silu)
    return inspect.unwrap(modeling_qwen3_moe.Qwen3MoeExperts.forward)(module, x, index, weights)


def fused_experts(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> Any:
    return LigerFusedMoEFunction.apply(x, up, down, index.to(torch.int32), weights)


# ---- the gated delta rule ------------------------------------------------------------------------------------------------
def samples(tokens: int, keys: int, values: int, width: int) -> Tensors:
    """Two packed samples, of 5/8 and 3/8 of the tokens. g: logarithms of decays, as a trained layer has them: most close to 0."""
    tensors = {"query": torch.randn(1, tokens, keys, width), "key": torch.randn(1, tokens, keys, width)}
    tensors["value"] = torch.randn(1, tokens, values, width)
    tensors |= {"g": -0.5 * torch.rand(1, tokens, values) ** 2, "beta": torch.rand(1, tokens, values)}
    return tensors | {"lengths": torch.tensor([0, tokens * 5 // 8, tokens])}


def delta_rule(lengths: torch.Tensor, **tensors: torch.Tensor) -> torch.Tensor:
    """Transformers' own, each sample by itself."""
    rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    cuts = [slice(a, b) for a, b in zip(lengths.tolist(), lengths.tolist()[1:], strict=False)]
    parts = [{name: tensor[:, cut] for name, tensor in tensors.items()} for cut in cuts]
    return torch.cat([rule(**part, use_qk_l2norm_in_kernel=True)[0] for part in parts], 1)


def fused_delta_rule(
    lengths: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **decays: Any
) -> Any:
    return chunk_gated_delta_rule(query, key, value, **decays, use_qk_l2norm_in_kernel=True, cu_seqlens=lengths)[0]


NORM: dict[str, Any] = {"inputs": rows_of("x", weights=("weight",)), "small": {"rows": 24, "width": 200}}
GLU: dict[str, Any] = {"inputs": rows_of("a", "b"), "small": {"rows": 8, "width": 1200}}
ROTARY: dict[str, Any] = {"small": {"tokens": 12, "queries": 4, "keys": 2, "width": 64}, "constant": ("cos", "sin")}
LOSS: dict[str, Any] = {"inputs": hidden_states, "constant": ("target",)}

CASES = {
    "RMSNorm": Case(
        LIGER, "Llama, Mistral, Phi-4, Qwen2.5, Qwen3, Qwen3-VL, SmolLM, gpt-oss, OLMo 3", **NORM,
        eager=norm_of(modeling_llama.LlamaRMSNorm), fused=rms_norm("llama", 0.0, True), large=widths(128, 4096, 8192, 16384),
    ),
    "RMSNorm of many short rows": Case(
        LIGER, "Qwen3 (queries and keys)", inputs=NORM["inputs"], small={"rows": 32768, "width": 32},
        eager=norm_of(modeling_llama.LlamaRMSNorm), fused=rms_norm("llama", 0.0, True), large=widths(128, 256, rows=32768),
    ),
    "RMSNorm, 1 + weight": Case(
        LIGER, "Gemma 3, Qwen3.5", **NORM,
        eager=norm_of(modeling_qwen3_5.Qwen3_5RMSNorm), fused=rms_norm("gemma", 1.0, False), large=widths(256, 4096, 5376),
    ),
    "LayerNorm": Case(
        LIGER, "towers of Gemma 3, SmolVLM2", inputs=rows_of("x", weights=("weight", "bias")), small=NORM["small"],
        eager=lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPSILON),
        fused=lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPSILON), large=widths(768, 1152, 4096),
    ),
    "rotary": Case(
        LIGER, "Llama, Mistral, Phi-4, Qwen2.5, Qwen3, Qwen3-VL, SmolLM, OLMo 3, Gemma 3", inputs=heads(), **ROTARY,
        eager=modeling_llama.apply_rotary_pos_emb, fused=copies(liger_rotary_pos_emb),
        large={"32 and 8 heads of 128": {"tokens": 16, "queries": 32, "keys": 8, "width": 128},
               "128 and 8 heads of 128": {"tokens": 16, "queries": 128, "keys": 8, "width": 128}},
    ),
    "rotary of gpt-oss": Case(
        LIGER, "gpt-oss", inputs=heads(half_width=True), **ROTARY,
        eager=modeling_gpt_oss.apply_rotary_pos_emb, fused=copies(liger_rotary_pos_emb_gpt_oss),
        large={"64 and 8 heads of 64": {"tokens": 16, "queries": 64, "keys": 8, "width": 64}},
    ),
    "SwiGLU": Case(
        LIGER, "Llama, Mistral, Phi-4, Qwen2.5, Qwen3, Qwen3.5, SmolLM, OLMo 3", **GLU,
        eager=lambda a, b: F.silu(a) * b, fused=lambda a, b: LigerSiLUMulFunction.apply(a, b, 1.0, 1.0),
        large=widths(9216, 14336, 28672, 53248),
    ),
    "GeGLU": Case(
        LIGER, "Gemma 3, Gemma 4", **GLU,
        eager=lambda a, b: F.gelu(a, approximate="tanh") * b, fused=lambda a, b: LigerGELUMulFunction.apply(a, b),
        large=widths(6912, 10240, 21504),
    ),
    "fused linear cross-entropy": Case(
        LIGER, "all that Liger knows; chunks as of Llama 3.1 8B (vocabulary 31 x width)", **LOSS,
        eager=loss(), fused=fused_loss(), small={"tokens": 256, "width": 32, "vocabulary": 1000},
        large={"vocabulary 128256": {"tokens": 16, "width": 256, "vocabulary": 128256}},
    ),
    "the same, many chunks": Case(
        LIGER, "as of Qwen3-0.6B (vocabulary 148 x width)", **LOSS,
        eager=loss(), fused=fused_loss(), small={"tokens": 512, "width": 16, "vocabulary": 2374},
        large={"vocabulary 151936": {"tokens": 16, "width": 256, "vocabulary": 151936}},
    ),
    "the same, capped logits": Case(
        LIGER, "Gemma 4", **LOSS,
        eager=loss(30.0), fused=fused_loss(30.0), small={"tokens": 64, "width": 32, "vocabulary": 1000},
        large={"vocabulary 262144": {"tokens": 16, "width": 256, "vocabulary": 262144}},
    ),
    "experts": Case(
        LIGER, "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3.5-35B-A3B", inputs=routed, eager=experts, fused=fused_experts,
        small={"tokens": 48, "width": 96, "inner": 768, "experts": 8, "chosen": 2}, constant=("index",), halves=True,
        large={"Qwen3-30B-A3B": {"tokens": 64, "width": 2048, "inner": 768, "experts": 128, "chosen": 8}},
    ),
    "gated delta rule": Case(
        FLA, "Qwen3.5, Qwen3-Next (where fla is installed)", inputs=samples, eager=delta_rule, fused=fused_delta_rule,
        small={"tokens": 256, "keys": 1, "values": 2, "width": 128}, constant=("lengths",), single=("g",), halves=True,
        large={"Qwen3.5-9B": {"tokens": 128, "keys": 16, "values": 32, "width": 128}},
    ),
}  # fmt: skip
