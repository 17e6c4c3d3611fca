"""What a run is about to train on: in figures, and as one sample whose supervised part is marked."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...errors.console import console, counted, marking
from ...errors.tables import Document, Fields
from ..recipe.batch import Batch
from ..recipe.data_section import DataSection
from ..recipe.objectives import objective_of
from ..recipe.training_section import TrainingSection
from .encoded import MOST_LOST
from .kinds import KINDS
from .marks import SAID
from .prepare import Prepared
from .store import IGNORED, Samples, TokenSequence

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

LONGEST = 700  # characters of a sample that is shown whole
# Of a longer one: its beginning, and characters before and behind where the first learned part begins and the last one ends.
BEGINNING, AROUND_BEGIN, AROUND_END = 150, (100, 200), (200, 50)
REPEATED = 8  # tokens of one kind, one behind the other, that are shown as one
MOST_UNREAD = 12  # keys that are named
FEW = 20  # samples whose mean loss is hardly another set's


def figures(
    prepared: Prepared, data: DataSection, training: TrainingSection, batch: Batch, squares: bool = False
) -> str:
    """Return in words: samples and tokens, shares of supervised tokens and of padding, what was cut or dropped.

    squares: as of Collate
    """
    facts, kind = prepared.facts, KINDS[objective_of(training).rows]
    held = sum(map(len, prepared.heldout.values()))
    if not isinstance(prepared.train, Samples):
        return f"streamed, {held:,} held-out samples" + (", packed" if data.packing else "")
    words = [
        f"{facts['samples']:,} training and {held:,} held-out {kind.called}",
        *kind.words(facts),
        tokens(facts),
        *([f"weights from {facts['weights'][0]:g} to {facts['weights'][1]:g}"] if "weights" in facts else []),
        *([f"{facts['images']:,} images in {facts['with_images']:,} of them"] if "images" in facts else []),
    ]
    stored = sum(samples.stored for samples in prepared.heldout.values())
    if held < stored:
        words.insert(1, f"spread evenly over the {stored:,} that are held out (max_eval_samples: null evaluates all)")
    if len(facts["by_source"]) > 1:
        counts = zip(facts["by_source"], prepared.heldout, strict=True)
        words.append(" + ".join(f"{count:,} {name}" for count, name in counts))
    return ", ".join(
        [
            *words,
            *shapes(facts, data, padding(prepared.train, training, batch, squares=squares), kind.samples),
            *losses(facts),
        ]
    )


def lines(prepared: Prepared) -> dict[str, str]:
    """Return what else is said of a run's data, by what it is about; {} where there is nothing to say."""
    about = {
        "chat template": chat_template(prepared),
        "lost": lost(prepared.facts),
        "held out": few(sum(map(len, prepared.heldout.values()))),
        "not read": unread(prepared.facts),
        "answers": said(prepared.facts),
    }
    return {name: words for name, words in about.items() if words}


def chat_template(prepared: Prepared) -> str:
    """Return which chat template stands in for a tokenizer's own without generation marks, or that its own is rendered turn by
    turn; "" where it has marks, or the recipe names one."""
    how, words = prepared.chat_format, []
    if how.stands_in:
        words.append(
            f"Brigade's {how.stands_in} for the tokenizer's own, which renders the same without generation marks"
        )
        if how.own_refuses:
            words[-1] += (
                f", but refuses a {how.own_refuses} turn: a chat that has one is served by {how.stands_in} only"
            )
    if how.turn_by_turn:
        words.append("the tokenizer's own, rendered turn by turn where it has no generation marks")
    return ", and for chats with tools ".join(words)


def lost(facts: Document) -> str:
    """Return a warning where more than MOST_LOST of the samples that there were teach nothing; else ""."""
    gone = facts.get("dropped", 0)
    share = gone / max(1, gone + facts.get("samples", 0))
    if share <= MOST_LOST:
        return ""
    why = "their supervised part lies beyond max_length, or they have none"
    enough = facts.get("enough")
    cure = f"{f'max_length {enough}' if enough else 'no max_length'} keeps {1 - MOST_LOST:.0%} of them"
    return f"{share:.0%} of the samples ({gone:,}) are dropped: {why}; {cure}"


def few(held: int) -> str:
    """Return a warning where few samples are held out; else ""."""
    if not 0 < held < FEW:
        return ""
    return f"{counted(held, 'sample')} only: their loss says little of others. Hold out {FEW} or more"


def unread(facts: Document) -> str:
    """Return which columns and keys nobody read, each with the number of rows where it holds something; "" where there is
    none."""
    names = [entry for entry in _counted(facts) if entry[0] not in SAID]
    words = [f"{name} ({count:,} row{'s' * (count > 1)})" for name, count in names[:MOST_UNREAD]]
    return ", ".join([*words, *[f"and {len(names) - MOST_UNREAD:,} more"] * (len(names) > MOST_UNREAD)])


def said(facts: Document) -> str:
    """Return which parts of answers have no loss, or begin differently than in serving, each with the number of rows; "" where
    there are none."""
    return "; ".join(f"{words} ({count:,} row{'s' * (count > 1)})" for words, count in _counted(facts) if words in SAID)


def _counted(facts: Document) -> list[tuple[str, int]]:
    return sorted(facts.get("unread", {}).items(), key=lambda entry: (-entry[1], entry[0]))


def tokens(facts: Document) -> str:
    """The number of tokens and the supervised share, in words."""
    return f"{facts['tokens']:,} tokens, {facts['supervised'] / facts['tokens']:.0%} supervised"


def shapes(facts: Document, data: DataSection, filler: float, samples: int = 1) -> list[str]:
    """How full packed sequences are, and how much is padding, in words. samples: of an item, for which there is room"""
    full = facts["tokens"] / (facts["sequences"] * samples * data.max_length)
    packed = [f"packed into {facts['sequences']:,} sequences, {full:.1%} full"] if data.packing else []
    return [*packed, f"{filler:.0%} padding"]


def losses(facts: Document) -> list[str]:
    """How many samples were cut, split or dropped, in words."""
    words = {
        "cut": "longer than max_length cut",
        "split": "longer texts split into several samples",
        "dropped": "without a supervised token dropped",
        "empty": "empty texts skipped",
        "skipped": "rows that cannot be used skipped (skip_bad_rows)",
        "thoughts": "answers whose thoughts are removed (thinking: cut)",
        "plain": "control tokens spelled out in questions, read as plain text",
        "control": "control tokens spelled out in answers or texts, which stay control tokens (a text's first and last are not "
        "added again)",
        "joined": "pairs of prompt and completion joined as they are, for no chat template is set",
        "scaled": "images scaled by max_pixels or min_pixels, which the model's processor does not do by itself: whoever serves "
        "the model has to",
        "shared": "held-out samples that are trained on, too",
        "weightless": "samples of weight 0, which teach nothing and take time",
        "unlike": "pairs whose answers do not begin at the same token, for their prompts are not rendered alike",
    }
    return [f"{facts[key]:,} {text}" for key, text in words.items() if facts.get(key)]


def padding(
    sequences: Samples,
    training: TrainingSection,
    batch: Batch,
    shuffled: bool = False,
    squares: bool = False,
) -> float:
    """Return the share of padding in what will be computed: none end to end, else that of the first epoch's first 200 steps.

    shuffled: whether the sequences are in their order already
    """
    if training.padding_free and not squares:
        return 0.0
    from .collate import wasteful  # it loads torch

    count = len(sequences)
    order = np.arange(count) if shuffled else np.random.default_rng((training.seed, 0)).permutation(count)
    lengths = sequences.lengths()[order[: 200 * batch.global_size]]
    micro = [lengths[i : i + batch.micro] for i in range(0, len(lengths), batch.micro)]
    flat = [training.padding_free and not wasteful(part.tolist()) for part in micro]
    slots = (part.sum() if end_to_end else len(part) * part.max() for part, end_to_end in zip(micro, flat, strict=True))
    return 1 - lengths.sum() / sum(slots)


def window_figures(
    samples: Samples,
    facts: Fields,
    data: DataSection,
    training: TrainingSection,
    batch: Batch,
    whole: bool,
    squares: bool = False,
) -> str:
    """Return the figures of a stream's window; unless `whole`, only what was cut or dropped, and "" where nothing was."""
    words = losses(facts if whole else facts | {"joined": 0})
    if whole:
        filler = padding(samples, training, batch, shuffled=True, squares=squares)
        words = [f"{facts['samples']:,} training samples, {tokens(facts)}", *shapes(facts, data, filler), *words]
        words += [f"no row has a column {name!r}, which data.columns names" for name in facts.get("absent", ())]
        for title, names in ("not read", unread(facts)), ("answers", said(facts)):
            words += [f"{title}: {names}"] if names else []
    called = "first window" if facts["number"] == 0 else f"window {facts['number'] + 1}"
    return f"{called} of the stream: {', '.join(words)}" if words else ""


def first(prepared: Prepared) -> TokenSequence:
    """Return the first sequence; of a stream, which begins with training, the first that is held out."""
    return next(iter(prepared.heldout.values()))[0] if prepared.train.streamed else prepared.train[0]


def show_sample(prepared: Prepared, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Print the first sample, or both of the first pair, under a heading, its lines unchanged: a terminal folds those that are
    too long."""
    out = console()
    kind = next(iter(prepared.heldout.values())).kind
    for number, heading in enumerate(kind.headings(first(prepared))):
        out.print(f"{heading}, its supervised part {marking(out)}:")
        out.print(sample(prepared, tokenizer, brackets=out.color_system is None, number=number), soft_wrap=True)


def _decoded(ids: np.ndarray, tokenizer: "PreTrainedTokenizerBase", images: bool) -> Iterator[str]:
    """Yield the text of token ids. With images, a token that stands there many times, as theirs do, is written once."""
    borders = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    runs = [(a, b) for a, b in itertools.pairwise(borders) if b - a >= REPEATED] if images else []
    done = 0
    for begin, stop in runs:
        yield f"{tokenizer.decode(ids[done : begin + 1])} (x {stop - begin:,}) "
        done = stop
    yield tokenizer.decode(ids[done:])


def sample(prepared: Prepared, tokenizer: "PreTrainedTokenizerBase", brackets: bool = True, number: int = 0) -> "Text":
    """Return a sample of the first sequence decoded, its supervised part green and underlined, or in brackets; a long one without
    what lies between its beginning and the ends of what is learned."""
    from rich.text import Text

    sequence = first(prepared)
    place = slice(sum(sequence["lengths"][:number]), sum(sequence["lengths"][: number + 1]))
    ids, own = sequence["input_ids"][place], sequence["labels"][place] != IGNORED
    bounds = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), len(ids)]
    parts = [
        ("".join(_decoded(ids[begin:stop], tokenizer, "images" in sequence)), bool(own[begin]))
        for begin, stop in itertools.pairwise(bounds)
    ]
    text = Text()
    for part, learned in _cut(parts):
        text.append(f"[[{part}]]" if learned and brackets else part, style="green underline" if learned else "dim")
    return text


def _cut(parts: list[tuple[str, bool]]) -> Iterator[tuple[str, bool | None]]:
    """Yield the parts of a sample, each a text and whether it is learned; of a long one only its beginning, where the first
    learned part begins, and where the last one ends. (words, None) stands for what is left out between them."""
    ends = list(itertools.accumulate(len(text) for text, _ in parts))
    begins = [0, *ends[:-1]]
    spans = [span for *span, (_, learned) in zip(begins, ends, parts, strict=True) if learned]
    kept = [(0, ends[-1])]
    if ends[-1] > LONGEST and spans:
        first, last = spans[0][0], spans[-1][1]
        kept = [
            (0, BEGINNING),
            (first - AROUND_BEGIN[0], first + AROUND_BEGIN[1]),
            (last - AROUND_END[0], last + AROUND_END[1]),
        ]

    def inside(low: int, high: int) -> Iterator[tuple[str, bool]]:
        for begin, end, (text, learned) in zip(begins, ends, parts, strict=True):
            if piece := text[max(low - begin, 0) : max(high - begin, 0)] if begin < high and low < end else "":
                yield piece, learned

    done = 0
    for low, high in [*kept, (ends[-1], ends[-1])]:
        if low > done:
            lost = sum(len(text) for text, learned in inside(done, low) if learned)
            also = f", {lost:,} of them learned" if lost else ""
            yield f" ... ({low - done:,} characters left out{also}) ... ", None
        yield from inside(max(low, done), high)
        done = max(done, high)
