"""How a recipe's data is prepared: sources are read, tokenised, split, mixed, packed and stored, once per host and content."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import UserError, console
from ...errors.tables import Document, Fields
from ..host import cache
from ..host.checksums import Manifest
from ..recipe.settings import Settings
from . import chat_template, encode, mixing, packing, sources, stream
from .image_store import StoredImages
from .images import ImageProcessor, folder_of_images
from .keys import names_of, without_weight
from .layout import ENCODING, FORMAT, META, folder_of, outdated
from .places import files_of
from .rows import Files, Rows
from .tokenise import encoded, encoder_of
from .writer import Writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build(settings: Settings, tokenizer: "PreTrainedTokenizerBase", images: ImageProcessor | None = None) -> Fields:
    """Prepare data in the cache; returns what a run has to know of it: fingerprint, folder, names of the sources, and how chats
    are written. Raises UserError as `prepare` does.

    images: the model's processor, for a recipe with data.images. Only the rows say which images there are: the folder's name is
    made of everything else, and the fingerprint also of the images in it. If an image has changed, the folder is made again.
    """
    if settings.recipe.data.streaming:
        stream.check(settings)
        store = stream.hold_out
    else:
        store = _store
    encoder, origins, fingerprint = plan(settings, tokenizer, images)
    folder = folder_of(_with_folders(fingerprint, origins) if encoder.images is not None else fingerprint)

    def whole(aside: Path) -> None:
        writer = Writer(aside, encoder.rows, encoder.images is not None)
        facts = store(settings, encoder, origins, writer)
        writer.close()
        (aside / META).write_text(json.dumps(facts))

    cache.once(folder, whole, _outdated)
    if encoder.images is not None:
        fingerprint = _digest([fingerprint, StoredImages(folder).digest()])
    chat_format = asdict(chat_template.chat_format(tokenizer, encoder.templates))
    known = {"sources": [origin.name for origin in origins], "chat_format": chat_format}
    return {"fingerprint": fingerprint, "folder": folder.name, **known}


def _outdated(folder: Path) -> str:
    """Return why a folder's prepared data has to be made again, in words; also where its images are no longer the same files."""
    manifest = Manifest(folder)
    changed = StoredImages.are_in(manifest) and StoredImages(folder, manifest).changed()
    return outdated(folder) or (f"the image {changed.path} has changed since it was prepared" if changed else "")


def _with_folders(fingerprint: str, origins: list[sources.Origin]) -> str:
    """Return a fingerprint that also says where relative paths of images begin."""
    rows = [(origin.image_folder, each) for origin in origins for each in (origin.train, origin.heldout) if each]
    places = [(given, path) for given, each in rows for path in getattr(each, "paths", [each.place])]
    return _digest([fingerprint, [str(folder_of_images(given, str(path))) for given, path in places]])


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def plan(
    settings: Settings, tokenizer: "PreTrainedTokenizerBase", images: ImageProcessor | None = None
) -> tuple[encode.Encoder, list[sources.Origin], str]:
    """Return the encoder, the opened sources, and the fingerprint of what they will yield, except for their images."""
    import tokenizers

    data = settings.recipe.data
    encoder, origins = encoder_of(settings, tokenizer, images), sources.open_origins(settings)
    contents = [
        (o.train.digests(), o.heldout and o.heldout.digests(), sorted(o.columns.items()), o.weight) for o in origins
    ]
    options = (data.packing, data.validation_split, data.max_train_samples, data.most_held_out, data.streaming)
    templates = encoder.templates
    how = vars(encoder) | {"templates": [templates.template, templates.with_tools, templates.joins]}
    for key in ("skip_bad_rows", "train_on_last_turn_only", "thinking", "rows", "images", "image_rules", "own_tokens"):
        if how[key] == getattr(encode.Encoder, key):  # it was not there once, and an unfinished run keeps its data
            del how[key]
    if encoder.images is not None:
        how["images"] = encoder.images.identity()
    seed = settings.recipe.training.seed if any(origin.weight for origin in origins) or data.streaming else None
    fingerprint = _digest([ENCODING, tokenizers.__version__, how, contents, options, seed])
    _refuse_files_on_both_sides(origins)
    return encoder, origins, fingerprint


def _refuse_files_on_both_sides(origins: list[sources.Origin]) -> None:
    """Raise UserError for a file that is both trained on and held out, under whatever name."""
    trained = {
        content: origin.train.place
        for origin in origins
        if isinstance(origin.train, Files)
        for content in origin.train.digests()
    }
    for origin in origins:
        if not isinstance(origin.heldout, Files):
            continue
        same = trained.keys() & set(origin.heldout.digests())
        if same:
            problem = f"it is held out, and has the content of {trained[same.pop()]}, which is trained on"
            split = "validation_split then holds some of the training rows out"
            raise UserError(
                origin.heldout.place, problem, f"hold out other rows, or leave validation_file out: {split}"
            )


def _store(settings: Settings, encoder: encode.Encoder, origins: list[sources.Origin], writer: Writer) -> Fields:
    """Store the training and held-out items of all sources. Returns their figures."""
    data = settings.recipe.data
    train: list[np.ndarray] = []
    heldout: list[np.ndarray] = []
    dropped: list[np.ndarray] = []
    sizes: list[float] = []
    by_size = len(origins) > 1 and any(origin.weight is None for origin in origins)
    for number, origin in enumerate(origins):
        share = 0.0 if origin.heldout else data.validation_split
        limit = data.max_train_samples
        if limit and not origin.heldout:
            limit += data.most_held_out or round(limit * share / (1 - share)) + 1
        if by_size and origin.train.size is None:  # only its end tells
            limit = None
        samples, lost, size = _encode_all(origin, origin.train, settings, encoder, writer, limit)
        if origin.heldout:
            limit = data.most_held_out
            held, *_ = _encode_all(origin, origin.heldout, settings, encoder, writer, limit, trained=False)
        else:
            row_of, fewest = writer.of_items(samples)["row"][:, 0], writer.kind.fewest
            samples, held = mixing.split(samples, row_of, share, data.most_held_out, fewest)
            if len(samples) and not len(held):
                cure = "give a validation_file, more rows, or a higher max_train_samples if it is set"
                raise UserError(origin.train.place, "only one row: nothing is left to hold out", cure)
        for name, rows, ids in ("training", origin.train, samples), ("held-out", origin.heldout or origin.train, held):
            if not len(ids):
                problem = f"it yields no {name} samples with a supervised token within {data.max_length} tokens"
                cure = "check that it has rows with answers, or raise max_length or the number of samples"
                raise UserError(rows.place, problem, cure)
        _refuse(held, False, origin.heldout or origin.train, writer, settings)
        train.append(samples)
        dropped.append(lost)
        sizes.append(size)
        heldout.append(held[: data.most_held_out])
        writer.split(f"heldout-{number}", packing.Sequences.of_single(heldout[-1]))
    weights, seed = [origin.weight for origin in origins], settings.recipe.training.seed
    chosen = mixing.mix(train, weights, sizes, seed, data.max_train_samples)
    if data.packing:
        lengths = writer.of_items(chosen)["length"].sum(axis=1)
        sequences = packing.best_fit(lengths, data.max_length * writer.kind.samples)
        sequences = packing.Sequences(chosen[sequences.samples], sequences.sizes)
    else:
        sequences = packing.Sequences.of_single(chosen)
    _refuse(chosen, True, origins[0].train, writer, settings)
    writer.split("train", sequences)
    used = [chosen[np.isin(chosen, samples)] for samples in train]
    beside = [
        mixing.dropped_beside(part, samples, lost) for part, samples, lost in zip(used, train, dropped, strict=True)
    ]
    facts = writer.facts(chosen, np.concatenate(beside))
    if encoder.images is not None and not facts["images"]:
        raise _without_images(origins[0].train, facts, settings)
    return facts | {
        "format": FORMAT,
        "sequences": len(sequences),
        "by_source": [len(part) for part in used],
        "files": files_of(data),
        "shared": writer.shared(np.concatenate(heldout), chosen),
    }


def _without_images(rows: Rows, facts: Document, settings: Settings) -> UserError:
    """Return the error of a recipe with data.images whose training samples have no image."""
    place, unread = settings.place("images"), ", ".join(facts["unread"]) or "nothing"
    problem = (
        f"it is true, and none of {facts['samples']:,} training samples has an image ({rows.place}; not read: {unread})"
    )
    cure = "name the column with the images: columns: {images: NAME}; raise max_length where it cut all of them off; or train on "
    return UserError(place, problem, f"{cure}texts alone: images: false")


def _refuse(items: np.ndarray, learned: bool, rows: Rows, writer: Writer, settings: Settings) -> None:
    """Raise UserError for items of a split that their kind cannot use. learned: whether they are trained on"""
    flaw = writer.kind.flaw(writer.table(), items, learned, settings.recipe.training.objective)
    if flaw:
        raise UserError(rows.place, *flaw)


def _encode_all(
    origin: sources.Origin,
    rows: Rows,
    settings: Settings,
    encoder: encode.Encoder,
    writer: Writer,
    limit: int | None,
    trained: bool = True,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Encode and store up to `limit` items of a split. rows: the origin's, of that split

    Returns their numbers in the store; for each row that was dropped as Encoded.dropped, but the number of the next item; and an
    estimate, from the part that was read, of how many items the whole split has.
    """
    first, read, seen = writer.items, 0, 0
    columns = origin.columns if trained else without_weight(origin.columns)
    most = limit and limit * writer.kind.samples
    absent, processes = names_of(columns), settings.recipe.data.dataset_num_proc
    dropped: list[np.ndarray] = []
    unit = "B" if isinstance(rows, Files) else "rows"
    with console.bar(rows.size, f"tokenising {Path(rows.place).name}", unit) as bar:
        for part in encoded(rows, columns, encoder, processes, most, origin.image_folder):
            seen += part.rows
            absent &= part.absent
            dropped.append((part.dropped + np.array([writer.samples, 0, 0])) // [writer.kind.samples, 1, 1])
            writer.add(part)
            bar.update(part.size)
            read += part.size
            if limit and writer.items - first >= limit:
                absent = set()  # for a row may follow
                break
    if not seen:
        raise UserError(rows.place, "the file is empty", 'write one sample a line: {"messages": [...]}')
    if absent and trained:  # a few rows that are held out need not have all of them
        problem = f"no row has a column {sorted(absent)[0]!r}, which data.columns names"
        raise UserError(rows.place, problem, "fix the name there, or remove it")
    size = (writer.items - first) * ((rows.size or read) / read)
    numbers, lost = np.arange(first, writer.items)[:limit], np.concatenate(dropped)
    if first + len(numbers) < writer.items:  # the rest of the last chunk is not used
        lost = lost[lost[:, 0] <= numbers[-1]]
    return numbers, lost, size
