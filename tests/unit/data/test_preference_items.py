"""Pairs and judged answers as items: chosen, mixed and packed whole, stored side by side, and told in figures."""

import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from brigade.train.data import build as building
from brigade.train.data import prepare as preparing
from brigade.train.data import report, rows
from brigade.train.data.store import IGNORED
from brigade.train.recipe.objectives import OBJECTIVES
from brigade.train.step import sample_answers
from testing.chats import chat
from testing.preparing import chats, figures

DPO, KTO = {"objective": "dpo"}, {"objective": "kto"}


LOST = {"prompt": "a " * 60, "chosen": "b", "rejected": "c"}  # of which 48 tokens leave nothing


def pairs(name, count):
    """Pairs of unlike lengths."""
    return [
        {"prompt": f"{name} {i}?", "chosen": f"Yes{' yes' * (i % 4)} {i}.", "rejected": f"No {name} {i}."}
        for i in range(count)
    ]


def judged(name, count):
    return [{"prompt": f"{name} {i}?", "completion": f"It is {i}.", "label": i % 3 > 0} for i in range(count)]


@pytest.fixture
def prepared(prepare, write):
    """prepared(rows, held, training, ...): the data of these rows."""

    def call(content, held=None, training=DPO, **data):
        files = {"train_file": write("a.jsonl", content)}
        files |= {"validation_file": write("h.jsonl", held)} if held else {}
        return prepare(training, **files | data)

    return call


def samples_of(tokenizer, sequence):
    """(whole text, what is supervised) of each sample of a sequence."""
    ends = sequence["lengths"].cumsum()[:-1]
    ids, labels = (np.split(sequence[key], ends) for key in ("input_ids", "labels"))
    answers = [[label for label in own if label != IGNORED] for own in labels]
    return [(tokenizer.decode(a), tokenizer.decode(b)) for a, b in zip(ids, answers, strict=True)]


def written(pair):
    whole = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    return [(whole.format(pair["prompt"], pair[key]), f"{pair[key]}<|im_end|>") for key in ("chosen", "rejected")]


def test_a_pair_is_two_samples_side_by_side(prepared, tokenizer):
    content, held = pairs("a", 30), pairs("h", 4)
    data = prepared(content, held)
    assert [samples_of(tokenizer, sequence) for sequence in data.train] == [written(pair) for pair in content]
    assert [samples_of(tokenizer, sequence) for sequence in data.heldout["a"]] == [written(pair) for pair in held]
    assert data.train.counted().tolist() == [1] * 30 and data.facts["samples"] == data.facts["sequences"] == 30
    assert set(data.train[0]) == {"input_ids", "labels", "lengths"}
    again = pickle.loads(pickle.dumps(data.train))
    assert again[7]["lengths"].tolist() == data.train[7]["lengths"].tolist() and again.counted().sum() == 30
    assert data.train.lengths().tolist() == [len(sequence["input_ids"]) for sequence in data.train]


def test_packing_keeps_both_answers_of_a_pair_in_one_sequence(prepared, tokenizer):
    content = pairs("a", 40)
    single, packed = prepared(content, content[:1]), prepared(content, content[:1], packing=True, max_length=48)
    assert len(packed.train) < 40 and packed.train.counted().sum() == 40 and packed.train.lengths().max() <= 96
    assert max(packed.train.lengths()) > 48, "a sequence has room for twice max_length"
    found = []
    for sequence, count in zip(packed.train, packed.train.counted(), strict=True):
        parts = samples_of(tokenizer, sequence)
        assert len(parts) == 2 * count and sequence["lengths"].max() <= 48
        found += zip(parts[::2], parts[1::2], strict=True)
    assert sorted(found) == sorted(tuple(written(pair)) for pair in content)
    assert packed.facts["tokens"] == single.facts["tokens"]
    answers = prepared(judged("a", 30), judged("h", 3), KTO, packing=True, max_length=48)
    assert answers.train.counted().sum() == 30 and answers.train.lengths().max() <= 48
    for sequence in answers.train:
        assert len(sequence["desirable"]) == len(sequence["lengths"]) == len(sequence["mismatched"]["lengths"])


def test_splits_limits_and_mixtures_count_pairs(prepared, prepare, write, tokenizer):
    content = pairs("a", 20)
    data = prepared(content, validation_split=0.25)
    (held,) = data.heldout.values()
    ours = [samples_of(tokenizer, sequence) for sequence in (*data.train, *held)]
    assert len(data.train) == 15 and len(held) == 5 and sorted(ours) == sorted(written(pair) for pair in content)
    few = prepared(content, pairs("h", 9), max_train_samples=7, max_eval_samples=3)
    assert [samples_of(tokenizer, sequence) for sequence in few.train] == [written(pair) for pair in content[:7]]
    assert len(few.heldout["a"]) == 3 and few.facts["samples"] == 7
    files = []
    for name, weight in (("b", 0.75), ("c", 0.25)):
        held = write(f"held-{name}.jsonl", pairs(f"held {name}", 2))
        train = write(f"{name}.jsonl", pairs(name, 20))
        files.append({"train_file": train, "validation_file": held, "weight": weight})
    mixed = prepare(DPO, datasets=files)
    assert mixed.facts["by_source"] == [20, 7] and all(len(sequence["lengths"]) == 2 for sequence in mixed.train)
    assert all(part[1][0].split("\n")[1] == part[0][0].split("\n")[1] for part in (
        samples_of(tokenizer, sequence) for sequence in mixed.train))  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
def test_what_cannot_be_used_is_skipped_as_whole_pairs(prepared, tokenizer, monkeypatch, processes):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 300)
    good, bad = pairs("a", 20), {"prompt": "a", "chosen": "b", "rejected": "b"}
    lost, long = (bad | changed for changed in (LOST, {"chosen": "b " * 60}))
    content = [bad, *good[:9], lost, bad, *good[9:], lost, long]
    data = prepared(content, pairs("h", 2), skip_bad_rows=True, max_length=48, dataset_num_proc=processes)
    assert [samples_of(tokenizer, sequence) for sequence in data.train][:20] == [written(pair) for pair in good]
    assert [data.facts[key] for key in ("skipped", "dropped", "cut", "samples")] == [4, 0, 1, 21]
    few = prepared(content, pairs("h", 2), skip_bad_rows=True, max_length=48, max_train_samples=9)
    assert [few.facts[key] for key in ("skipped", "dropped", "samples")] == [1, 0, 9]


def test_a_pair_of_which_nothing_is_left_is_named_by_its_line(prepared, mistake, tmp_path):
    message = mistake(prepared, [*pairs("a", 3), LOST], pairs("h", 2), max_length=48)
    assert f"{tmp_path / 'a.jsonl'}, line 4\n  nothing of the chosen answer is left within" in message
    assert "raise max_length, or drop the row; skip_bad_rows" in message


def test_pairs_that_are_trained_on_and_held_out_are_counted(prepared):
    content = pairs("a", 6)
    turned = [pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in content[:2]]
    assert prepared(content, [*content[2:5], *pairs("h", 2), *turned]).facts["shared"] == 3


def test_pairs_from_parquet_and_labels_from_csv(prepare, prepared, write, tokenizer, tmp_path):
    content = pairs("a", 6)

    def turns(pair):
        return {key: chat(pair["prompt"], pair[key])["messages"] for key in ("chosen", "rejected")} | {"score": 1.0}

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*map(turns, content)]), tmp_path / "a.parquet")
    data = prepare(DPO, train_file=str(tmp_path / "a.parquet"), validation_file=write("held.jsonl", pairs("h", 2)))
    assert [samples_of(tokenizer, sequence) for sequence in data.train] == [written(pair) for pair in content]
    assert data.facts["unread"] == {"column 'score'": 6}
    (tmp_path / "a.csv").write_text("prompt,completion,label\na?,b,True\nc?,d,0\n")
    data = prepare(KTO, train_file=str(tmp_path / "a.csv"), validation_file=write("held2.jsonl", judged("h", 2)))
    assert [bool(sequence["desirable"][0]) for sequence in data.train] == [True, False]


def test_of_many_held_out_pairs_a_part_is_evaluated(prepared, tokenizer, monkeypatch):
    monkeypatch.setattr(preparing, "MOST_EVALUATED", 3)
    (held,) = prepared(pairs("a", 200)).heldout.values()
    assert (len(held), held.stored, held.counted().tolist()) == (3, 4, [1, 1, 1])
    assert all(len(samples_of(tokenizer, sequence)) == 2 for sequence in held)


# ---- judged answers ----------------------------------------------------------------------------------------------
def test_a_judged_answer_keeps_its_label_and_has_another_rows_answer_beside_it(prepared, tokenizer):
    content = judged("a", 12)
    data = prepared(content, judged("h", 4), KTO)
    assert data.train.counted().tolist() == [1] * 12
    others = []
    for row, sequence in zip(content, data.train, strict=True):
        assert sequence["desirable"].dtype == bool and sequence["desirable"].tolist() == [row["label"]]
        ((whole, answer),) = samples_of(tokenizer, sequence)
        ((mixed, other),) = samples_of(tokenizer, sequence["mismatched"])
        assert row["prompt"] in whole and answer == f"{row['completion']}<|im_end|>"
        assert mixed == whole.replace(row["completion"], other.removesuffix("<|im_end|>")) and other != answer
        others.append(other)
    assert len(set(others)) == 12, "each answer is another one's once"
    again = pickle.loads(pickle.dumps(data.train))
    assert others == [samples_of(tokenizer, sequence["mismatched"])[0][1] for sequence in again]
    packed = prepared(content, judged("h", 4), KTO, packing=True)
    beside = [part for sequence in packed.train for part in samples_of(tokenizer, sequence["mismatched"])]
    single = [part for sequence in data.train for part in samples_of(tokenizer, sequence["mismatched"])]
    assert sorted(beside) == sorted(single), "packing changes no neighbour"


def test_answers_of_one_pair_are_never_each_others_neighbours(prepared, tokenizer):
    for count in (2, 3, 5, 12):
        data = prepared(pairs("a", count), pairs("h", 2), KTO)
        assert data.train.counted().tolist() == [1] * 2 * count
        assert [bool(sequence["desirable"][0]) for sequence in data.train] == [True, False] * count
        for sequence in data.train:
            ((whole, _),) = samples_of(tokenizer, sequence)
            ((_, other),) = samples_of(tokenizer, sequence["mismatched"])
            number = whole.split("?")[0].split()[-1]
            assert number not in other.split(".")[0].split()


def test_how_many_are_evaluated_changes_no_neighbour(prepared, tokenizer, monkeypatch):
    """What the reference says of it is kept for both."""
    monkeypatch.setattr(preparing, "MOST_EVALUATED", 5)
    content = judged("a", 400)
    few, every = prepared(content, None, KTO), prepared(content, None, KTO, max_eval_samples=None)
    assert few.fingerprint == every.fingerprint
    (few,), (every,) = few.heldout.values(), every.heldout.values()
    assert 5 == len(few) < len(every)
    of_each = [
        {samples_of(tokenizer, each)[0]: samples_of(tokenizer, each["mismatched"])[0] for each in held}
        for held in (few, every)
    ]
    assert of_each[0].items() <= of_each[1].items()


def test_a_mismatched_answer_is_cut_at_max_length(prepared):
    texts = (("a " * 20, "b", True), ("a", "b " * 20, False))
    content = [dict(zip(("prompt", "completion", "label"), text, strict=True)) for text in texts]
    data = prepared(content, judged("h", 2), KTO, max_length=32)
    for sequence in data.train:
        beside = sequence["mismatched"]
        assert beside["lengths"].sum() == len(beside["input_ids"]) <= 32 and (beside["labels"] != IGNORED).any()
    assert max(len(sequence["mismatched"]["input_ids"]) for sequence in data.train) == 32


@pytest.mark.parametrize(
    "label, said", [(True, "labelled good, and there is none that is bad"), (False, "labelled bad, and")]
)
def test_one_label_is_refused(prepared, mistake, label, said):
    content = [row | {"label": label} for row in judged("a", 5)]
    message = mistake(prepared, content, judged("h", 4), KTO)
    assert f"all 5 answers that are trained on are {said}" in message and "learns from both" in message


def test_one_row_is_refused(prepared, mistake):
    assert "there is one row" in mistake(prepared, pairs("a", 1), pairs("h", 2), KTO)
    message = mistake(prepared, pairs("a", 3), pairs("h", 1), KTO)
    assert "h.jsonl" in message and "there is one row" in message


# ---- the cache ---------------------------------------------------------------------------------------------------
def test_objectives_that_read_the_same_share_a_cache_and_answers_have_the_old_one(load, tokenizer, write, monkeypatch):
    texts = []
    real = building.json.dumps
    monkeypatch.setattr(building.json, "dumps", lambda content, **how: texts.append(content) or real(content, **how))
    data = {"dataset_name": None, "train_file": write("a.jsonl", chats("a", 9))}
    teacher = {"distill": {"teacher": "other"}}
    prints = {
        name: building.plan(load(data=data, training={"objective": name} | teacher.get(name, {})), tokenizer)[2]
        for name in OBJECTIVES
    }
    assert building.plan(load(data=data), tokenizer)[2] == prints["sft"] == prints["distill"]
    assert len(set(prints.values())) == 3 and prints["dpo"] == prints["reward"] != prints["kto"]
    known = {"tokenizer", "templates", "variables", "end", "max_length", "truncation"}
    of_the_data = [text for text in texts if isinstance(text, list)][-1]
    assert set(of_the_data[2]) == known, "a key more would prepare the data of an unfinished run anew"


def test_answers_are_stored_as_before(from_rows):
    prepared = from_rows(*chats("a", 9))
    files = {path.name for path in prepared.train.folder.iterdir()}
    assert "desirable.npy" not in files and not {"better", "worse", "unlike"} & set(prepared.facts)
    assert prepared.train.counted().tolist() == prepared.train.supervised().tolist()


def test_a_stream_has_no_preferences(load, tokenizer, write, mistake):
    data = {"dataset_name": None, "train_file": write("a.jsonl", pairs("a", 9)), "streaming": True}
    message = mistake(preparing.prepare, load(data=data, training=DPO | {"max_steps": 3}), tokenizer)
    assert "streaming" in message.splitlines()[0] and "objective dpo" in message


# ---- what is printed ---------------------------------------------------------------------------------------------
def test_figures_of_preferences(load, prepared, tokenizer, capsys):
    content = [{"prompt": asked, "chosen": "b b b b", "rejected": "c"} for asked in ("a?", "b?")]
    data = prepared(content, pairs("h", 2))
    assert data.facts["better"] == {"answers": 2, "supervised": 10}
    assert data.facts["worse"] == {"answers": 2, "supervised": 4}
    said = figures(load, data, training=DPO)
    assert said.startswith(
        "2 training and 2 held-out pairs, on average 5 tokens in better answers and 2 tokens in worse answers, "
    )
    assert f"{data.facts['tokens']} tokens" in said and "begin at the same token" not in said
    report.show_sample(data, tokenizer)
    shown = capsys.readouterr().out
    assert "one pair, the better answer, its supervised part" in shown and "the worse answer, its" in shown
    assert shown.index("[[b b b b<|im_end|>]]") < shown.index("[[c<|im_end|>]]")
    data = prepared(judged("a", 9), judged("h", 3), KTO)
    said = figures(load, data, training=KTO)
    assert said.startswith("9 training and 3 held-out judged answers, 6 good and 3 bad, on average ")
    report.show_sample(data, tokenizer)
    assert "one sample, judged bad, its supervised part" in capsys.readouterr().out
    packed = prepared(pairs("a", 40), pairs("h", 2), packing=True, max_length=48)
    full = packed.facts["tokens"] / packed.facts["sequences"] / 96
    assert f"{full:.1%} full" in figures(load, packed, data={"packing": True, "max_length": 48}, training=DPO)


def test_prompts_that_are_not_rendered_alike_are_counted(load, prepared):
    thinks = [{"role": "assistant", "content": "b", "reasoning_content": "Hm."}]
    data = prepared([{"prompt": "a?", "chosen": thinks, "rejected": "c"}], pairs("h", 2), chat_template="qwen3.5")
    assert data.facts["unlike"] == 1
    assert "1 pairs whose answers do not begin at the same token" in figures(load, data, training=DPO)


def test_a_question_is_a_prompt_and_its_reference_the_better_answer(prepared, tokenizer):
    def asked(data, wanted=9):
        chosen = sample_answers.choose(data.heldout, wanted)
        return [(tokenizer.decode(one.prompt), tokenizer.decode(one.reference)) for one in chosen]

    held = pairs("h", 2)
    whole = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    better = [(whole.format(pair["prompt"]), f"{pair['chosen']}<|im_end|>") for pair in held]
    assert asked(prepared(pairs("a", 3), held)) == better
    held = judged("h", 6)
    good = [(whole.format(row["prompt"]), f"{row['completion']}<|im_end|>") for row in held if row["label"]]
    data = prepared(judged("a", 6), held, KTO)
    assert asked(data) == good and asked(data, 2) == good[:2]
    bad = [row | {"label": False} for row in held]
    assert [reference for _, reference in asked(prepared(judged("a", 6), bad, KTO))] == [""] * 6
