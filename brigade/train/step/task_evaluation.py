"""Benchmark tasks, by EleutherAI's lm-evaluation-harness (the optional package lm_eval).

A model is evaluated on them at the end of training (`eval_tasks`), or once it is saved (`python -m brigade eval OUTPUT --tasks`).
"""

from __future__ import annotations

import copy
import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from ...errors.console import OF_LOGS, console
from ..distributed import heartbeat, ranks
from ..distributed.process import this_process
from ..host import files
from ..run import typed
from ..run.directory import TASK_RESULTS
from ..run.hooks import Feature
from .context import TrainingContext
from .task_loading import PACKAGE, Tasks, load

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, TrainingArguments

    from .sample_answers import Record


_WHOLE = ("single", "ddp", "zero1", "zero2")  # each rank has all weights
# A later figure replaces one that is alike in these.
_SAME = ("step", "task", "metric", "filter", "chat_template", "limit")


def evaluate(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    loaded: Tasks,
    batch_size: int,
    device: torch.device,
    of: tuple[int, int] = (0, 1),
    chat_template: bool = False,
    limit: int | None = None,
    shown: bool = True,
) -> list[Record]:
    """Evaluate a model that is in memory. A collective where `of` divides the samples.

    of: which rank of how many takes which share of the samples; (0, 1) on several ranks: all compute the same
    limit: only so many samples of each task; shown: whether this rank shows progress on a terminal
    Return one record for each figure, on rank 0 of a host (records()); elsewhere [].
    """
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    class Model(HFLM):
        """lm_eval's model, over this run's ranks."""

        rank, world_size = of  # type: ignore[assignment]

        @property
        def device(self) -> torch.device:
            return device

        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.tensor(ranks.gather(tensor.tolist()))

        def gather_object(self, obj: object, dst: int = 0) -> list[object] | None:
            return ranks.gather(_plain(obj))

        def barrier(self) -> None:
            ranks.barrier()

    tokenizer = copy.deepcopy(tokenizer)  # it gets a padding side and a padding token
    # lm_eval turns autocast off around each pass, unless it has the dtype itself.
    mixed = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    quiet = nullcontext() if shown and sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), quiet, _lent(model, of[1] == 1):
        how = {"batch_size": batch_size, "mixed_precision_dtype": mixed}
        lm = Model(pretrained=model, backend="causal", tokenizer=tokenizer, **how)
        results = evaluator.simple_evaluate(
            model=lm,
            tasks=[*loaded["groups"].values(), *_alone(loaded)],
            limit=limit,
            apply_chat_template=chat_template,
            log_samples=False,
            bootstrap_iters=0 if of[0] else 1000,
            task_manager=TaskManager(
                include_defaults=False
            ),  # all tasks are loaded; the index of lm_eval's takes seconds
        )
    return records(results, chat_template, limit) if results else []


def _alone(loaded: Tasks) -> list[Task]:
    """The tasks that are in no group."""
    inside = {task.task_name for group in loaded["groups"].values() for task in group.get_all_tasks()}
    return [task for name, task in loaded["tasks"].items() if name not in inside]


def _plain(value: object) -> object:
    """Figures of samples as ranks may send them: NumPy's numbers as Python's."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


@contextmanager
def _lent(model: PreTrainedModel, in_step: bool) -> Iterator[None]:
    """While lm_eval has the model: it must not tie weights that are sharded, each pass is a sign of life, and ranks that generate
    the same stay in step, for sharded parameters are gathered by all of them at once."""
    beat = model.get_input_embeddings().register_forward_pre_hook(
        lambda *_: this_process.heartbeat.enter(heartbeat.EVALUATION)
    )
    model.tie_weights = lambda *_, **__: None
    if in_step and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        model.generate = partial(model.generate, synced_gpus=True)
    try:
        yield
    finally:
        beat.remove()
        for name in ("tie_weights", "generate"):
            model.__dict__.pop(name, None)


def records(results: Record, chat_template: bool, limit: int | None) -> list[Record]:
    """The figures of lm_eval's results: task, metric, filter, value, stderr (None where it has none), samples and shots."""
    found = []
    for task, figures in results["results"].items():
        counts = results["n-samples"].get(task, {})
        for key, value in figures.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not typed.is_number(value):
                continue
            error = figures.get(f"{metric}_stderr,{filtered}")
            about = {"task": task, "metric": metric, "filter": filtered, "value": value}
            about |= {"stderr": error if typed.is_number(error) else None, "samples": counts.get("effective")}
            about |= {"shots": results["n-shot"].get(task), "chat_template": chat_template, "limit": limit}
            found.append(about | {PACKAGE: version(PACKAGE)})
    return found


def store(found: list[Record], step: int, directory: Path) -> None:
    """Add records to a run's task_results.jsonl. They replace figures of the same step and prompts that are there already."""
    path, now = directory / TASK_RESULTS, time.strftime("%Y-%m-%dT%H:%M:%S")
    new = [{"step": step, "time": now, **record} for record in found]
    known = {tuple(map(record.get, _SAME)) for record in new}
    lines = files.read_text(path).split("\n") if path.exists() else []
    kept = [line for line in lines if (named := _named(line)) and named not in known]
    files.write(path, "\n".join([*kept, *map(json.dumps, new)]) + "\n")


def _named(line: str) -> tuple[object, ...]:
    """Return what tells a figure from others; () for a line that is not a record."""
    with suppress(ValueError):
        record = typed.kept(typed.loaded(line), typed.TASK)
        return tuple(map(record.get, _SAME)) if record else ()
    return ()


def show(found: list[Record]) -> None:
    """Print records as a table, above a progress bar where there is one."""
    from rich.table import Table

    prompts = "with the chat template" if found and found[0]["chat_template"] else "without a chat template"
    table = Table(
        title=f"Tasks (lm_eval {version(PACKAGE)}, prompts {prompts})", title_justify="left", box=None, pad_edge=False
    )
    for name, justify in (("task", "left"), ("metric", "left"), ("value", "right"), ("stderr", "right"), ("samples", "right"),
                          ("shots", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for record in found:
        error = "" if record["stderr"] is None else f"{record['stderr']:.4f}"
        counts = ("" if record[key] is None else str(record[key]) for key in ("samples", "shots"))
        table.add_row(record["task"], metric_of(record), f"{record['value']:.4f}", error, *counts)
    with tqdm.external_write_mode():
        console(columns=OF_LOGS).print(table)
        sys.stdout.flush()


def metric_of(record: Record) -> str:
    """`acc`, or with a filter that lm_eval puts over answers `exact_match (strict-match)`."""
    return record["metric"] + ("" if record["filter"] == "none" else f" ({record['filter']})")


class TaskEvaluation(Feature):
    """Evaluates `eval_tasks` at the end of training, with the model in memory, which is the one that is saved.

    Where each rank has all weights, each evaluates its share of the samples. Where weights are sharded or layers divided, all
    ranks compute every sample together.
    """

    def __init__(self, trainer: TrainingContext) -> None:
        self.trainer = trainer

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: object, **_: object) -> None:
        trainer, run = self.trainer, self.trainer.run
        if trainer.stopping.by:  # it goes on later
            return
        training = run.settings.recipe.training
        with this_process.heartbeat.within(heartbeat.EVALUATION), trainer.meter.pause(), trainer.at_rest():
            loaded = load(training.eval_tasks, run.settings.place("eval_tasks"))
            trainer.model_wrapped.eval()
            with trainer.accelerator.autocast(), trainer.engine.answering(trainer):
                found = evaluate(
                    trainer.model,
                    trainer.processing_class,
                    loaded,
                    args.per_device_eval_batch_size,
                    args.device,
                    self._share(loaded),
                    training.eval_tasks_chat_template,
                    shown=run.world.is_main_rank,
                )
            trainer.model_wrapped.train()
            if run.world.is_main_rank:
                run.check_directory()
                store(found, state.global_step, run.directory)
                show(found)
            trainer.log({f"eval_task_{record['task']}_{_key(record)}": record["value"] for record in found})

    def _share(self, loaded: Tasks) -> tuple[int, int]:
        """Which rank of how many this one is, where samples are divided: every rank must have one of each task."""
        run = self.trainer.run
        size, fewest = run.world.size, min(len(task.eval_docs) for task in loaded["tasks"].values())
        whole = run.strategy.kind in _WHOLE and not run.strategy.axes.used and run.strategy.replicas == 1
        return (run.world.rank, size) if whole and size <= fewest else (0, 1)


def _key(record: Record) -> str:
    return record["metric"] + ("" if record["filter"] == "none" else f"_{record['filter']}")
