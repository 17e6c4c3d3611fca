"""What a window of a stream holds, in figures."""

from ..recipe.batch import Batch
from ..recipe.schema import DataSection, TrainingSection
from .report import losses, padding, shapes, tokens
from .store import Samples


def window(
    samples: Samples,
    facts: dict[str, int],
    data: DataSection,
    training: TrainingSection,
    batch: Batch,
    whole: bool,
    squares: bool = False,
) -> str:
    """The figures of a stream's window; if not the whole of them what was cut or dropped, "" if nothing was."""
    words = losses(facts)
    if whole:
        filler = padding(samples, training, batch, shuffled=True, squares=squares)
        words = [f"{facts['samples']:,} training samples, {tokens(facts)}", *shapes(facts, data, filler), *words]
    called = "first window" if facts["number"] == 0 else f"window {facts['number'] + 1}"
    return f"{called} of the stream: {', '.join(words)}" if words else ""
