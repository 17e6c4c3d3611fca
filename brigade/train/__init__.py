"""All that a run needs. It imports nothing of the rooms around it but brigade/errors.

For programs of one's own: `from brigade import train`, then train.main(...) (docs/extending.md).
"""

import functools  # not its cache(): that is a module here
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from .step.trainer import Trainer


def main(argv: Sequence[object] | None = None, callbacks: Sequence["TrainerCallback"] = ()) -> "Trainer | None":
    """Train one run, as `python train.py ARGV` does: on this process, or on the ranks that a launcher started.

    Return its Trainer: `state.log_history` has what was logged, `model` is the trained model. None: the run had finished before.

    argv: the words after train.py; None: those of this process
    callbacks: further ones, which Transformers calls on every rank; neither a run's identity nor its rehearsal knows of them

    Several runs may follow each other in one process, each with an --output_dir of its own; all ranks then call main() equally
    often, with the same words. Raise SystemExit(2) on all ranks for a user's mistake that any of them finds, after one has told
    it. An error once the model is being built ends this process, after it is told: its launcher stops the other ranks.
    """
    words = None if argv is None else [str(word) for word in argv]
    return _story().main(words, tuple(callbacks))  # type: ignore[no-any-return]


@functools.cache
def _story() -> ModuleType:
    """Return train.py, which tells the story of a run and stands beside the package."""
    from .recipe.files import REPOSITORY  # not above: every module of the hall passes by here

    spec = importlib.util.spec_from_file_location("brigade_story", REPOSITORY / "train.py")
    assert spec and spec.loader
    story = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(story)
    return story
