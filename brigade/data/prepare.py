"""Tokenising as a step of its own: in parallel, once per host and content, with a progress bar.

What decides the samples (data, tokenizer, template, length, packing, splits) is the cache's key: changing any of it
makes a new cache, changing none reads the old one.
"""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..errors import UserError, console
from ..recipe.flags import Settings
from . import cache, chat_template, encode, mixing, packing, sources, stream, workers
from .rows import Files, Rows
from .store import Samples, Writer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODING = 7  # raise it when the same input would be encoded differently: an unfinished run then has other data
FORMAT = 8  # of the cache: raise it when it would be stored differently, or rare rows alone encoded differently
META = "meta.json"
LISTED, MANY = 10, 1000  # bad rows that are named; as many that no more are looked for


@dataclass(frozen=True)
class Prepared:
    """A recipe's data. heldout: by the source's name; facts: what `report` tells of it; stands_in: the template of ours
    that is used for the tokenizer's own."""

    train: Samples | stream.Stream
    heldout: dict[str, Samples]
    fingerprint: str
    facts: dict[str, Any]
    stands_in: str = ""

    def close(self) -> None:
        """Remove what is of use to this run alone."""
        if isinstance(self.train, stream.Stream):
            self.train.close()


def plan(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> tuple[encode.Encoder, list[sources.Origin], str]:
    """The encoder, the opened sources, and the fingerprint of what they will yield."""
    import tokenizers

    data = settings.recipe.data
    if not tokenizer.is_fast:
        raise UserError(
            settings.place("tokenizer_name_or_path"),
            f"{type(tokenizer).__name__} is not one of the Rust tokenizers, so nothing says which tokens are whose",
            "name one with a tokenizer.json",
        )
    variables = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    # How it was last called (padding, truncation) is part of its state, but of no sample.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    template, no_template, stands_in = chat_template.load(settings, tokenizer)
    encoder = encode.Encoder(
        json.dumps(backend),
        template,
        no_template,
        variables,
        tokenizer.eos_token_id,
        data.max_length,
        data.truncation,
        stands_in,
        data.skip_bad_rows,
    )
    found = sources.origins(settings)
    _tell_apart(found)
    contents = [
        (o.train.digests(), o.heldout and o.heldout.digests(), sorted(o.columns.items()), o.weight) for o in found
    ]
    options = (data.packing, data.validation_split, data.max_train_samples, data.max_eval_samples, data.streaming)
    how = asdict(encoder) | {"no_template": None, "stands_in": None}
    if not how["skip_bad_rows"]:  # the key was not there once, and an unfinished run keeps its data
        del how["skip_bad_rows"]
    seed = settings.recipe.training.seed if any(origin.weight for origin in found) or data.streaming else None
    text = json.dumps([ENCODING, tokenizers.__version__, how, contents, options, seed])
    return encoder, found, hashlib.sha256(text.encode()).hexdigest()[:16]


def _tell_apart(found: list[sources.Origin]) -> None:
    """Raises UserError for a file that is trained on and held out, under whatever name."""
    trained = {
        content: origin.train.place
        for origin in found
        if isinstance(origin.train, Files)
        for content in origin.train.digests()
    }
    for origin in found:
        if isinstance(origin.heldout, Files) and (same := trained.keys() & set(origin.heldout.digests())):
            raise UserError(
                origin.heldout.place,
                f"it is held out, and has the content of {trained[same.pop()]}, which is trained on",
                "hold out other rows, or leave validation_file out: validation_split then holds "
                "some of the training rows out",
            )


def prepare(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> Prepared:
    """Training and held-out samples of a recipe, from the cache where the same was prepared before.

    Raises UserError for missing, empty or broken data and for data without any supervised token.
    """
    data, training = settings.recipe.data, settings.recipe.training
    if data.streaming:
        stream.check(settings)
    encoder, found, fingerprint = plan(settings, tokenizer)
    folder = cache.cache_directory() / "prepared" / fingerprint
    if folder.is_dir() and not _whole(folder):
        print(
            f"{folder} was written by another version of Brigade, or not to its end: preparing anew.", file=sys.stderr
        )
    cache.once(folder, _whole, lambda aside: _build(aside, settings, encoder, found))
    facts = json.loads((folder / META).read_text())
    heldout = {origin.name: Samples(folder, f"heldout-{i}") for i, origin in enumerate(found)}
    if data.streaming:
        rows = training.max_steps * training.global_batch_size
        begin = stream.begin(facts["begins"])
        return Prepared(stream.Stream(settings, encoder, begin, rows), heldout, fingerprint, facts, encoder.stands_in)
    return Prepared(Samples(folder, "train"), heldout, fingerprint, facts, encoder.stands_in)


def _whole(folder: Path) -> bool:
    try:
        return json.loads((folder / META).read_text())["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(folder: Path, settings: Settings, encoder: encode.Encoder, found: list[sources.Origin]) -> None:
    data = settings.recipe.data
    writer = Writer(folder)
    if data.streaming:
        begins = [_hold_out(number, origin, settings, encoder, writer) for number, origin in enumerate(found)]
        writer.close()
        (folder / META).write_text(json.dumps({"format": FORMAT, "begins": begins}))
        return
    train: list[np.ndarray] = []
    heldout: list[np.ndarray] = []
    dropped: list[np.ndarray] = []
    sizes: list[float] = []
    by_size = len(found) > 1 and any(origin.weight is None for origin in found)
    for number, origin in enumerate(found):
        share = 0.0 if origin.heldout else data.validation_split
        limit = data.max_train_samples and data.max_train_samples + (
            0 if origin.heldout else data.max_eval_samples or round(data.max_train_samples * share / (1 - share)) + 1
        )
        if by_size and origin.train.size is None:  # nothing but its end tells
            limit = None
        rows, lost, size = _encode_all(origin.train, origin.columns, settings, encoder, writer, limit)
        if origin.heldout:
            held, *_ = _encode_all(origin.heldout, origin.columns, settings, encoder, writer, data.max_eval_samples)
        else:
            rows, held = mixing.split(rows, writer.rows()[rows], share, data.max_eval_samples)
            if len(rows) and not len(held):
                raise UserError(
                    origin.train.place,
                    "one row alone: nothing is left to hold out",
                    "give a validation_file, more rows, or a higher max_train_samples if it is set",
                )
        for name, ids in (("training", rows), ("held-out", held)):
            if not len(ids):
                raise UserError(
                    (origin.heldout or origin.train).place if name == "held-out" else origin.train.place,
                    f"it yields no {name} samples with a supervised token within {data.max_length} tokens",
                    "check that it has rows with answers, or raise max_length or the number of samples",
                )
        train.append(rows)
        dropped.append(lost)
        sizes.append(size)
        heldout.append(held[: data.max_eval_samples])
        writer.split(f"heldout-{number}", [[int(i)] for i in heldout[-1]])
    weights, seed = [origin.weight for origin in found], settings.recipe.training.seed
    chosen = mixing.mix(train, weights, sizes, seed, data.max_train_samples)
    lengths = writer.lengths()
    if data.packing:
        sequences = [[int(chosen[i]) for i in row] for row in packing.best_fit(lengths[chosen], data.max_length)]
    else:
        sequences = [[int(i)] for i in chosen]
    writer.split("train", sequences)
    used = [chosen[np.isin(chosen, rows)] for rows in train]
    beside = [mixing.beside(part, rows, lost) for part, rows, lost in zip(used, train, dropped, strict=True)]
    facts = writer.facts(chosen, np.concatenate(beside)) | {
        "format": FORMAT,
        "sequences": len(sequences),
        "by_source": [len(part) for part in used],
        "shared": writer.shared(np.concatenate(heldout), chosen),
    }
    writer.close()
    (folder / META).write_text(json.dumps(facts))  # last: its presence says that the rest is whole


def _hold_out(number: int, origin: sources.Origin, settings: Settings, encoder: encode.Encoder, writer: Writer) -> Any:
    """Store a stream's held-out samples: its own split, or its first samples. Returns where training begins."""
    wanted = settings.recipe.data.max_eval_samples or stream.HELD_OUT
    rows, first, cursor, begins = origin.heldout or origin.train, writer.samples, None, None
    for part in encoded(rows, origin.columns, encoder, 1, wanted):
        missing = first + wanted - writer.samples
        writer.add(part)
        if missing <= len(part.lengths):
            begins = stream.behind(cursor, part, missing)
            break
        cursor = begins = part.after
    if writer.samples == first:
        raise UserError(
            rows.place,
            "it yields no samples with a supervised token",
            "check that it has rows with answers, or raise max_length",
        )
    if not origin.heldout and next(stream.read(origin, encode.Machine(encoder), begins), None) is None:
        raise UserError(
            rows.place,
            f"nothing is left to train on besides {writer.samples - first} samples that are held out",
            "set max_eval_samples lower, or name a validation_file",
        )
    writer.split(f"heldout-{number}", [[i] for i in range(first, min(writer.samples, first + wanted))])
    return None if origin.heldout else begins


def _encode_all(
    rows: Rows, columns: dict[str, str], settings: Settings, encoder: encode.Encoder, writer: Writer, limit: int | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Encode and store up to `limit` samples; returns their numbers in the store, of each row that was dropped the number
    of the next sample and its fate, and how many samples the whole split has, from the part of it that was read."""
    first, read = writer.samples, 0
    dropped: list[np.ndarray] = []
    some = False
    unit = "B" if hasattr(rows, "paths") else "rows"
    with console.bar(rows.size, f"tokenising {Path(rows.place).name}", unit) as bar:
        for part in encoded(rows, columns, encoder, settings.recipe.data.dataset_num_proc, limit):
            some = some or part.rows > 0
            dropped.append(part.dropped + np.array([writer.samples, 0]))
            writer.add(part)
            bar.update(part.size)
            read += part.size
            if limit and writer.samples - first >= limit:
                break
    if not some:
        raise UserError(rows.place, "the file is empty", 'write one sample a line: {"messages": [...]}')
    size = (writer.samples - first) * ((rows.size or read) / read)
    numbers, lost = np.arange(first, writer.samples)[:limit], np.concatenate(dropped)
    if first + len(numbers) < writer.samples:  # the rest of the last chunk is not used
        lost = lost[lost[:, 0] <= numbers[-1]]
    return numbers, lost, size


def encoded(
    rows: Rows,
    columns: dict[str, str],
    encoder: encode.Encoder,
    processes: int | None = None,
    limit: int | None = None,
    cursor: Any = None,
) -> Iterator[encode.Encoded]:
    """The chunks of a split, tokenised in order. Small data is tokenised here, without further processes."""
    jobs = ((chunk, columns) for chunk in rows.chunks(cursor))
    processes = processes or min(os.cpu_count() or 1, 16)
    first = [job for _, job in zip(range(2), jobs, strict=False)]
    parts: Iterator[encode.Encoded]
    if len(first) < 2 or processes == 1 or (limit and limit <= 2000):
        machine = encode.Machine(encoder)
        parts = (machine.encode(*job) for job in itertools.chain(first, jobs))
    else:
        parts = workers.encoded(itertools.chain(first, jobs), encoder, processes, rows.place)
    return _usable(parts, encoder.skip_bad_rows, limit)


def _usable(parts: Iterator[encode.Encoded], skip: bool, limit: int | None) -> Iterator[encode.Encoded]:
    """The parts, the first bad rows of which are listed. Raises UserError for such, after a look at what follows, unless
    they are to be skipped."""
    told: list[UserError] = []
    count = samples = 0
    for part in parts:
        count, samples = count + len(part.bad), samples + len(part.lengths)
        errors = part.errors(LISTED - len(told))
        told += errors
        if skip:
            for error in errors:
                tqdm.write(f"skipped: {error.place}: {error.problem}", file=sys.stderr)
        elif count and (count >= MANY or (limit and samples >= limit)):
            break
        if skip or not count:
            yield replace(part, bad=[], chunk=None)
    if told and not skip:
        if count > 1:
            said = [f"{error.place}: {error.problem}" for error in told]
            more = f"... and {count - len(told):,} more" if count > len(told) else ""
            tqdm.write("\n".join([*said, more]).rstrip(), file=sys.stderr)
        raise encode.refusal(told[0], count, at_least=count >= MANY)
