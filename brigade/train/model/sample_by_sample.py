"""Layers that carry a state from token to token compute each sample of a sequence separately.

Attention learns from positions or masks where a sample begins. A recurrence, or a convolution over tokens, learns it in
Transformers only from GPU kernels, and only in some architectures (flash-linear-attention's `cu_seqlens`). Here such a
layer is called once for each group of samples of like lengths: they lie below each other in a batch, padded on the right, for
in these layers no token changes what comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..data.collate import BORDERS, KEY_PLACES, KEYS, Inputs, on_host
from ..upstream import replaced
from ..upstream.experts import gather_whole
from ..upstream.samples_end_to_end import count_within_samples
from ..upstream.stateful_layers import is_stateful

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The longest sample of a group has at most this many times the tokens of its shortest, so that less than a third is padding.
ALIKE = 1.5
# What layers are told about the samples of a sequence. Stateful ones read it only with kernels, and raise an error without them.
_TOLD = (BORDERS, KEYS, KEY_PLACES, "max_length_q", "max_length_k")
_CACHES = ("cache", "past_key_values", "cache_params")


class Samples:
    """The samples of the micro-batch that a model computes, or of one whose layers are computed again.

    lengths: of each sample in tokens, one sequence after the other; None: each sequence is a single sample, or padded
    computing: the module that is computing a micro-batch: the model, or in a pipeline the decoder around a stage's layers
    """

    lengths: list[int] | None = None
    computing: torch.nn.Module | None = None

    def begin(self, module: torch.nn.Module, args: tuple[object, ...], given: Inputs) -> None:
        """Take over what the outermost module is told, for not every model passes it on to its decoder: a pre-hook of both."""
        if self.computing is None:
            self.lengths, self.computing = lengths_of(given), module

    def end(self, module: torch.nn.Module, *_: object) -> None:
        """Forget it: a hook of both, which is called when the pass fails, too."""
        if module is self.computing:
            self.lengths = self.computing = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a layer's forward pass and of its recomputation (context_fn of torch.utils.checkpoint), before
        which other micro-batches may come."""
        return nullcontext(), replaced(self, lengths=self.lengths, computing=self.computing)


def divide(model: PreTrainedModel) -> Samples | None:
    """Let the stateful layers of a causal language model compute each sample separately, or return None where it has none.
    Layers that count tokens (Llama 4's) count those of their sample.

    model: with adapters or without; it is changed in place, before an engine wraps it
    """
    samples, names = Samples(), list[str]()
    count_within_samples(model)
    for name, layer in model.named_modules():
        if is_stateful(layer) and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
            layer.forward = _BySample(layer.forward, samples)
            gather_whole(layer)  # its parts are called as often as there are groups: not equally often on all ranks
    if not names:
        return None
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    for module in (whole, whole.base_model):
        module.register_forward_pre_hook(samples.begin, with_kwargs=True)
        module.register_forward_hook(samples.end, always_call=True)
    return samples


class _BySample:
    """The forward method of a stateful layer, whose tensors have the shape (sequences, tokens, ...)."""

    def __init__(self, forward: Callable[..., object], samples: Samples) -> None:
        self.forward, self.samples = forward, samples

    @torch.compiler.disable  # every set of lengths would be a program of its own
    def __call__(self, *args: object, **given: object) -> object:
        if self.samples.computing is None:
            raise RuntimeError("nobody says where samples begin: the layer is not called by its model's forward pass")
        lengths = self.samples.lengths
        given = {key: value for key, value in given.items() if key not in _TOLD}
        if lengths is None:
            return self.forward(*args, **given)
        inputs, structure = tree_flatten((args, given | dict.fromkeys(given.keys() & {"attention_mask"})))
        shape = next(value.shape[:2] for value in inputs if isinstance(value, torch.Tensor))
        # split and not slices: the gradient of each slice would be a whole sequence of zeros with the slice in it
        divided = {
            number: value.flatten(0, 1).split(lengths)
            for number, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and value.shape[:2] == shape
        }
        outputs: dict[int, list[Any]] = {}
        for group in alike(lengths):
            batch = [
                pad_sequence([divided[number][sample] for sample in group], batch_first=True)
                if number in divided
                else value
                for number, value in enumerate(inputs)
            ]
            positional, named = tree_unflatten(batch, structure)
            of_group, returned = tree_flatten(self.forward(*positional, **named))
            of_samples = [_rows(value, group, lengths) for value in of_group]
            outputs |= {sample: [rows[place] for rows in of_samples] for place, sample in enumerate(group)}
        in_order = zip(*(outputs[sample] for sample in range(len(lengths))), strict=True)
        joined = [None if parts[0] is None else torch.cat(parts).unflatten(0, shape) for parts in in_order]
        return tree_unflatten(joined, returned)


def _rows(value: object, group: Sequence[int], lengths: Sequence[int]) -> Sequence[torch.Tensor | None]:
    """Return what a layer's output holds for each sample of a group: None, where it does not belong to tokens (MiniMax's state,
    which only a cache would keep)."""
    longest = lengths[group[0]]
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (len(group), longest):
        return [None] * len(group)
    return [row[: lengths[sample]] for row, sample in zip(value.unbind(), group, strict=True)]


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the samples that are computed together: groups of like lengths, the longest first."""
    groups: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if groups and lengths[groups[-1][0]] <= ALIKE * lengths[sample]:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def lengths_of(given: Inputs) -> list[int] | None:
    """Return the lengths of a micro-batch's samples from a model's keyword arguments: what Samples.lengths holds. Raises
    ValueError for position ids that are not (sequences, tokens): nobody would see where a sample begins."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    padded = isinstance(mask, torch.Tensor) and mask.dim() == 2
    if padded or any(given.get(key) is not None for key in _CACHES):
        return None
    borders = given.get(BORDERS)
    if borders is not None:
        lengths = on_host(borders).diff().tolist()
        return lengths if len(lengths) > 1 else None
    if positions is None:
        return None
    positions = on_host(positions)
    if positions.dim() == 3 and len(positions) == 4:  # of M-RoPE, whose first ones are those in the text
        positions = positions[0]
    if positions.dim() != 2:
        raise ValueError(f"position ids have the shape {tuple(positions.shape)}, and (sequences, tokens) is read")
    begins = torch.ones(positions.shape, dtype=torch.bool)
    begins[:, 1:] = positions.diff() != 1
    if int(begins.sum()) == len(positions):
        return None
    places = begins.flatten().nonzero().flatten()
    return places.diff(append=places.new_tensor([begins.numel()])).tolist()
