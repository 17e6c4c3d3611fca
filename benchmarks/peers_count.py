"""What the peers' runs share: encoding with the same labels, counting supervised tokens, and a result file.

Runs in the peers' environment, without Brigade. A token is supervised when it is an assistant's own, lies within the
length limit and is predicted from the token before it: labels[:, 1:] != -100.
"""

import json
import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

IGNORED = -100


def supervised(labels: torch.Tensor) -> int:
    """Supervised tokens of one micro-batch of labels, shape (rows, tokens)."""
    return int((labels[:, 1:] != IGNORED).sum())


def encode(tokenizer: Any, train_file: str, max_length: int | None) -> list[dict[str, list[int]]]:
    """Every chat of a JSONL file as {"input_ids", "labels"}, cut to max_length; chats without a supervised token within
    it are dropped."""
    samples = []
    for line in Path(train_file).read_text(encoding="utf-8").splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, own = encoded["input_ids"][:max_length], encoded["assistant_masks"][:max_length]
        labels = [token if mine else IGNORED for token, mine in zip(ids, own, strict=True)]
        if any(label != IGNORED for label in labels[1:]):
            samples.append({"input_ids": ids, "labels": labels})
    return samples


class Counter(TrainerCallback):
    """Tokens and seconds from the end of the first optimizer step to the end of the last.

    The first step allocates, compiles and fills caches; it is no part of the rate.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []  # of finished optimizer steps
        self.fetched: list[tuple[int, int, int]] = []  # of the step that runs: rows x longest, real tokens, supervised
        self.ended = 0.0

    def fetch(self, micro_batches: list[dict[str, Any]]) -> None:
        """Note the micro-batches of the optimizer step that begins."""
        for batch in micro_batches:
            mask = batch.get("attention_mask")
            shown = batch["input_ids"].numel()
            self.fetched.append((shown, shown if mask is None else int(mask.sum()), supervised(batch["labels"])))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        now = time.perf_counter()
        positions, tokens, own = (sum(column) for column in zip(*self.fetched, strict=True))
        self.steps.append({"seconds": now - self.ended, "positions": positions, "tokens": tokens, "supervised": own})
        self.fetched, self.ended = [], now

    def result(self) -> dict[str, Any]:
        """Sums over all steps but the first, and rates."""
        timed = self.steps[1:]
        total = {key: sum(step[key] for step in timed) for key in ("seconds", "positions", "tokens", "supervised")}
        return {
            "steps": len(timed),
            "seconds": round(total["seconds"], 3),
            "positions": int(total["positions"]),
            "tokens": int(total["tokens"]),
            "supervised_tokens": int(total["supervised"]),
            "tokens_per_second": round(total["tokens"] / total["seconds"], 2),
            "supervised_tokens_per_second": round(total["supervised"] / total["seconds"], 2),
            "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        }


def counted(trainer_class: type) -> type:
    """The Trainer class with a `counter` that sees the micro-batches of every optimizer step."""

    class Counted(trainer_class):  # type: ignore[misc]
        counter: Counter

        def get_batch_samples(self, *arguments: Any, **named: Any) -> Any:
            micro_batches, items = super().get_batch_samples(*arguments, **named)
            self.counter.fetch(micro_batches)
            return micro_batches, items

    return Counted


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    """The keys of TrainingArguments that all peers share, from a job of benchmarks/peers.py."""
    return {
        "output_dir": job["output"],
        "max_steps": job["steps"] + 1,
        "per_device_train_batch_size": job["micro_batch"],
        "gradient_accumulation_steps": job["accumulation"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": job["optim"],
        "bf16": job["bf16"],
        "seed": job["seed"],
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "torch_compile": job.get("torch_compile", False),
        **job.get("arguments", {}),
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages in the peers' environment that decide what a run computes."""
    return {name: version(name) for name in ("torch", "transformers", "trl", "accelerate", "peft", "datasets")}


def train(trainer: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Train, and write the result beside the job's file."""
    trainer.counter = Counter()
    trainer.add_callback(trainer.counter)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result = trainer.counter.result() | {"first_loss": losses[0], "last_loss": losses[-1]}
    result |= {"losses": losses, "versions": versions()}
    Path(job["result"]).write_text(json.dumps(result))
    return result
