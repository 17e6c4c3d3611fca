"""How a model learns where the samples of a sequence begin, so that none sees another: this is tried, not assumed.

Most of Transformers' models make their attention masks from position ids that start again. gpt-oss does not, but takes masks that
are made already; old models (OPT, Falcon, BLOOM) and layers with a state do not learn it in any way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import UserError, first_line
from .. import upstream
from ..data.collate import Layout, cumulative, positions
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from . import attention, parts, sample_by_sample, trial
from .tiny import SPAN, shrink, with_short_spans

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin


# What a model learns it from; LENGTHS are cumulative ones, as varlen and FlashAttention take them; MASKS are one for each kind of
# layer, MASK is one for all.
LENGTHS, POSITIONS, MASKS, MASK, NOTHING = "lengths", "positions", "masks", "mask", "nothing"
BY_MASKS = (MASKS, MASK)


def check(settings: Settings, config: PreTrainedConfig, how: str) -> None:
    """Raise UserError where a recipe packs samples that the model, with the attention `how`, would let see each other."""
    if settings.recipe.data.packing:
        way, why = method_of(config, how, settings.recipe.model.trust_remote_code)
        if way == NOTHING:
            problem = f"packed samples of {type(config).__name__} would see each other: {why}"
            raise UserError(settings.place("packing"), problem, "set packing to false")


def layout(settings: Settings, config: PreTrainedConfig, how: str) -> tuple[bool, bool, str]:
    """Return how samples of a micro-batch lie with the attention `how`: (whether end to end, whether only some of them because
    attention also computes products between samples, the reason)."""
    if not settings.recipe.training.padding_free:
        return False, False, "padded: padding_free is false"
    way, why = method_of(config, how, settings.recipe.model.trust_remote_code)
    if way == NOTHING:
        return False, False, f"padded: {why}"
    if how in attention.SAMPLE_BY_SAMPLE:
        return True, False, f"end to end: {how} computes no products between samples"
    why = f"end to end, or padded where {how}, which computes products between samples, would compute twice as much"
    return True, True, why


def layout_of(
    settings: Settings, config: PreTrainedConfig, how: str, marks: bool, processor: ProcessorMixin, shares: bool
) -> Layout:
    """Return how samples lie in a run's micro-batches. how: its attention; marks, processor, shares: as of Layout"""
    padding_free, squares, _ = layout(settings, config, how)
    objective = objective_of(settings.recipe.training)
    return Layout(
        padding_free=padding_free,
        packed=settings.recipe.data.packing,
        cumulative=upstream.attention_of(config) in attention.NEEDS_CUMULATIVE_LENGTHS,
        squares=squares and not objective.scores,  # which are asked for by their places in a single row
        marks=marks,
        rows=objective.rows,
        shares=shares,
        scores=objective.scores,
        processor=processor,
        # Each rank runs the tower in each micro-batch: the others would wait for one that does not. One process does so, too, for
        # AdamW moves a weight whose gradient is 0, and none without a gradient.
        always_image=bool(processor),
        targets=2 if settings.recipe.training.torch_compile else 1,  # for one, torch would compile the loss again
    )


def method_of(config: PreTrainedConfig, how: str, trust_remote_code: bool = False) -> tuple[str, str]:
    """Return (LENGTHS, POSITIONS, MASKS or NOTHING, for the attention `how`; why it is NOTHING)."""
    return _tried(trial.Architecture.of(config), how, trust_remote_code)


def way_of_sharing(config: PreTrainedConfig, how: str, trust_remote_code: bool = False) -> tuple[str, str]:
    """Return (LENGTHS, MASKS or MASK, by which the two answers of a pair can share the tokens of their prompt, or NOTHING; why it
    is NOTHING)."""
    if how not in (*attention.NEEDS_CUMULATIVE_LENGTHS, *attention.MASKED):
        return NOTHING, f"nobody has compared it with {how}"
    return _tried(trial.Architecture.of(config), how, trust_remote_code, shares=True)


def masks(
    config: PreTrainedConfig, position_ids: torch.Tensor, dtype: torch.dtype, way: str = MASKS
) -> dict[str, torch.Tensor] | torch.Tensor:
    """Return a mask for each kind of layer, or one (MASK), as Transformers makes it; from position ids of shape (sequences,
    tokens)."""
    from transformers.masking_utils import create_causal_mask

    text = config.get_text_config()
    shape = torch.empty(*position_ids.shape, 0, dtype=dtype, device=position_ids.device)
    window, of_kind = getattr(text, "sliding_window", None), {}
    for kind, reach in {"full_attention": None, **({"sliding_attention": window} if window else {})}.items():
        # by their places: Transformers renames its cache
        of_kind[kind] = create_causal_mask(text, shape, None, None, None, and_mask_function=_Sees(position_ids, reach))
    return of_kind if way == MASKS else list(of_kind.values())[-1]


class _Sees:
    """Says which tokens see which, as a function of Transformers' masks: those of their sample, and where its positions do not
    begin with 0, as many of the sample before it.

    position_ids: (sequences, tokens); window: how many tokens a token sees at most, itself included
    """

    def __init__(self, position_ids: torch.Tensor, window: int | None) -> None:
        begins = position_ids.diff(prepend=position_ids[:, :1] - 1) != 1
        sample, places = begins.cumsum(-1), torch.arange(position_ids.shape[1], device=position_ids.device)
        before = position_ids - places + torch.where(begins, places, 0).cummax(-1).values
        own, of_key, place = sample[:, :, None], sample[:, None], position_ids[:, None]
        # Comparisons only: a difference of each two tokens would take eight times as much memory.
        self.seen = (own == of_key) | ((own == of_key + 1) & (place < before[:, :, None]))
        self.seen &= place <= position_ids[:, :, None]
        if window:
            self.seen &= place > position_ids[:, :, None] - window

    def __call__(self, row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return self.seen[row, query, key]


@lru_cache(maxsize=16)
def _tried(
    architecture: trial.Architecture, how: str, trust_remote_code: bool, shares: bool = False
) -> tuple[str, str]:
    """Find out what method_of() returns: compare the logits of samples in one sequence with those of each sample by itself, in a
    tiny random model of the architecture. shares: what way_of_sharing() returns, of samples after the beginning of another; then
    the gradients are compared, too.

    The model has a layer of each kind, samples are longer than any of them looks back, and every weight is moved, for a gate that
    begins at 0 would hide what follows it. The trial runs on a CPU in fp32, where varlen stands for FlashAttention and SDPA
    for flex attention: they learn it in the same way.
    """
    config, by_lengths = architecture.config, how in attention.NEEDS_CUMULATIVE_LENGTHS
    stand_in = attention.VARLEN if by_lengths else "sdpa" if how.startswith("flex") else how
    try:
        tiny = type(config).from_dict(shrink(config.to_dict()))
        # A decoder that is no language model by itself is tried with its tower.
        images = upstream.model_class(tiny.get_text_config()) is None and parts.takes_images(config)
        tiny = tiny if images else tiny.get_text_config()
        tiny = type(tiny).from_dict(with_short_spans(tiny.to_dict()))
        # fp32 rounds each of the sums that a logit comes from; samples that see each other move it a thousand times as much.
        text = tiny.get_text_config()
        rounding = torch.finfo(torch.float32).eps * text.hidden_size * text.num_hidden_layers
    except Exception as error:  # what cannot be tried is not trusted
        return NOTHING, f"a tiny model to try it with cannot be described ({type(error).__name__}: {first_line(error)})"
    samples, before = [2 * SPAN + 3, 3, 2 * SPAN + 1], [0, 0, 0]  # lengths that no span divides
    if shares:
        samples, before = [*samples, 2 * SPAN + 3, 3], [0, 1, 0, 2 * SPAN - 1, 0]
    position_ids = torch.from_numpy(positions(np.array(samples), np.array(before)))[None]
    rows = parts.position_rows(config) if images else 1
    ways = (LENGTHS,) if by_lengths else BY_MASKS if shares else (POSITIONS, MASKS)
    attention.register()
    why = "its attention lets them see something else" if shares else "nothing tells it where one begins"
    options = {"attn_implementation": stand_in, "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    with trial.alone(), torch.enable_grad() if shares else torch.inference_mode():
        sequence = torch.randint(7, 4000, (1, sum(samples)))

        def logits(ids: torch.Tensor, position_ids: torch.Tensor, **more: object) -> torch.Tensor:
            if rows > 1:
                position_ids = position_ids.expand(rows, *position_ids.shape)
            return model(ids, use_cache=False, position_ids=position_ids, **more).logits

        def told(way: str) -> dict[str, Any]:
            if way == LENGTHS:
                return cumulative(np.array(samples), np.array(before))
            return {} if way == POSITIONS else {"attention_mask": masks(model.config, position_ids, torch.float32, way)}

        def gradients(computed: torch.Tensor) -> torch.Tensor:
            weighted = computed * torch.linspace(-1, 1, computed.numel()).view_as(computed)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            found = torch.autograd.grad(weighted.sum(), trained, materialize_grads=True)
            return torch.cat([gradient.flatten() for gradient in found])

        def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
            return bool((found - expected).abs().max() <= rounding * expected.abs().max())

        try:
            model = upstream.auto_class_for(images).from_config(tiny, **options).eval()
            sample_by_sample.divide(model)
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
            each, pieces = [], sequence.split(samples, dim=1)
            for number, ids in enumerate(pieces):
                ids = torch.cat([pieces[number - 1][:, : before[number]], ids], dim=1)
                count = ids.shape[1]
                borders = cumulative(np.array([count])) if by_lengths else {}
                whole = logits(ids, position_ids=torch.arange(count)[None], **borders)
                each.append(whole[:, before[number] :])
            apart = torch.cat(each, dim=1)
            learned = gradients(apart) if shares else None
        except Exception as error:
            return NOTHING, _untried(error)
        for way in ways:
            try:
                together = logits(sequence, position_ids=position_ids, **told(way))
                if alike(together, apart) and (learned is None or alike(gradients(together), learned)):
                    return way, ""
            except Exception as error:  # nor here; some models take no masks that are made already
                if way != MASKS:
                    why = _untried(error)
    return NOTHING, why


def _untried(error: Exception) -> str:
    return f"that it is told where one begins could not be tried ({type(error).__name__}: {first_line(error)})"
