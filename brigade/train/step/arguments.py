"""Transformers' TrainingArguments, made of a run's settings. What differs between the engines: engine.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..engines.engine import Engine
from ..recipe.training_section import OWN_OPTIMIZERS
from ..run.directory import Run
from ..upstream.trainer import let_swanlab_have_no_run
from .schedule import run_length, schedule_arguments, warmup

if TYPE_CHECKING:
    from transformers import TrainingArguments


SAME = ("num_train_epochs", "max_steps", "lr_scheduler_type", "weight_decay", "max_grad_norm",
        "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "fp16", "seed", "logging_steps", "report_to")  # fmt: skip

NEVER = 2**40  # steps
# Trackers that would write into the working directory -> the variable that says where, and where it is unless a user sets it.
LOCAL = {"mlflow": ("MLFLOW_TRACKING_URI", "sqlite:///{}/mlflow.db"), "swanlab": ("SWANLAB_LOG_DIR", "{}/swanlab")}


def training_arguments(run: Run, engine: Engine, train_samples: int, resuming: bool) -> TrainingArguments:
    """TrainingArguments for a run. After this call ZeRO-3 models load shard by shard."""
    from transformers import TrainingArguments
    from transformers.utils import logging as transformers_logging

    training, batch, steps = run.settings.recipe.training, run.batch, run_length(run, train_samples)
    transformers_logging.disable_progress_bar()  # ours is progress.py
    transformers_logging.set_verbosity_error()
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run.directory / "tensorboard")
    for tracker, (name, place) in LOCAL.items():
        if tracker in training.report_to:
            os.environ.setdefault(name, place.format(run.directory.absolute()))
    if "swanlab" in training.report_to:
        let_swanlab_have_no_run()
    options: dict[str, Any] = {key: getattr(training, key) for key in SAME}
    if run.world.replica:
        options["report_to"] = []  # the first replica reports
    evaluated, workers = training.per_device_eval_batch_size, training.dataloader_num_workers
    if training.optim not in OWN_OPTIMIZERS:
        options |= {"optim": training.optim, "optim_args": training.optim_args}
    options["save_strategy"] = "steps" if training.save_steps else "no"
    if training.save_steps:
        # auto: by no number, but when save_interval.py says so
        options["save_steps"] = NEVER if training.save_steps == "auto" else training.save_steps
    if training.eval_steps:
        options |= {"eval_strategy": "steps", "eval_steps": training.eval_steps}  # checkpoints.py keeps the best one
    arguments = TrainingArguments(
        output_dir=str(run.directory),
        per_device_train_batch_size=batch.micro,
        per_device_eval_batch_size=batch.micro if evaluated == "auto" else evaluated,
        gradient_accumulation_steps=batch.accumulation,
        learning_rate=batch.learning_rate,
        warmup_steps=warmup(run, steps),
        lr_scheduler_kwargs=schedule_arguments(run, steps),
        dataloader_num_workers=workers if workers != "auto" else 0 if engine.cpu else 2,
        use_cpu=engine.cpu,
        eval_on_start=not resuming,
        disable_tqdm=True,  # progress.py shows it
        run_name=run.directory.name,
        save_on_each_node=not run.shared,
        restore_callback_states_from_checkpoint=True,
        logging_nan_inf_filter=False,  # on by default, it logs a NaN loss as 0.0
        log_level="error",
        log_level_replica="error",
        **options,
        **engine.arguments(),
    )
    engine.after_arguments(arguments)
    return arguments
