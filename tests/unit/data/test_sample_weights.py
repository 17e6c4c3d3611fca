"""Weights of samples: read from a column that data.columns names, stored, and handed on beside the tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from brigade.train.data import report
from brigade.train.data.collate import WEIGHTS, Collate, Layout, WithFiller
from brigade.train.data.sampling import GlobalBatches
from brigade.train.distributed.process import this_process
from brigade.train.loss import supervised_loss, tiled
from testing.chats import HELD, chat
from testing.small_configs import LEAST

WEIGHS = {"columns": {"weight": "weight"}}


def rows(*weights):
    return [chat(f"question {number}", "word " * (number + 2)) | {"weight": w} for number, w in enumerate(weights)]


def batch(data, padding_free=True, **how):
    whole = WithFiller(data.train, 0)
    return Collate(0, Layout(padding_free, how.pop("packed", False), False, **how))(
        ([whole[i] for i in range(len(data.train))], 1)
    )


def test_each_token_gets_the_weight_of_its_sample(from_rows):
    data = from_rows(*rows(0.5, 0, 2), **WEIGHS)
    samples = list(data.train)
    assert [sample["weights"].tolist() for sample in samples] == [[0.5], [0.0], [2.0]]
    counts = [int((sample["labels"] != -100).sum()) for sample in samples]
    assert data.train.counted().tolist() == [0.5 * counts[0], 0, 2 * counts[2]]
    expected = np.repeat(np.float32([0.5, 0, 2]), counts).tolist()
    assert batch(data)[WEIGHTS][0].tolist() == expected
    padded = batch(data, padding_free=False)
    shifted = padded["labels"][:, 1:] != -100
    assert padded[WEIGHTS].shape == padded["labels"].shape
    assert padded[WEIGHTS][:, :-1][shifted].tolist() == expected
    assert report.losses(data.facts)[-1].startswith("1 samples of weight 0")


def test_packed_samples_keep_theirs(from_rows):
    data = from_rows(*rows(0.5, 3, 2), packing=True, **WEIGHS)
    (sequence,) = data.train
    assert len(sequence["lengths"]) == 3 and sorted(sequence["weights"].tolist()) == [0.5, 2, 3]
    own = np.repeat(sequence["weights"], sequence["lengths"])[1:][sequence["labels"][1:] != -100]
    for padding_free in (True, False):
        found = batch(data, padding_free, packed=True, multiple=64)
        targets = found["shift_labels" if padding_free else "labels"]
        if not padding_free:
            targets = torch.nn.functional.pad(targets, (0, 1), value=-100)[:, 1:]
        assert found[WEIGHTS].shape == targets.shape
        assert found[WEIGHTS][targets != -100].tolist() == own.tolist()


def test_where_all_weigh_one_nothing_is_handed_on(from_rows):
    weighed, plain = from_rows(*rows(1, 1.0, 1), **WEIGHS), from_rows(*rows(1, 1, 1), columns={"ignore": "weight"})
    assert "weights" not in weighed.train[0] and WEIGHTS not in batch(weighed)
    assert weighed.train.counted().tolist() == plain.train.counted().tolist()
    assert weighed.train.counted().dtype == np.int64
    some = from_rows(*rows(1, 1, 2), **WEIGHS)
    assert WEIGHTS not in Collate(0, Layout(True, False, False))(([some.train[0], some.train[1]], 1))


def test_the_columns_name_is_the_sources_own_and_a_text_of_csv_is_a_number(from_rows, prepare, write, tmp_path):
    rows = ({"text": "a b c", "quality": 0.25}, {"text": "d e f", "quality": 4})
    named = from_rows(*rows, columns={"weight": "quality"})
    assert sorted(float(sample["weights"][0]) for sample in named.train) == [0.25, 4]
    (tmp_path / "rows.csv").write_text("text,weight\na b c,0.25\nd e f,4\n")
    held = write("held.jsonl", [{"text": "held out"}])
    data = prepare(train_file=str(tmp_path / "rows.csv"), validation_file=held, **WEIGHS)
    assert sorted(float(sample["weights"][0]) for sample in data.train) == [0.25, 4]


@pytest.mark.parametrize("weight, says", [
    (None, "holds no weight"),
    (-1, "is -1, not a weight"),
    (float("nan"), "holds no weight"),  # as null
    (float("inf"), "not a weight"),
    ("heavy", "is 'heavy', not a weight"),
    (True, "is True, not a weight"),
    ([1], "not a weight"),
])  # fmt: skip
def test_what_is_no_weight_is_an_error_with_its_line(from_rows, weight, says, user_error):
    bad = rows(1, weight)
    if weight is None:
        del bad[1]["weight"]
    error = user_error(from_rows, *bad, **WEIGHS)
    assert error.place.endswith("train.jsonl, line 2") and says in error.problem, error.problem


def test_a_weight_that_no_key_names_is_refused_and_held_out_rows_need_none(from_rows, write, mistake):
    assert "read where data.columns names it" in mistake(lambda: from_rows(*rows(2)))
    assert "column 'heft' holds no weight" in mistake(from_rows, HELD[0], columns={"weight": "heft"})
    held = write("weighed.jsonl", [HELD[0], HELD[0] | {"weight": "heavy"}])
    data = from_rows(*rows(2), validation_file=held, **WEIGHS)
    (heldout,) = data.heldout.values()
    assert len(heldout) == 2 and "weights" not in heldout[0]
    part = from_rows(*rows(*[2] * 20), validation_file=None, validation_split=0.2, **WEIGHS)
    (heldout,) = part.heldout.values()
    assert "weights" in part.train[0] and "weights" not in heldout[0]


def test_a_step_of_no_weight_is_divided_by_one():
    counted = np.array([0.0, 0.0, 1.5, 2.0])
    steps = [indices.supervised for indices in GlobalBatches(4, 2, 1, 0, 1, None, counted)]
    assert steps == [1, 3.5]


# ---- the loss ----------------------------------------------------------------------------------------------------------
def loss_of(logits, targets, weights, terms=supervised_loss.PLAIN, items=3.0, flat=True):
    labels = {"shift_labels": targets} if flat else {"labels": targets}
    with this_process.forward_pass.told(weights=weights):
        return supervised_loss._of_model(
            SimpleNamespace(training=True), terms, logits, num_items_in_batch=items, **labels
        )


@pytest.fixture
def given():
    torch.manual_seed(0)
    targets = torch.randint(0, 11, (2, 40))
    targets[:, ::3] = -100
    return torch.randn(2, 40, 11, requires_grad=True), targets, torch.rand(2, 40)


def test_the_loss_without_weights_is_transformers_to_the_bit(given):
    logits, targets, _ = given
    theirs = ForCausalLMLoss(logits, None, 11, num_items_in_batch=51, shift_labels=targets)
    assert torch.equal(loss_of(logits, targets, None, items=51.0), theirs)
    theirs = ForCausalLMLoss(logits, targets, 11, num_items_in_batch=51)
    assert torch.equal(loss_of(logits, targets, None, items=51, flat=False), theirs)


@pytest.mark.parametrize("terms", [supervised_loss.PLAIN, supervised_loss.Terms(0.1, 0.01)])
def test_each_tokens_loss_is_weighed_with_all_that_is_added_to_it(given, terms):
    logits, targets, weights = given
    each = supervised_loss.of_tokens(logits.flatten(0, 1), targets.flatten(), terms, "none")
    assert torch.allclose(loss_of(logits, targets, weights, terms), (each * weights.flatten()).sum() / 3)
    assert (each[targets.flatten() == -100] == 0).all()


def test_a_sample_of_weight_zero_adds_nothing_to_loss_and_gradient(given):
    logits, targets, weights = given
    weights[1] = 0
    loss_of(logits, targets, weights).backward()
    both, logits.grad = logits.grad, None
    loss_of(logits[:1], targets[:1], weights[:1]).backward()
    assert (both[1] == 0).all() and torch.allclose(both[0], logits.grad[0])


def test_a_head_in_tiles_weighs_too(given):
    _, _, weights = given
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LEAST, vocab_size=11)).train()
    terms, ids = supervised_loss.Terms(0.1, 0.01), torch.randint(0, 11, (2, 40))
    supervised_loss.apply(model, terms)
    losses = []
    for tiles in (None, 7):
        tiled.apply(model, tiles, None, terms=terms)
        with this_process.forward_pass.told(weights=weights):
            losses.append(model(input_ids=ids, labels=ids, num_items_in_batch=5.5).loss)
    assert torch.allclose(*losses)
    held_out = model.eval()(input_ids=ids, labels=ids, num_items_in_batch=5.5).loss
    with this_process.forward_pass.told(weights=weights):
        assert torch.equal(model(input_ids=ids, labels=ids, num_items_in_batch=5.5).loss, held_out)
