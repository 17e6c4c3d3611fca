"""Attention that is wrong, slow or breaks on purpose: rows of a table of paths (brigade/kernels/paths.yaml) for tests."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

REPEATS = 2_500_000  # divided by the square of a row's tokens: a few times in a proof, often where a short row is timed


def row(name: str, **more: Any) -> dict[str, Any]:
    return {"kind": "attention", "register": f"testing.faulty_kernels:{name}", **more}


def _register(name: str, wrap: Callable[..., Any], mask: Any = None) -> None:
    from transformers import masking_utils
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(*args: Any, **kwargs: Any) -> Any:
        return wrap(sdpa_attention_forward, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask or masking_utils.sdpa_mask)


def ignores_borders() -> None:
    """Causal over a whole row: a sample sees those before it."""
    _register("ignores_borders", lambda sdpa, *args, **kwargs: sdpa(*args, **kwargs), mask=lambda *_, **__: None)


def leaks_one_token() -> None:
    """The first token of each sample sees the token before it."""

    def attention(sdpa: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.clone()
            firsts = mask[0, 0].sum(-1).eq(1).nonzero().flatten()
            mask[:, :, firsts[firsts > 0], firsts[firsts > 0] - 1] = True
        return sdpa(module, query, key, value, mask, **kwargs)

    _register("leaks_one_token", attention)


class _OnePercentMore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 1.01


def gradient_one_percent_off() -> None:
    """Its logits are right, and the gradient through it is 1.01 times what it should be."""

    def attention(sdpa: Any, *args: Any, **kwargs: Any) -> Any:
        found, weights = sdpa(*args, **kwargs)
        return _OnePercentMore.apply(found), weights

    _register("gradient_one_percent_off", attention)


def slow() -> None:
    """Right, and computed many times over."""

    def attention(sdpa: Any, module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(1 + REPEATS // query.shape[2] ** 2):
            found = sdpa(module, query, *args, **kwargs)
        return found

    _register("slow", attention)


def one_half(model: Any) -> None:
    """Right alone; together with `other_half` logits are 1 % too large, as two patches of one function may be."""
    _halves(model)


def other_half(model: Any) -> None:
    _halves(model)


def _halves(model: Any) -> None:
    model.halves = getattr(model, "halves", 0) + 1
    if model.halves == 2:
        model.get_output_embeddings().register_forward_hook(lambda module, given, logits: logits * 1.01)


def raises() -> None:
    def attention(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _register("raises", attention)


def crashes() -> None:
    _register("crashes", lambda *_, **__: os.kill(os.getpid(), signal.SIGSEGV))


def hangs() -> None:
    _register("hangs", lambda *_, **__: threading.Event().wait())
