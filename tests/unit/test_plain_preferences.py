"""testing/plain_preferences.py: its losses by numbers worked out by hand, and its data as runs of train.py have them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from brigade.train.data import builtin, mixing
from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.encode import Encoder, LoadedEncoder
from brigade.train.data.keys import Columns
from brigade.train.data.samples import convert
from brigade.train.data.sampling import FILLER, GlobalBatches
from brigade.train.recipe.objectives import OBJECTIVES
from testing import plain_preferences as plain
from testing.runs import write_model

DATA = Path(__file__).parents[1] / "data/preferences"
ROWS = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in DATA.glob("*.jsonl")}


def answer(logp, tokens=1, reference=0.0):
    return plain.Answer(torch.tensor(logp, dtype=torch.float64), tokens, reference)


# Log-ratios of 4 and -2, over 4 and 2 tokens; with beta 0.5 the margin is 3, and its sigmoid 0.9525741268.
BETTER, WORSE = answer(-8.0, 4, -12.0), answer(-5.0, 2, -3.0)
BY_HAND = {
    ("dpo", None, 0.0): 0.0485873516,  # log(1 + exp(-3))
    ("dpo", None, 0.1): 0.3485873516,  # 0.9 x 0.0485873516 + 0.1 x 3.0485873516
    ("dpo", "robust", 0.1): -0.3264126484,  # (0.9 x 0.0485873516 - 0.1 x 3.0485873516) / 0.8
    ("dpo", "hinge", 0.0): 0.0,
    ("dpo", "apo_zero", 0.0): 0.3881445,  # 1 - sigmoid(2) + sigmoid(-1) = 1 - 0.8807971 + 0.2689414
    ("dpo", "apo_down", 0.0): 0.9282230,  # 1 + 0.8807971 - 0.9525741
    ("ipo", None, 0.0): 1.0,  # (4 / 4 + 2 / 2 - 1 / (2 x 0.5)) ** 2
    ("simpo", None, 0.0): 0.5759394,  # -log sigmoid(0.5 x (-2 + 2.5) - 0) = log(1 + exp(-0.25))
    ("orpo", None, 0.0): 2.2259655,  # 2 + 0.5 x log(1 + exp(-0.5597631)), of log odds -1.8545865 and -2.4143496
    ("reward", None, 0.0): 3.0485873516,  # scores -8 and -5: log(1 + exp(3))
}


@pytest.mark.parametrize(("objective", "loss_type", "smoothing"), BY_HAND)
def test_losses_of_pairs(objective, loss_type, smoothing):
    keys = plain.Keys(objective=objective, loss_type=loss_type, beta=0.5, label_smoothing=smoothing, simpo_gamma=0.0)
    loss = plain.PAIRS[plain.form_of(keys)](keys, BETTER, WORSE)
    assert float(loss) == pytest.approx(BY_HAND[objective, loss_type, smoothing], abs=1e-6)


def test_each_loss_of_pairs_is_known_by_hand():
    assert {
        plain.form_of(plain.Keys(objective=name, loss_type=kind)) for name, kind, _ in BY_HAND
    } == plain.PAIRS.keys()


def test_hinge_and_simpo_within_their_margins():
    keys = plain.Keys(beta=0.1, simpo_gamma=0.3)
    assert float(plain.PAIRS["hinge"](keys, BETTER, WORSE)) == pytest.approx(0.4)  # 1 - 0.1 x 6
    assert float(plain.PAIRS["simpo"](keys, BETTER, WORSE)) == pytest.approx(math.log1p(math.exp(0.25)))  # 0.05 - 0.3


def test_losses_of_judged_answers():
    keys = plain.Keys(objective="kto", beta=0.5, desirable_weight=2.0, undesirable_weight=3.0)
    good, bad = (answer(ratio) for ratio in (4.0, -2.0))
    kto, apo = plain.JUDGED["kto"], plain.JUDGED["apo_zero_unpaired"]
    assert float(kto(keys, good, True, 2.0)) == pytest.approx(2 * 0.2689414, abs=1e-6)  # 1 - sigmoid(0.5 x (4 - 2))
    assert float(kto(keys, bad, False, 2.0)) == pytest.approx(3 * 0.1192029, abs=1e-6)  # 1 - sigmoid(0.5 x (2 + 2))
    assert float(apo(keys, good, True, 2.0)) == pytest.approx(2 * 0.1192029, abs=1e-6)  # 1 - sigmoid(2)
    assert float(apo(keys, bad, False, 2.0)) == pytest.approx(3 * 0.2689414, abs=1e-6)  # sigmoid(-1)


def test_another_rows_answers_make_one_round():
    samples = [plain.Tokens([1, 10 + at, 20 + at, 2], 2, 4) for at in range(7)]
    other = [sample.ids[2] - 20 for sample in plain.mismatched(samples, 99)]
    seen, at = [], 0
    for _ in other:
        seen.append(at)
        at = other[at]
    assert at == 0 and sorted(seen) == list(range(7))
    assert [sample.ids[:2] for sample in plain.mismatched(samples, 99)] == [[1, 10 + at] for at in range(7)]
    assert plain.mismatched(samples, 3)[0] == plain.Tokens([1, 10, 20 + other[0]], 2, 3)


def test_steps_and_held_out_rows_are_those_of_runs():
    batches = GlobalBatches(23, 4, 1, 0, 1, seed=3)
    theirs = [[at for at in batches.of_step(step).flatten().tolist() if at != FILLER] for step in range(14)]
    assert list(plain.steps(23, plain.Keys(seed=3, global_batch_size=4, max_steps=14))) == theirs
    for rows, share in (24, 0.02), (24, 0.25), (2, 0.9), (103, 0.1):
        trained, _ = mixing.split(np.arange(rows), np.arange(rows), share)
        assert plain.kept([{"at": at} for at in range(rows)], share) == [{"at": at} for at in trained]


@pytest.mark.parametrize("begins", [False, True], ids=["no first token", "a first token of the tokenizer's"])
def test_tokens_are_those_of_samples(begins):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(builtin.TOKENIZER)
    if begins:
        first = ("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{first[0]} $A", special_tokens=[first])
    text, end = tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id
    encoder = LoadedEncoder(Encoder(text, ChatTemplates("", joins=True), {}, end, 4096, True))
    answers = [(row["prompt"], row[key]) for row in ROWS["pairs"] for key in ("chosen", "rejected")]
    texts = [convert({"prompt": prompt, "completion": text}, Columns(), encoder.chats) for prompt, text in answers]
    merged = 0
    for (prompt, text), (ids, mask) in zip(answers, encoder._ids(texts), strict=True):
        own = plain.tokens_of(tokenizer, prompt, text, 4096)
        assert own.ids == ids.tolist() and np.flatnonzero(mask).tolist() == list(range(own.first, own.end))
        merged += own.ids[: own.first] != tokenizer(prompt)["input_ids"]
        assert plain.tokens_of(tokenizer, prompt, text, own.first + 1).ids == own.ids[: own.first + 1]
        with pytest.raises(ValueError, match="leaves nothing of the answer"):
            plain.tokens_of(tokenizer, prompt, text, own.first)
    assert merged, "in no row does the answer's first token begin within the prompt"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), "llama")


FORMS = [
    (name, each)
    for name, known in OBJECTIVES.items()
    if known.compares and not known.scores
    for each in known.loss_types or (None,)
]


def at_start(objective, loss_type):
    """The loss of each row where the model is its own reference; None without one."""
    keys = plain.Keys(objective=objective, loss_type=loss_type, label_smoothing=0.1)
    form, same = plain.form_of(keys), answer(-1.0, 1, -1.0)
    if form in plain.WITHOUT_REFERENCE:
        return None
    return float(
        plain.PAIRS[form](keys, same, same) if form in plain.PAIRS else plain.JUDGED[form](keys, same, True, 0.0)
    )


@pytest.mark.parametrize(("objective", "loss_type"), FORMS)
def test_training_lowers_each_loss(model, objective, loss_type):
    rows = ROWS["judged" if objective == "kto" else "pairs"][:4]
    keys = {"objective": objective, "loss_type": loss_type, "validation_split": None, "global_batch_size": 4}
    history = plain.train(rows, model, model, **keys, label_smoothing=0.1, max_steps=3, learning_rate=1e-3)
    losses = [step["loss"] for step in history]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    begins = at_start(objective, loss_type)
    assert begins is None or history[0]["loss"] == pytest.approx(begins, rel=1e-6)


def test_a_reward_model_is_read_at_its_last_token(model, tmp_path):
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    scoring = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    scoring.config.pad_token_id = scoring.config.eos_token_id = 2
    scoring.save_pretrained(tmp_path)
    loaded = plain.load(tmp_path, "reward")
    assert plain.score_of(loaded, plain.Tokens([5, 6, 2], 1, 3)) != plain.score_of(loaded, plain.Tokens([5, 6], 1, 2))
    keys = {"objective": "reward", "validation_split": None, "global_batch_size": 4, "max_steps": 3}
    history = plain.train(ROWS["pairs"][:4], tmp_path, model, **keys, learning_rate=1e-3)
    assert history[0]["loss"] > history[-1]["loss"] and "logps/chosen" not in history[0]


def test_a_steps_gradient_is_that_of_one_sum(model):
    """With SGD a step moves the weights by the gradient, whose norm is therefore how far the loss falls for a small step."""
    keys = {"validation_split": None, "global_batch_size": 4, "max_steps": 2, "optim": "sgd", "max_grad_norm": 0.0}
    first, second = plain.train(ROWS["pairs"][:4], model, model, **keys, learning_rate=1e-3)
    assert first["loss"] - second["loss"] == pytest.approx(1e-3 * first["grad_norm"] ** 2, rel=0.01)
    (clipped, _) = plain.train(ROWS["pairs"][:4], model, model, **keys | {"max_grad_norm": 1e-3})
    assert clipped == first  # the norm is that before clipping
