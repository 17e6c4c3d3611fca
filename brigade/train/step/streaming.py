"""Training on a stream: its windows are opened, reached and kept in checkpoints, and shown as a run reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ..data import report
from ..distributed import ranks
from ..run.hooks import Feature
from .context import TrainingContext

if TYPE_CHECKING:
    from transformers import TrainerState


class Streaming(Feature):
    """The main rank shows all figures of the first window that this run reads, and what was cut or dropped in the others."""

    def __init__(self, trainer: TrainingContext) -> None:
        self.trainer, self.stream, self.first = trainer, trainer.data.train, True
        self.global_size = trainer.run.batch.global_size

    def before_wrapping(self, checkpoint: Path | None) -> None:
        run = self.trainer.run
        self.stream.open(run.world, checkpoint, run.directory, ranks.gather(os.getpid())[0])
        ranks.barrier()  # the others look for windows where the host's first rank makes them

    def before_step(self) -> None:
        self.stream.reach(self.trainer.state.global_step * self.global_size)

    def on_step_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        if not self.trainer.run.world.is_main_rank:
            return
        recipe, batch, how = self.trainer.run.settings.recipe, self.trainer.run.batch, self.trainer.collate.layout
        computed = recipe.training.model_copy(update={"padding_free": how.end_to_end})
        row = state.global_step * self.global_size
        for samples, facts in self.stream.entered(range(row, row + self.global_size)):
            line = report.window_figures(samples, facts, recipe.data, computed, batch, self.first, how.squares)
            self.first = False
            if line:
                tqdm.write(line)

    def write(self, folder: Path) -> None:
        """Write where the data goes on."""
        if self.trainer.args.should_save:
            self.stream.save(folder, self.trainer.state.global_step * self.global_size)
