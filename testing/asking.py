"""One rank of a run that keeps its teacher's words: it leaves how many tokens its teacher was asked for.

run_ranks("testing.asking", FOLDER, *FLAGS, ...) writes FOLDER/asked-RANK.
"""

import os
import sys
from pathlib import Path

import numpy as np

import train
from brigade.train.data.store import MicroBatch
from brigade.train.distributed import ranks
from brigade.train.loss.distillation import Distillation


def main() -> None:
    sound, asked = Distillation._look, list[int]()

    def look(self: Distillation, inputs: MicroBatch) -> np.ndarray:
        rows = sound(self, inputs)
        asked.append(len(rows))
        return rows

    Distillation._look = look  # type: ignore[method-assign]
    train.main(sys.argv[2:])
    Path(sys.argv[1], f"asked-{os.environ['RANK']}").write_text(str(sum(asked)))


if __name__ == "__main__":
    ranks.run_to_the_end(main)
