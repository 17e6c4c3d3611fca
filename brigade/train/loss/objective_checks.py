"""Checks, before the model is built, whether a run can compute its objective. What strategies refuse: strategy/refused.yaml."""

from typing import TYPE_CHECKING

from ...errors import UserError
from ..model import packed_samples, scores
from ..model.experts import router_loss_coef
from ..model.location import load_config
from ..recipe.objectives import ADAPTERS_OFF, MODEL, may_share, needs_second_model, objective_of, reference_of
from ..run.directory import Run
from ..strategy import facts_of, refusal
from . import distillation, own_loss, second_model
from .objective.load import loss_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check(run: Run, config: "PreTrainedConfig") -> None:
    """Raise UserError where the objective is not a valid one, or its reference is unavailable. config: of the trained model"""
    settings = run.settings
    training = settings.recipe.training
    if training.teacher:
        distillation.check(run, config)
    if not objective_of(training).compares:
        return
    loss_of(settings)
    if objective_of(training).scores:
        _check_scores(run, config)
    elif why := own_loss.why_no_token_losses(config, settings.recipe.model.trust_remote_code):
        problem = f"{type(config).__name__} gives no losses of single tokens: {why}"
        raise UserError(settings.place("objective"), problem, "choose a causal language model of Transformers")
    if training.share_prompts is True:
        way, why = way_of_sharing(run, config)
        if way == packed_samples.NOTHING:
            problem = f"the answers of a pair cannot share the tokens of their prompt: {why}"
            raise UserError(settings.place("share_prompts"), problem, "set it to auto or false")
    if needs_second_model(settings.recipe):
        second_model.check(run, str(reference_of(settings.recipe)), config)


def way_of_sharing(run: Run, config: "PreTrainedConfig") -> tuple[str, str]:
    """Return (how attention learns that the two answers of a pair share the tokens of their prompt, as packed_samples says, or
    NOTHING where they do not; why not, "" where nobody asks for it)."""
    settings, how = run.settings, run.kernels.attention
    if not may_share(settings.recipe.training):
        return packed_samples.NOTHING, ""
    row = refusal("share_prompts", **facts_of(run.strategy, settings) | {"share_prompts": True})
    if row:
        return packed_samples.NOTHING, str(row["problem"])
    if router_loss_coef(settings, config):
        return packed_samples.NOTHING, "the loss of the model's routers is a mean over tokens, and there would be fewer"
    end_to_end, _, why = packed_samples.layout(settings, config, how)
    if not end_to_end:
        return packed_samples.NOTHING, why
    trusts, reference = settings.recipe.model.trust_remote_code, reference_of(settings.recipe)
    found = packed_samples.way_of_sharing(config, how, trusts)
    if reference not in (None, ADAPTERS_OFF, MODEL):  # another model reads the same micro-batches
        way, why = packed_samples.way_of_sharing(load_config(settings.of_second(str(reference))), how, trusts)
        if way != found[0]:
            return packed_samples.NOTHING, f"the reference's attention learns it otherwise: {why or way}"
    if run.kernels.no_sharing and found[0] != packed_samples.NOTHING:
        return packed_samples.NOTHING, f"with {how}: {run.kernels.no_sharing}"
    return found


def describe_sharing(run: Run, config: "PreTrainedConfig") -> dict[str, str]:
    """Return {"prompts": whether those of pairs are computed once, or why not}; {} where nobody asks for it."""
    way, why = way_of_sharing(run, config)
    once = "once for both answers of a pair" if way != packed_samples.NOTHING else ""
    return {"prompts": once or f"once for each answer: {why}"} if once or why else {}


def _check_scores(run: Run, config: "PreTrainedConfig") -> None:
    """Raise UserError where no reward model is built of this config, or where its scores cannot be asked for."""
    settings = run.settings
    if scores.class_of(config) is None:
        problem = f"Transformers has no classifier of {type(config).__name__}, whose head could score answers"
        raise UserError(settings.place("model_name_or_path"), problem, "choose another model")
    end_to_end, _, why = packed_samples.layout(settings, config, run.kernels.attention)
    if not end_to_end:
        problem = f"scores are asked for by their places among samples that lie end to end, and these would be {why}"
        raise UserError(settings.place("padding_free"), problem, "leave padding_free true, or choose another model")
