"""Whether a run goes on from its checkpoint under another length: max_steps or num_train_epochs."""

import json
import math
from pathlib import Path

from ...errors import UserError
from ...errors.console import counted
from ..checkpoint import manifest
from ..recipe.batch import length
from ..recipe.files import another_output
from ..run.directory import Run
from ..run.success import SUCCESS
from .schedule import rate, run_length


def how_lengthened(run: Run, train_samples: int, checkpoint: Path | None) -> str:
    """How a run goes on from a checkpoint that a run of another length wrote, in words; "" where there is none, or the length
    is the same. Raise UserError where it cannot.

    A run can be lengthened at its end. Its order of samples does not depend on its length, but its learning rate may: a run that
    is lengthened midway would have the rates of two lengths, as no run of a single length does.
    """
    settings, here = run.settings, run.directory
    is_finished = run.resized and (here / SUCCESS).exists()
    if not checkpoint and not is_finished:
        return ""
    training, in_parts = settings.recipe.training, run_length(run, train_samples)
    place, steps = settings.place(length(training.model_dump())[0]), math.ceil(in_parts)
    further = f"train its model further as a run of its own: --model_name_or_path {here} and another --output_dir"
    if checkpoint is None:
        problem = "the finished run kept no checkpoint (save_steps), so it cannot be lengthened"
        raise UserError(str(here), problem, further)
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    done, before = state["global_step"], state["max_steps"]
    shares = manifest.recorded(checkpoint).get("shares")
    if shares:  # an elastic run: it has further steps for missed samples
        done, before = shares["begun"], shares["steps"]
    if steps == before:
        return ""
    if done < before:
        problem = f"cannot change the length of an unfinished run to {counted(steps, 'step')}: it is at step {done} of {before} "
        problem += f"({checkpoint.name}), with the learning rates of a run of {counted(before, 'step')}"
        begin = (
            "without --resume_from_checkpoint" if settings.resume_from_checkpoint else f"with {another_output(here)}"
        )
        cure = f"finish it with --max_steps {before}, then give it more; or begin a new run of {counted(steps, 'step')}, {begin}"
        if is_finished:
            early = json.loads((here / SUCCESS).read_text()).get("steps") == state["global_step"]
            why = "it stopped early" if early else "its last checkpoint is gone"
            problem, cure = f"{why}: {checkpoint.name} is at step {done} of {before}", further
        raise UserError(place, problem, cure)
    if steps <= done:
        cure = (
            f"a number above {done} lengthens it; for a shorter run name a directory of its own: {another_output(here)}"
        )
        raise UserError(place, f"it asks for {steps} steps, and the run in {here} has {done} already", cure)
    if not any(rate(run, in_parts, step) for step in range(done + 1, steps + 1)):
        cure = f"{further}, with a schedule of its own"
        raise UserError(settings.place("lr_scheduler_type"), f"from step {done} on its learning rate is 0", cure)
    old, new = rate(run, before, done), rate(run, in_parts, done + 1)
    return (
        f"from {before} to {steps} steps; the learning rate is from here on that of {training.lr_scheduler_type} over {steps} "
        f"steps: {new:.3g} at step {done + 1}, after {old:.3g} at step {done}"
    )
