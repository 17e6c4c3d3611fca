"""How a recipe's rows become tokens: its encoder, and a split tokenised in order, with its bad rows listed."""

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tqdm import tqdm

from ...errors import UserError
from ..host import control_groups
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from . import chat_template, encode, tokenizer_trial, workers
from .encoded import Encoded, refusal
from .images import ImageProcessor, ImageRules
from .keys import Columns
from .rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST = 64  # processes: more of them wait for the one that writes what they make
LISTED, MANY = 10, 1000  # reasons that are named; bad rows after which no more are looked for


def encoder_of(
    settings: Settings, tokenizer: "PreTrainedTokenizerBase", images: ImageProcessor | None = None
) -> encode.Encoder:
    """Return how the recipe's rows become tokens. images: the model's processor, of a recipe with data.images. Raises UserError
    for a tokenizer that is not a Rust one."""
    data = settings.recipe.data
    if data.images and images is None:
        raise ValueError("a recipe with data.images needs the model's processor")
    if not tokenizer.is_fast:
        raise UserError(
            settings.place("tokenizer_name_or_path"),
            f"{type(tokenizer).__name__} is not one of the Rust tokenizers, so nothing says which tokens are whose",
            "name one with a tokenizer.json",
        )
    own = images is not None and images.scales  # then the limits are the processor's own settings
    limits = (None, None) if own else (data.max_pixels, data.min_pixels)
    # How it was last called (padding, truncation) is a part of its state, but not of any sample's.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    model, templates = settings.recipe.model, chat_template.load(settings, tokenizer)
    # What a template writes, or ends a text, is nobody's to spell out, even where the recipe has added it.
    variables = {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    written = " ".join([templates.template, templates.with_tools, *variables.values()])
    own_tokens = tuple(token for token in model.add_tokens + model.add_special_tokens if token not in written)
    return encode.Encoder(
        tokenizer=json.dumps(backend),
        templates=templates,
        variables=variables,
        end=tokenizer.eos_token_id,
        max_length=data.max_length,
        truncation=data.truncation,
        skip_bad_rows=data.skip_bad_rows,
        train_on_last_turn_only=data.train_on_last_turn_only,
        thinking=data.thinking,
        rows=objective_of(settings.recipe.training).rows,
        images=images if data.images else None,
        image_rules=ImageRules(*limits, data.fetch_images),
        own_tokens=own_tokens,
    )


def encoded(
    rows: Rows,
    columns: Columns,
    encoder: encode.Encoder,
    processes: int | None = None,
    limit: int | None = None,
    folder: str | None = None,
) -> Iterator[Encoded]:
    """Yield the chunks of a split, tokenised, in order, by as many processes as this one may use cores unless told otherwise.
    Small data is tokenised here, without further processes. The result is the same either way.

    folder: Source.image_folder

    Bad rows are listed by their reasons. Unless they are to be skipped, raises UserError for them, after a look at what follows.
    """
    others = ((chunk, columns, folder) for chunk in rows.chunks())
    processes = processes or min(int(control_groups.cores()) or 1, MOST)
    first = list(itertools.islice(others, 2))
    jobs = itertools.chain(first, others)
    parts: Iterator[Encoded]
    loaded = encode.LoadedEncoder(encoder)
    if first:
        tokenizer_trial.check_rows(loaded.tokenizer, first[0][0])
    if len(first) < 2 or processes == 1 or (limit and limit <= 2000):
        parts = itertools.starmap(loaded.encode, jobs)
    else:
        chunks = -(-rows.size // first[0][0].size) if rows.size else processes  # about: they are equally large
        parts = workers.encoded(jobs, loaded, min(processes, max(chunks, 2)), rows.place)
    skip, reasons = encoder.skip_bad_rows, Reasons()
    rows_read = samples = 0
    for part in parts:
        samples, rows_read = samples + len(part.samples), rows_read + len(part.samples) + len(part.dropped)
        for error in reasons.add(part):
            if skip:
                tqdm.write(f"skipped: {error.place}: {error.problem}", file=sys.stderr)
        if not skip and reasons.count and (reasons.count >= MANY or (limit and samples >= limit)):
            break
        if skip or not reasons.count:
            yield replace(part, bad=[])
    if reasons.count and not skip:
        if reasons.count > 1:
            tqdm.write("\n".join(reasons.lines(whole=rows_read == reasons.count)), file=sys.stderr)
        raise refusal(reasons.first[0], reasons.count, at_least=reasons.count >= MANY)


class Reasons:
    """Why rows cannot be used: for each of the first LISTED reasons its first row, and how many rows have it."""

    def __init__(self) -> None:
        self.first: list[UserError] = []
        self.counts: dict[str, int] = {}
        self.count = 0

    def add(self, part: Encoded) -> list[UserError]:
        """Take in the bad rows of a chunk. Returns the errors whose reason is new and is listed."""
        new = []
        for number, error in part.bad:
            problem = str(error.args[0])
            if problem not in self.counts and len(self.first) < LISTED:
                new.append(part.error(number, error))
                self.first.append(new[-1])
                self.counts[problem] = 0
            if problem in self.counts:
                self.counts[problem] += 1
        self.count += len(part.bad)
        return new

    def lines(self, whole: bool) -> Iterator[str]:
        """Yield a line for each reason. whole: whether all rows that were read are bad"""
        if whole and len(self.counts) == 1 and self.counts[self.first[0].problem] == self.count:
            yield f"all {self.count:,} rows from {self.first[0].place} on: {self.first[0].problem}"
            return
        for error in self.first:
            same = self.counts[error.problem] - 1
            yield f"{error.place}: {error.problem}" + (
                f" (and {same:,} more such row{'s' * (same > 1)})" if same else ""
            )
        others = self.count - sum(self.counts.values())
        if others:
            yield f"... and {others:,} more"
