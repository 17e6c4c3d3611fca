"""One run of TRL's SFTTrainer, packed or padding-free, for benchmarks/peers.py; in the peers' environment.

    .venv/peers/bin/python -m benchmarks.peers_trl JOB.json
    .venv/peers/bin/python -m benchmarks.peers_trl JOB.json --isolation    # no training: do packed samples see each other?

TRL gets what is fastest for it on a CPU: no gradient checkpointing (its default is to recompute), its own loss, and one
row per micro-batch, because attention over a flattened row costs the square of the row's length here.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks import peers_count


def build(job: dict[str, Any]) -> Any:
    """The SFTTrainer of a job, counting."""
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job.get("dtype", "float32")), attn_implementation=job["attention"]
    )
    shared: dict[str, Any] = {
        **peers_count.arguments(job),
        "gradient_checkpointing": False,
        "completion_only_loss": False,
    }
    adapters = LoraConfig(task_type="CAUSAL_LM", **job["lora"]) if "lora" in job else None
    data = Dataset.from_json(job["train"])
    if "chat_template" in job:
        config = SFTConfig(
            **shared,
            max_length=job["max_length"],
            assistant_only_loss=True,
            chat_template_path=job["chat_template"],
        )
    elif job["packing"]:
        config = SFTConfig(
            **shared, packing=True, packing_strategy="bfd", max_length=job["max_length"], assistant_only_loss=True
        )
    else:
        # Padding-free without packing enforces no length: TRL wants data that is cut already.
        config = SFTConfig(**shared, padding_free=True, max_length=None)
        data = Dataset.from_list(peers_count.encode(tokenizer, job["train"], job["max_length"]))
    trainer_class = peers_count.counted(SFTTrainer)
    return trainer_class(model=model, args=config, train_dataset=data, processing_class=tokenizer, peft_config=adapters)


@torch.no_grad()
def isolation(job: dict[str, Any]) -> dict[str, float]:
    """Largest difference of a packed row's logits to those of its samples by themselves, in the trainer's own batches.

    leak: by how much logits move when the row's first sample is replaced; 0 means that no later sample sees it.
    """
    trainer = build(job)
    model = trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch.pop("labels")
    together = model(**batch, use_cache=False).logits[0]
    bounds = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), together.shape[0]]
    apart = max(
        float((model(batch["input_ids"][:, begin:end], use_cache=False).logits[0] - together[begin:end]).abs().max())
        for begin, end in itertools.pairwise(bounds)
    )
    batch["input_ids"][:, : bounds[1]] = 7
    moved = (
        float((model(**batch, use_cache=False).logits[0] - together)[bounds[1] :].abs().max()) if bounds[2:] else 0.0
    )
    return {"samples": len(bounds) - 1, "tokens": labels.numel(), "difference_to_samples_alone": apart, "leak": moved}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("--isolation", action="store_true")
    options = parser.parse_args()
    job = json.loads(options.job.read_text())
    print(json.dumps(isolation(job) if options.isolation else peers_count.train(build(job), job)))


if __name__ == "__main__":
    main()
