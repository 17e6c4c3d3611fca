"""Files of rows as users have them, and all that a reader gives of them."""

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from brigade.errors import UserError
from brigade.train.data import rows, sources
from brigade.train.data.json_rows import JsonDocuments, JsonLines
from brigade.train.data.table_rows import Csv, Parquet

Row = dict[str, Any]


def write_jsonl(path: Path, content: list[Row], blank: str = "", end: str = "\n") -> None:
    """Write a row a line. blank: lines before and behind each row; end: "" leaves the last line's end out"""
    text = blank + "".join(json.dumps(row, ensure_ascii=False) + "\n" + blank for row in content)
    path.write_text(text if end else text.removesuffix("\n"), newline="")


def write_csv(path: Path, content: list[Row]) -> None:
    """Write rows of "text" and "answer"."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "answer"])
        writer.writeheader()
        writer.writerows(content)


def write_parquet(path: Path, content: list[Row], group: int = 2) -> None:
    """Write rows of "text" and "answer". group: rows of a row group"""
    schema = pyarrow.schema({"text": pyarrow.string(), "answer": pyarrow.string()})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content, schema), path, row_group_size=group)


def write_json(path: Path, content: list[Row], indent: int = 2) -> None:
    """Write rows as one array."""
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent))


READERS = {".jsonl": JsonLines, ".json": JsonDocuments, ".csv": Csv, ".parquet": Parquet}
WRITERS = {".jsonl": write_jsonl, ".json": write_json, ".csv": write_csv, ".parquet": write_parquet}


def read(source: Any, cursor: Any = None) -> list[tuple[Row, str]]:
    """Return (row, place) of all rows from a cursor on, through the pickle and the JSON that chunks and cursors travel in."""
    found = []
    for chunk in source.chunks(json.loads(json.dumps(cursor))):
        chunk = pickle.loads(pickle.dumps(chunk))
        for number, content in chunk.rows():
            if isinstance(content, rows.BadRow):
                raise UserError(chunk.where.place(number), *content.args)
            found.append((content, chunk.where.place(number)))
    return found


def holds(source: Any, content: list[Row]) -> list[str]:
    """Assert that a reader gives all of `content`, and from the end of any chunk on exactly the rest; return the rows' places."""
    whole = read(source)
    assert [found for found, _ in whole] == content
    done = size = 0
    for chunk in source.chunks():
        done += sum(1 for _ in chunk.rows())
        size += chunk.size
        assert read(source, chunk.after) == whole[done:]
    assert source.size in (None, size)
    return [place for _, place in whole]


def origin(load: Any, **data: Any) -> sources.Origin:
    """Return the one source of a recipe with these keys of data. load: the fixture of that name"""
    (found,) = sources.open_origins(load(data={"dataset_name": None} | data))
    return found
