"""What a run says of the windows of a stream as it reads them."""

from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from ..data import report
from ..data.collate import Collate
from ..data.stream import Stream
from ..run.directory import Run


class ShowWindows(TrainerCallback):
    """On the main rank: of the first window that this run reads all figures, of the others what was cut or dropped."""

    def __init__(self, run: Run, stream: Stream, collate: Collate) -> None:
        self.run, self.stream, self.collate, self.first = run, stream, collate, True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        recipe, batch, how = self.run.settings.recipe, self.run.batch, self.collate
        computed = recipe.training.model_copy(update={"padding_free": how.padding_free})
        row = state.global_step * batch.global_size
        for samples, facts in self.stream.entered(range(row, row + batch.global_size)):
            line = report.window_figures(samples, facts, recipe.data, computed, batch, self.first, how.squares)
            self.first = False
            if line:
                tqdm.write(line)
