"""TRL: SFTTrainer with assistant_only_loss, packing by its own strategy, and its trainers of preferences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, List
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.court.peers import common, record

PREFERENCES: dict[str, Any] = {
    "dpo": (DPOTrainer, DPOConfig, {"beta": 0.1}),
    "kto": (KTOTrainer, KTOConfig, {"beta": 0.1, "train_sampling_strategy": "sequential"}),
    "orpo": (ORPOTrainer, ORPOConfig, {"beta": 0.1}),
}


def rows_of(job: record.Job) -> Dataset:
    if job["kind"] != "image":
        return Dataset.from_json(job["file"])
    folder = Path(job["file"]).parent
    found = []
    for row in common.rows_of(job):
        asked, answered = row["messages"]
        images = [str(folder / part["image"]) for part in asked["content"] if part["type"] == "image"]
        parts = [{"type": part["type"], "text": part.get("text")} for part in asked["content"]]
        answer = [{"type": "text", "text": answered["content"]}]
        found.append(
            {
                "images": images,
                "prompt": [{"role": "user", "content": parts}],
                "completion": [{"role": "assistant", "content": answer}],
            }
        )
    return Dataset.from_list(found).cast_column("images", List(Image()))


def load(job: record.Job) -> Any:
    """Return a job's model, in which the tower of images stays as it is, as the loop has it."""
    kind: Any = AutoModelForImageTextToText if job["kind"] == "image" else AutoModelForCausalLM
    model = kind.from_pretrained(job["model_path"], dtype="float32", attn_implementation="sdpa")
    if job["kind"] == "image":
        model.model.vision_tower.requires_grad_(False)
    return model


def answer(job: record.Job, load: Callable[[record.Job], Any] = load) -> str:
    """Train, and return where it saved. load: returns a job's model, with adapters where it makes them itself"""
    given: record.Job = common.arguments(job) | {"gradient_checkpointing": False, "max_length": 256}
    data = rows_of(job)

    def make() -> Any:
        learned = {"assistant_only_loss": job["kind"] == "chat", "packing": job["packing"]}
        trainer, config, more = PREFERENCES.get(job["kind"], (SFTTrainer, SFTConfig, learned))
        settings = config(**given, **more)  # before the model, which ZeRO-3 divides as it is loaded
        model = load(job)
        adapters = LoraConfig(**common.LORA) if job["lora"] and not hasattr(model, "peft_config") else None
        reader = AutoProcessor.from_pretrained(job["model_path"])
        return trainer(model=model, args=settings, train_dataset=data, processing_class=reader, peft_config=adapters)

    return common.trained(job, make)
