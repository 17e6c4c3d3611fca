"""Flash attention of sequences of various lengths, which no CPU kernel has: aten::_flash_attention_forward and its backward.

In fp32, sequence by sequence. What the real kernel refuses is refused: other dtypes than half precision, lengths in int64. The
last query of a sequence is aligned with its last key, as in FlashAttention since 2.1; with FAKE_GPU_ALIGNS=top-left the first
with the first, as before.
"""

import itertools
import os
from typing import Any

import torch

from .native import native

library = torch.library.Library("aten", "IMPL")


def install() -> None:
    library.impl("_flash_attention_forward", forward, "CUDA")
    library.impl("_flash_attention_backward", backward, "CUDA")


@torch.autocast("cuda", enabled=False)
def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor, _longest_query: int,
    _longest_key: int, dropout: float, causal: bool, _debug: bool = False, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Any = None,
    alibi_slopes: Any = None, block_table: Any = None, num_splits: Any = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """q, k, v: (tokens, heads, head size); starts, key_starts: (sequences + 1,), where queries and keys of each begin"""
    _check(q, starts, key_starts, dropout)
    window = _window(window_size_left, window_size_right, causal)
    sequences = _sequences(q, k, v, starts, key_starts, scale, window)
    parts = [(weights @ value).transpose(0, 1) for weights, _, _, value in sequences]
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    log_sum_exp = torch.zeros(q.shape[1], q.shape[0], device=q.device)
    return torch.cat(parts).to(q.dtype), log_sum_exp, seed, seed, q.new_zeros(0)


@torch.autocast("cuda", enabled=False)
def backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _out: Any, _log_sum_exp: Any,
    starts: torch.Tensor, key_starts: torch.Tensor, _longest_query: int, _longest_key: int, dropout: float, causal: bool,
    _seed: Any, _offset: Any, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Gradients of q, k and v, by hand: nothing is recorded below autograd."""
    _check(q, starts, key_starts, dropout)
    factor, per_head = scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    window = _window(window_size_left, window_size_right, causal)
    heads = gradient.float().transpose(0, 1)
    parts, begin = [], 0
    for weights, query, key, value in _sequences(q, k, v, starts, key_starts, scale, window):
        own = heads[:, begin : begin + query.shape[1]]
        begin += query.shape[1]
        of_weights = own @ value.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * factor
        of_key, of_value = of_scores.transpose(1, 2) @ query, weights.transpose(1, 2) @ own
        shared = [each.unflatten(0, (-1, per_head)).sum(1) for each in (of_key, of_value)]
        parts.append([each.transpose(0, 1) for each in (of_scores @ key, *shared)])
    return tuple(torch.cat(each).to(q.dtype) for each in zip(*parts, strict=True))


def _check(q: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor, dropout: float) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    for name, each in (("q", starts), ("k", key_starts)):
        if each.dtype != torch.int32 or not each.is_cuda:
            raise RuntimeError(f"cu_seqlens_{name} must have dtype int32, on CUDA")
    if dropout:
        raise NotImplementedError("the fake GPU's flash attention has no dropout")


def _window(left: int | None, right: int | None, causal: bool) -> tuple[int, int]:
    """Return how many tokens before and after its own each sees; -1: all."""
    return -1 if left is None else left, 0 if causal else -1 if right is None else right


def _sequences(
    q: Any, k: Any, v: Any, starts: Any, key_starts: Any, scale: float | None, window: tuple[int, int]
) -> Any:
    """Yield (weights, query, key, value) of each sequence in fp32, heads first, with a key and value for each head."""
    factor, per_head = scale or q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    bounds = [native.peek(each) for each in (starts, key_starts)]  # the real kernel reads them on the device: no wait
    if [each[-1] for each in bounds] != [len(q), len(k)]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    for (begin, end), (first, last) in zip(*map(itertools.pairwise, bounds), strict=True):
        query = q[begin:end].transpose(0, 1).float()
        key, value = (each[first:last].transpose(0, 1).float().repeat_interleave(per_head, 0) for each in (k, v))
        more = 0 if os.environ.get("FAKE_GPU_ALIGNS") == "top-left" else key.shape[1] - query.shape[1]
        before = (
            torch.arange(end - begin, device=q.device)[:, None] + more - torch.arange(last - first, device=q.device)
        )
        seen = torch.ones_like(before, dtype=torch.bool)
        if window[0] >= 0:
            seen = seen & (before <= window[0])
        if window[1] >= 0:
            seen = seen & (-before <= window[1])
        scores = query @ key.transpose(1, 2) * factor
        yield scores.masked_fill(~seen, -torch.inf).softmax(-1), query, key, value
