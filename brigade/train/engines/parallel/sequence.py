"""Ulysses sequence parallelism: the ranks of a group compute with the same sequences, each with its part of their tokens.

Everything except attention treats tokens one by one. For attention an all-to-all exchanges tokens for heads: a rank then has all
tokens of its share of the heads, and a second one brings each token's result back to the rank that has it (Jacobs et al. 2023,
arXiv 2309.14509). Each rank's loss is a sum over its own tokens. So these are plain data-parallel ranks to DDP, ZeRO and FSDP2:
their gradients add up to the whole sequence's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from ...data.answers import ANSWERS, RUNS, in_part
from ...data.collate import ABOUT, REAL, TEACHER, WEIGHTS, About, Collate, Layout, MicroBatch
from ...data.store import IGNORED, TokenSequence
from ...distributed.process import this_process
from ...distributed.process_group import COLLECTIVE_TIMEOUT
from ...host.cluster import World
from ...strategy.axes import Axes
from ...strategy.axis_keys import groups

if TYPE_CHECKING:
    from transformers import PreTrainedModel


IN_PARTS = "in_parts"  # key of a micro-batch and option of attention: whether ranks have parts of its sequences
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]  # as Transformers registers it


class DividedSequences(Collate):
    """The part with this number of each micro-batch, laid end to end and padded to a multiple of `of` tokens.

    Tensors are (1, tokens / of), except cumulative lengths, which describe all tokens: attention sees them all. With images what
    the model makes embeddings of is whole, too: see cut_before_decoder().
    ABOUT counts only this part, so that sums over ranks are those of the sequences.
    """

    def __init__(self, pad_token_id: int, layout: Layout, number: int, of: int) -> None:
        super().__init__(pad_token_id, replace(layout, multiple=layout.multiple * of))
        self.number, self.of = number, of

    def __call__(self, fetched: tuple[list[TokenSequence], float | None]) -> MicroBatch:
        batch = super().__call__(fetched)
        size = batch["input_ids"].shape[1] // self.of
        begin = size * self.number
        # The places of an image's features are found among the ids of whole sequences.
        whole = {"input_ids", "position_ids"} if self.layout.processor is not None else set()
        for key in {"input_ids", "labels", "position_ids", REAL} & batch.keys() - whole:
            batch[key] = batch[key][:, begin : begin + size].contiguous()
        kept, targets = batch["logits_to_keep"], batch["shift_labels"]
        here = (kept >= begin) & (kept < begin + size)
        if TEACHER in batch:
            batch[TEACHER] = batch[TEACHER][here[targets[0] != IGNORED]]
        # As for a filler: every parameter stays in the graph, and every rank in every all-to-all.
        more = (0, max(0, self.layout.targets - int(here.sum())))
        kept, targets = pad(kept[here] - begin, more), pad(targets[:, here], more, value=IGNORED)
        if WEIGHTS in batch:
            batch[WEIGHTS] = pad(batch[WEIGHTS][:, here], more, value=1.0)
        if self.layout.compares:
            answers = batch[ANSWERS]
            answers[RUNS] = in_part(answers[RUNS], here)
            answers[RUNS][-1] += more[1]
        batch |= {"logits_to_keep": kept, "shift_labels": targets, IN_PARTS: True}
        batch[ABOUT] = self._about(fetched[0], batch, slice(begin, begin + size))
        return batch

    def _about(self, sequences: list[TokenSequence], batch: MicroBatch, part: slice) -> About:
        lengths = np.concatenate([sequence["lengths"] for sequence in sequences])
        real = np.concatenate(
            [np.full(len(sequence["labels"]), (sequence["labels"] != IGNORED).any()) for sequence in sequences]
        )
        # A sample's squared length is the sum of its length over its tokens.
        attended = np.repeat(lengths, lengths)[part][real[part]]
        whole = batch[ABOUT]
        return About(
            tokens=len(attended),
            squared_lengths=int(attended.sum()),
            supervised=int((batch["labels"] != IGNORED).sum()),
            slots=part.stop - part.start,
            step_supervised=whole.step_supervised,
            end_to_end=whole.end_to_end,
            length=whole.length,
            logits=len(batch["logits_to_keep"]),
        )


def cut_before_decoder(model: PreTrainedModel, number: int, of: int) -> None:
    """Let a model of images and texts make embeddings of whole sequences, with an image's features in their places, and hand its
    decoder the part with this number of them, where IN_PARTS says so.

    Each rank of the group thus runs the tower on all images. Its features get a gradient from this rank's tokens, and the sum
    over ranks is that of the whole sequence.
    """

    def cut(_: object, args: tuple[object, ...], given: MicroBatch) -> tuple[tuple[object, ...], MicroBatch]:
        if not given.get(IN_PARTS):
            return args, given
        size = given["inputs_embeds"].shape[1] // of
        part = slice(size * number, size * (number + 1))
        given |= {"inputs_embeds": given["inputs_embeds"][:, part], "position_ids": given["position_ids"][..., part]}
        seen = given.get("visual_pos_masks")
        if seen is not None:  # Qwen3-VL adds features to some layers' outputs, too
            begin, end = int(seen[:, : part.start].sum()), int(seen[:, : part.stop].sum())
            given["visual_pos_masks"] = seen[:, part]
            given["deepstack_visual_embeds"] = [each[begin:end] for each in given["deepstack_visual_embeds"]]
        return args, given

    model.get_decoder().register_forward_pre_hook(cut, with_kwargs=True)


class _AllToAll(torch.autograd.Function):
    """Sends part i of the first dimension to rank i of the group, and receives rank i's part for this rank at place i."""

    @staticmethod
    def forward(ctx: FunctionCtx, parts: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None


def heads_for_tokens(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Turn (1, heads, tokens / n, size) of this rank's tokens into (1, heads / n, tokens, size) of its heads. A collective.

    Where there are fewer heads than ranks (keys and values), each goes to several.
    """
    n = group.size()
    heads = tensor.repeat_interleave(math.lcm(tensor.shape[1], n) // tensor.shape[1], dim=1)[0]
    return _AllToAll.apply(heads.unflatten(0, (n, -1)), group).transpose(0, 1).flatten(1, 2)[None]


def tokens_for_heads(tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Turn (1, tokens, heads / n, size) of this rank's heads into (1, tokens / n, heads, size) of its tokens. A collective."""
    return _AllToAll.apply(tensor[0].unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)[None]


def around(attention: Attention) -> Attention:
    """Return an attention of Transformers that also takes sequences in parts, where IN_PARTS says so. Without it, as when answers
    are generated, each rank computes by itself."""

    def divided(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not options.pop(IN_PARTS, False):
            return attention(module, query, key, value, attention_mask, **options)
        group = this_process.sequence_group
        if attention_mask is not None:
            raise RuntimeError("sequences in parts have no attention mask: cumulative lengths say where samples begin")
        if torch.is_autocast_enabled(query.device.type):  # rotary embeddings and norms hand over fp32: twice the bytes
            half = torch.get_autocast_dtype(query.device.type)
            query, key, value = (tensor.to(half) for tensor in (query, key, value))
        options.pop("position_ids", None)  # this rank's part of them
        sinks = options.get("s_aux")
        if sinks is not None:  # one for each head
            options["s_aux"] = sinks.chunk(group.size())[group.rank()]
        whole = (heads_for_tokens(tensor, group) for tensor in (query, key, value))
        output, _ = attention(module, *whole, None, **options)
        return tokens_for_heads(output, group), None

    return divided


def install(name: str, group: ProcessGroup) -> None:
    """Let the attention `name` take sequences that the ranks of `group` have in parts."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS[name]
    if not hasattr(attention, IN_PARTS):  # an earlier run of this process may have
        divided = torch.compiler.disable(around(attention))
        setattr(divided, IN_PARTS, True)
        ALL_ATTENTION_FUNCTIONS[name] = divided  # not register(): attention.register() would undo it
    this_process.sequence_group = group


class _Sum(torch.autograd.Function):
    """Adds up over the group. Each of its ranks has the whole loss divided by their number, so a rank's own part gets the
    gradients of all of them."""

    @staticmethod
    def forward(ctx: FunctionCtx, own: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.size, total = group.size(), own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.size, None


def summed(own: torch.Tensor) -> torch.Tensor:
    """Return the sum of what the ranks of this run's group have of their parts of sequences, on each of them. A collective.

    Its gradient is right where each rank goes on to the same loss, divided by their number.
    """
    total: torch.Tensor = _Sum.apply(own, this_process.sequence_group)
    return total


def group_of(axes: Axes, world: World) -> ProcessGroup:
    """Return the process group of the ranks that have parts of this rank's sequences. A collective of all ranks."""
    made = {tuple(ranks): dist.new_group(ranks, COLLECTIVE_TIMEOUT) for ranks in groups(axes, world.size, "sequence")}
    return next(group for ranks, group in made.items() if world.rank in ranks)
