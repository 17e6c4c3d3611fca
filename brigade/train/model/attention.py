"""Which attention a run computes, what this host lacks for it, and `varlen`: scaled dot products sample by sample.

Where several samples lie end to end, SDPA with a block-diagonal mask still computes every product between two samples
and throws it away; varlen computes none of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...errors import UserError
from .. import upstream
from ..data.collate import on_host
from ..distributed.process import this_process
from ..recipe.settings import Settings
from . import parts, per_layer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


VARLEN = "varlen"
FLASH_WIDTH = 256  # of a head, the most that FlashAttention takes
FLASH = ("flash_attention_2", "flash_attention_3")
MASKED = ("sdpa", "eager")
NEEDS_CUMULATIVE_LENGTHS = (VARLEN, *FLASH)
# Implementations that compute no products between the samples of a sequence. Others compute them, and hide them by a mask.
SAMPLE_BY_SAMPLE = (*NEEDS_CUMULATIVE_LENGTHS, "flex_attention")
# by the key of a model's config
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
# What varlen does not compute of a model's attention, by the key of its config.
BEYOND_VARLEN = ("attn_logit_softcapping", "attention_chunk_size", "index_topk", "index_topk_blocks")


def choose(
    settings: Settings, config: PreTrainedConfig, divides_sequences: bool = False, proven: Collection[str] = ()
) -> tuple[str, str]:
    """Return the implementation to load the model with on this host, and why in a few words ("" where it was asked for).

    divides_sequences: whether the strategy divides sequences over ranks; proven: implementations that agree with eager on every
    device of this run, the fastest first (none: nothing is known, or there is no GPU)

    auto: on a CPU varlen where the model's attention allows it; on a GPU the fastest that is proven there (docs/gpu.md), and
    without a proof FlashAttention 2 where it is installed, else varlen where torch has its kernel or sequences are divided over
    ranks, else SDPA. Models without SDPA (gpt-oss) take eager. Raises UserError for varlen where it would compute something else.
    """
    import transformers
    from transformers.utils import is_flash_attn_2_available

    wanted, training = settings.recipe.model.attn_implementation, settings.recipe.training
    if settings.recipe.data.images and parts.needs_masks(config):
        return _by_masks(settings, config, wanted)
    classes = [getattr(transformers, name, None) for name in config.architectures or []]
    classes.append(upstream.model_class(config))
    model = next(filter(None, classes), None)
    no_sdpa = not upstream.supports(model, "sdpa")
    own = not upstream.supports(model, "attention_backend")  # classes of its own for each implementation
    has = next((key for key in BEYOND_VARLEN if getattr(config.get_text_config(), key, None)), None)
    beyond = has or ("no SDPA" if no_sdpa else "attention classes of its own" if own else None)
    if wanted == VARLEN and beyond:
        problem = f"varlen does not compute {type(config).__name__}'s attention ({beyond})"
        raise UserError(settings.place("attn_implementation"), problem, "use auto or eager")
    if wanted != "auto":
        return wanted, ""
    for name in proven:
        if not (beyond and name == VARLEN) and (name in NEEDS_CUMULATIVE_LENGTHS or not divides_sequences):
            return name, "the fastest that is proven here"
    if no_sdpa:
        return "eager", "the model has no SDPA"
    if not torch.cuda.is_available():
        return ("sdpa", f"the model has {beyond}") if beyond else (VARLEN, "the fastest proven on a CPU")
    half = training.bf16 or training.fp16
    if divides_sequences and not beyond and not (half and is_flash_attn_2_available()):
        return VARLEN, "it needs no mask of a whole sequence"
    if not half:
        return "sdpa", "FlashAttention computes in bf16 and fp16 only"
    if per_layer.widest_head(config.get_text_config()) > FLASH_WIDTH:
        return "sdpa", f"FlashAttention takes heads of at most {FLASH_WIDTH}"
    if is_flash_attn_2_available():
        return "flash_attention_2", "it is installed"
    if not beyond and _has_varlen_kernel(config):
        return VARLEN, "it computes nothing between samples"
    return "sdpa", "flash-attn is not installed"


def _by_masks(settings: Settings, config: PreTrainedConfig, wanted: str) -> tuple[str, str]:
    """Return what choose() does, for a model in which the tokens of an image see each other in both directions."""
    if wanted in MASKED:
        return wanted, ""
    if wanted != "auto":
        problem = f"the tokens of an image see each other in {type(config).__name__}, which only masks can say"
        raise UserError(settings.place("attn_implementation"), problem, f"use auto, {' or '.join(MASKED)}")
    return "sdpa", "the tokens of an image see each other, which only masks can say"


def of_parts(implementation: str) -> dict[str, str]:
    """Return what from_pretrained is told where a model of images and texts computes with this attention, by the keys of its
    config ("": its own). The tower has SDPA: varlen and FlashAttention are told where samples of tokens begin."""
    return {"": implementation, "text_config": implementation, "vision_config": "sdpa"}


def _has_varlen_kernel(config: PreTrainedConfig) -> bool:
    """Whether varlen() takes torch's varlen_attn, a FlashAttention 2, for this model in half precision on this rank's GPU: from
    compute capability 8.0 on, for heads up to 256 wide whose values are as wide as their keys, and without dropout
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp). DeepSeek-V3's head_dim is a part of its keys."""
    text = config.get_text_config()
    if any(getattr(text, key, None) for key in ATTENTION_DROPOUT) or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0) and all(map(_has_widths, per_layer.each_layers(text)))


def _has_widths(layer: PreTrainedConfig) -> bool:
    """Whether a layer's heads are as wide as _has_varlen_kernel() says."""
    width = getattr(layer, "qk_head_dim", None) or getattr(layer, "head_dim", None)
    width = width or layer.hidden_size // layer.num_attention_heads
    return getattr(layer, "v_head_dim", None) in (None, width) and width <= FLASH_WIDTH and width % 8 == 0


def lacking(settings: Settings, gpu: bool) -> Iterator[tuple[str, str, str]]:
    """Yield key, problem and cure for whatever this host lacks for the attention that a recipe names. gpu: whether it has one"""
    training, attention = settings.recipe.training, settings.recipe.model.attn_implementation
    if attention == "flex_attention" and not gpu:
        yield "attn_implementation", "flex_attention has no backward pass on a CPU", "use sdpa or eager"
    if not attention.startswith("flash_attention"):
        return
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    package, there = "install flash-attn", is_flash_attn_2_available
    if attention.endswith("3"):
        package, there = "install flash-attn-3", is_flash_attn_3_available
    if not gpu:
        yield "attn_implementation", f"{attention} needs a GPU, and this host has none", "use sdpa or eager"
    if not (training.bf16 or training.fp16):
        problem = f"{attention} computes in bf16 or fp16, but the recipe says fp32"
        yield "attn_implementation", problem, "set bf16, or use sdpa"
    if not there():
        cure = f"{package} (docs/containers.md says from where), or use auto"
        yield "attn_implementation", f"{attention} is not installed on this host", cure


def register() -> None:
    """Make `varlen` a name that Transformers knows. Call it before a model is loaded with it."""
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(*args: object, **kwargs: object) -> torch.Tensor | None:
        """Return None while training on samples end to end, for `varlen` is told where they begin; else SDPA's mask."""
        same = kwargs.get("q_length") == kwargs.get("kv_length")
        return None if same and kwargs.get("attention_mask") is None else masking_utils.sdpa_mask(*args, **kwargs)

    # Not traced by torch.compile: every set of lengths would be a program of its own. The layers around it are.
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, torch.compiler.disable(varlen))
    for name in FLASH:
        ALL_ATTENTION_FUNCTIONS.register(name, flash)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(VARLEN, mask)

    look = masking_utils.find_packed_sequence_indices

    def know(position_ids: torch.Tensor) -> torch.Tensor | None:
        """Return the number of the sample, within its sequence, that each token belongs to; None where there is only one.

        Transformers asks the device in every forward pass whether there are several, and the host waits for the answer.
        """
        several = this_process.forward_pass.end_to_end
        if several is None:
            return look(position_ids)
        return None if not several else (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)

    if look.__module__ == masking_utils.__name__:  # once
        masking_utils.find_packed_sequence_indices = know


def varlen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    key_places: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each sample of a sequence.

    query: (1, heads, tokens, head size); key, value: (1, key-value heads, tokens, head size)
    cu_seq_lens_q: int32 (samples + 1,), where samples begin and the last one ends; None: a single sample; on_host: the same on
    the host, which otherwise waits for it in SDPA
    cu_seq_lens_k, key_places: the same for the keys that samples see, and int64 (keys,), the places of their tokens; None: each
    sample's own. A sample with more keys than queries first sees those with which the sample before it begins, the prompt that
    both share; its last query sees all keys
    Returns (1, tokens, heads, head size). In bf16 and fp16 by torch's varlen_attn on a GPU, a FlashAttention kernel, and
    by BlockedAttention on a CPU; else by SDPA.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None or query.shape[2] != key.shape[2]:  # padded sequences, or decoding with a cache
        kwargs |= {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if torch.is_autocast_enabled(query.device.type):  # as for SDPA: rotary embeddings and norms hand over fp32
        half = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(half) for tensor in (query, key, value))
    key, value = seen(key_places, key, value)
    grouped = query.shape[1] != key.shape[1]
    alike = query.shape[-1] == value.shape[-1]  # as FlashAttention needs; DeepSeek-V3's are not
    if cu_seq_lens_q is not None and query.is_cuda and query.dtype != torch.float32 and not dropout and alike:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        by_token = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        borders = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        output = varlen_attn(*by_token, *borders, scale=scaling, window_size=window, enable_gqa=grouped)
        return output[None], None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = {"dropout_p": dropout, "scale": scale, "enable_gqa": grouped}
    half_on_cpu = query.device.type == "cpu" and query.dtype in (torch.bfloat16, torch.float16)
    if half_on_cpu:
        from .cpu_attention import BlockedAttention, takes
    parts: list[torch.Tensor] = []
    lengths = [query.shape[2]] if cu_seq_lens_q is None else on_host(cu_seq_lens_q).diff().tolist()
    keys = lengths if cu_seq_lens_k is None else on_host(cu_seq_lens_k).diff().tolist()
    # split and not slices: the gradient of each slice would be a whole sequence of zeros with the slice in it
    samples = (tensor.split(each, dim=2) for tensor, each in ((query, lengths), (key, keys), (value, keys)))
    for q, k, v in zip(*samples, strict=True):
        before = k.shape[2] - q.shape[2]
        if half_on_cpu and takes(q, k, dropout, sliding_window):
            parts.append(BlockedAttention.apply(q, k, v, scale))
            continue
        band = None
        if before or (sliding_window is not None and k.shape[2] > sliding_window):
            places = torch.arange(k.shape[2], device=query.device)
            distance = places[before:, None] - places[None]
            band = (distance >= 0) & (distance < (sliding_window or k.shape[2]))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        parts.append(sdpa(q, k, v, attn_mask=band, is_causal=band is None, **options))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def flash(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    key_places: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute FlashAttention by Transformers' function, which takes keys as its kernels do. All arguments are as in varlen()."""
    from transformers.integrations.flash_attention import flash_attention_forward

    output: torch.Tensor = flash_attention_forward(
        module, query, *seen(key_places, key, value), attention_mask, **kwargs
    )[0]
    return output, None


def seen(places: torch.Tensor | None, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the keys, or values, of the tokens at these places: (1, heads, keys, head size) of (1, heads, tokens, head size).

    A prompt that two answers share is there twice, and its gradient is the sum of both: of two numbers, so that no order
    matters in which a GPU adds them. places: as from collate.key_places(); None: all tokens, as they are
    """
    return tensors if places is None else [tensor.index_select(2, places) for tensor in tensors]
