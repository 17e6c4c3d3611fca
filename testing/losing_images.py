"""Worker of test_images_lost.py: train.py, of whose images one is another file, or none any more, once training begins.

BRIGADE_TEST_LOST: the file, and behind a = what it holds from then on; without, it is gone.
"""

import os
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

import train
from brigade.train.distributed import ranks


class Loses(TrainerCallback):
    """After the evaluation before the first step, and before the first row that is trained on is read."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if os.environ["RANK"] == "0":
            file, another, content = os.environ["BRIGADE_TEST_LOST"].partition("=")
            Path(file).unlink()
            if another:
                Path(file).write_text(content)


if __name__ == "__main__":
    ranks.run_to_the_end(lambda: train.main(sys.argv[1:], callbacks=(Loses(),)))
