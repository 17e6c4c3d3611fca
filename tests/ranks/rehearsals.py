"""Worker of test_rehearsal.py: many rehearsals in one process group, each result written as it comes.

torchrun --nproc_per_node 2 -m tests.ranks.rehearsals CASES.json, with {"folder": ..., "cases": {name: flags}}
"""

import contextlib
import gc
import io
import json
import os
import sys
from pathlib import Path

import train
from benchmarks.parity import LONGEST_ANSWER
from brigade.distributed import ranks
from brigade.training import sample_answers


def main() -> None:
    sample_answers.LONGEST = LONGEST_ANSWER
    job = json.loads(Path(sys.argv[1]).read_text())
    os.chdir(job["folder"])  # rehearsals lie in outputs/ of the current directory
    for name, flags in job["cases"].items():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            train.main([*flags, "--rehearse"])
        if int(os.environ["RANK"]) == 0:
            Path(f"{name}.txt").write_text(said.getvalue())
        gc.collect()  # a ZeRO-3 configuration that is still alive would shard the next case's model


if __name__ == "__main__":
    ranks.run_to_the_end(main)
