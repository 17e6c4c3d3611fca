"""What a run can learn: answers, or which answers are better; and which keys of a recipe each objective reads.

The losses themselves stand in brigade/train/loss/objective/. This module imports no torch.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from ...errors import UserError
from .model_section import ModelSection
from .section import Section

ANSWERS, PAIRS, JUDGED = "answers", "pairs", "judged"  # what a row holds
ACCURACY, DIVERGENCE, SCORE = "eval_rewards/accuracies", "eval_divergence", "eval_answer_score"
# What tells the best checkpoint, and its names for readers; and of which of these more is better.
HELD_OUT = {"eval_loss": "loss", DIVERGENCE: "divergence", ACCURACY: "accuracy", SCORE: "score of answers"}
HIGHER = (ACCURACY, SCORE)
SCORES = ("text", "tool_call", "json")
SFT, REWARD, DISTILL, ADAPTERS_OFF, MODEL = "sft", "reward", "distill", "adapters_off", "model"
_OWN = re.compile(r".+\.py:[A-Za-z_]\w*")


class Objective(NamedTuple):
    """One objective. title: its name for readers; rows: ANSWERS, PAIRS of a better and a worse one, or JUDGED: answers, each with
    its label; keys: those of the recipe that it reads

    beta: its default; loss_types: those that it knows, the default first; reference: whether it compares with a reference model
    scores: whether the model gets a head that scores answers, in place of the one that predicts tokens
    """

    title: str
    rows: str
    keys: tuple[str, ...] = ()
    beta: float | None = None
    loss_types: tuple[str, ...] = ()
    reference: bool = False
    scores: bool = False

    @property
    def compares(self) -> bool:
        """Whether answers are compared, and not learned by their tokens."""
        return self.rows != ANSWERS

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return the held-out figures, beside the loss, by which a checkpoint may be the best."""
        known = {ACCURACY: self.rows == PAIRS, DIVERGENCE: "teacher" in self.keys, SCORE: self.rows == ANSWERS}
        return tuple(metric for metric, has in known.items() if has)


_REFERENCE = ("reference", "precompute_ref_log_probs")
OBJECTIVES = {
    SFT: Objective(
        "supervised fine-tuning",
        ANSWERS,
        ("token_loss", "label_smoothing_factor", "z_loss_coef", "neftune_noise_alpha", "answer_score"),
    ),
    "dpo": Objective(
        "DPO",
        PAIRS,
        ("beta", "loss_type", "label_smoothing", "share_prompts", *_REFERENCE),
        0.1,
        ("sigmoid", "hinge", "robust", "apo_zero", "apo_down"),
        reference=True,
    ),
    "ipo": Objective("IPO", PAIRS, ("beta", "share_prompts", *_REFERENCE), 0.1, reference=True),
    "simpo": Objective("SimPO", PAIRS, ("beta", "simpo_gamma", "share_prompts"), 2.0),
    "orpo": Objective("ORPO", PAIRS, ("beta", "share_prompts"), 0.1),
    "kto": Objective(
        "KTO",
        JUDGED,
        ("beta", "loss_type", "desirable_weight", "undesirable_weight", *_REFERENCE),
        0.1,
        ("kto", "apo_zero_unpaired"),
        reference=True,
    ),
    REWARD: Objective("a reward model", PAIRS, ("share_prompts",), scores=True),
    DISTILL: Objective(
        "distillation",
        ANSWERS,
        (
            "teacher",
            "teacher_load_in_4bit",
            "teacher_top_k",
            "kd_ratio",
            "kd_temperature",
            "loss_type",
            "beta",
            "answer_score",
        ),
        0.5,
        ("forward_kl", "reverse_kl", "jsd"),
    ),
}


def _or_own(*names: str) -> AfterValidator:
    """What permits these names, and functions of the user's."""

    def checked(value: str | None) -> str | None:
        if value in (None, *names) or _OWN.fullmatch(str(value)):
            return value
        known = f"{', '.join(names)}, or " if names else ""
        raise ValueError(f"{known}a function of your own: path/to/file.py:function")

    return AfterValidator(checked)


class ObjectiveKeys(Section):
    """The keys of a recipe's training section that say what is learned."""

    objective: Annotated[str, _or_own(*OBJECTIVES)] = SFT
    """sft: answers; distill: answers, and what a teacher says of their tokens; dpo, ipo, simpo, orpo: which of two answers is
    better; kto: answers that are labelled good or bad; reward: a model that scores answers. Or `path/to/file.py:function`, a loss
    of your own over pairs (docs/preferences.md)."""
    token_loss: Annotated[str | None, _or_own()] = None
    """sft: `path/to/file.py:function` of your own: what training sums in the place of each token's loss (docs/extending.md)."""
    label_smoothing_factor: float = Field(0.0, ge=0, lt=1)
    """sft: the share of each target that is spread evenly over the vocabulary, in training only (docs/training.md)."""
    z_loss_coef: float = Field(0.0, ge=0)
    """sft: in training, the weight of the square of log Z, the logits' logarithmic sum: it keeps logits small. PaLM: 1e-4."""
    neftune_noise_alpha: float | None = Field(None, gt=0)
    """sft: noise on the embeddings while training (NEFTune, arXiv 2310.05914), by each sample's own length. Usual: 5."""
    teacher: str | None = None
    """distill: the model whose probabilities are learned, a directory or a name on the Hub, with the tokens of the trained one
    (docs/distillation.md)."""
    teacher_load_in_4bit: bool = False
    """distill: hold the teacher in 4 bits."""
    teacher_top_k: int | None = Field(None, gt=0)
    """distill: let the teacher read all samples once before training, and keep so many of its most likely words for each
    supervised token. Default: the teacher reads each micro-batch."""
    kd_ratio: float = Field(0.5, gt=0, le=1)
    """distill: the weight of the divergence from the teacher; the rest is that of the cross-entropy."""
    kd_temperature: float = Field(1.0, gt=0)
    """distill: what both models' logits are divided by before they are compared. The divergence is multiplied by its square."""
    beta: float | None = Field(None, gt=0)
    """How much a difference of log-probabilities counts; default: 0.1, for simpo 2.0. orpo: the weight of its odds ratio.
    distill: the teacher's share of the mixture that jsd compares with (0.5)."""
    loss_type: (
        Literal[
            "sigmoid",
            "hinge",
            "robust",
            "apo_zero",
            "apo_down",
            "kto",
            "apo_zero_unpaired",
            "forward_kl",
            "reverse_kl",
            "jsd",
        ]
        | None
    ) = None
    """The form of the loss, by TRL's names. dpo: sigmoid (default), hinge, robust, apo_zero, apo_down. kto: kto (default),
    apo_zero_unpaired. distill: forward_kl (default), reverse_kl, jsd."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo: how probably a pair is the wrong way round: robust corrects for it, sigmoid smooths by it (conservative DPO)."""
    simpo_gamma: float = Field(0.5, ge=0)
    """simpo: by how much the better answer's reward is to exceed the worse one's."""
    desirable_weight: float = Field(1.0, gt=0)
    """kto: the weight of good answers."""
    undesirable_weight: float = Field(1.0, gt=0)
    """kto: the weight of bad answers."""
    answer_score: Annotated[str | None, _or_own(*SCORES)] = None
    """sft, distill: score the eval_answers answers of an evaluation, and log the mean as eval_answer_score. text: the same words;
    tool_call: the same calls; json: the share of equal fields. Or `path/to/file.py:function` of your own (docs/training.md)."""
    metric_for_best_model: Literal["eval_loss", "eval_rewards/accuracies", "eval_divergence", "eval_answer_score"] = (
        "eval_loss"
    )
    """Which held-out figure tells the best checkpoint, and when to stop early: the lowest loss, the highest share of pairs that
    are the right way round, the least divergence from a teacher, or the highest score of answers."""
    reference: str | None = None
    """The model that an answer's log-probability is compared with. model: the weights that training begins with. adapters_off:
    the same, by switching adapters off (default with adapters). Or a directory or a name on the Hub."""
    share_prompts: Literal["auto"] | bool = "auto"
    """Compute the prompt of a pair once, and not with each answer (docs/preferences.md). auto: where a trial gives the same
    losses and gradients. true: an error where not."""
    precompute_ref_log_probs: bool | None = None
    """Compute the reference's log-probabilities once before training, and keep them beside the prepared data. false: hold the
    reference in memory. Default: true, but with adapters_off."""


class OfRecipe(Protocol):
    """What objectives look at in a recipe: the sections know no schema."""

    @property
    def model(self) -> ModelSection: ...

    @property
    def training(self) -> ObjectiveKeys: ...


def to_minimise(metric: str, metrics: Mapping[str, float]) -> float:
    """Return a held-out figure such that lower is better. metric: the recipe's metric_for_best_model"""
    return -metrics[metric] if metric in HIGHER else metrics[metric]


def is_own(objective: str) -> bool:
    """Whether an objective is a function of the user's."""
    return objective not in OBJECTIVES


def objective_of(training: ObjectiveKeys) -> Objective:
    """Return the recipe's objective. One of the user's reads pairs and all keys of comparisons, and compares with a reference
    where one is named."""
    known = OBJECTIVES.get(training.objective)
    if known:
        return known
    keys, named = (
        {key for each in OBJECTIVES.values() if each.compares for key in each.keys},
        training.reference is not None,
    )
    without = () if named else ("precompute_ref_log_probs",)
    return Objective(training.objective, PAIRS, tuple(keys.difference(without)), reference=named)


def may_share(training: ObjectiveKeys) -> bool:
    """Whether a recipe permits that the two answers of a pair share the tokens of their prompt."""
    return "share_prompts" in objective_of(training).keys and bool(training.share_prompts)


def beta_of(training: ObjectiveKeys) -> float:
    """Return the recipe's beta, or its objective's default."""
    return training.beta or objective_of(training).beta or 0.1


def loss_type_of(training: ObjectiveKeys) -> str:
    """Return the recipe's loss_type, or its objective's default; "" where there is one form only."""
    return training.loss_type or next(iter(objective_of(training).loss_types), "")


def reference_of(recipe: OfRecipe) -> str | None:
    """Return ADAPTERS_OFF, MODEL, or where the reference's weights lie; None where the objective has no reference."""
    if not objective_of(recipe.training).reference:
        return None
    fresh = recipe.model.use_peft and recipe.model.adapter_name_or_path is None
    return recipe.training.reference or (ADAPTERS_OFF if fresh else MODEL)


def begins_as_reference(recipe: OfRecipe) -> bool:
    """Whether the reference is the model as it is before the first step: each log-ratio is then 0 but for rounding."""
    is_new = recipe.model.adapter_name_or_path is None
    return reference_of(recipe) in ((MODEL, ADAPTERS_OFF) if is_new else (MODEL,))


def precomputes(recipe: OfRecipe) -> bool:
    """Whether what the reference or the teacher says is computed before training."""
    if recipe.training.teacher:
        return recipe.training.teacher_top_k is not None
    reference, asked = reference_of(recipe), recipe.training.precompute_ref_log_probs
    return reference is not None and (reference != ADAPTERS_OFF if asked is None else asked)


def other_models(recipe: OfRecipe) -> dict[str, str]:
    """Return the models that a recipe names beside its own, by their keys: a teacher, and a reference with weights of its own."""
    named = {"teacher": recipe.training.teacher, "reference": reference_of(recipe)}
    return {key: name for key, name in named.items() if name not in (None, ADAPTERS_OFF, MODEL)}


def named_models(recipe: OfRecipe) -> dict[str, str]:
    """Return all that a recipe names as a model is named, by a directory or on the Hub, by its keys."""
    keys = ("model_name_or_path", "tokenizer_name_or_path", "adapter_name_or_path", "processor_name_or_path")
    named = {key: getattr(recipe.model, key) for key in keys}
    return {key: name for key, name in named.items() if name} | other_models(recipe)


def bytes_of_token(k: int, words: int) -> int:
    """Return what a token takes on the disk of which k words are kept: 8 bytes for each, for the rest, and for a checksum
    (loss/divergence.py: as_rows, data/known.py)."""
    return 8 * (k + (k < words) + 1)


def needs_second_model(recipe: OfRecipe) -> bool:
    """Whether a second model is in memory at any time: one that stays, or another one that computes before training."""
    reference = reference_of(recipe)
    return reference not in (None, ADAPTERS_OFF) and not (reference == MODEL and precomputes(recipe))


def describe(recipe: OfRecipe) -> dict[str, str]:
    """Return {"objective": "DPO, loss_type sigmoid, beta 0.1; reference: model, computed before training"}; {} for SFT."""
    training, reference = recipe.training, reference_of(recipe)
    known = objective_of(training)
    if training.objective == SFT:
        return {}
    words = [f"{known.title} of {training.teacher}" if training.teacher else known.title]
    loss_type = loss_type_of(training)
    words += [f"loss_type {loss_type}"] if loss_type else []
    words += (
        [f"beta {beta_of(training):g}"]
        if "beta" in known.keys and loss_type not in ("forward_kl", "reverse_kl")
        else []
    )
    if training.teacher:
        words += [f"temperature {training.kd_temperature:g}", f"weight {training.kd_ratio:g} beside the cross-entropy"]
    when = "computed before training" if precomputes(recipe) else "computed in each step"
    return {"objective": ", ".join(words) + (f"; reference: {reference}, {when}" if reference else "")}


def check(recipe: OfRecipe, place: Callable[[str], str]) -> None:
    """Raise UserError for keys that the recipe's objective does not read, or that contradict each other."""
    training = recipe.training
    name, known = training.objective, objective_of(training)
    for key, info in ObjectiveKeys.model_fields.items():
        if key not in ("objective", "metric_for_best_model", *known.keys) and getattr(training, key) != info.default:
            readers = ", ".join(name for name, each in OBJECTIVES.items() if key in each.keys)
            raise UserError(place(key), f"objective {name} does not read it", f"remove it; it is read by {readers}")
    if training.metric_for_best_model not in ("eval_loss", *known.metrics):
        problem = f"objective {name} has no {training.metric_for_best_model}"
        raise UserError(place("metric_for_best_model"), problem, f"choose {' or '.join(('eval_loss', *known.metrics))}")
    if training.metric_for_best_model == SCORE and not training.answer_score:
        cure = f"set answer_score: {', '.join(SCORES)}, or a function of your own"
        raise UserError(place("metric_for_best_model"), "without answer_score nothing is scored", cure)
    if not is_own(name):
        _check_form(training, known, place)
    if name == DISTILL and training.teacher is None:
        raise UserError(
            place("teacher"), "objective distill names no teacher", "name a directory, or a model on the Hub"
        )
    if training.reference == ADAPTERS_OFF and not recipe.model.use_peft:
        problem = "adapters_off, but the recipe trains no adapters (use_peft)"
        raise UserError(place("reference"), problem, "write model, or train adapters")
    if recipe.model.load_in_4bit and reference_of(recipe) == MODEL and not precomputes(recipe):
        problem = "a second model is not in 4 bits, as the weights are that training begins with"
        raise UserError(place("reference"), problem, "write adapters_off: the same weights, without a second model")


def _check_form(training: ObjectiveKeys, known: Objective, place: Callable[[str], str]) -> None:
    """Raise UserError for a loss_type that the objective does not have, and for keys that it does not read or lacks."""
    form = loss_type_of(training)
    if training.loss_type and form not in known.loss_types:
        problem = f"{form} is no form of {training.objective}"
        raise UserError(place("loss_type"), problem, f"choose from {', '.join(known.loss_types)}")
    if training.label_smoothing and form not in ("sigmoid", "robust"):
        problem = f"loss_type {form} does not read it"
        raise UserError(place("label_smoothing"), problem, "remove it, or choose sigmoid or robust")
    if form == "robust" and not training.label_smoothing:
        problem = "robust corrects for wrong pairs, and label_smoothing says that there are none"
        raise UserError(place("loss_type"), problem, "set label_smoothing (0.1), or choose sigmoid")
    if training.beta and form in ("forward_kl", "reverse_kl"):
        raise UserError(place("beta"), f"loss_type {form} does not read it", "remove it, or choose jsd")
    if form == "jsd" and beta_of(training) >= 1:
        problem = "of a mixture the teacher has a share below 1"
        raise UserError(place("beta"), problem, "choose 0.5; reverse_kl is its limit at 1")
