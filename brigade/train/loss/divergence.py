"""How far a model's probabilities of the next token are from a teacher's."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.store import IGNORED
from ..recipe.objectives import beta_of, loss_type_of
from ..recipe.training_section import TrainingSection


class Options(NamedTuple):
    """What a recipe says of its divergence. form: loss_type; beta: the teacher's share of jsd's mixture
    temperature: what logits are divided by; ratio: the divergence's weight in the loss, beside the cross-entropy's 1 - ratio"""

    form: str
    beta: float
    temperature: float
    ratio: float

    @classmethod
    def of(cls, training: TrainingSection) -> "Options":
        return cls(loss_type_of(training), beta_of(training), training.kd_temperature, training.kd_ratio)


class Said(NamedTuple):
    """What a teacher says of the targets of a micro-batch.

    column: (targets, ...); sums: of a tile's logits, targets, weights and column, as sums() gives them
    taken: turns the sums over all tiles into the micro-batch's part of the loss
    """

    column: Tensor
    sums: Callable[..., Tensor]
    taken: Callable[[Tensor], Tensor]


def between(teacher: Tensor, student: Tensor, form: str, beta: float) -> Tensor:
    """Return the divergence of each token, in nats: (tokens,).

    teacher p, student q: log-probabilities of each word, (tokens, words) in fp32
    forward_kl: KL(p || q) (Hinton et al. 2015, arXiv 1503.02531, section 2, less the teacher's entropy)
    reverse_kl: KL(q || p) (Gu et al. 2024, arXiv 2306.08543, section 2.1)
    jsd: beta KL(p || m) + (1 - beta) KL(q || m), m being beta p + (1 - beta) q (Agarwal et al. 2024, arXiv 2306.13649, section 2)
    """
    if form == "forward_kl":
        return _kl(teacher, student)
    if form == "reverse_kl":
        return _kl(student, teacher)
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)


class Few(NamedTuple):
    """Some words of a vocabulary, for each token. ids: int64 (tokens, k), ascending; words: of the vocabulary

    All other words together count as one more (`rest`), unless there are none. By the data processing inequality
    a divergence of such distributions is at most that of all words.
    """

    ids: Tensor
    words: int

    def of(self, log_probabilities: Tensor) -> Tensor:
        """Return the log-probabilities of these words and of the rest: (tokens, words) -> (tokens, k + 1), or (tokens, words)."""
        chosen = log_probabilities.gather(-1, self.ids)
        if self.ids.shape[-1] == self.words:
            return chosen
        others = log_probabilities.scatter(-1, self.ids, -math.inf)
        return torch.cat([chosen, others.logsumexp(-1, keepdim=True)], -1)


def columns(k: int, words: int) -> int:
    """Return how many fp64 numbers as_rows() makes of a token."""
    return k + (k < words)


def few_of(known: Tensor, k: int | None) -> tuple[Tensor, Few | None]:
    """Return the k most likely words' log-probabilities and the rest's, and which words these are; None: all, as they are.

    known: log-probabilities of all words, (tokens, words)
    """
    if k is None:
        return known, None
    few = Few(known.topk(k).indices.sort(-1).values, known.shape[-1])
    return few.of(known), few


def as_rows(known: Tensor, k: int) -> Tensor:
    """Return the k most likely words of each token as rows that are stored: (tokens, words) in fp32 -> fp64 (tokens, columns).

    The bytes are k ids in int32, ascending, their log-probabilities in fp32, and the rest's in fp64. With all words
    in their order, the rows thus hold exactly `known`.
    """
    said, few = few_of(known, k)
    assert few is not None
    halves = torch.cat([few.ids.int(), said[:, :k].contiguous().view(torch.int32)], -1)
    return torch.cat([halves.view(torch.float64), said[:, k:].double()], -1)


def of_rows(rows: Tensor, k: int, words: int) -> tuple[Tensor, Few]:
    """Return log-probabilities, (tokens, k + 1) or of all words, and the words that they are of. rows: of as_rows()"""
    ids, known = rows[:, :k].contiguous().view(torch.int32).chunk(2, -1)
    return torch.cat([known.contiguous().view(torch.float32), rows[:, k:].float()], -1), Few(ids.long(), words)


def sums(
    options: Options,
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None,
    teacher: Tensor,
    few: Few | None = None,
) -> Tensor:
    """Return sums over supervised tokens, (3,) in fp32: of the cross-entropy, of the divergence times the temperature's
    square (by which its gradients keep their size: Hinton et al., section 2), and of the tokens' weights.

    logits: of the student, (tokens, its words); targets: (tokens,); weights: fp32 (tokens,); None: all weigh 1
    teacher: its log-probabilities at that temperature, fp32 (tokens, words that both have), or what Few.of() makes of them
    """
    logits, words, temperature = logits.float(), few.words if few else teacher.shape[-1], options.temperature
    own = logits.log_softmax(-1)
    crossed = -own.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    if temperature != 1 or words != logits.shape[-1]:
        own = (logits[:, :words] / temperature).log_softmax(-1)
    own = few.of(own) if few else own
    apart = temperature**2 * between(teacher, own, options.form, options.beta)
    counted = (targets != IGNORED).float()
    if weights is not None:
        counted = counted * weights
    return torch.stack([(crossed * counted).sum(), (apart * counted).sum(), counted.sum()])
