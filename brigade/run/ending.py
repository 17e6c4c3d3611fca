"""A run's end: the marker that means success, and what is said then."""

import json
from typing import Any

from ..distributed import supervised
from ..recipe.batch import length
from . import best_checkpoint, events, page
from .directory import RECORD, STATE, SUCCESS, Run, now, release, write_whole


def succeed(run: Run, state: Any, held_out_loss: float) -> None:
    """As the very last thing, on one rank: write the marker that means success, and say where everything lies."""
    if not run.world.is_main_rank:
        release(run)
        return
    before = next((entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry), None)
    figures = {
        "identity": run.identity,
        "finished": now(),
        "steps": state.global_step,
        "saved_step": best_checkpoint.saved_step(run.settings, state),
        "held_out_loss_before": before,
        "held_out_loss": held_out_loss,
    }
    write_whole(run.directory / SUCCESS, json.dumps(figures, indent=2) + "\n")
    events.add(run.directory, "end", **figures)
    release(run)
    supervised.note(marker=True)
    written = run.settings.recipe.training.report_page and page.write(run.directory)
    print(*best_checkpoint.closing_lines(run.settings, state, before, held_out_loss), sep="\n")
    where = f"The model lies in {run.directory}, its log in {run.directory / STATE}, "
    print(f"{where}the resolved run in {run.directory / RECORD}.")
    if written:
        print(f"How it went, for the browser: {run.directory / page.FILE}.", flush=True)


def say_finished(run: Run) -> None:
    """The run reached its end before; the same command asks for nothing more."""
    supervised.note(marker=True)
    key, value = length(run.settings.recipe.training.model_dump())
    print(f"This run is finished: {run.directory} (--{key} above {value:g} lengthens it, --fresh begins it anew).")
