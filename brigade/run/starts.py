"""How often a job that its scheduler starts again has begun at the same step: one that gets no further must not come back for
ever, as it does where its steps, or its checkpoints, take longer than it has time."""

import json
from contextlib import suppress
from pathlib import Path

from ..errors import UserError

MOST = 3  # starts of a job from one step


def count(file: Path, job: str, step: int) -> None:
    """Count this start of a job, of a run that has checkpoints up to `step`. The file: {"job", "step", "starts"}.

    Raises UserError when the job was started MOST times already, and did not get beyond that step.
    """
    before, now = {}, {"job": job, "step": step}
    with suppress(OSError, ValueError):
        before = json.loads(file.read_text())
    starts = before["starts"] + 1 if before == before | now else 1
    if starts > MOST:
        problem = f"this job was started {MOST} times from step {step}, and never came to its next checkpoint"
        cure = "give it more time or a smaller --save_steps, see in its log what ended it, and hand it in as a new job"
        raise UserError(str(file.parent), problem, cure)
    with suppress(OSError):  # whoever trains here says that it cannot be written
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(now | {"starts": starts}))
