"""Data sets by name: what a directory holds, its splits and revision, and what is said where they do not do."""

import json

import pytest

from brigade.data import sources

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
        (tmp_path / "set").mkdir()
        for split, content in splits.items():
            (tmp_path / "set" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        return str(tmp_path / "set")

    return call


@pytest.fixture
def opened(load):
    """opened(**data): the source, opened."""

    def call(**data):
        (found,) = sources.origins(load(data=data))
        return found

    return call


def read(rows):
    return [row for chunk in rows.chunks() for _, row in chunk.rows()]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_directory_of_files_is_read_as_the_hub_would(laid_out, opened, streaming):
    found = opened(dataset_name=laid_out(train=CONTENT[:4], test=CONTENT[4:]), streaming=streaming)
    assert read(found.train) == CONTENT[:4] and read(found.heldout) == CONTENT[4:]
