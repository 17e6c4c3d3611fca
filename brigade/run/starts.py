"""How often a job that its scheduler starts again has begun at the same step: one that gets no further must not come back for
ever, as it does where its steps, or its checkpoints, take longer than it has time."""

import json
import os
from contextlib import suppress
from pathlib import Path

from ..errors import UserError

JOB = "BRIGADE_JOB"  # set by the files of `launch --write`: what is the same at each start of one job, and no other's
FILE = ".starts"  # {"job", "step", "starts"}, in the output directory
MOST = 3  # starts of a job from one step


def count(directory: Path, step: int) -> None:
    """Count this start, of a run that has checkpoints up to `step`. Nothing is counted of what a person starts.

    Raises UserError when the job was started MOST times already, and did not get beyond that step.
    """
    if not (job := os.environ.get(JOB)):
        return
    before, now = {}, {"job": job, "step": step}
    with suppress(OSError, ValueError):
        before = json.loads((directory / FILE).read_text())
    starts = before["starts"] + 1 if before == before | now else 1
    if starts > MOST:
        problem = f"this job was started {MOST} times from step {step}, and never came to its next checkpoint"
        cure = "give it more time or a smaller --save_steps, see in its log what ended it, and hand it in as a new job"
        raise UserError(str(directory), problem, cure)
    with suppress(OSError):  # whoever trains here says that it cannot be written
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_text(json.dumps(now | {"starts": starts}))
