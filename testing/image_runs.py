"""The cases of training on images: train.py against the plain loop of testing/plain_images.py, on equal rows.

Each case is a run of six steps in fp32, with SGD at a rate that moves the loss. Of 21 rows eight have no image, and the global
batch is 8: some micro-batches have no image, others several, and each epoch ends in the middle of a batch.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from . import parity, plain_images
from .command_line import as_flags
from .preferences import run_group

TOLERANCE = 1e-5  # relative
# A gradient's norm is rounded more where weights are multiplied again and again: gates, recurrences.
LOOSER = {"qwen3_5": 1e-4, "gemma4": 1e-4}
STEPS, BATCH, HELD_OUT, ROWS = 6, 8, 4, 25
# Model type -> a learning rate at which the loss moves and rounding does not show.
MODELS = dict.fromkeys(
    ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "smolvlm", "internvl", "llava_onevision", "mistral3"), 0.1
) | {"qwen3_5": 0.02, "gemma4": 0.02}
SINGLE = ("llava_onevision",)  # which reads one image of a sample
SIZES = ((32, 32), (48, 32), (24, 40), (64, 24), (20, 20))  # of images, in pixels
WORDS = ("red", "green", "blue", "circle", "square", "left", "right", "above", "one", "two", "three", "nothing")


def write_rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Write images and rows, and return these: {"train", "heldout"}."""
    import numpy as np
    from PIL import Image

    draw, rows = np.random.default_rng(3), []
    for number in range(ROWS):
        count = (1, 0, 2, 0, 1, 3, 0, 1)[number % 8]
        paths = []
        for place in range(count):
            width, height = SIZES[int(draw.integers(len(SIZES)))]
            paths.append(f"{number}-{place}.png")
            pixels = draw.integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((width, height), 0).save(folder / paths[-1])
        texts = [" ".join(draw.choice(WORDS, int(draw.integers(1, 7)))) for _ in range(count + 1)]
        parts = [{"type": "text", "text": f"{texts[0]} "}]
        for path, text in zip(paths, texts[1:], strict=True):
            parts += [{"type": "image", "image": path}, {"type": "text", "text": f" {text} "}]
        if number % 3 == 0 and paths:  # a question that begins with its image
            parts = parts[1:]
        answer = " ".join(draw.choice(WORDS, int(draw.integers(1, 9))))
        asked: Any = parts if paths else texts[0]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages})
    split = {"train": rows[HELD_OUT:], "heldout": [row for row in rows[:HELD_OUT] if images_of(row) < 2]}
    split["train-single"] = [row for row in split["train"] if images_of(row) < 2]
    for name, each in split.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each))
    return split


def flags_of(folder: Path, model: str) -> list[str]:
    """Write a model and rows with images, and return the flags by which a run of another recipe trains on them."""
    from .vision_models import write_vision_model

    folder.mkdir(exist_ok=True)
    write_rows(folder)
    train = "train-single" if model in SINGLE else "train"
    files = {"train_file": folder / f"{train}.jsonl", "validation_file": folder / "heldout.jsonl"}
    flags = as_flags(images=True, max_length=512, **{key: str(path) for key, path in files.items()})
    flags += as_flags(tokenizer_name_or_path="null", chat_template="null", from_scratch=False)
    return [*flags, "--model_name_or_path", str(write_vision_model(folder / model, model))]


def images_of(row: dict[str, Any]) -> int:
    """Return how many images a row has."""
    return sum(part["type"] == "image" for part in plain_images.parts_of(row["messages"][0]["content"]))


class Case(NamedTuple):
    """One run. model: of MODELS; strategy: of STRATEGIES; variant: of VARIANTS"""

    model: str
    strategy: str = "single"
    ranks: int = 1
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.model}, {self.strategy} on {self.ranks}" + (f", {self.variant}" if self.variant else "")

    def run(self, folder: Path, *further: str, **more: Any) -> dict[str, Any]:
        """Return this case for testing.runs. further: flags behind all others; more: as there"""
        flags = ["--recipe", str(folder / "images.yaml"), "--model_name_or_path", str(folder / self.model)]
        flags += as_flags(learning_rate=MODELS[self.model])
        if self.model in SINGLE:
            flags += as_flags(train_file=str(folder / "train-single.jsonl"))
        # A step has two micro-batches or more of each rank, and filler in the last ones.
        flags += ["--per_device_train_batch_size", "3" if self.ranks < 3 else "2"]
        flags += [*STRATEGIES[self.strategy], *VARIANTS[self.variant], *further]
        name = more.pop("name", str(self))
        return {"name": name, "flags": [*flags, "--output_dir", str(folder / "outputs" / name)], **more}


STRATEGIES: dict[str, list[str]] = {"single": [], **parity.STRATEGIES}
PACKED, TOWER, ADAPTERS = "packed", "tower trained", "LoRA"
EVERYWHERE = "LoRA on tower, too"
SMALL = "AdamW, steps without an image"
VARIANTS: dict[str, list[str]] = {
    "": [],
    PACKED: ["--packing", "true", "--global_batch_size", "32", "--max_length", "512"],
    TOWER: ["--freeze_vision_tower", "false"],
    "tower trained, checkpointing": ["--freeze_vision_tower", "false", "--activation_checkpointing", "true"],
    "sdpa": ["--attn_implementation", "sdpa"],
    "eager": ["--attn_implementation", "eager"],
    "padded": ["--padding_free", "false"],
    "bf16": ["--bf16", "true"],
    SMALL: as_flags(
        optim="adamw_torch",
        freeze_vision_tower=False,
        global_batch_size=2,
        per_device_train_batch_size=1,
        max_steps=12,
        learning_rate=0.003,
        weight_decay=0.1,
    ),
    ADAPTERS: ["--use_peft", "true", "--learning_rate", "0.5"],
    EVERYWHERE: ["--use_peft", "true", "--learning_rate", "0.5", "--lora_parts", "language,vision_tower"],
}


def write_inputs(folder: Path, models: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Write models, images, rows and the recipe that all cases share; return the rows."""
    from .vision_models import write_vision_model

    rows = write_rows(folder)
    for model in models:
        write_vision_model(folder / model, model)
    recipe = {
        "model": {"model_name_or_path": "given by a flag"},
        "data": {
            "train_file": str(folder / "train.jsonl"), "validation_file": str(folder / "heldout.jsonl"), "images": True,
            "max_length": 512,
        },
        "training": {
            "global_batch_size": BATCH, "max_steps": STEPS, "optim": "sgd", "lr_scheduler_type": "constant",
            "max_grad_norm": 0, "eval_steps": STEPS // 2, "eval_answers": 0, "save_steps": None, "report_to": [],
            "report_page": False, "seed": 0, "per_device_eval_batch_size": 2,
        },
    }  # fmt: skip
    (folder / "images.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return rows


def run_cases(folder: Path, cases: list[Case]) -> dict[Case, list[dict[str, Any]]]:
    """Return what each case logged. Raises RuntimeError where one fails."""
    write_inputs(folder, {case.model for case in cases})
    found: dict[Case, list[dict[str, Any]]] = {}
    for ranks in sorted({case.ranks for case in cases}):
        of_group = [case for case in dict.fromkeys(cases) if case.ranks == ranks]
        found |= run_group(folder, ranks, {case: case.run(folder) for case in of_group})
    return found


def processor_of(folder: Path) -> Any:
    """Return the processor of a model of write_vision_model(), Transformers' own."""
    from transformers import AutoConfig, AutoTokenizer

    from brigade.train.images.processor import read_processor

    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    return read_processor("a test", str(folder), None, config, tokenizer).own


def plain(folder: Path, case: Case, rows: dict[str, list[dict[str, Any]]]) -> tuple[list[dict[str, float]], float]:
    """Return what the plain loop says of the steps of a case without adapters, and of the held-out rows at the end."""
    model, processor = folder / case.model, processor_of(folder / case.model)
    trains_tower = "false" in VARIANTS[case.variant] and "--freeze_vision_tower" in VARIANTS[case.variant]
    history, trained = plain_images.train(
        rows["train-single" if case.model in SINGLE else "train"], folder, model, processor,
        global_batch_size=ROWS - HELD_OUT if case.variant == PACKED else BATCH, max_steps=STEPS, seed=0,
        learning_rate=MODELS[case.model], freeze_vision_tower=not trains_tower,
    )  # fmt: skip
    return history, plain_images.held_out(rows["heldout"], folder, trained, processor)


def worst(log: list[dict[str, Any]], history: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest relative difference of losses and of gradient norms to the plain loop's. Raises ValueError for another
    number of steps."""
    steps = [entry for entry in log if "loss" in entry]
    if len(steps) != len(history):
        raise ValueError(f"{len(steps)} steps, where {len(history)} were expected")
    return {
        key: max(abs(own[key] - other[key]) / abs(other[key]) for own, other in zip(steps, history, strict=True))
        for key in ("loss", "grad_norm")
    }


def is_equal(case: Case, differences: dict[str, float]) -> bool:
    """Whether losses differ by TOLERANCE at most, and norms by what their model allows."""
    return differences["loss"] <= TOLERANCE and differences["grad_norm"] <= LOOSER.get(case.model, TOLERANCE)


def held_out(log: list[dict[str, Any]]) -> float:
    return float([entry["eval_loss"] for entry in log if "eval_loss" in entry][-1])
