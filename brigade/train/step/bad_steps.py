"""What is done with a step whose loss or gradient is not finite, or whose loss is a spike: `nonfinite` and `loss_spike` decide.

skip      the step is left out: weights and optimizer states stay, bit for bit; data and learning rate go on.
rollback  in addition, weights and optimizer states go back to the last whole checkpoint. The data since then is left out with it,
          as Chowdhery et al. 2022 did (PaLM, arXiv 2204.02311, 5.1): computed again, it would lead to the same weights.
stop      the run ends. The checkpoint before it is whole, for no weight has changed.

FILE names the samples of each such step: those of the micro-batches whose loss is not finite, or all if every loss is finite.
"""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ...errors import UserError
from .. import upstream
from ..checkpoint.manifest import flaw
from ..data import places
from ..data.collate import FILLER
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..engines import resharding
from ..model.base_weights import first_not_finite
from ..run import events, on_disk
from ..upstream import checkpoint_files
from .context import TrainingContext

if TYPE_CHECKING:
    import torch

    from ..data.store import TokenSequence


FILE = "bad_steps.jsonl"
WINDOW, FEWEST = 64, 16  # steps whose median loss a spike is compared with; no fewer
NAMED = 12  # samples in a message; FILE has all

MicroBatch = dict[str, Any]


def judge_not_finite(trainer: TrainingContext, norm: torch.Tensor | float | None) -> torch.Tensor | float | None:
    """Treat a step whose gradients' norm is not finite, as _treat does. Under fp16 return the norm where each loss is finite:
    fp16's loss scaling itself skips such steps. A collective."""
    micro_batches = _gathered(trainer)
    bad = [each for each in micro_batches if not math.isfinite(each["loss"])]
    if trainer.args.fp16 and not bad:
        trainer.nonfinite.dropped = True  # fused optimizers skip on the device, and Accelerate does not hear of it
        return norm
    what = "a gradient is not finite, though every loss is"
    if bad:
        where = "micro-batch {micro_batch} of rank {rank} on {host}".format(**bad[0])
        what = f"the loss is {bad[0]['loss']} in {where}" + (f" and in {len(bad) - 1} more" if len(bad) > 1 else "")
    policy = trainer.run.settings.recipe.training.nonfinite
    return _treat(trainer, "nonfinite", what, bad or micro_batches, policy)


def judge_spike(trainer: TrainingContext, norm: torch.Tensor | float | None) -> torch.Tensor | float | None:
    """Return the norm of a step whose numbers are finite, or None where its loss is a spike and the run went back.

    A collective.
    """
    micro_batches, counts = _gathered(trainer), trainer.nonfinite.counts
    loss = sum(each["loss"] for each in micro_batches)
    usual = statistics.median(counts.recent) if len(counts.recent) >= FEWEST else math.inf
    if loss > (trainer.run.settings.recipe.training.loss_spike or math.inf) * usual:
        what = f"the loss is {loss:.4f}, and {usual:.4f} is the median of the {len(counts.recent)} steps before"
        return _treat(trainer, "loss_spike", what, micro_batches, "rollback", norm)
    counts.recent = [*counts.recent, loss][-WINDOW:]
    return norm


def check_weights(trainer: TrainingContext) -> None:
    """Look for a trained weight that is not finite, before a checkpoint is written: it would show in the loss one step later.

    A collective. Where any rank holds such a weight, the run goes back under rollback; otherwise all ranks raise UserError.
    """
    name = next((name for name in ranks.gather(first_not_finite(trainer.model)) if name), None)
    if name:
        step, what = trainer.state.global_step, f"the weight {name} is not finite"
        if trainer.run.settings.recipe.training.nonfinite != "rollback":
            raise error(what, trainer, step)
        _treat(trainer, "nonfinite", what, [], "rollback", after=True)


def error(what: str, trainer: TrainingContext, step: int, samples: str = "", cure: str = "") -> UserError:
    """Return the error that ends the run at a step."""
    run = trainer.run
    trainer.checkpoints.let_finish()  # the newest one may be on its way
    kept = on_disk.whole_checkpoints(run.directory)
    newest = f"{kept[max(kept)]} is from before" if kept else "there is no checkpoint from before"
    precision = ", bf16 instead of fp16" if run.settings.recipe.training.fp16 else ""
    usual = (
        f"a lower learning_rate (it is {run.batch.learning_rate:g}), more warmup_steps{precision}; or look at the data"
    )
    if not step:
        usual = "look at the weights that it begins with, and at its data"
    problem = f"{what}: the run stops here, for it would not recover; {newest}"
    return UserError(f"step {step}", problem + (f"; {samples}" if samples else ""), cure or usual)


# ---- leaving a step out ----------------------------------------------------------------------------------------------
def _treat(
    trainer: TrainingContext,
    kind: str,
    what: str,
    micro_batches: list[MicroBatch],
    policy: str,
    norm: torch.Tensor | float | None = None,
    after: bool = False,
) -> torch.Tensor | float | None:
    """Stop, skip or roll back, with a line in FILE, an event, and one on the screen.

    norm: of a step that may be kept where there is nothing to go back to; after: the step is already done.
    Returns None, or the norm of a step that is kept. Raises UserError on all ranks where the run stops.
    """
    training, step = trainer.run.settings.recipe.training, trainer.state.global_step + (not after)
    counts = trainer.nonfinite.counts
    counts.in_a_row = counts.in_a_row + 1 if step == counts.last + 1 else 0
    counts.last = step
    back_to = _checkpoint(trainer, counts.in_a_row) if policy == "rollback" else None
    action, cure = policy, ""
    if policy != "stop" and counts.left_out >= training.nonfinite_limit:
        action = "stop"
        cure = f"look at {FILE}: as many steps were left out as nonfinite_limit allows ({counts.left_out})"
    elif policy == "rollback" and back_to is None:
        action = "stop" if norm is None else "none"
        cure = "there is no checkpoint to go back to: set save_steps lower, or nonfinite: skip"
    elif policy == "stop":
        cure = "look at these samples, or continue with --nonfinite skip; a lower learning_rate (it is "
        cure += f"{trainer.run.batch.learning_rate:g}) or more warmup_steps" + (", or bf16" if training.fp16 else "")
    samples = ""
    if trainer.run.world.rank == 0:  # of each replica
        samples = _record(trainer, step, kind, what, action, back_to, micro_batches)
    samples = ranks.gather(samples)[0]
    if action == "stop":
        raise error(f"{what}, and no weight was changed" if not after else what, trainer, step, samples, cure)
    if action == "none":
        _say(trainer, f"step {step}: {what}. {cure[0].upper()}{cure[1:]}.")
        return norm
    counts.left_out += 1
    if not after:
        trainer.engine.drop_step(trainer)
        trainer.nonfinite.dropped = True
        upstream.forget_step(trainer, trainer.nonfinite.logged_before)
        for feature in trainer.features:
            feature.forget_step()
    done = "it is left out"
    if back_to:
        with trainer.meter.pause():
            _go_back(trainer, back_to)
        done = (
            f"back to the weights of {back_to.name}, without the data of steps {on_disk.step_of(back_to) + 1} to {step}"
        )
    _say(trainer, f"step {step}: {what}: {done} ({counts.left_out} of at most {training.nonfinite_limit}); {samples}")
    return None


def _say(trainer: TrainingContext, line: str) -> None:
    if trainer.run.world.rank == 0:
        tqdm.write(line)


def _checkpoint(trainer: TrainingContext, older: int) -> Path | None:
    """The newest whole checkpoint as rank 0 sees it; after several such steps in a row an older one, if there is one."""
    trainer.checkpoints.wait()  # the newest one may be on its way
    whole = [folder for folder in on_disk.checkpoints(trainer.run.directory) if flaw(folder) is None]
    name = ranks.gather(whole[min(older, len(whole) - 1)].name if whole else None)[0]
    return trainer.run.directory / name if name else None


def _go_back(trainer: TrainingContext, checkpoint: Path) -> None:
    """Load weights and optimizer states of a checkpoint; the learning rate stays that of this step."""
    schedule = trainer.lr_scheduler.state_dict()
    with this_process.heartbeat.within(heartbeat.LOADING):
        with ExitStack() as entered:
            for feature in trainer.features:
                entered.enter_context(feature.reloading())
            if trainer.loads_by_itself(checkpoint):
                checkpoint_files.load_states(trainer, checkpoint)
                trainer.engine.load_states(trainer, checkpoint)
            else:  # other ranks wrote it, before this run went on
                resharding.reshard(trainer, checkpoint)
        trainer.lr_scheduler.load_state_dict(schedule)
        upstream.take_rates_of(trainer.lr_scheduler)
        ranks.barrier()  # whoever removes old checkpoints waits until all have read this one


# ---- whose fault it was ----------------------------------------------------------------------------------------------
def _gathered(trainer: TrainingContext) -> list[MicroBatch]:
    """Return the rank, host, number from 1, and part of the step's loss of each micro-batch of this step. A collective.

    Where several ranks compute with the same tokens, only the first of them is listed.
    """
    size, world = trainer.engine.averaged_over, trainer.run.world
    held = ranks.gather((world.host, [float(loss) / size for loss in trainer.nonfinite.micro_losses]))
    return [
        {"rank": rank, "host": host, "micro_batch": number, "loss": loss}
        for rank, (host, losses) in enumerate(held)
        for number, loss in enumerate(losses, 1)
        if trainer.run.strategy.axes.place(rank, world.size).speaks_for_its_data
    ]


def _record(
    trainer: TrainingContext,
    step: int,
    kind: str,
    what: str,
    action: str,
    back_to: Path | None,
    micro_batches: list[MicroBatch],
) -> str:
    """Write the step into FILE, with the samples of these micro-batches, and add an event. Return the samples' names in words."""
    of_step = trainer.callback_handler.train_dataloader.batch_sampler.of_step(step - 1)
    place, size = trainer.run.strategy.axes.place, trainer.run.world.size
    first = trainer.data_rank - trainer.place.data  # of this replica
    written = []
    for each in micro_batches:
        rows = [
            int(row)
            for row in of_step[each["micro_batch"] - 1, first + place(each["rank"], size).data]
            if row != FILLER
        ]
        samples = places.places_of(trainer.data, rows, trainer.run.settings)
        loss = each["loss"] if math.isfinite(each["loss"]) else str(each["loss"])
        written.append(each | {"loss": loss, "samples": samples})
    samples = [place for each in written for place in each["samples"]]
    fields = {"step": step, "kind": kind, "what": what, "action": action, "back_to": back_to and str(back_to)}
    events.append(trainer.run.directory / FILE, **fields, micro_batches=written)
    whose = {key: micro_batches[0][key] for key in ("rank", "host")} if micro_batches else {}
    events.add(trainer.run.directory, "fault", **fields, **whose, samples=samples[:NAMED], all_samples=FILE)
    return f"{_named(samples)}{FILE} names all samples" if samples else ""


def _named(samples: list[TokenSequence]) -> str:
    """`chats.jsonl row 3, 17 and 12 more; `"""
    shown: dict[str, list[str]] = {}
    for place in samples[:NAMED]:
        shown.setdefault(Path(place["source"]).name, []).append(str(place["row"]))
    words = "; ".join(f"{source} row {', '.join(rows)}" for source, rows in shown.items())
    return words + (f" and {len(samples) - NAMED} more; " if len(samples) > NAMED else "; ")
