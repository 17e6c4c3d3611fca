"""The cases of training on images: train.py against the plain loop of testing/plain_images.py, on equal rows.

Each case is a run of six steps in fp32, with SGD at a rate that moves the loss. Of 21 rows eight have no image, and the global
batch is 8: some micro-batches have no image, others several, and each epoch ends in the middle of a batch.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from . import axes, axes_sequence, parity, plain_images
from .command_line import as_flags
from .image_rows import HELD_OUT, ROWS, SINGLE, write_rows
from .preferences import run_groups, steps_of, worst
from .runs import PLAIN

TOLERANCE = 1e-5  # relative
# A gradient's norm is rounded more where weights are multiplied again and again: gates, recurrences.
LOOSER = {"qwen3_5": 1e-4, "gemma4": 1e-4}
STEPS, BATCH = 6, 8
# Kind of vision_models.yaml -> a learning rate at which the loss moves and rounding does not show.
MODELS = dict.fromkeys(
    (
        "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "smolvlm", "internvl", "llava_onevision", "llava/pixtral",
        "mistral3", "llama4",
    ), 0.1
) | {"qwen3_5": 0.02, "gemma4": 0.02, "llama4": 0.02}  # fmt: skip
# With a vocabulary that ranks of a tensor group can divide; the same model of that type otherwise.
EVEN = "-even"
RATES = MODELS | {f"{model}{EVEN}": rate for model, rate in MODELS.items()}


class Case(NamedTuple):
    """One run. model: of MODELS; strategy: of STRATEGIES; variant: of VARIANTS"""

    model: str
    strategy: str = "single"
    ranks: int = 1
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.model}, {self.strategy} on {self.ranks}" + (f", {self.variant}" if self.variant else "")

    @property
    def rate(self) -> float:
        """The learning rate, but for AdamW's (SMALL)."""
        return RATES[self.model] * FACTORS.get(self.variant, 1.0)

    def run(self, folder: Path, *further: str, **more: Any) -> dict[str, Any]:
        """Return this case for testing.runs. further: flags behind all others; more: as there"""
        flags = ["--recipe", str(folder / "images.yaml"), "--model_name_or_path", str(folder / self.model)]
        flags += as_flags(learning_rate=self.rate)
        if self.model.removesuffix(EVEN) in SINGLE:
            flags += as_flags(train_file=str(folder / "train-single.jsonl"))
        # A step has two micro-batches or more of each rank, and filler in the last ones.
        flags += ["--per_device_train_batch_size", "3" if self.ranks < 3 else "2"]
        flags += [*STRATEGIES[self.strategy], *VARIANTS[self.variant], *further]
        name = more.pop("name", str(self).replace("/", "-"))  # it becomes a file's name
        flags += ["--output_dir", str(folder / "outputs" / name)]
        # What AutoTP leaves behind in a process asks later runs for equal batches, too.
        group = "divided" if self.strategy in axes.STRATEGIES else ""
        return {"name": name, "ranks": self.ranks, "group": group, "flags": flags, **more}


# Models whose language part a tensor group can divide, and a number of ranks for each strategy with such groups.
IN_TENSOR_GROUPS = (
    f"qwen2_5_vl{EVEN}", f"qwen3_5{EVEN}", "gemma3", f"smolvlm{EVEN}", "internvl", f"llava_onevision{EVEN}",
    f"llava/pixtral{EVEN}", "mistral3",
)  # fmt: skip
TENSOR_GROUPS = {"ddp_tp2": 2, "zero1_tp2": 2, "zero2_tp2": 4, "zero3_tp2": 2, "fsdp2_tp2": 4}
STRATEGIES: dict[str, list[str]] = {"single": [], **parity.STRATEGIES, **axes.STRATEGIES}
STRATEGIES |= {
    f"{kind}_sp2": axes_sequence.strategy(kind, 2, 4) for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp")
}
PACKED, TOWER, ADAPTERS = "packed", "tower trained", "LoRA"
EVERYWHERE = "LoRA on tower, too"
RSLORA, DORA, QLORA, QDORA = "rsLoRA", "DoRA", "QLoRA", "QDoRA"
TILED, CHECKPOINTING = "tiles", "checkpointing"
SMALL = "AdamW, steps without an image"
# How many times a model's learning rate adapters learn at. rsLoRA's scale is four times LoRA's.
FACTORS = dict.fromkeys((ADAPTERS, EVERYWHERE, DORA), 5.0) | {QLORA: 2.5, QDORA: 2.5, RSLORA: 0.5}
_ADAPTED = {"use_peft": True}
_LORA = ["--use_peft", "true"]
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
    TILED: ["--tiled_loss", "5", "--tiled_mlp", "7"],
    CHECKPOINTING: ["--activation_checkpointing", "true"],
    ADAPTERS: _LORA,
    EVERYWHERE: [*_LORA, "--lora_parts", "language,vision_tower"],
    RSLORA: [*_LORA, "--use_rslora", "true"],
    DORA: [*_LORA, "--use_dora", "true"],
    QLORA: [*_LORA, "--load_in_4bit", "true"],
    QDORA: [*_LORA, "--load_in_4bit", "true", "--use_dora", "true"],
}


def write_inputs(folder: Path, models: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Write models, images, rows and the recipe that all cases share; return the rows."""
    from .vision_models import write_vision_model

    rows = write_rows(folder)
    for model in models:
        write_vision_model(folder / model, model.removesuffix(EVEN), 4 if model.endswith(EVEN) else 1)
    recipe = {
        "model": {"model_name_or_path": "given by a flag"},
        "data": {
            "train_file": str(folder / "train.jsonl"), "validation_file": str(folder / "heldout.jsonl"), "images": True,
            "max_length": 512,
        },
        "training": PLAIN | {"global_batch_size": BATCH, "max_steps": STEPS, "eval_steps": STEPS // 2},
    }  # fmt: skip
    (folder / "images.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return rows


def run_cases(folder: Path, cases: list[Case]) -> dict[Case, list[dict[str, Any]]]:
    """Return what each case logged. Raises RuntimeError where one fails."""
    write_inputs(folder, {case.model for case in cases})
    return run_groups(folder, {case: case.run(folder) for case in cases})


def processor_of(folder: Path) -> Any:
    """Return the processor of a model of write_vision_model(), Transformers' own."""
    from transformers import AutoConfig, AutoTokenizer

    from brigade.train.model.images.load import read_processor

    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    return read_processor("a test", str(folder), None, config, tokenizer).own


# What the plain loop does otherwise in a variant; in all others it does as in "".
OF_LOOP: dict[str, dict[str, Any]] = {
    "": {},
    PACKED: {"global_batch_size": ROWS - HELD_OUT},
    TOWER: {"freeze_vision_tower": False},
    ADAPTERS: _ADAPTED,
    EVERYWHERE: _ADAPTED | {"adapts_tower": True},
    RSLORA: _ADAPTED | {"use_rslora": True},
    DORA: _ADAPTED | {"use_dora": True},
    QLORA: _ADAPTED | {"load_in_4bit": True},
    QDORA: _ADAPTED | {"load_in_4bit": True, "use_dora": True},
}


def loop_of(case: Case) -> str:
    """Return the variant by which the plain loop computes what a case does."""
    if case.variant in OF_LOOP:
        return case.variant
    return TOWER if "--freeze_vision_tower" in VARIANTS[case.variant] else ""


def plain(folder: Path, case: Case, rows: dict[str, list[dict[str, Any]]]) -> tuple[list[dict[str, float]], float]:
    """Return what the plain loop says of the steps of a case, and of the held-out rows at the end."""
    model, processor = folder / case.model, processor_of(folder / case.model)
    shared = {"global_batch_size": BATCH, "max_steps": STEPS, "seed": 0, "learning_rate": case.rate}
    history, trained = plain_images.train(
        rows["train-single" if case.model.removesuffix(EVEN) in SINGLE else "train"], folder, model, processor,
        **shared | OF_LOOP[loop_of(case)],
    )  # fmt: skip
    return history, plain_images.held_out(rows["heldout"], folder, trained, processor)


def assert_equal(case: Case, log: list[dict[str, Any]], history: list[dict[str, float]]) -> None:
    """Losses differ from the plain loop's by TOLERANCE at most, and norms by what their model allows."""
    differences, looser = worst(steps_of(log), history), LOOSER.get(case.model.removesuffix(EVEN), TOLERANCE)
    assert differences["loss"] <= TOLERANCE and differences["grad_norm"] <= looser, differences


def held_out(log: list[dict[str, Any]]) -> float:
    return float([entry["eval_loss"] for entry in log if "eval_loss" in entry][-1])
