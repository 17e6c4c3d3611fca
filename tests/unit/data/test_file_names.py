"""Names of data files: patterns, and the ending by which a file is read."""

import pytest

from testing.data_files import READERS, WRITERS, origin, read, write_csv, write_jsonl


def test_a_pattern_is_all_its_files_by_name(load, tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"part-{name}.jsonl", [{"text": name}])
    (tmp_path / "deep").mkdir()
    write_jsonl(tmp_path / "deep" / "d.jsonl", [{"text": "d"}])
    found = origin(load, train_file=f"{tmp_path}/part-*.jsonl")
    assert [content["text"] for content, _ in read(found.train)] == ["a", "b", "c"]
    assert found.name == "part-" and found.heldout is None
    found = origin(load, train_file=f"{tmp_path}/**/*.jsonl", validation_file=str(tmp_path / "part-a.jsonl"))
    assert len(read(found.train)) == 4 and len(read(found.heldout)) == 1


@pytest.mark.parametrize("kind", sorted(READERS))
def test_the_ending_says_how_a_file_is_read(load, tmp_path, kind):
    content = [{"text": "a", "answer": "b"}]
    WRITERS[kind](tmp_path / f"a{kind}", content)
    found = origin(load, train_file=str(tmp_path / f"a{kind}"))
    assert isinstance(found.train, READERS[kind]) and [one for one, _ in read(found.train)] == content


def test_file_names_that_do_not_do(load, tmp_path, mistake):
    def message(name):
        return mistake(origin, load, train_file=str(tmp_path / name))

    write_jsonl(tmp_path / "a.jsonl", [])
    write_csv(tmp_path / "a.csv", [])
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "plain").write_text("hello")
    assert "'.txt'" in message("a.txt") or ".txt" in message("a.txt")
    assert "without an ending" in message("plain")
    assert ".csv and .jsonl" in message("a.[cj]s*")
    assert "no data file" in message("b*.jsonl") and "train_file" in message("b*.jsonl")
    (tmp_path / "folder").mkdir()
    assert "directory" in message("folder")
