"""Where chats come from: a JSONL file, the Hub, a saved data set, or the built-in documentation of Python."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..flags import Settings
from ..recipe import find
from . import builtin

BUILT_IN = "python-docs"
ROLES = ("system", "user", "assistant", "tool")

Chat = dict[str, Any]  # {"messages": [{"role": str, "content": str}, ...]}


def files(settings: Settings, cache: Path) -> tuple[Path | None, Path | None]:
    """The JSONL files of training and held-out chats; None where they come from the Hub or a split.

    Raises UserError for a file that is not there, and for no or two sources at once.
    """
    data = settings.recipe.data
    if bool(data.dataset_name) == bool(data.train_file):
        problem = "both dataset_name and train_file are given" if data.train_file else "no data is named"
        raise UserError(settings.place("train_file"), problem, "give exactly one: dataset_name or train_file")
    if data.dataset_name == BUILT_IN:
        if data.validation_file:
            raise UserError(settings.place("validation_file"), f"{BUILT_IN} has held-out samples of its own",
                            "remove validation_file")  # fmt: skip
        built = builtin.ensure(cache)
        return built.train, built.heldout
    return _file(settings, "train_file"), _file(settings, "validation_file")


def _file(settings: Settings, key: str) -> Path | None:
    name = getattr(settings.recipe.data, key)
    if not name:
        return None
    path = find(name, settings.place(key), "data file")
    if not path.is_file():
        raise UserError(settings.place(key), f"{str(path)!r} is a directory, not a file", "name one JSONL file")
    return path


def read_jsonl(path: Path) -> Iterator[Chat]:
    """The chats of a JSONL file, checked. Raises UserError with the line's number for the first that is broken."""
    empty = True
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            empty = False
            place = f"{path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8").rstrip())
            except UnicodeDecodeError:
                raise UserError(place, f"not UTF-8: {line[:40]!r}", "give text: JSONL in UTF-8") from None
            except json.JSONDecodeError as error:
                raise UserError(place, f"not JSON: {error.msg} at column {error.colno}: {error.doc[:40]!r}",
                                "mend or delete that line") from None  # fmt: skip
            check_chat(row, place)
            yield row
    if empty:
        raise UserError(str(path), "the file is empty", 'write one chat a line: {"messages": [...]}')


def local_digests(settings: Settings) -> list[bytes]:
    """Hashes of the files of a data set that is a local directory: it may change under the same name."""
    name = settings.recipe.data.dataset_name
    digests = []
    for path in sorted(Path(name).rglob("*")) if name and name != BUILT_IN else ():
        if path.is_file():
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").digest())
    return digests


def from_datasets(settings: Settings) -> tuple[list[Chat], list[Chat] | None]:
    """Training chats, and held-out ones if the set has a validation or test split, through the datasets library."""
    import datasets

    data = settings.recipe.data
    place, name = settings.place("dataset_name"), str(data.dataset_name)
    try:
        local = Path(name).is_dir() and not any(Path(name).glob("*.parquet"))
        loaded = datasets.load_from_disk(name) if local else datasets.load_dataset(name, data.dataset_config_name)
    except Exception as error:  # the library raises its own, OSErrors and HTTP errors alike
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise UserError(place, f"data set {name!r} does not load: {reason}",
                        "check the name and the network, or give a train_file") from None  # fmt: skip
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise UserError(place, f"{name!r} has no train split, only {', '.join(splits)}", "name another data set")
    heldout = next((splits[split] for split in ("validation", "test") if split in splits), None)
    for rows in filter(None, (splits["train"], heldout)):
        if "messages" not in rows.column_names:
            raise UserError(place, f"{name!r} has no column 'messages', only {', '.join(rows.column_names)}",
                            "convert it to chats, one {messages: [...]} a row")  # fmt: skip
        for number, row in enumerate(rows):
            check_chat(row, f"{name}, row {number}")
    return list(splits["train"]), list(heldout) if heldout is not None else None


def check_chat(row: Any, place: str) -> None:
    """Raises UserError unless `row` is {"messages": [...]} with known roles and text contents."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        found = f"only {', '.join(map(repr, row))}" if isinstance(row, dict) else repr(row)[:60]
        raise UserError(
            place, f"no list 'messages' here: {found}", 'write {"messages": [{"role": ..., "content": ...}]}'
        )
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise UserError(place, f"role {role!r} is none of {', '.join(ROLES)}", "mend the message's role")
        if not isinstance(message.get("content"), str):
            raise UserError(place, f"the content of {role!r} is {type(message.get('content')).__name__}, not text",
                            "give each message a text content")  # fmt: skip
