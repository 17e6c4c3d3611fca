"""How often a job that its scheduler starts again has begun at the same step: one that gets no further must not come back for
ever, as it does where its steps, or its checkpoints, take longer than it has time."""

import json
import sys
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from ...errors.disk import writing
from ..host import files
from . import on_disk

FILE = ".starts"  # in the run's directory

MOST = 3  # starts of a job from one step


def count(file: Path, job: str, step: int) -> None:
    """Count this start of a job, of a run that has checkpoints up to `step`. The file: {"job", "step", "starts"}.

    Raise UserError when the job was started MOST times already, and did not get beyond that step; OSError where the file cannot
    be written.
    """
    before, now = {}, {"job": job, "step": step}
    with suppress(OSError, ValueError, RecursionError):
        before = json.loads(files.read(file))
    starts = before["starts"] + 1 if before == before | now else 1
    if starts > MOST:
        problem = f"this job was started {MOST} times from step {step}, and never came to its next checkpoint"
        cure = "give it more time or a smaller --save_steps, see in its log what ended it, and hand it in as a new job"
        raise UserError(str(file.parent), problem, cure)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write(file, json.dumps(now | {"starts": starts}))


def main(directory: Path, job: str) -> int:
    """Count a start of `job` before its ranks start, as Slurm's script does: it may get notice of its end before train.py can
    count. Return an exit code, 2 where the job gets no further or nothing can be counted."""
    try:
        with writing(directory):
            count(directory / FILE, job, max(on_disk.whole_checkpoints(directory), default=0))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2]))
