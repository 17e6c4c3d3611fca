"""Data sets by name: what a directory holds, its splits and revision, and what is said where they do not do."""

import errno
import json
import os
from types import SimpleNamespace

import pytest

from brigade.train.data import sources
from brigade.train.data.build import plan

CONTENT = [{"text": f"text {i}"} for i in range(6)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What the library makes of files goes there."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def laid_out(tmp_path):
    """laid_out(train=rows, ...): a directory with a file for each split, as on the Hub."""

    def call(**splits):
        folder = tmp_path / "set" / "data"
        folder.mkdir(parents=True)
        for split, content in splits.items():
            (folder / f"{split}-00000-of-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        return str(tmp_path / "set")

    return call


@pytest.fixture
def opened(load):
    """opened(**data): the source, opened."""

    def call(**data):
        (found,) = sources.open_origins(load(data=data))
        return found

    return call


def read(rows):
    return [row for chunk in rows.chunks() for _, row in chunk.rows()]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_directory_of_files_is_read_as_the_hub_would(laid_out, opened, streaming):
    found = opened(dataset_name=laid_out(train=CONTENT[:4], test=CONTENT[4:]), streaming=streaming)
    assert read(found.train) == CONTENT[:4] and read(found.heldout) == CONTENT[4:]


@pytest.mark.parametrize("other", ["more.csv", "more.tsv", "more.csv.gz"])
def test_a_directory_of_several_kinds_of_files_is_refused(other, laid_out, opened, mistake, tmp_path):
    """The datasets library would read one kind, and leave the others out without a word."""
    name = laid_out(train=CONTENT)
    (tmp_path / "set/data" / other).write_text("text\na\n")
    said = mistake(opened, dataset_name=name)
    assert "holds " in said and other[4:8] in said and ".jsonl" in said
    (tmp_path / "set/README.md").write_text("---\nconfigs: [{config_name: a, data_files: data/*.jsonl}]\n---\n")
    assert read(opened(dataset_name=name).train) == CONTENT


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_that_changed_and_kept_its_time_is_read_again(laid_out, opened, fingerprint, streaming, tmp_path):
    """As rsync -t, cp -p and tar leave it: the library knows a file by its time."""
    name, file = laid_out(train=A), tmp_path / "set/data/train-00000-of-00001.jsonl"
    made = []
    for content in (A, [{"text": "new", "more": 1}]):
        file.write_text("".join(json.dumps(row) + "\n" for row in content))
        os.utime(file, (1e9, 1e9))
        assert read(opened(dataset_name=name, streaming=streaming).train) == content
        made.append(fingerprint(dataset_name=name))
    assert made[0] != made[1]


LINES = [json.dumps(row) + "\n" for row in CONTENT]
MORE = [json.dumps(row | {"more": 1}) + "\n" for row in CONTENT]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("files, reason", [
    ({"train.jsonl": [*LINES[:1], "{broken\n"]}, "JSON parse error: Missing a name for object member. in row 1"),
    ({"train.csv": ["a,b\n", "1,2\n", "1,2,3\n"]}, "Expected 2 fields in line 3, saw 3"),
    ({"train-a.jsonl": LINES, "train-b.jsonl": MORE}, "there are 1 new columns ({'more'})"),
    ({"train-a.jsonl": LINES[:1], "train-b.jsonl": MORE[:1]}, "there are 1 new columns ({'more'})"),
], ids=["broken JSON", "broken CSV", "other columns", "other columns of a single row"])  # fmt: skip
def test_why_a_directory_is_not_read(opened, mistake, tmp_path, files, reason, streaming):
    """The library says only that an error occurred, and keeps the reason behind that."""
    folder = tmp_path / "set"
    folder.mkdir()
    for file, lines in files.items():
        (folder / file).write_text("".join(lines))
    said = mistake(lambda: read(opened(dataset_name=str(folder), streaming=streaming).train))
    assert str(folder) in said and reason in said and "An error occurred" not in said
    assert "network" not in said and "give its files as train_file" in said


def test_a_directory_without_what_is_asked_for(laid_out, opened, mistake, tmp_path):
    said = mistake(opened, dataset_name=laid_out(train=A), dataset_config_name="en")
    assert (
        "Available: ['default']" in said and "check its files and its configurations" in said and "network" not in said
    )
    (tmp_path / "empty").mkdir()
    said = mistake(opened, dataset_name=str(tmp_path / "empty"))
    assert "doesn't contain any data files" in said and "check its files and its configurations" in said


def test_a_full_disk_is_no_fault_of_the_files(laid_out, opened, mistake, monkeypatch):
    def full(*args, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.write_table", full)
    said = mistake(opened, dataset_name=laid_out(train=CONTENT))
    assert "No space left on device" in said and "free some space" in said and "train_file" not in said


# ---- splits --------------------------------------------------------------------------------------------------------
A, B, C = CONTENT[:3], CONTENT[3:5], CONTENT[5:]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["laid_out", "saved"])
@pytest.mark.parametrize("names, held", [
    ({"dataset_train_split": "train_sft"}, None),
    ({"dataset_train_split": "train_sft", "dataset_test_split": "test_sft"}, B),
    ({"dataset_train_split": "train_sft", "dataset_test_split": "test"}, C),
], ids=str)  # fmt: skip
def test_splits_of_other_names(request, opened, kind, names, held, streaming):
    splits = {"train_sft": A, "test_sft": B} | ({"test": C} if held is C else {})
    found = opened(dataset_name=request.getfixturevalue(kind)(**splits), streaming=streaming, **names)
    assert read(found.train) == A
    assert found.heldout is None if held is None else read(found.heldout) == held


def test_what_is_held_out_by_default(saved, opened):
    name = saved(train=A, test=B, validation=C)
    assert read(opened(dataset_name=name).heldout) == C, "validation before test"
    assert read(opened(dataset_name=name, dataset_train_split="validation").heldout) == B, "not what is trained on"
    assert read(opened(dataset_name=name, dataset_test_split="test").heldout) == B


@pytest.mark.parametrize("names, key", [
    ({}, "dataset_train_split"), ({"dataset_train_split": "first"}, "dataset_train_split"),
    ({"dataset_train_split": "a", "dataset_test_split": "test"}, "dataset_test_split"),
], ids=str)  # fmt: skip
def test_of_a_split_that_is_missing_the_others_are_told(saved, opened, mistake, names, key):
    message = mistake(opened, dataset_name=saved(a=A, b=B), **names)
    assert f"data.{key}" in message and f"no {names.get(key, 'train')} split, only a, b" in message


def test_splits_of_each_source(load, saved, laid_out):
    several = [
        {"dataset_name": saved(a=A, b=B), "dataset_train_split": "b"},
        {"dataset_name": laid_out(train=C, c=A), "dataset_test_split": "c"},
    ]
    first, second = sources.open_origins(load(data={"dataset_name": None, "datasets": several}))
    assert read(first.train) == B and read(second.train) == C and read(second.heldout) == A


def test_a_split_is_trained_on_or_held_out(saved, opened, mistake):
    message = mistake(opened, dataset_name=saved(train=A, test=B), dataset_test_split="train")
    assert "dataset_test_split" in message and "trained on" in message


@pytest.mark.parametrize("data, key", [
    ({"dataset_revision": "v1"}, "dataset_revision"), ({"dataset_train_split": "a"}, "dataset_train_split"),
    ({"dataset_test_split": "a"}, "dataset_test_split"), ({"dataset_config_name": "en"}, "dataset_config_name"),
], ids=str)  # fmt: skip
def test_files_have_no_splits_or_revisions(opened, tmp_path, mistake, data, key):
    (tmp_path / "a.jsonl").write_text(json.dumps(CONTENT[0]) + "\n")
    message = mistake(opened, dataset_name=None, train_file=str(tmp_path / "a.jsonl"), **data)
    assert f"data.{key}" in message and "has none" in message and "remove it" in message
    assert f"data.{key}" in mistake(opened, dataset_name="python-docs", **data)


@pytest.mark.parametrize("none", [(), ("--dataset_name=",), ("--dataset_name", "null")])
def test_a_flag_with_a_file_replaces_all_that_names_a_data_set(load, none):
    settings = load("--train_file", "a.jsonl", *none, data={"dataset_revision": "v1", "dataset_test_split": "b"})
    data, said = settings.recipe.data, " ".join(settings.overridden)
    assert not data.dataset_name and data.dataset_revision is None and data.dataset_test_split is None
    assert all(key in said for key in ("dataset_name", "dataset_revision", "dataset_test_split"))
    assert "dataset_train_split" not in said, "it is what it is by default"


def test_contradictions(saved, opened, mistake, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(CONTENT[0]) + "\n")
    name = saved(train=A, test=B)
    message = mistake(opened, dataset_name=name, validation_file=str(tmp_path / "a.jsonl"), dataset_test_split="test")
    assert "dataset_test_split" in message and "validation_file" in message
    message = mistake(opened, dataset_name=name, dataset_revision="v1")
    assert "dataset_revision" in message and "directory" in message
    for saved_set in (name, saved(train=A)):
        message = mistake(opened, dataset_name=saved_set, dataset_config_name="en")
        assert "data.dataset_config_name" in message and "save_to_disk" in message


# ---- what they are known by ----------------------------------------------------------------------------------------
@pytest.fixture
def fingerprint(load, tokenizer):
    return lambda **data: plan(load(data=data), tokenizer)[2]


def test_another_split_is_other_data(saved, fingerprint):
    name = saved(train=A, a=B, b=C)
    given = [{}, {"dataset_train_split": "a"}, {"dataset_test_split": "a"}, {"dataset_test_split": "b"}, {}]
    found = [fingerprint(dataset_name=name, **names) for names in given]
    assert len(set(found)) == 4 and found[0] == found[-1]


class Hub:
    """A data set on the Hub: branches and tags, each at a commit. Stands in for load_dataset_builder."""

    def __init__(self, **commits):
        self.commits, self.asked = commits, []

    def __call__(self, name, config, revision=None):
        import datasets

        self.asked.append((name, config, revision))
        if (revision or "main") not in self.commits:
            raise ValueError(f"Revision {revision} doesn't exist for dataset {name}")
        whole = datasets.DatasetDict(train=datasets.Dataset.from_list(CONTENT))
        streamed = datasets.IterableDatasetDict(train=whole["train"].to_iterable_dataset())
        return SimpleNamespace(
            hash=self.commits[revision or "main"],
            download_and_prepare=lambda: None,
            as_dataset=lambda: whole,
            as_streaming_dataset=lambda: streamed,
        )


@pytest.mark.parametrize("streaming", [False, True])
def test_a_set_on_the_hub_is_known_by_its_commit(fingerprint, monkeypatch, mistake, streaming):
    hub = Hub(main="111", v1="000")
    monkeypatch.setattr("datasets.load_dataset_builder", hub)

    def found(**data):
        return fingerprint(dataset_name="some/set", streaming=streaming, **data)

    now, old = found(), found(dataset_revision="v1", dataset_config_name="en")
    assert hub.asked == [("some/set", None, None), ("some/set", "en", "v1")] and now != old
    assert found(dataset_config_name="en") != now and found(dataset_revision="main") == now
    hub.commits["main"] = "222"
    assert found() != now, "the branch has moved"
    message = mistake(found, dataset_revision="v2")
    assert "dataset_name" in message and "Revision v2" in message
