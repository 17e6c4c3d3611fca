"""Each sample that is trained on is found again in the file or data set that it comes from."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from brigade.train.data import places, rows
from brigade.train.data import prepare as preparing
from brigade.train.host.checksums import write_manifest


@pytest.fixture
def sources(tmp_path, tmp_path_factory, monkeypatch):
    """Two files of lines, with blank and bad ones among them, and a Parquet file, read in small chunks: a recipe's data."""
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(rows, "CHUNK_BYTES", 200)
    monkeypatch.setattr(rows, "CHUNK_ROWS", 3)
    for name, count in (("a-1", 17), ("a-2", 9), ("held", 2)):
        lines = [json.dumps({"text": f"{name} has line {i + 1}"}) if i % 5 else " " for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(["{bad", *lines][1 - (name == "a-1") :]) + "\n")
    table = pyarrow.table({"text": [f"b has row {i + 1}" for i in range(11)]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    held = {"validation_file": str(tmp_path / "held.jsonl")}
    return [
        {"train_file": str(tmp_path / "a-*.jsonl"), "name": "a", **held},
        {"train_file": str(tmp_path / "b.parquet"), "name": "b", **held},
    ]


def texts_of(place):
    """What stands at a place, read without any of the code under test."""
    if place["source"].endswith(".parquet"):
        return pyarrow.parquet.read_table(place["source"])["text"].to_pylist()[place["row"] - 1]
    return json.loads(Path(place["source"]).read_text().split("\n")[place["row"] - 1])["text"]


def check(found, settings, tokenizer):
    seen = 0
    for number in range(len(found.train)):
        row = found.train[number]
        parts = np.split(row["input_ids"], row["lengths"].cumsum()[:-1])
        named = places.places_of(found, [number], settings)
        assert len(named) == len(parts)
        for part, place in zip(parts, named, strict=True):
            assert tokenizer.decode(part, skip_special_tokens=True) == texts_of(place)
        seen += len(parts)
    return seen


@pytest.mark.parametrize("packing", [False, True])
def test_each_sample_is_found_in_its_file(sources, load, tokenizer, tmp_path, packing):
    data = {"dataset_name": None, "datasets": sources, "packing": packing, "skip_bad_rows": True, "max_length": 64}
    settings = load(data=data)
    found = preparing.prepare(settings, tokenizer)
    assert check(found, settings, tokenizer) == 13 + 7 + 11
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for path in [*tmp_path.glob("*.jsonl"), *tmp_path.glob("*.parquet")]:
        path.rename(moved / path.name)
    elsewhere = json.loads(json.dumps(data).replace(str(tmp_path), str(moved)))
    again = load(data=elsewhere)
    found_again = preparing.prepare(again, tokenizer)
    assert found_again.fingerprint == found.fingerprint
    assert check(found_again, again, tokenizer) == 13 + 7 + 11
    assert {place["row"] for place in places.places_of(found, [0], settings)} == {None}, "its files are gone"


def test_what_is_in_a_window_of_a_stream_is_found(sources, load, tokenizer, tmp_path):
    from brigade.train.data import stream
    from brigade.train.data.encode import LoadedEncoder
    from brigade.train.data.sources import open_origins
    from brigade.train.data.store import Samples
    from brigade.train.data.tokenise import encoder_of

    for source in sources:
        source["weight"] = 0.5
    data = {"dataset_name": None, "datasets": sources, "streaming": True, "skip_bad_rows": True, "max_length": 64}
    settings = load(data=data, training={"max_steps": 3})
    prepared = preparing.prepare(settings, tokenizer)
    folder = tmp_path / "window"
    folder.mkdir()
    begins = prepared.facts["begins"]
    start = {"number": 0, "first_row": 0, "begins": begins, "cursors": begins, "samples": [0, 0]}
    machine = LoadedEncoder(encoder_of(settings, tokenizer))
    stream.make_window(folder, start, settings, machine, open_origins(settings), 12)
    write_manifest(folder, folder.name)
    window = Samples(folder, "train")
    train = SimpleNamespace(streamed=True, in_window=lambda row: (window, row))
    for number in range(len(window)):
        (place,) = places.places_of(SimpleNamespace(facts=prepared.facts, train=train), [number], settings)
        assert tokenizer.decode(window[number]["input_ids"], skip_special_tokens=True) == texts_of(place)
    assert len(window) >= 12
