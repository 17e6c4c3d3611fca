"""A run's end: the marker that means success, and what is said then."""

import json
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ..distributed import ranks, stop, tell
from ..distributed.process import this_process
from ..host import files
from ..recipe.batch import length
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from . import best_checkpoint, events, on_disk, page
from .directory import RECORD, REHEARSAL, STOPPED, Run, release
from .success import SUCCESS, of_model
from .versions import now

if TYPE_CHECKING:
    from transformers import TrainerState


def succeed(run: Run, state: "TrainerState", held_out_loss: float) -> None:
    """Write the marker that means success, on one rank, and say where everything lies. The very last thing in a run."""
    if not run.world.is_main_rank:
        release(run)
        return
    run.check_directory()
    before = next((entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry), None)
    figures = {
        "identity": run.identity,
        "finished": now(),
        "steps": state.global_step,
        "saved_step": best_checkpoint.saved_step(run.settings, state),
        "held_out_loss_before": before,
        "held_out_loss": held_out_loss,
    }
    elastic = run.peers is not None and run.peers.elastic
    if elastic:
        figures["saved_by_replica"] = run.peers.members[0]
    marker = figures | of_model(run.directory)
    files.write(run.directory / SUCCESS, json.dumps(marker, indent=2) + "\n")
    events.add(run.directory, "end", **figures)
    release(run)
    this_process.agent.note(marker=True)
    if elastic and not run.peers.speaks:
        return
    run.pages.end()
    written = run.settings.recipe.training.report_page and page.write(run.directory)
    print(*best_checkpoint.closing_lines(run.settings, state, before, held_out_loss), sep="\n")
    where = f"The model lies in {run.directory}, its log in {run.directory / on_disk.STATE}, "
    print(f"{where}the resolved run in {run.directory / RECORD}.")
    if run.settings.recipe_path.name != REHEARSAL:
        print(*next_steps(run.settings, run.directory), sep="\n")
    if written:
        print(f"How it went, for the browser: {run.directory / page.FILE}.", flush=True)


def next_steps(settings: Settings, directory: Path) -> list[str]:
    """Sentences that say how to talk to a finished run's model, how to serve it, and how to hand it on."""
    export, merged = f"python -m brigade export {quote(str(directory))}", quote(f"{directory}-merged")
    served = quote(str(directory))
    if settings.recipe.model.use_peft:  # a server that takes adapters wants their base beside them
        served = f"{merged}, after {export} {merged} --merge"
    elif not any(directory.glob("*model*.safetensors")):  # shards, of a ds_config that gathers no weights
        whole = quote(f"{directory}-whole")
        served = f"{whole}, after {export} {whole}"
    if objective_of(settings.recipe.training).scores:
        return [f"Hand it on: {export} NEW_DIRECTORY"]
    return [
        f"Talk to it: python -m brigade chat {quote(str(directory))}",
        f"Serve it: vllm serve {served}",
        f"Hand it on: {export} NEW_DIRECTORY",
    ]


def leave(run: Run, step: int, by: str) -> None:
    """Wait until all ranks have written their parts of the checkpoint of this step, and write the marker that names it and who
    asked to stop (`by`, in words). A collective."""
    directory = run.directory
    this_process.agent.note(marker="stopped", step=step)
    ranks.barrier()
    if run.world.local_rank == 0:
        (directory / stop.FILE).unlink(missing_ok=True)
    if run.world.is_main_rank:
        run.check_directory()
        checkpoint = on_disk.whole_checkpoints(directory).get(step)
        marker = {"step": step, "checkpoint": checkpoint and checkpoint.name, "by": by, "time": now()}
        marker["identity"] = run.identity
        files.write(directory / STOPPED, json.dumps(marker, indent=2) + "\n")
        events.add(directory, "stopped", **{key: marker[key] for key in ("step", "checkpoint", "by")})
    release(run)
    if run.world.is_main_rank and run.settings.recipe.training.report_page:
        run.pages.end()
        page.write(directory, limit=10)  # whoever asked may not wait long
    farewell = f"Stopped by {by} {this_process.signals.where()}"
    tell.tell_launcher(f"{farewell} This is no failure")
    if run.world.is_main_rank:
        sys.stdout.flush()
        print(farewell, file=sys.stderr, flush=True)


def say_finished(settings: Settings, directory: Path) -> None:
    """Say that the run reached its end before: the same command asks for nothing more."""
    this_process.agent.note(marker=True)
    key, value = length(settings.recipe.training.model_dump())
    print(
        f"This run is finished: {settings.remote or directory} (--{key} above {value:g} lengthens it, --fresh begins it anew)."
    )
