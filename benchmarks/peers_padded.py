"""One run of a plain transformers.Trainer on padded batches, for benchmarks/peers.py; in the peers' environment.

    .venv/peers/bin/python -m benchmarks.peers_padded JOB.json

Batches are grouped by length with Transformers' own sampler and padded to the longest of the batch; no sample is longer
than the data's 95th percentile.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from benchmarks import peers_count
from benchmarks.peers_data import percentile


class EvenSteps(torch.utils.data.Sampler):
    """Optimizer steps taken at even distances from an epoch of another sampler.

    Transformers sorts 50 global batches at a time, longest first. The first ten steps of an epoch hold the longest
    samples; ten at even distances hold what an epoch holds. The first, which is not measured, is the middle one.
    """

    def __init__(self, sampler: Any, global_batch: int, steps: int) -> None:
        self.sampler, self.global_batch, self.steps = sampler, global_batch, steps

    def __len__(self) -> int:
        return self.global_batch * (self.steps + 1)

    def __iter__(self) -> Any:
        order = list(self.sampler)
        whole = len(order) // self.global_batch
        chosen = [int((at + 0.5) * whole / self.steps) for at in range(self.steps)]
        for step in [whole // 2, *chosen]:
            yield from order[step * self.global_batch : (step + 1) * self.global_batch]


class Padded(Trainer):
    """A Trainer whose few steps are spread over a whole epoch of the length-grouped sampler."""

    def _get_train_sampler(self, *arguments: Any, **named: Any) -> Any:
        global_batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return EvenSteps(super()._get_train_sampler(*arguments, **named), global_batch, self.args.max_steps - 1)


def build(job: dict[str, Any]) -> Any:
    """The Trainer of a job, counting."""
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    whole = peers_count.encode(tokenizer, job["train"], job["max_length"])
    cap = percentile(sorted(len(sample["input_ids"]) for sample in whole), 95)
    samples = peers_count.encode(tokenizer, job["train"], cap)
    data = Dataset.from_list(samples).add_column("length", [len(sample["input_ids"]) for sample in samples])
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation=job["attention"]
    )
    return peers_count.counted(Padded)(
        model=model,
        args=TrainingArguments(**peers_count.arguments(job), train_sampling_strategy="group_by_length"),
        train_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding="longest"),
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(peers_count.train(build(job), job)))


if __name__ == "__main__":
    main()
