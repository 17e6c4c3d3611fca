"""Preference training as its papers say it, in plain PyTorch and Transformers: what the runs of train.py are compared with.

It shares no code with brigade. Each answer is tokenised and read by itself, without padding, in fp32 and without dropout; the
reference is a copy of the model at the start; all losses stand in the tables PAIRS and JUDGED. train() takes the keys of a recipe
by their names. Prompts and answers are texts that are joined as they are, as by `chat_template: none`.
"""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import logsigmoid
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    get_scheduler,
)

Row = dict[str, Any]  # {"prompt", "chosen", "rejected"}, or {"prompt", "completion", "label"}: texts and a bool


class Keys(NamedTuple):
    """The keys of a recipe that the loop reads. validation_split: None where the rows hold out nothing; optim: adamw or sgd"""

    objective: str = "dpo"
    loss_type: str | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    max_length: int = 1024
    validation_split: float | None = 0.02
    global_batch_size: int = 8
    max_steps: int = 8
    seed: int = 0
    optim: str = "adamw"
    learning_rate: float = 1e-4
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0


class Tokens(NamedTuple):
    """One sequence. ids: all of its tokens; first: the place of the answer's first token; end: of the one behind its last"""

    ids: list[int]
    first: int
    end: int


class Answer(NamedTuple):
    """What a model says of one answer, fp64 scalars. logp: sum over its tokens; tokens: how many; reference: the reference's sum.
    A reward model's logp is its score"""

    logp: torch.Tensor
    tokens: int = 1
    reference: torch.Tensor | float = 0.0

    @property
    def ratio(self) -> torch.Tensor:
        return self.logp - self.reference

    @property
    def mean(self) -> torch.Tensor:
        return self.logp / self.tokens


# ---- the losses ----------------------------------------------------------------------------------------------------
def _sigmoid(keys: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """DPO, arXiv 2305.18290 eq. 7. With smoothing conservative DPO (Mitchell's note on it): wrong pairs have that probability."""
    margin = keys.beta * (better.ratio - worse.ratio)
    return -(1 - keys.label_smoothing) * logsigmoid(margin) - keys.label_smoothing * logsigmoid(-margin)


def _robust(keys: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """Robust DPO, arXiv 2403.00409 section 3: without bias where that share of the pairs is the wrong way round."""
    margin, wrong = keys.beta * (better.ratio - worse.ratio), keys.label_smoothing
    return (-(1 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1 - 2 * wrong)


def _hinge(keys: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """SLiC on log-ratios: hinge-norm of arXiv 2309.06657 section 3."""
    return (1 - keys.beta * (better.ratio - worse.ratio)).clamp(min=0)


def _apo_zero(keys: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """APO-zero, arXiv 2408.06266 eq. 7, plus 1: as TRL has it, so that no loss is negative."""
    return 1 - torch.sigmoid(keys.beta * better.ratio) + torch.sigmoid(keys.beta * worse.ratio)


def _apo_down(keys: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """APO-down, arXiv 2408.06266 eq. 8, plus 1 likewise."""
    return 1 + torch.sigmoid(keys.beta * better.ratio) - torch.sigmoid(keys.beta * (better.ratio - worse.ratio))


def _ipo(keys: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """IPO, arXiv 2310.12036 eq. 17, of log-ratios per token."""
    return (better.ratio / better.tokens - worse.ratio / worse.tokens - 1 / (2 * keys.beta)) ** 2


def _simpo(keys: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """SimPO, arXiv 2405.14734 eq. 6."""
    return -logsigmoid(keys.beta * better.mean - keys.beta * worse.mean - keys.simpo_gamma)


def _orpo(keys: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """ORPO, arXiv 2403.07691 eqs. 6 and 7; log odds are log p - log(1 - p), eq. 4."""
    log_odds = [answer.mean - torch.log(-torch.expm1(answer.mean)) for answer in (better, worse)]
    return -better.mean - keys.beta * logsigmoid(log_odds[0] - log_odds[1])


def _reward(_: Keys, better: Answer, worse: Answer) -> torch.Tensor:
    """Bradley and Terry's model of scores: arXiv 2203.02155 eq. 1."""
    return -logsigmoid(better.logp - worse.logp)


def _kto(keys: Keys, answer: Answer, good: bool, z0: float) -> torch.Tensor:
    """KTO, arXiv 2402.01306 section 4: a weight minus a value, which is the weight times a sigmoid."""
    if good:
        return keys.desirable_weight * (1 - torch.sigmoid(keys.beta * (answer.ratio - z0)))
    return keys.undesirable_weight * (1 - torch.sigmoid(keys.beta * (z0 - answer.ratio)))


def _apo_zero_unpaired(keys: Keys, answer: Answer, good: bool, _: float) -> torch.Tensor:
    """APO-zero's two terms, each of its own answers; the 1 belongs to the good ones'."""
    share = torch.sigmoid(keys.beta * answer.ratio)
    return keys.desirable_weight * (1 - share) if good else keys.undesirable_weight * share


PAIRS: dict[str, Callable[[Keys, Answer, Answer], torch.Tensor]] = {
    "sigmoid": _sigmoid, "hinge": _hinge, "robust": _robust, "apo_zero": _apo_zero, "apo_down": _apo_down,
    "ipo": _ipo, "simpo": _simpo, "orpo": _orpo, "reward": _reward,
}  # fmt: skip
JUDGED: dict[str, Callable[[Keys, Answer, bool, float], torch.Tensor]] = {
    "kto": _kto, "apo_zero_unpaired": _apo_zero_unpaired,
}  # fmt: skip
WITHOUT_REFERENCE = ("simpo", "orpo", "reward")


def form_of(keys: Keys) -> str:
    """Return the name of a loss in PAIRS or JUDGED."""
    return keys.loss_type or {"dpo": "sigmoid"}.get(keys.objective, keys.objective)


# ---- the data ------------------------------------------------------------------------------------------------------
def tokens_of(tokenizer: Any, prompt: str, answer: str, max_length: int) -> Tokens:
    """Return prompt and answer joined, with the tokenizer's own special tokens, and eos behind them unless it stands there.

    The answer's are all tokens from the first to the last that has one of its characters, and eos. Raises ValueError where none
    of them is left within max_length.
    """
    encoded = tokenizer(prompt + answer, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    own = [at for at, (begin, end) in enumerate(encoded["offset_mapping"]) if begin < end and end > len(prompt)]
    if ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    first = max(1, own[0])  # nothing comes before the first token that could predict it
    if own[-1] + 2 != len(ids):
        raise ValueError(f"tokens stand between the answer {answer!r} and eos")
    if first >= max_length:
        raise ValueError(f"max_length {max_length} leaves nothing of the answer {answer!r}")
    return Tokens(ids[:max_length], first, min(len(ids), max_length))


def mismatched(samples: list[Tokens], max_length: int) -> list[Tokens]:
    """Return each sample's prompt with the answer of another: of the one that follows it in a fixed order of all."""
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(samples))
    following = dict(zip(order.tolist(), np.roll(order, -1).tolist(), strict=True))
    joined = []
    for at, sample in enumerate(samples):
        other = samples[following[at]]
        ids = (sample.ids[: sample.first] + other.ids[other.first : other.end])[:max_length]
        joined.append(Tokens(ids, sample.first, len(ids)))
    return joined


def kept(rows: list[Row], share: float | None) -> list[Row]:
    """Return the rows that are trained on, where a share of them is held out, spread evenly."""
    if share is None:
        return rows
    count = min(max(1, round(len(rows) * share)), len(rows) - 1)
    held = {int(place) for place in np.linspace(0, len(rows) - 1, count)}
    return [row for at, row in enumerate(rows) if at not in held]


def steps(items: int, keys: Keys) -> Iterator[list[int]]:
    """Yield the items of each step; the last step of an epoch has what is left."""
    done = 0
    for epoch in range(keys.max_steps):
        order = np.random.Generator(np.random.PCG64((keys.seed, epoch))).permutation(items).tolist()
        for begin in range(0, items, keys.global_batch_size):
            if done == keys.max_steps:
                return
            yield order[begin : begin + keys.global_batch_size]
            done += 1


# ---- the loop ------------------------------------------------------------------------------------------------------
def logp_of(model: Any, sample: Tokens) -> torch.Tensor:
    """Return the sum of an answer's log-probabilities, in fp64."""
    ids = torch.tensor([sample.ids])
    predicted = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    of_tokens = predicted.gather(1, ids[0, 1:, None])[:, 0]
    return of_tokens[sample.first - 1 : sample.end - 1].double().sum()


def score_of(model: Any, sample: Tokens) -> torch.Tensor:
    """Return a reward model's score, read at the last token."""
    return model(input_ids=torch.tensor([sample.ids]), use_cache=False).logits[0, 0].float()


def load(model: str | Path, objective: str) -> Any:
    """Return a model in fp32 without dropout. A reward model's directory has its head, of one label."""
    kind = AutoModelForSequenceClassification if objective == "reward" else AutoModelForCausalLM
    loaded = kind.from_pretrained(model, dtype=torch.float32).eval()
    loaded.config.get_text_config().pad_token_id = None  # so that the score is read at the last token, whatever that is
    return loaded


class Comparison(NamedTuple):
    """Rows whose answers a model and its reference read. samples: of each row, one or two; others: KTO's, to other prompts"""

    keys: Keys
    rows: list[Row]
    samples: list[list[Tokens]]
    others: list[Tokens]
    policy: Any
    reference: Any

    @property
    def form(self) -> str:
        return form_of(self.keys)

    def said(self, sample: Tokens) -> Answer:
        read = score_of if self.form == "reward" else logp_of
        return Answer(read(self.policy, sample), sample.end - sample.first, self._reference(sample))

    @torch.no_grad()
    def _reference(self, sample: Tokens) -> torch.Tensor | float:
        return logp_of(self.reference, sample) if self.reference else 0.0

    @torch.no_grad()
    def divergence(self, items: list[int]) -> float:
        return max(0.0, sum(float(self.said(self.others[item]).ratio) for item in items) / len(items))

    def means(self, items: list[int]) -> dict[str, float]:
        """Return the means of these rows' loss and figures. Where gradients are on, they are added to the model's."""
        keys, form = self.keys, self.form
        losses = []
        answers: dict[str, list[Answer]] = {"chosen": [], "rejected": []}
        z0 = self.divergence(items) if form == "kto" else 0.0
        for item in items:
            heard = [self.said(sample) for sample in self.samples[item]]
            good = bool(self.rows[item].get("label"))
            sides = ["chosen" if good else "rejected"] if form in JUDGED else ["chosen", "rejected"]
            judged, pairs = JUDGED.get(form), PAIRS.get(form)
            loss = judged(keys, heard[0], good, z0) if judged else pairs(keys, *heard)  # type: ignore[misc]
            if loss.requires_grad:
                (loss / len(items)).backward()
            losses.append(float(loss.detach()))
            for side, answer in zip(sides, heard, strict=True):
                answers[side].append(answer._replace(logp=answer.logp.detach()))
        return {"loss": mean(losses)} | ({"kl": z0} if form == "kto" else {}) | logged(keys, form, answers)


def comparison(rows: list[Row], policy: Any, reference: Any, tokenizer: str | Path, keys: Keys) -> Comparison:
    """Return rows as a model reads them. tokenizer: its directory"""
    # Not AutoTokenizer: for some types of models it puts another splitting of words in place of what tokenizer.json says.
    words = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    columns = ("completion",) if form_of(keys) in JUDGED else ("chosen", "rejected")
    samples = [[tokens_of(words, row["prompt"], row[key], keys.max_length) for key in columns] for row in rows]
    others = mismatched([answer for (answer,) in samples], keys.max_length) if form_of(keys) == "kto" else []
    return Comparison(keys, rows, samples, others, policy, reference)


def train(
    rows: list[Row], model: str | Path, tokenizer: str | Path, reference: str | Path | None = None, **keys: Any
) -> list[dict[str, float]]:
    """Train, and return what each step says: means over its items, before its update.

    model: a directory; reference: likewise; default: the model at the start; keys: of Keys
    Each step has loss, grad_norm (before clipping), rewards/chosen, rewards/rejected and rewards/margins; of pairs also
    rewards/accuracies; logps/chosen and logps/rejected, sums over an answer's tokens, but of a reward model; of KTO kl, its z0.
    NaN stands where a step has no such answer.
    """
    settings = Keys(**keys)
    policy = load(model, settings.objective)
    compared = load(reference, settings.objective) if reference else copy.deepcopy(policy)
    frozen = None if form_of(settings) in WITHOUT_REFERENCE else compared.requires_grad_(False)
    batch = comparison(kept(rows, settings.validation_split), policy, frozen, tokenizer, settings)
    decayed, rest = [[p for p in policy.parameters() if (p.ndim > 1) == wide] for wide in (True, False)]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    betas = (settings.adam_beta1, settings.adam_beta2)
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, settings.learning_rate)
        if settings.optim == "sgd"
        else torch.optim.AdamW(groups, settings.learning_rate, betas, settings.adam_epsilon)
    )
    schedule = get_scheduler(settings.lr_scheduler_type, optimizer, settings.warmup_steps, settings.max_steps)
    history = []
    for items in steps(len(batch.rows), settings):
        said = batch.means(items)
        norm = norm_of(policy)
        torch.nn.utils.clip_grads_with_norm_(policy.parameters(), settings.max_grad_norm or math.inf, norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        history.append(said | {"grad_norm": float(norm)})
    return history


def norm_of(model: Any) -> torch.Tensor:
    """Return the norm of a model's gradient, a scalar; summed in fp64, for in fp32 an embedding's is off by 1e-5 on a CPU."""
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return torch.stack(squares).sum().sqrt().float()


@torch.no_grad()
def held_out(
    rows: list[Row], model: str | Path, reference: str | Path, tokenizer: str | Path, **keys: Any
) -> dict[str, float]:
    """Return what a model says of rows that it was not trained on: as train() of a step, without grad_norm.

    model, reference: directories; keys: of Keys
    """
    settings = Keys(**keys)
    frozen = None if form_of(settings) in WITHOUT_REFERENCE else load(reference, settings.objective)
    batch = comparison(rows, load(model, settings.objective), frozen, tokenizer, settings)
    return batch.means(list(range(len(rows))))


def logged(keys: Keys, form: str, answers: dict[str, list[Answer]]) -> dict[str, float]:
    """Return what a step says of its answers. A reward is beta times a log-ratio, of IPO that of a token; where no reference is,
    beta times the mean log-probability of a token; of a reward model the score."""
    rewards = {side: [reward_of(keys, form, answer) for answer in given] for side, given in answers.items()}
    found = {f"rewards/{side}": mean(values) for side, values in rewards.items()}
    found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    if form in PAIRS:
        found["rewards/accuracies"] = mean([better > worse for better, worse in zip(*rewards.values(), strict=True)])
    if form != "reward":
        found |= {f"logps/{side}": mean([float(answer.logp) for answer in given]) for side, given in answers.items()}
    return found


def reward_of(keys: Keys, form: str, answer: Answer) -> float:
    """Return one answer's reward."""
    if form == "reward":
        return float(answer.logp)
    if form == "ipo":
        return keys.beta * float(answer.ratio) / answer.tokens
    return keys.beta * float(answer.mean if form in WITHOUT_REFERENCE else answer.ratio)


def mean(values: list[Any]) -> float:
    """Return the mean of numbers, NaN of none."""
    return sum(values) / len(values) if values else math.nan
