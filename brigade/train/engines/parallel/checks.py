"""Whether a model fits the axes of its run, before it is built. Rules that need no model: strategy/axis_rules.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....errors import UserError
from ...model import experts, parts
from ...run.directory import Run

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check(run: Run, config: PreTrainedConfig) -> None:
    """Raise UserError for heads, layers or experts that an axis cannot divide, and for models that it has no way to divide."""
    settings, strategy = run.settings, run.strategy
    axes = strategy.axes
    if axes.tensor > 1:
        from . import tensor

        besides = experts.plan(config) if axes.experts > 1 else ()
        why = parts.why_undivided(config) if settings.recipe.data.images else ""
        if why:
            problem = f"{type(config).__name__} cannot be divided beside its tower: {why}"
            raise UserError(strategy.place("tensor"), problem, tensor.CURE)
        model, shards = settings.recipe.model, strategy.shards(run.world.part(strategy.replicas).size)
        mistake = tensor.check(config, axes.tensor, besides, model.load_in_4bit, shards, model.trust_remote_code)
        if mistake:
            raise UserError(strategy.place("tensor"), *mistake)
    if axes.sequence > 1:
        from . import sequence_checks

        ranks = run.world.part(strategy.replicas).size // (axes.tensor * axes.stages)
        attention = run.kernels.attention, run.kernels.why
        sequence_checks.check(
            settings, config, attention, axes.sequence, strategy.place("sequence"), axes.tensor, ranks
        )
    if axes.experts > 1:
        in_whole = strategy.kind == "ddp" or axes.stages > 1
        ranks = axes.tensor if in_whole else run.world.size // strategy.replicate
        experts.check(settings, config, axes.experts, ranks, run.world.size, strategy.place("experts"))
    if axes.stages > 1:
        from . import pipeline_rules

        pipeline_rules.check(run, config, run.batch)
