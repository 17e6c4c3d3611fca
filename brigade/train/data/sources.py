"""Where rows come from: JSONL, JSON, Parquet and CSV files, saved data sets, the Hub, and the built-in set."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError, first_line
from ...errors.disk import of_disk
from ..host.files import refuse_lfs_pointers, refuse_other_forms
from ..host.hub import CONNECT, hub_is_away, is_path, refusal, status_of
from ..host.urls import is_remote
from ..recipe.data_section import OF_DATASETS, Source, WeightedSource
from ..recipe.settings import Settings
from .builtin import BUILT_IN, HELDOUT, TRAIN
from .data_files import paths_of
from .json_rows import JsonDocuments, JsonLines, is_document
from .keys import Columns
from .rows import Files, Rows
from .table_rows import AS_FILES, Csv, Parquet, Table, digests_of, why_unread

FORMATS: dict[str, type[Files]] = {".jsonl": JsonLines, ".json": JsonLines, ".parquet": Parquet, ".csv": Csv}
# Files with rows, compressed ones too, by what the datasets library reads alike. Those in .json and .txt are not among them: they
# often only describe the others.
_KINDS = {kind: kind for kind in (".csv", ".jsonl", ".parquet", ".tsv")} | {".ndjson": ".jsonl"}


@dataclass(frozen=True)
class Origin:
    """One source of a recipe, opened. heldout: None where a share of the training rows is to be held out."""

    name: str
    train: Rows
    heldout: Rows | None
    columns: Columns
    weight: float | None
    image_folder: str | None = None


def open_origins(settings: Settings) -> list[Origin]:
    """Open the sources of a recipe. Raises UserError as check_together does, and where one cannot be opened."""
    check_together(settings)
    return [_origin(settings, source, place) for source, place in each(settings)]


def check_together(settings: Settings) -> None:
    """Raise UserError where sources contradict each other or what stands beside them, and for weights that do not add up to 1."""
    data, place = settings.recipe.data, settings.place("datasets")
    several = data.datasets or []
    given = [key for key, field in Source.model_fields.items() if getattr(data, key) != field.default]
    if several and given:
        problem = f"datasets is given, too, whose sources have a {given[0]} of their own, so nobody would read this one"
        raise UserError(settings.place(given[0]), problem, "write it into each source of datasets that it is meant for")
    weights = [source.weight for source in several if source.weight is not None]
    if weights and len(weights) < len(several):
        problem = f"{len(several) - len(weights)} of {len(several)} sources have no weight"
        raise UserError(place, problem, "give every source a weight, or none")
    if weights and abs(sum(weights) - 1) > 1e-6:
        problem = f"the weights {', '.join(map(str, weights))} add up to {sum(weights):g}, not 1"
        raise UserError(place, problem, f"divide each by {sum(weights):g}")
    names = [_name_of(source) for source in several]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(place, f"two sources are called {twice!r}", "give each a `name` of its own")


def _name_of(source: Source) -> str:
    named = source.name if isinstance(source, WeightedSource) else None
    return named or Path(source.train_file or str(source.dataset_name)).stem.replace("*", "") or "data"


def check_files(settings: Settings) -> None:
    """Raise UserError for files of a recipe's sources that are not there, or contradict each other. What lies in object storage
    is not looked for."""
    check_together(settings)
    for source, place in each(settings):
        if not any(map(is_remote, (source.train_file, source.validation_file))):
            _files(source, place)


def each(settings: Settings) -> Iterator[tuple[Source, Callable[[str], str]]]:
    """Yield the sources of a recipe, each with what names the place of its keys."""
    data = settings.recipe.data
    for index, source in enumerate(data.sources):
        yield source, _places(settings, f"[{index}]" if data.datasets else "")


def check_named(settings: Settings) -> None:
    """Raise UserError as check_files does, and for a data set of which the Hub says that it has none."""
    check_files(settings)
    for source, place in each(settings):
        name = source.dataset_name
        if name and name != BUILT_IN and not Path(name).is_dir() and (is_path(name) or not hub_is_away()):
            _ask_hub(name, source.dataset_revision, place)


def _ask_hub(name: str, revision: str | None, place: Callable[[str], str]) -> None:
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, revision=revision, timeout=CONNECT)
    except Exception as error:
        if is_path(name) or status_of(error) in (401, 403, 404):  # else the cache may have it
            raise _not_loaded(error, name, revision, place) from None


def _not_loaded(error: Exception, name: str, revision: str | None, place: Callable[[str], str]) -> UserError:
    local = Path(name).is_dir()
    why, cure = ("", "") if local else refusal(error, name, "dataset", revision)
    if not cure:
        why, check = why_unread(error), "its files and its configurations" if local else "the name and the network"
        is_of_a_file = why != first_line(error)  # which the library's own error does not say
        cure = AS_FILES if is_of_a_file else f"check {check}, or give a train_file"
    return UserError(place("dataset_name"), f"data set {name!r} does not load: {why}", cure)


def _places(settings: Settings, index: str) -> Callable[[str], str]:
    """Return what names the place of a source's key. index: "[0]" of the first of several"""
    return lambda key: f"{settings.place('datasets')}{index}.{key}" if index else settings.place(key)


def _files(source: Source, place: Callable[[str], str]) -> tuple[Rows | None, Rows | None]:
    """Return the training and the held-out rows of a source that are in files, or built in."""
    if bool(source.dataset_name) == bool(source.train_file):
        problem = "both dataset_name and train_file are given" if source.train_file else "no data is named"
        raise UserError(place("train_file"), problem, "give exactly one: dataset_name or train_file")
    if source.train_file or source.dataset_name == BUILT_IN:
        for key in OF_DATASETS:
            if getattr(source, key) != Source.model_fields[key].default:
                raise UserError(place(key), f"{source.train_file or BUILT_IN} is a whole and has none", "remove it")
    if source.validation_file and source.dataset_test_split:
        raise UserError(place("dataset_test_split"), "validation_file names held-out rows, too", "keep one of them")
    if source.image_folder is not None and not Path(source.image_folder).expanduser().is_dir():
        raise UserError(place("image_folder"), f"{source.image_folder!r} is no folder", "name the one with the images")
    heldout = files_of(source.validation_file, place("validation_file")) if source.validation_file else None
    if source.dataset_name == BUILT_IN:
        if heldout:
            problem = f"{BUILT_IN} has held-out samples of its own"
            raise UserError(place("validation_file"), problem, "remove validation_file")
        return JsonLines([TRAIN]), JsonLines([HELDOUT])
    return files_of(source.train_file, place("train_file")) if source.train_file else None, heldout


def _origin(settings: Settings, source: Source, place: Callable[[str], str]) -> Origin:
    train, heldout = _files(source, place)
    if train is None:
        train, own = _from_datasets(source, place, settings.recipe.data.streaming)
        heldout = heldout or own
    weight = source.weight if isinstance(source, WeightedSource) else None
    columns: Columns = dict(source.columns)  # type: ignore[arg-type]
    return Origin(_name_of(source), train, heldout, columns, weight, source.image_folder)


# ---- files ---------------------------------------------------------------------------------------------------------
def files_of(name: str, place: str) -> "Rows":
    """Return the rows of files. name: a path, or a pattern of several. Raises UserError at `place`."""
    paths = paths_of(name, place)
    for path in paths:
        if path.is_dir():
            cure = f"name its files ({path}/*.jsonl), or give it as dataset_name if it is a saved data set"
            raise UserError(place, f"{str(path)!r} is a directory, not a file", cure)
        if not path.is_file():  # it would be read several times, and never end
            raise UserError(place, f"{str(path)!r} is a pipe, a socket or a device, and no file", "name a file")
    refuse_lfs_pointers(paths)
    kinds = sorted({path.suffix for path in paths})
    if len(kinds) > 1 or kinds[0] not in FORMATS:
        problem = f"{name!r} is {' and '.join(kinds) or 'without an ending'}"
        raise UserError(place, problem, f"give files of one kind: {', '.join(FORMATS)}")
    refuse_other_forms(paths)
    documents = [path for path in paths if FORMATS[kinds[0]] is JsonLines and is_document(path)]
    if documents and len(documents) < len(paths):
        problem = f"{documents[0]} is one JSON array or object, others of {name!r} are one object a line"
        raise UserError(place, problem, "give files of one kind")
    return JsonDocuments(paths) if documents else FORMATS[kinds[0]](paths)


# ---- the datasets library ------------------------------------------------------------------------------------------
def _from_datasets(source: Source, place: Callable[[str], str], streaming: bool) -> tuple[Table, Table | None]:
    """Return training rows, and held-out ones where the set has a split of them."""
    name, config, revision = str(source.dataset_name), source.dataset_config_name, source.dataset_revision
    if revision and Path(name).is_dir():
        raise UserError(place("dataset_revision"), f"{name!r} is a directory, which has no revisions", "remove it")
    if config and _is_saved(name):
        raise UserError(
            place("dataset_config_name"), f"{name!r} is of save_to_disk, which keeps no configs", "remove it"
        )
    inside = list(Path(name).rglob("*")) if Path(name).is_dir() else []
    refuse_lfs_pointers(inside)
    kinds = sorted({_KINDS[suffix] for path in inside for suffix in path.suffixes if suffix in _KINDS})
    if len(kinds) > 1 and not (Path(name) / "README.md").is_file():  # which may say what is read
        problem = f"{name!r} holds {' and '.join(kinds)}, and the datasets library reads one kind of a directory"
        raise UserError(place("dataset_name"), problem, "name each kind as a source of its own: datasets, train_file")
    try:
        splits, commit = _load(name, config, revision, streaming)
    except Exception as error:  # the library raises its own, OSErrors and HTTP errors alike
        raise of_disk(error.__cause__ or error) or _not_loaded(error, name, revision, place) from None

    def table(key: str, split: str) -> Table:
        if split not in splits:
            there = ", ".join(map(str, splits))
            raise UserError(place(key), f"{name!r} has no {split} split, only {there[:400]}", "name one that it has")
        return Table(splits[split], name, (config, split, commit))

    train, test = source.dataset_train_split, source.dataset_test_split
    if train == test:
        raise UserError(place("dataset_test_split"), f"{test!r} is the split that is trained on", "name another one")
    own = test or next((split for split in ("validation", "test") if split in splits and split != train), None)
    return table("dataset_train_split", train), table("dataset_test_split", own) if own else None


def _is_saved(name: str) -> bool:
    """Whether save_to_disk has written a directory."""
    return any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _load(name: str, config: str | None, revision: str | None, streaming: bool) -> tuple[dict[str, Any], str | None]:
    """Return all splits by name and, for a set on the Hub, the commit that they come from."""
    if not Path(name).is_dir():
        hub_is_away()  # before the library is loaded, which asks only now whether to stay offline
    import datasets

    if _is_saved(name):
        loaded = datasets.load_from_disk(name)
        return loaded if isinstance(loaded, dict) else {"train": loaded}, None
    if Path(name).is_dir():  # of which the library would know the files by their times, which rsync -t and tar keep
        content = hashlib.sha256(repr(digests_of(Path(name))).encode()).hexdigest()[:16]
        made = Path(datasets.config.HF_DATASETS_CACHE) / content
        builder, commit = datasets.load_dataset_builder(name, config, cache_dir=str(made)), None
    else:
        builder = datasets.load_dataset_builder(name, config, revision=revision)
        commit = builder.hash
    if streaming:
        return builder.as_streaming_dataset(), commit
    builder.download_and_prepare()
    return builder.as_dataset(), commit
