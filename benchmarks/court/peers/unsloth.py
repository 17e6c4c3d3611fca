"""Unsloth, by FastLanguageModel and TRL's trainers, which it changes when it is imported.

On a CPU its models are Transformers' own, with a cross-entropy in the place of the output layer and the loss (unsloth_zoo/cpu).
Batches, losses and norms are Trainer's, and are recorded there as of TRL.
"""

import os
from typing import Any

os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"  # read when it is imported

from unsloth import FastLanguageModel, FastVisionModel  # isort: skip  # before TRL
from benchmarks.court.peers import common, record, trl


def load(job: record.Job) -> Any:
    fast = FastVisionModel if job["kind"] == "image" else FastLanguageModel
    model, _ = fast.from_pretrained(
        job["model_path"],
        max_seq_length=256,
        dtype="float32",
        load_in_4bit=False,
        full_finetuning=not job["lora"],
        use_gradient_checkpointing=False,
    )
    if job["lora"]:
        given = {key: value for key, value in common.LORA.items() if key != "task_type"}
        model = FastLanguageModel.get_peft_model(model, **given, use_gradient_checkpointing=False)
    return model


def answer(job: record.Job) -> str:
    model = load(job)  # before the arguments, as its documentation does: with those of ZeRO-3 it cannot be loaded
    return trl.answer(job, lambda _: model)
