"""Names of data files: patterns, and the ending by which a file is read."""

import bz2
import gzip
import io
import json
import lzma
import zipfile

import pyarrow
import pyarrow.parquet
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
    for name in ("e[1]", "e1"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": name}])
    ((content, _),) = read(origin(load, train_file=f"{tmp_path}/e[1].jsonl").train)
    assert content["text"] == "e[1]", "a file that is called so goes before those that the pattern fits"


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


CSV, JSONL = 'text,answer\na,"é, b"\nc,d\n', json.dumps({"text": "é"}, ensure_ascii=False) + "\n"


def parquet():
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), file)
    return file.getvalue()


def archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("xl/workbook.xml", "<a/>")
    return file.getvalue()


@pytest.mark.parametrize("name, content, problem, cure", [
    *[(f"a{kind}", text.encode(form), f"in {form[:6].upper()}", "write it in UTF-8: iconv")
      for form in ("utf-16", "utf-32") for kind, text in ((".csv", CSV), (".jsonl", JSONL), (".json", f"[{JSONL}]"))],
    *[(name, CSV.encode(form), "holds zero bytes", "UTF-16")
      for name in ("a.csv", "a.jsonl") for form in ("utf-16-le", "utf-16-be")],
    ("a.csv", b"\xfe\xff" + CSV.encode("utf-16-be"), "in UTF-16", "iconv"),
    *[(name, gzip.compress(CSV.encode()), "compressed by gzip", "unpack")
      for name in ("a.csv", "a.jsonl", "a.json", "a.parquet")],
    ("a.csv", bz2.compress(CSV.encode()), "bzip2", "unpack"), ("a.jsonl", lzma.compress(CSV.encode()), "xz", "unpack"),
    ("a.jsonl", b"\x28\xb5\x2f\xfd\x24\x00", "zstd", "unpack"), ("a.csv", archive(), "zip archive", "as CSV or JSONL"),
    ("a.csv", parquet(), "a Parquet file", "what it is: .parquet"), ("a.json", parquet(), "a Parquet file", ".parquet"),
    ("a.csv", b"\n<!DOCTYPE html><html>", "a page of HTML", "download"),
    ("a.parquet", CSV.encode(), "not a whole Parquet file", "write or download"),
    ("a.csv", CSV.encode("latin-1"), "a.csv, line 2\n  not UTF-8: b'\\xe9'", "iconv -f WINDOWS-1252"),
    ("a.csv", b"text\n" + b"a\n" * 9000 + b"\x93b\x94\n", "a.csv, line 9002", "WINDOWS-1252"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_file_that_is_not_what_its_name_says(load, tmp_path, mistake, name, content, problem, cure):
    (tmp_path / name).write_bytes(content)
    message = mistake(lambda: read(origin(load, train_file=str(tmp_path / name)).train))
    assert problem in message and cure in message.splitlines()[-1]


@pytest.mark.parametrize("name, content", [
    *[(f"a{kind}", text.encode("utf-8-sig")) for kind, text in ((".csv", CSV), (".jsonl", JSONL), (".json", f"[{JSONL}]"))],
    ("a.csv", b"text,PAR1,BZ\na,b,c\n"), ("a.jsonl", b'\n{"text": "\\u0000"}\n'),
])  # fmt: skip
def test_a_file_with_a_mark_of_utf_8_or_an_odd_beginning_is_read(load, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert "text" in read(origin(load, train_file=str(tmp_path / name)).train)[0][0]
