"""How a recipe's rows become tokens: its encoder, and the rows of a split, in order, the bad ones listed."""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tqdm import tqdm

from ..errors import UserError
from ..recipe.flags import Settings
from . import chat_template, encode, workers
from .rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LISTED, MANY = 10, 1000  # bad rows that are named; as many that no more are looked for


def encoder_of(settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> encode.Encoder:
    """How the recipe's rows become tokens."""
    data = settings.recipe.data
    if not tokenizer.is_fast:
        raise UserError(
            settings.place("tokenizer_name_or_path"),
            f"{type(tokenizer).__name__} is not one of the Rust tokenizers, so nothing says which tokens are whose",
            "name one with a tokenizer.json",
        )
    # How it was last called (padding, truncation) is part of its state, but of no sample.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    template, no_template, stands_in = chat_template.load(settings, tokenizer)
    return encode.Encoder(
        tokenizer=json.dumps(backend),
        template=template,
        no_template=no_template,
        variables={name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)},
        end=tokenizer.eos_token_id,
        max_length=data.max_length,
        truncation=data.truncation,
        stands_in=stands_in,
        skip_bad_rows=data.skip_bad_rows,
    )


def encoded(
    rows: Rows, columns: dict[str, str], encoder: encode.Encoder, processes: int | None = None, limit: int | None = None
) -> Iterator[encode.Encoded]:
    """The chunks of a split, tokenised in order. Small data is tokenised here, without further processes.

    The first bad rows are listed. Raises UserError for such, after a look at what follows, unless they are to be skipped.
    """
    unread = ((chunk, columns) for chunk in rows.chunks())
    processes = processes or min(os.cpu_count() or 1, 16)
    first = list(itertools.islice(unread, 2))
    jobs = itertools.chain(first, unread)
    parts: Iterator[encode.Encoded]
    if len(first) < 2 or processes == 1 or (limit and limit <= 2000):
        parts = itertools.starmap(encode.LoadedEncoder(encoder).encode, jobs)
    else:
        parts = workers.encoded(jobs, encoder, processes, rows.place)
    skip, listed = encoder.skip_bad_rows, list[UserError]()
    count = samples = 0
    for part in parts:
        count, samples = count + len(part.bad), samples + len(part.samples)
        errors = part.errors(LISTED - len(listed))
        listed += errors
        if skip:
            for error in errors:
                tqdm.write(f"skipped: {error.place}: {error.problem}", file=sys.stderr)
        elif count and (count >= MANY or (limit and samples >= limit)):
            break
        if skip or not count:
            yield replace(part, bad=[])
    if listed and not skip:
        if count > 1:
            lines = [f"{error.place}: {error.problem}" for error in listed]
            lines += [f"... and {count - len(listed):,} more"] if count > len(listed) else []
            tqdm.write("\n".join(lines), file=sys.stderr)
        raise encode.refusal(listed[0], count, at_least=count >= MANY)
