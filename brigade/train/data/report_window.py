"""What a window of a stream holds, in figures."""

from typing import Any

from ..recipe.batch import Batch
from ..recipe.schema import DataSection, TrainingSection
from .report import losses, padding, shapes, tokens, unread
from .store import Samples


def window(
    samples: Samples,
    facts: dict[str, Any],
    data: DataSection,
    training: TrainingSection,
    batch: Batch,
    whole: bool,
    squares: bool = False,
) -> str:
    """The figures of a stream's window; if not the whole of them what was cut or dropped, "" if nothing was."""
    words = losses(facts if whole else facts | {"joined": 0})
    if whole:
        filler = padding(samples, training, batch, shuffled=True, squares=squares)
        words = [f"{facts['samples']:,} training samples, {tokens(facts)}", *shapes(facts, data, filler), *words]
        words += [f"no row has a column {name!r}, which data.columns names" for name in facts.get("absent", ())]
        words += [f"not read: {names}" for names in [unread(facts)] if names]
    called = "first window" if facts["number"] == 0 else f"window {facts['number'] + 1}"
    return f"{called} of the stream: {', '.join(words)}" if words else ""
