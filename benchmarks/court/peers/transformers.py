"""Transformers' Trainer with its own collators. It has no masks of chats and no losses of preferences: its user writes labels.

Rows of chats therefore come with the oracle's tokens and labels (tokens of the job), padded by DataCollatorForSeq2Seq; packed
ones by DataCollatorWithFlattening, as its page on padding-free training says; plain texts by DataCollatorForLanguageModeling.
"""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from benchmarks.court.peers import common, record


def answer(job: record.Job) -> str:
    tokenizer = AutoTokenizer.from_pretrained(job["model_path"])
    data = Dataset.from_list(json.loads(Path(job["tokens"]).read_text()))
    collate: Any = DataCollatorForSeq2Seq(tokenizer)
    if job["kind"] == "text":
        data = data.remove_columns("labels")
        collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    if job["packing"]:
        collate = DataCollatorWithFlattening()

    def make() -> Trainer:
        given = TrainingArguments(**common.arguments(job))
        model: Any = AutoModelForCausalLM.from_pretrained(
            job["model_path"], dtype="float32", attn_implementation="sdpa"
        )
        if job["lora"]:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(**common.LORA))
        return Trainer(model=model, args=given, train_dataset=data, data_collator=collate, processing_class=tokenizer)

    return common.trained(job, make)
