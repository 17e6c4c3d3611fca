"""The divergence from a teacher, against torch.distributions, and what a teacher has to have in common with the model."""

import math

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from brigade.train.data.store import IGNORED
from brigade.train.loss import distillation, divergence, second_model
from brigade.train.loss.divergence import Options
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
from testing import runs

TARGETS = torch.tensor([3, IGNORED, 0, 11])
MORE = torch.tensor([1.0, 5.0, 0.5, 2.0])


def logits(seed, words=12):
    return 3 * torch.randn(len(TARGETS), words, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("form, beta", [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)])
def test_sums_are_those_of_the_distributions(form, beta, temperature):
    student, teacher = logits(0), logits(1)
    p, q = (Categorical(logits=each.double() / temperature) for each in (teacher, student))
    m = Categorical(probs=beta * p.probs + (1 - beta) * q.probs)
    expected = {
        "forward_kl": kl_divergence(p, q),
        "reverse_kl": kl_divergence(q, p),
        "jsd": beta * kl_divergence(p, m) + (1 - beta) * kl_divergence(q, m),
    }[form]
    known = (teacher / temperature).log_softmax(-1)
    crossed, apart, tokens = divergence.sums(Options(form, beta, temperature, 0.5), student, TARGETS, MORE, known)
    weights = torch.where(TARGETS == IGNORED, 0.0, MORE)
    own = torch.nn.functional.cross_entropy(student, TARGETS, ignore_index=IGNORED, reduction="none")
    assert crossed == pytest.approx(float((own * weights).sum()), rel=1e-6)
    assert apart == pytest.approx(float((temperature**2 * expected * weights).sum()), rel=1e-5)
    assert tokens == weights.sum()


def learned(form, student, teacher):
    """The divergence from a teacher, and its gradient."""
    student.requires_grad_()
    apart = divergence.sums(Options(form, 0.5, 1.0, 1.0), student, TARGETS, None, teacher.log_softmax(-1))[1]
    return float(apart.detach()), torch.autograd.grad(apart, student)[0]


@pytest.mark.parametrize("form", ["forward_kl", "reverse_kl", "jsd"])
def test_who_says_what_its_teacher_says_has_nothing_to_learn_and_a_word_that_is_excluded_is_finite(form):
    apart, slope = learned(form, logits(0), logits(0))
    assert abs(apart) < 1e-5 and slope.abs().max() < 1e-6
    student = logits(0)
    student[:, 5] = -1e4
    apart, slope = learned(form, student, logits(1))
    assert math.isfinite(apart) and slope.isfinite().all()


# ---- a teacher --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "other"):
        runs.write_model(folder / name, "llama")
    return folder


def test_a_teacher_with_other_tokens_is_refused_by_one_of_them(models, user_error):
    own = ["--model_name_or_path", str(models / "llama"), "--tokenizer_name_or_path", str(models / "llama")]
    teacher = ["--from_scratch", "false", "--objective", "distill", "--teacher", str(models / "other")]
    settings = flags.load([*own, *teacher, "--max_length", "64"])
    named = distillation.of_teacher(settings)
    asked = settings, "teacher", named, (load_config(settings), load_config(named)), distillation.BY_TEXT
    second_model.check_tokens(*asked)
    runs.swap_tokens(models / "other", "the", "def")
    caught = user_error(second_model.check_tokens, *asked)
    assert caught.place == "flag --teacher"
    assert caught.problem.startswith("2 tokens differ: ")
    assert "let the teacher answer, and train with objective: sft on its answers" in caught.cure
