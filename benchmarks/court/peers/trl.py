"""TRL: SFTTrainer with assistant_only_loss, packing by its own strategy, and its trainers of preferences."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, Image, List
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.court.peers import common, record

PREFERENCES: dict[str, Any] = {
    "dpo": (DPOTrainer, DPOConfig, {}),
    "kto": (KTOTrainer, KTOConfig, {"train_sampling_strategy": "sequential"}),
    "orpo": (ORPOTrainer, ORPOConfig, {}),
}


def rows_of(job: record.Job) -> Dataset:
    rows = [json.loads(line) for line in Path(job["file"]).read_text().splitlines()]
    if job["kind"] != "image":
        return Dataset.from_json(job["file"])
    folder = Path(job["file"]).parent
    found = []
    for row in rows:
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


def answer(job: record.Job) -> str:
    given: record.Job = common.arguments(job) | {"gradient_checkpointing": False, "max_length": 256}
    loaded = {"dtype": "float32", "attn_implementation": "sdpa"}
    data = rows_of(job)

    def make() -> Any:
        if job["kind"] in PREFERENCES:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            trainer, config, more = PREFERENCES[job["kind"]]
            compared = AutoModelForCausalLM.from_pretrained(job["model_path"], **loaded)
            tokenizer = AutoTokenizer.from_pretrained(job["model_path"])
            settings = config(**given, beta=0.1, **more)
            return trainer(model=compared, args=settings, train_dataset=data, processing_class=tokenizer)
        settings = SFTConfig(**given, assistant_only_loss=job["kind"] == "chat", packing=job["packing"])
        model: Any = job["model_path"]
        if job["kind"] == "image":
            from transformers import AutoModelForImageTextToText

            model = AutoModelForImageTextToText.from_pretrained(model, **loaded)
            model.model.vision_tower.requires_grad_(False)  # as the loop has it
        else:
            settings.model_init_kwargs = loaded
        adapters = LoraConfig(**common.LORA) if job["lora"] else None
        return SFTTrainer(model=model, args=settings, train_dataset=data, peft_config=adapters)

    return common.trained(job, make)


if __name__ == "__main__":
    record.run(answer)
