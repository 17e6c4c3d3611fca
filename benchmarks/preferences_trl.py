"""One run of a TRL trainer of preferences, for benchmarks/preferences.py; in the peers' environment.

    .venv/peers/bin/python -m benchmarks.preferences_trl JOB.json

It reads its rows in the order of the file. The tokenizer's first token (bos_token) is taken away: TRL's ORPO and CPO would put
one before each prompt that the tokenizer itself does not put there.
"""

import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

from benchmarks import peers_count

warnings.filterwarnings("ignore", category=FutureWarning)


class Clock(TrainerCallback):
    """The seconds of each step, from the end of the one before it."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.ends.append(time.perf_counter())


def classes(name: str) -> tuple[Any, Any]:
    """Return a trainer of TRL's and its configuration: DPO, KTO, ORPO, CPO, Reward or SFT."""
    import trl
    from trl.experimental import cpo, orpo

    where = {"ORPO": orpo, "CPO": cpo}.get(name, trl)
    return getattr(where, f"{name}Trainer"), getattr(where, f"{name}Config")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    trainer_class, config_class = classes(job["trainer"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.bos_token = None
    kind = AutoModelForSequenceClassification if job["trainer"] == "Reward" else AutoModelForCausalLM
    model = kind.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="sdpa")
    config = config_class(
        **peers_count.arguments(job),
        gradient_checkpointing=False,
        max_length=job["max_length"],
        **job["config"],
    )
    clock = Clock()
    trainer = trainer_class(
        model=model,
        args=config,
        train_dataset=Dataset.from_json(job["train"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    if job.get("others"):
        answers = trainer.train_dataset["completion_ids"][:]
        others = [answers[other] for other in job["others"]]
        trainer.train_dataset = trainer.train_dataset.remove_columns("KL_completion_ids").add_column(
            "KL_completion_ids", others
        )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "history": history,
        "seconds": clock.ends[-1] - clock.ends[0],
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "versions": peers_count.versions(),
    }
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
