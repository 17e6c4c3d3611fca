"""Rows in parts: together they are the whole row, and count as it does; and models and recipes for which that cannot be."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from brigade.train.data.answers import ANSWERS, MISMATCHED, RUNS
from brigade.train.data.collate import ABOUT, Collate, Layout
from brigade.train.data.store import IGNORED
from brigade.train.engines.parallel import sequence, sequence_checks
from brigade.train.model import attention
from brigade.train.recipe.objectives import JUDGED


def row(lengths, labelled):
    """Samples end to end, whose first token has never a label."""
    size = sum(lengths)
    labels = np.where(np.resize(labelled, size), np.arange(size) + 100, IGNORED).astype(np.int64)
    labels[np.cumsum([0, *lengths[:-1]])] = IGNORED
    return {"input_ids": np.arange(size, dtype=np.int32), "labels": labels, "lengths": np.array(lengths)}


ROWS = st.lists(
    st.builds(
        row, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.lists(st.booleans(), min_size=1, max_size=5)
    ),
    min_size=1,
    max_size=4,
)
HOW = Layout(padding_free=True, packed=True, cumulative=True)


@given(ROWS, st.integers(2, 5), st.integers(1, 2))
def test_the_parts_of_a_micro_batch_are_the_whole(rows, of, least):
    how = dataclasses.replace(HOW, targets=least)
    whole = Collate(0, dataclasses.replace(how, multiple=of))((rows, 17))
    parts = [sequence.DividedSequences(0, how, number, of)((rows, 17)) for number in range(of)]
    assert len(whole["logits_to_keep"]) == whole["shift_labels"].shape[1] >= least
    for key in ("input_ids", "labels", "position_ids"):
        assert torch.equal(torch.cat([part[key] for part in parts], 1), whole[key])
    kept, targets = [], []
    for number, part in enumerate(parts):
        labelled = part["shift_labels"][0] != IGNORED
        kept.append(part["logits_to_keep"][labelled] + number * part["input_ids"].shape[1])
        targets.append(part["shift_labels"][0][labelled])
        # each rank has a loss, be it of nothing
        assert len(part["logits_to_keep"]) == part["shift_labels"].shape[1] >= least
        assert torch.equal(part["cu_seq_lens_q"], whole["cu_seq_lens_q"])
        assert part["max_length_q"] == whole["max_length_q"]
    there = whole["shift_labels"][0] != IGNORED
    assert torch.equal(torch.cat(kept), whole["logits_to_keep"][there])
    assert torch.equal(torch.cat(targets), whole["shift_labels"][0][there])


def test_the_answers_to_other_prompts_are_divided_as_the_answers_are():
    """KTO sums the log-probabilities of both over the parts."""
    other = row([12], [False, True])
    rows = [row([9], [False, True]) | {"desirable": np.array([True]), MISMATCHED: other}]
    how = dataclasses.replace(HOW, rows=JUDGED)
    parts = [sequence.DividedSequences(0, how, number, 2)((rows, 17)) for number in range(2)]
    for wanted, batches in (rows[0], parts), (other, [part[ANSWERS][MISMATCHED] for part in parts]):
        assert all(batch[sequence.IN_PARTS] for batch in batches)
        assert sum(int(batch[ANSWERS][RUNS].sum()) for batch in batches) == (wanted["labels"] != IGNORED).sum()
        ids = torch.cat([batch["input_ids"] for batch in batches], 1)[0, : len(wanted["input_ids"])]
        assert ids.tolist() == wanted["input_ids"].tolist()


@given(ROWS, st.integers(2, 5))
def test_the_figures_of_the_parts_add_up(rows, of):
    whole = Collate(0, dataclasses.replace(HOW, multiple=of))((rows, 17))[ABOUT]
    parts = [sequence.DividedSequences(0, HOW, number, of)((rows, 17))[ABOUT] for number in range(of)]
    for key in ("tokens", "squared_lengths", "supervised", "slots"):
        assert sum(getattr(part, key) for part in parts) == getattr(whole, key), key
    same = {key: {getattr(part, key) for part in parts} for key in ("step_supervised", "end_to_end", "length")}
    assert same == {key: {getattr(whole, key)} for key in same}
    assert len(dataclasses.fields(whole)) == 8  # logits aside: a rank without a label has one all the same


@pytest.mark.parametrize("heads, of", [(8, 2), (8, 4), (2, 4), (1, 4), (6, 4)])
def test_each_rank_gets_the_keys_of_its_queries(heads, of, monkeypatch):
    """All ranks in one process: the parts that each sends are exchanged by hand. 12 query heads."""
    tokens, size = 8, 3
    whole = {name: torch.randn(1, count, tokens, size) for name, count in (("query", 12), ("key", heads))}
    for name, tensor in whole.items():
        sent = []
        monkeypatch.setattr(sequence._AllToAll, "apply", lambda parts, _, sent=sent: sent.append(parts) or parts)
        for part in tensor.chunk(of, 2):
            sequence.heads_for_tokens(part, Group(of))
        got = [torch.stack([parts[rank] for parts in sent]) for rank in range(of)]
        monkeypatch.setattr(sequence._AllToAll, "apply", lambda _, group, got=got: got[group.number])
        found = [sequence.heads_for_tokens(tensor.chunk(of, 2)[n], Group(of, n)) for n in range(of)]
        if name == "query":
            assert torch.equal(torch.cat(found, 1), tensor)
        each = whole["key"].repeat_interleave(12 // heads, 1).chunk(of, 1)
        for rank in range(of) if name == "key" else ():
            assert torch.equal(found[rank].repeat_interleave(12 // of // found[rank].shape[1], 1), each[rank])


class Group:
    def __init__(self, count, number=0):
        self.count, self.number = count, number

    def size(self):
        return self.count

    def rank(self):
        return self.number


# ---- what cannot be ----------------------------------------------------------------------------------------------------
def config(family, **values):
    return transformers.AutoConfig.for_model(family, **values)


def check(load, config, size=2, *argv, **sections):
    settings = load(*argv, **sections)
    how = attention.choose(settings, config, divides_sequences=True)
    sequence_checks.check(settings, config, how, size, "ds.json: sequence_parallel_size")


FAMILIES = ["llama", "qwen3", "qwen3_moe", "mistral", "phi3", "gemma3_text", "deepseek_v3", "opt"]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_whose_tokens_meet_in_attention_alone(load, family):
    check(load, config(family))


@pytest.mark.parametrize("family, said", [
    ("gpt_oss", "no SDPA"), ("gemma2", "no SDPA"), ("bloom", "no SDPA"), ("llama4_text", "attention_chunk_size"),
    ("lfm2", "its layers look at other tokens than by attention"),
])  # fmt: skip
def test_other_models_are_refused(load, mistake, family, said):
    convolutions = {"layer_types": ["full_attention"] * 31 + ["conv"]} if family == "lfm2" else {}
    message = mistake(check, load, config(family, **convolutions))
    assert "ds.json: sequence_parallel_size" in message and said in message


@pytest.mark.parametrize("size, sections, said", [
    (3, {}, ["8 attention heads of LlamaConfig cannot be divided over 3 ranks", "2 or 4"]),
    (16, {}, ["8 attention heads of LlamaConfig cannot be divided over 16 ranks", "8"]),
    (2, {"training": {"padding_free": False}}, ["padding_free", "end to end"]),
    (2, {"model": {"attn_implementation": "sdpa"}}, ["attn_implementation", "varlen"]),
])  # fmt: skip
def test_heads_that_do_not_divide_padded_rows_and_masks_are_refused(load, mistake, size, sections, said):
    message = mistake(check, load, config("llama", num_attention_heads=8), size, **sections)
    assert all(words in message for words in said), message


def test_the_cure_names_a_size_that_divides_the_ranks_too(load, mistake):
    """Sequence 3 x tensor 2 on 6 ranks: three are left for a row."""
    settings = load(training={"padding_free": True})
    for heads, cure in ((8, "remove the key"), (12, "")):
        llama = config("llama", num_attention_heads=heads, hidden_size=96)
        how = attention.choose(settings, llama, divides_sequences=True)
        given = (settings, llama, how, 3, "ds.json: sequence_parallel_size", 2, 3)
        if cure:
            assert cure in mistake(sequence_checks.check, *given)
        else:
            sequence_checks.check(*given)


def test_auto_on_a_gpu_is_one_without_masks(load, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    settings = load("--bf16")
    assert attention.choose(settings, config("llama"))[0] == "sdpa"
    assert attention.choose(settings, config("llama"), divides_sequences=True)[0] == "varlen"
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    assert attention.choose(settings, config("llama"), divides_sequences=True)[0] == "flash_attention_2"
