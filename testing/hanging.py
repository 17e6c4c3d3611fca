"""Worker of test_hanging.py: train.py, with rank 1 broken as BRIGADE_TEST_FAULT says (bad_input/sitecustomize.py)."""

import os
import runpy
import sys

import train
from brigade.train.distributed import ranks
from brigade.train.step import trainer

from .ranks import REPOSITORY


def main() -> None:
    breaks = runpy.run_path(str(REPOSITORY / "tests/ranks/bad_input/sitecustomize.py"))
    if os.environ["RANK"] == "1" and os.environ.get("BRIGADE_TEST_FAULT"):
        breaks["break_trainer"](trainer.Trainer)
    train.main(sys.argv[1:])


if __name__ == "__main__":
    ranks.run_to_the_end(main)
