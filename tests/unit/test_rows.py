"""Readers: every row once and in order, whatever the chunks; a cursor gives exactly the rest; places are right."""

import codecs
import itertools
import json
import os
import tempfile
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from brigade.train.data import rows
from brigade.train.data.images import _size_of
from brigade.train.data.json_rows import JsonDocuments, JsonLines
from brigade.train.data.rows import BadRow
from brigade.train.data.table_rows import Csv, Parquet, Table
from testing.data_files import READERS, WRITERS, holds, origin, read, write_json, write_jsonl, write_parquet

cell = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t\"',"), min_size=1, max_size=12)
row = st.fixed_dictionaries({"text": cell, "answer": cell})
files = st.lists(st.lists(row, max_size=9), min_size=1, max_size=3)
blanks = st.sampled_from(["", "\n", "  \n\n", "\r\n"])


@hypothesis(max_examples=40)
@given(st.sampled_from(sorted(READERS)), files, st.integers(1, 60), st.integers(1, 5), st.integers(1, 4))
def test_every_row_once_and_from_any_cursor_the_rest(kind, content, chunk_bytes, chunk_rows, group):
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(rows, "CHUNK_BYTES", chunk_bytes),
        mock.patch.object(rows, "CHUNK_ROWS", chunk_rows),
    ):
        paths = [Path(folder) / f"{number}{kind}" for number in range(len(content))]
        for path, part in zip(paths, content, strict=True):
            write_parquet(path, part, group) if kind == ".parquet" else WRITERS[kind](path, part)
        places = holds(READERS[kind](paths), list(itertools.chain(*content)))
        for path, part in zip(paths, content, strict=True):
            own = [place for place in places if place.startswith(str(path))]
            wanted = "line" if kind == ".jsonl" else "row"
            assert own == [f"{path}, {wanted} {number}" for number in range(1, len(part) + 1)]


@given(st.lists(row, min_size=1, max_size=9), st.integers(1, 80), blanks, st.booleans())
def test_lines_are_counted_with_the_blank_ones(content, chunk_bytes, blank, ends):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(rows, "CHUNK_BYTES", chunk_bytes):
        path = Path(folder) / "a.jsonl"
        write_jsonl(path, content, blank, ends)
        lines = path.read_bytes().split(b"\n")
        for place, wanted in zip(holds(JsonLines([path]), content), content, strict=True):
            assert json.loads(lines[int(place.rpartition(" ")[2]) - 1]) == wanted


def streams(kind, folder, parts):
    """Rows of several shards as the datasets library streams them, from files of a kind or a generator, or as it saves them."""
    import datasets

    if kind == "generator":
        return datasets.IterableDataset.from_generator(
            lambda parts: itertools.chain(*parts), gen_kwargs={"parts": parts}
        )
    if kind == "saved":
        if not (folder / "set").exists():
            datasets.Dataset.from_list([*itertools.chain(*parts)]).save_to_disk(folder / "set")
        return datasets.load_from_disk(folder / "set")
    for number, part in enumerate(parts):
        WRITERS[kind](folder / f"{number}{kind}", part)
    reader = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}[kind]
    paths = [str(folder / f"{number}{kind}") for number in range(len(parts))]
    return datasets.load_dataset(reader, data_files=paths, split="train", streaming=True)


@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 9, 40])
@pytest.mark.parametrize("kind", [*sorted(READERS), "generator", "saved"])
def test_a_data_set_continues_at_the_next_row(tmp_path, monkeypatch, kind, chunk_rows):
    """At cursors within a shard, at its end, and at the end of all; in a process that has read nothing yet, too."""
    monkeypatch.setattr(rows, "CHUNK_ROWS", chunk_rows)
    parts = [[{"text": f"{shard}-{i}", "answer": "a" * (i + 1)} for i in range(8)] for shard in range(2)]
    source = Table(streams(kind, tmp_path, parts), "a/set")
    content = list(itertools.chain(*parts))
    assert holds(source, content) == [f"a/set, row {number}" for number in range(1, len(content) + 1)]
    first = next(source.chunks())
    fresh = Table(streams(kind, tmp_path, parts), "a/set")
    assert [found for found, _ in read(fresh, first.after)] == content[first.size :]


def test_chunks_of_a_large_file_have_the_size_they_should(tmp_path):
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "x" * 1000}) + "\n"
    path.write_text(line * 3000)
    sizes = [chunk.size for chunk in JsonLines([path]).chunks()]
    assert len(sizes) == 3 and max(sizes) <= rows.CHUNK_BYTES + len(line)


def test_a_row_group_is_not_read_to_be_skipped(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    monkeypatch.setattr(rows, "CHUNK_ROWS", 2)
    write_parquet(path, [{"text": str(i), "answer": "a"} for i in range(8)], group=2)
    asked = []
    real = pyarrow.parquet.ParquetFile.iter_batches

    def watched(self, *args, **named):
        asked.append(named["row_groups"])
        return real(self, *args, **named)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", watched)
    assert [r["text"] for r, _ in read(Parquet([path]), (0, 5))] == ["5", "6", "7"]
    assert asked == [[2, 3]]


def test_arrow_structs_lose_the_keys_of_others(tmp_path):
    """Arrow gives every struct the keys of all; a null that JSON says is one stays."""
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"y": "b"}}]
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"function": call}]} for call in calls]
    content = [{"messages": [turn]} for turn in turns]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), tmp_path / "a.parquet")
    assert [found for found, _ in read(Parquet([tmp_path / "a.parquet"]))] == content
    write_jsonl(tmp_path / "a.jsonl", [{"x": {"y": None}}])
    assert read(JsonLines([tmp_path / "a.jsonl"]))[0][0] == {"x": {"y": None}}


def test_a_row_that_python_cannot_hold_is_named_and_the_others_are_read(tmp_path):
    texts = pyarrow.array(["a", "b", "c"])
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 3, [*texts.buffers()[:2], pyarrow.py_buffer(b"a\xffc")])
    twice = [[("x", "1")], [("x", "1"), ("x", "2")], []]
    for column in broken, pyarrow.array(twice, pyarrow.map_(pyarrow.string(), pyarrow.string())):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts, "other": column}), tmp_path / "a.parquet")
        (chunk,) = Parquet([tmp_path / "a.parquet"]).chunks()
        (_, first), (number, bad), (_, last) = chunk.rows()
        assert (first["text"], last["text"]) == ("a", "c") and chunk.where.place(number).endswith("row 2")
        assert isinstance(bad, BadRow) and "a column cannot be read" in bad.args[0]


def test_json_in_an_object_of_lists_is_decoded(tmp_path):
    """As the datasets library stores a sequence of objects."""
    inner = {"role": {"dtype": "string", "_type": "Value"}, "content": {"_type": "Json"}}
    features = {"messages": {"feature": inner, "_type": "Sequence"}}
    table = pyarrow.table({"messages": [{"role": ["user"], "content": ['"q"']}]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    ((row, _),) = read(Parquet([tmp_path / "a.parquet"]))
    assert row == {"messages": {"role": ["user"], "content": ["q"]}}


PARTS = [{"type": "text", "text": "q"}]
TOOL = {"name": "f", "parameters": {"x": {"enum": [None, "a"], "default": None}}}
MIXED = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": 'He said "no".'}]


@pytest.mark.parametrize("features", [
    {"messages": "json", "tools": "json", "n": "json"}, {"messages": ["json"], "tools": ["json"], "n": "json"},
    {"messages": [{"role": "text", "content": "json"}], "tools": [{"name": "text", "parameters": {"x": "json"}}], "n": "json"},
], ids=str)  # fmt: skip
def test_json_that_a_schema_names_is_decoded(tmp_path, features):
    """datasets writes columns of mixed types as JSON, DuckDB and others by Parquet's own type; nulls inside are meant."""
    import datasets

    def feature(kind):
        if isinstance(kind, str):
            return datasets.Json() if kind == "json" else datasets.Value("string")
        return (
            {key: feature(k) for key, k in kind.items()} if isinstance(kind, dict) else datasets.List(feature(kind[0]))
        )

    content = [{"messages": MIXED, "tools": [TOOL], "n": 3}, {"messages": MIXED[1:], "tools": [], "n": None}]
    held = datasets.Dataset.from_list(content, features=datasets.Features(feature(features)))
    table = held.data.table
    pyarrow.parquet.write_table(table, tmp_path / "stored.parquet")
    pyarrow.parquet.write_table(table.replace_schema_metadata({}), tmp_path / "typed.parquet", store_schema=False)
    texts = table  # as a writer leaves them who knows the types by datasets' metadata only
    if features["messages"] == "json":
        texts = pyarrow.table({name: table[name].cast(pyarrow.string()) for name in table.column_names})
    pyarrow.parquet.write_table(texts.replace_schema_metadata(table.schema.metadata), tmp_path / "named.parquet")
    files = [Parquet([tmp_path / f"{name}.parquet"]) for name in ("stored", "typed", "named")]
    for source in (Table(held, "a"), Table(held.to_iterable_dataset(), "a"), *files):
        assert [row for row, _ in read(source)] == content


@pytest.mark.parametrize("text", ["{", '{"a": 1, "a": 2}'])
def test_json_that_cannot_be_read_is_refused(tmp_path, mistake, text):
    broken = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['{"a": 1}', text]))
    pyarrow.parquet.write_table(pyarrow.table({"x": broken}), tmp_path / "a.parquet")
    message = mistake(read, Parquet([tmp_path / "a.parquet"]))
    assert "a.parquet, row 2" in message and "column 'x' is JSON by its table's schema, and is not" in message


def test_a_class_is_its_name_and_no_number(tmp_path):
    import datasets

    kinds = datasets.Features({"label": datasets.ClassLabel(names=["good", "bad"]), "text": datasets.Value("string")})
    table = datasets.Dataset.from_dict({"label": [1, 0, -1], "text": ["a", "b", "c"]}, kinds)
    table.to_parquet(tmp_path / "a.parquet")
    for source in Parquet([tmp_path / "a.parquet"]), Table(table, "set"):
        assert [row["label"] for row, _ in read(source)] == ["bad", "good", None]


def test_maps_are_objects(tmp_path):
    kind = pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    table = pyarrow.table({"messages": pyarrow.array([[[*turn.items(), ("name", None)] for turn in turns]], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(Parquet([tmp_path / "a.parquet"]))[0][0] == {"messages": turns}


def test_the_same_content_is_the_same_wherever_it_lies(tmp_path, own_cache):
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        write_jsonl(path, [{"text": "a"}])
    assert JsonLines(paths[:1]).digests() == JsonLines(paths[1:]).digests()
    before = JsonLines(paths[:1]).digests()
    write_jsonl(paths[0], [{"text": "ab"}])
    longer, status = JsonLines(paths[:1]).digests(), paths[0].stat()
    assert longer != before
    # In place, with the size kept and the time set back, as rsync --inplace does.
    write_jsonl(paths[0], [{"text": "cd"}])
    os.utime(paths[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert JsonLines(paths[:1]).digests() != longer


# ---- what cannot be read -----------------------------------------------------------------------------------------
GOOD = json.dumps({"text": "Grüße " * 5}, ensure_ascii=False).encode() + b"\n"


@pytest.mark.parametrize("bad, said", [
    (b'{"text": ', "not JSON"),
    (b"\xff\xfe", "not UTF-8"),
    (("ü" * 30).encode(), "not JSON"),  # 40 bytes end in the middle of no character, 41 would
    (("x" + "ü" * 30).encode(), "not JSON"),
    (b"[" * 100_000, "not JSON"),  # nested deeper than Python recurses
    (b'{"n": ' + b"1" * 5000 + b"}", "not JSON"),  # Python reads no integer of more than 4300 digits
], ids=lambda value: str(value)[:12])  # fmt: skip
@pytest.mark.parametrize("before", [0, 1, 7])
def test_a_bad_line_is_named_in_any_chunk(tmp_path, mistake, monkeypatch, bad, said, before):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 2 * len(GOOD))
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * before + b"\n" + bad + b"\n" + GOOD)
    message = mistake(read, JsonLines([path]))
    assert f"{path}, line {before + 2}" in message and said in message


@pytest.mark.parametrize("text, line, said", [
    *[(f'text,answer\na,"two\nlines"\n{bad}\n', 4, "") for bad in ("a,b,c", "a", '"a"b,c', '"open,c')],
    *[(f"prompt{mark}completion\na, b{mark}c\n", 1, f"separated by {mark!r}") for mark in ";\t"],
    ("text,answer,text\na,b,c\n", 1, "two columns are called 'text'"),
])  # fmt: skip
def test_a_csv_that_is_none_is_named_by_its_line(tmp_path, mistake, text, line, said):
    (tmp_path / "a.csv").write_text(text)
    message = mistake(read, Csv([tmp_path / "a.csv"]))
    assert f"{tmp_path}/a.csv, line {line}" in message and said in message


@pytest.mark.parametrize("reader, text", [(Csv, "text\nGrüße\n"), (JsonDocuments, '[{"text": "Grüße"}]')])
def test_another_encoding_is_told(tmp_path, mistake, reader, text):
    (tmp_path / "a").write_bytes(text.encode("latin-1"))
    assert "UTF-8" in mistake(read, reader([tmp_path / "a"]))


def test_lines_behind_a_byte_order_mark(tmp_path, monkeypatch):
    path, content = tmp_path / "a.jsonl", [{"text": "\ufeffa"}, {"text": "b"}, {"text": "c"}]
    write_jsonl(path, content)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    monkeypatch.setattr(rows, "CHUNK_BYTES", 5)
    assert holds(JsonLines([path]), content) == [f"{path}, line {number}" for number in (1, 2, 3)]


# ---- JSON that is one array --------------------------------------------------------------------------------------
@pytest.mark.parametrize("text, count", [
    ('[{"text": "a"}, {"text": "[]"}]', 2), ('\ufeff \n[\n{"text": "a"}\n,\n{"text": "[]"}\n]\n\n', 2),
    ('[{"text":"a"},{"text":"[]"}]', 2), ("[]", 0), ("[ \n]\n", 0),
])  # fmt: skip
def test_one_json_array_is_its_elements(load, tmp_path, text, count):
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    found = origin(load, train_file=str(path))
    rows_of_it = [{"text": "a"}, {"text": "[]"}][:count]
    assert holds(found.train, rows_of_it) == [f"{path}, row {number + 1}" for number in range(count)]


ROW = {"prompt": "a {", "completion": "b }"}
TURNS = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("ending", [".json", ".jsonl"])
@pytest.mark.parametrize("text, content", [
    (json.dumps({"data": [ROW, ROW]}, indent=2), [ROW, ROW]), (json.dumps({"data": [TURNS]}), [TURNS]),
    (json.dumps({"version": "1", "tools": [], "rows": [ROW]}, indent=1), [ROW]),
    (json.dumps({"type": "x", "instances": []}, indent=1), []),
    ('{"data": [\n' + json.dumps(ROW) + "\n]}\n", [ROW]), ("\ufeff\n" + json.dumps(TURNS, indent=4), [TURNS]),
    (json.dumps(ROW, indent=1) + "\n\n" + json.dumps(TURNS, indent=2) + "\n", [ROW, TURNS]),
    *[(json.dumps({split: [ROW], "version": [1]}), [ROW]) for split in ("test", "validation", "train")],
    (json.dumps([ROW, TURNS], indent=2), [ROW, TURNS]), (json.dumps({"data": TURNS["messages"]}), [{"data": TURNS["messages"]}]),
    (json.dumps({"data": TURNS["messages"]}, indent=1), [{"data": TURNS["messages"]}]),
], ids=lambda value: str(value)[:20] if isinstance(value, str) else "")  # fmt: skip
def test_json_over_several_lines_is_read(load, tmp_path, ending, text, content):
    path = tmp_path / f"a{ending}"
    path.write_text(text, encoding="utf-8")
    holds(origin(load, train_file=str(path)).train, content)


@pytest.mark.parametrize("text, line, said", [
    ('{\n"data": [\n{"a": 1}\n{"b": 2}]}', 4, "not JSON"), ('{\n"a": 1\n', 3, "not JSON"),
    (json.dumps(ROW, indent=1) + '\n{"data": [{}]}', 5, "beside others"),
    ('{"a": \n{"a": 1}\n{"a": 2}', 1, "not JSON"), ('{"a": ', 1, "not JSON"),
    ('[{"text": "a"},\n{"text": ]', 2, "Expecting value"), ('[{"text": "a"}\n\n{"text": "b"}]', 3, "wanted after a row"),
    ('[{"text": "a"}', 1, "wanted after a row"), ('[{"text": "a"},\n]', 2, "Expecting value"), ("[", 1, "Expecting value"),
    ('[{"text": "a"}]\n{}', 2, "more behind"), ("[\n" + "[" * 100_000, 2, "recursion"),
    ('[\n{"n": ' + "1" * 5000 + "}]", 2, "integer"),
], ids=lambda value: str(value)[:12])  # fmt: skip
def test_broken_json_is_named_by_its_line(load, tmp_path, mistake, text, line, said):
    (tmp_path / "a.json").write_text(text)
    message = mistake(read, origin(load, train_file=str(tmp_path / "a.json")).train)
    assert f"{tmp_path / 'a.json'}, line {line}" in message and said in message


def test_json_of_one_object_a_line_is_read_as_such(load, tmp_path, mistake):
    write_jsonl(tmp_path / "a.json", [{"text": "a"}, {"text": "b"}])
    found = origin(load, train_file=str(tmp_path / "a.json"))
    assert isinstance(found.train, JsonLines) and len(read(found.train)) == 2
    write_json(tmp_path / "b.json", [{"text": "a"}])
    assert "b.json is one JSON array" in mistake(origin, load, train_file=f"{tmp_path}/*.json")


@pytest.mark.parametrize("document, said", [
    ({"train": [ROW], "test": [ROW]}, "'train' and 'test'"), ({"data": [ROW], "validation": [ROW]}, "'data' and 'validation'"),
    ({"train": [ROW], "valid": [], "test": [ROW]}, "'train' and 'valid' and 'test'"),
    ({"system": "a", "data": [ROW]}, "'system' beside the rows under 'data'"), (ROW | {"data": [ROW]}, "'prompt' beside"),
    ({"version": 1, "tools": [{"name": "f"}], "rows": [ROW]}, "'tools' beside the rows under 'rows', and it is read of a row"),
])  # fmt: skip
@pytest.mark.parametrize("indent", [None, 1])
def test_a_document_of_several_splits_or_with_more_than_rows_is_refused(
    load, tmp_path, mistake, document, said, indent
):
    (tmp_path / "a.json").write_text(json.dumps(document, indent=indent))
    message = mistake(lambda: read(origin(load, train_file=str(tmp_path / "a.json")).train))
    assert f"{tmp_path / 'a.json'}" in message and said in message and "give each" in message


def test_two_columns_or_keys_of_one_name_are_refused(tmp_path, mistake):
    (tmp_path / "a.csv").write_text("text,,\na,,\n")  # as spreadsheets write what is empty
    assert len(read(Csv([tmp_path / "a.csv"]))) == 1
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, ["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "two columns are called 'text'" in mistake(read, Parquet([tmp_path / "a.parquet"]))
    for name, reader in ("a.jsonl", JsonLines), ("a.json", JsonDocuments):
        (tmp_path / name).write_text('{"text": "a", "m": {"x": 1, "x": 1}}')
        assert read(reader([tmp_path / name]))[0][0] == {"text": "a", "m": {"x": 1}}
        (tmp_path / name).write_text('{"text": "a", "m": {"content": "b", "content": "c"}}')
        assert "line 1" in (message := mistake(read, reader([tmp_path / name]))) and "'content' twice" in message


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 12345\n"


def test_a_pointer_of_git_lfs_is_called_so(load, tmp_path, mistake):
    for kind in READERS:
        (tmp_path / f"a{kind}").write_text(POINTER)
        message = mistake(origin, load, train_file=str(tmp_path / f"a{kind}"))
        assert f"a{kind}" in message and "a pointer of Git LFS" in message and "git lfs pull" in message
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.parquet").write_text(POINTER)
    assert "set/train.parquet" in mistake(origin, load, dataset_name=str(tmp_path / "set"))
    with pytest.raises(BadRow, match="image 1 is a pointer of Git LFS"):
        _size_of(POINTER.encode(), "image 1")


# ---- CSV and Parquet ---------------------------------------------------------------------------------------------
def test_csv_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbftext,answer\r\n" + b'"a\r\nb","say ""hi"""\r\n' + b"x" * 200_000 + b",c\r\n")
    found = [content for content, _ in read(Csv([path]))]
    assert found == [{"text": "a\r\nb", "answer": 'say "hi"'}, {"text": "x" * 200_000, "answer": "c"}]


def test_a_broken_parquet_file(tmp_path, mistake):
    path = tmp_path / "a.parquet"
    write_parquet(path, [{"text": f"some text {i}" * 9, "answer": str(i)} for i in range(500)], 100)
    whole = path.read_bytes()
    no_footer = (b"", b"hello", whole[: len(whole) // 2], whole[:-3])
    for broken in (*no_footer, whole[:1000] + bytes(len(whole) // 2) + whole[1000 + len(whole) // 2 :]):
        path.write_bytes(broken)
        message = mistake(read, Parquet([path]))
        assert str(path) in message and "not a whole Parquet file" in message
