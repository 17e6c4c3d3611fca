"""Causal attention on a CPU in half precision, by blocks of queries.

torch's CPU kernel for scaled dot products computes bf16 in fp32; matrix products of whole blocks use the CPU's own bf16
instructions, forward and backward. `python -m benchmarks.peers --ablation` measures what that brings to a run.
"""

import itertools
from collections.abc import Iterator

import torch
from torch.autograd.function import FunctionCtx

BLOCK = 128  # queries; keys beyond a block's last query are never multiplied
LONGEST = 2048  # tokens of a sample, for probabilities are kept for the backward pass: heads x tokens^2 bytes


class BlockedAttention(torch.autograd.Function):
    """Causal attention of one sample, block by block.

    query: (1, heads, tokens, head size); key: (1, key-value heads, keys, head size), of the tokens and, where there are more keys
        than tokens, of those before them; value: the same with a head size of its own (DeepSeek-V3's); all bf16 or fp16
    Returns (1, heads, tokens, value's head size). Scores are rounded to half precision before the softmax, as in eager attention.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx: FunctionCtx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        _, heads, tokens, size = query.shape
        groups, before = key.shape[1], key.shape[2] - tokens
        q = query.reshape(groups, heads // groups, tokens, size)  # the query heads that share keys, side by side
        k, v = key[0].contiguous(), value[0].contiguous()
        out, kept = q.new_empty(*q.shape[:3], v.shape[-1]), []
        for begin, end in _blocks(tokens):
            queries, seen = q[:, :, begin:end].flatten(1, 2), before + end
            scores = _scaled(queries, k[:, :seen].transpose(1, 2), scale).unflatten(1, (-1, end - begin))
            future = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
            scores[..., before + begin :].masked_fill_(future, -torch.inf)
            kept.append(scores.softmax(-1).flatten(1, 2))
            out[:, :, begin:end] = torch.bmm(kept[-1], v[:, :seen]).unflatten(1, (-1, end - begin))
        ctx.save_for_backward(q, k, v, *kept)
        ctx.scale = scale
        return out.flatten(0, 1)[None]

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        gradient = gradients[0].reshape(*q.shape[:3], v.shape[-1])
        of_q = torch.empty_like(q)
        of_k, of_v = (torch.zeros(like.shape, dtype=torch.float32) for like in (k, v))  # sums over blocks
        for probabilities, (begin, end) in zip(kept, _blocks(q.shape[2]), strict=True):
            queries, upper = q[:, :, begin:end].flatten(1, 2), gradient[:, :, begin:end].flatten(1, 2)
            seen = k.shape[1] - q.shape[2] + end
            of_v[:, :seen] += torch.bmm(probabilities.transpose(1, 2), upper)
            of_p = torch.bmm(upper, v[:, :seen].transpose(1, 2))
            of_scores = torch._softmax_backward_data(of_p, probabilities, -1, of_p.dtype)
            of_q[:, :, begin:end] = _scaled(of_scores, k[:, :seen], ctx.scale).unflatten(1, (-1, end - begin))
            of_k[:, :seen] += _scaled(of_scores.transpose(1, 2), queries, ctx.scale)
        return of_q.flatten(0, 1)[None], of_k.to(k.dtype)[None], of_v.to(v.dtype)[None], None


def takes(query: torch.Tensor, key: torch.Tensor, dropout: float, sliding_window: int | None) -> bool:
    """Whether BlockedAttention can compute this sample, in half precision: in fp32 torch's kernel is as fast."""
    inside = sliding_window is None or key.shape[2] <= sliding_window
    single = query.shape[0] == 1  # generation has several sequences
    return single and key.shape[2] <= LONGEST and inside and not dropout


def _scaled(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute scale * left @ right, in one pass."""
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _blocks(tokens: int) -> Iterator[tuple[int, int]]:
    return itertools.pairwise([*range(0, tokens, BLOCK), tokens])
