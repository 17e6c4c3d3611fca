"""One rank of a run that keeps its teacher's words: it leaves how many tokens its teacher was asked for.

run_ranks("testing.asking", FOLDER, *FLAGS, ...) writes FOLDER/asked-RANK.
"""

import os
import sys
from pathlib import Path

import numpy as np

import train
from brigade.train.data.store import MicroBatch
from brigade.train.loss.distillation import Distillation


def main(folder: str, *flags: str) -> None:
    """Run train.py with these flags, and count."""
    sound, asked = Distillation._look, list[int]()

    def look(self: Distillation, inputs: MicroBatch) -> np.ndarray:
        rows = sound(self, inputs)
        asked.append(len(rows))
        return rows

    Distillation._look = look  # type: ignore[method-assign]
    try:
        train.main(list(flags))
    finally:
        Distillation._look = sound  # type: ignore[method-assign]
    Path(folder, f"asked-{os.environ['RANK']}").write_text(str(sum(asked)))


if __name__ == "__main__":
    main(*sys.argv[1:])
