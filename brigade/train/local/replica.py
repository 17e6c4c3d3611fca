"""What a Trainer asks of the replica that it trains."""

from collections.abc import Callable

from ..data.sampling import GlobalBatches
from ..engines.engine import StepContext
from ..run.hooks import Feature


class Replica(Feature):
    """The only one of its run: each step is common to all ranks. LocalSteps is one of several.

    own: whether the checkpoint that it continues from is this replica's
    of_others: tokens that this rank's peers in other replicas have trained on
    """

    own = True
    of_others = 0

    def __init__(self, trainer: StepContext) -> None:
        self.trainer = trainer

    @property
    def speaks(self) -> bool:
        """Whether this replica saves and tells what all have in common."""
        return True

    @property
    def samples(self) -> int:
        """How many samples all replicas together have trained on."""
        return self.trainer.state.global_step * self.trainer.run.batch.global_size

    def batches(self) -> Callable[..., GlobalBatches]:
        """Return what makes its batches."""
        return GlobalBatches

    def epochs(self, asked: int) -> int:
        """Return how many epochs Transformers is to begin where the recipe asks for so many."""
        return asked

    def summary(self) -> dict[str, str]:
        """Return further lines of the run's summary."""
        return {}
