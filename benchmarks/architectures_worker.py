"""The ranks of benchmarks/architectures.py: run_ranks(this, JOB) trains cases until one kills its process, and tells of each.

JOB is a JSON file: {"folder": where models lie, "results": a directory, "cases": [{"name", "flags"}]}. Of each case rank 0
writes NAME.result.json there: {"log": the Trainer's log history, "said": what it printed} of a run that went well, {"refused":
what it printed} of one that train.py refused before it began.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from testing.runs import forget


class _Both(io.StringIO):
    """Keeps what is written, and hands it on: the last words of a process that dies."""

    def write(self, text: str) -> int:
        assert sys.__stderr__
        sys.__stderr__.write(text)
        return super().write(text)


def work(job: Path) -> None:
    """Train each case in order; what fails in the middle ends all ranks, and leaves no result."""
    import train
    from brigade.train.distributed import ranks

    todo = json.loads(job.read_text())
    os.chdir(todo["folder"])
    rank, size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
    for case in todo["cases"]:
        os.environ.update(LOCAL_WORLD_SIZE=size, LOCAL_RANK=str(rank))
        said, trainer = _Both(), None
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                trainer = train.main(case["flags"])
            result = {"log": trainer.state.log_history if trainer else [], "said": said.getvalue()}
        except SystemExit:
            result = {"refused": said.getvalue()}
        if rank == 0:
            Path(todo["results"], f"{case['name']}.result.json").write_text(json.dumps(result))
        forget(trainer)
        del trainer
        ranks.whole_again()


if __name__ == "__main__":
    from brigade.train.distributed.ranks import run_to_the_end

    run_to_the_end(lambda: work(Path(sys.argv[1])))
