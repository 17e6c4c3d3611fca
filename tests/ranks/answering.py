"""Worker of test_answers.py: many runs in one process group, each leaving its directory and what it printed.

torchrun --nproc_per_node 2 -m tests.ranks.answering CASES.json, with {"folder": ..., "cases": {name: flags}}
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import train
from benchmarks import parity
from brigade.distributed import ranks
from brigade.training import sample_answers

LONGEST = 12  # tokens of an answer, else these are most of the time


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.chdir(job["folder"])
    sample_answers.LONGEST = LONGEST
    for name, flags in job["cases"].items():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            trainer = train.main([*flags, "--output_dir", name])
        if int(os.environ["RANK"]) == 0:
            Path(f"{name}.txt").write_text(said.getvalue())
        parity.forget(trainer)


if __name__ == "__main__":
    ranks.run_to_the_end(main)
