"""Fine-tuning on images and texts in plain PyTorch and Transformers: what the runs of train.py are compared with.

It shares no code with brigade but for how a processor is made without video files (upstream/image_processors.py). Each sample is
read by itself: the model's own chat template and its processor make its tokens and its pixels, in one call, without padding, in
fp32 and without dropout; the loss is the mean over the supervised tokens of the global batch.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from .plain_preferences import norm_of
from .plain_preferences import steps as steps_of

Row = dict[
    str, Any
]  # {"messages": [...]}: of user and assistant; contents are texts or lists of parts; an image is a path

# Model type -> where its tower and its projector stand, by the beginnings of their parameters' names.
TOWERS = {
    "gemma3": ("model.vision_tower.",),
    "gemma4": ("model.vision_tower.",),
    "internvl": ("model.vision_tower.",),
    "llava": ("model.vision_tower.",),
    "llava_onevision": ("model.vision_tower.",),
    "mistral3": ("model.vision_tower.",),
    "qwen2_5_vl": ("model.visual.patch_embed.", "model.visual.blocks."),
    "qwen3_vl": ("model.visual.patch_embed.", "model.visual.pos_embed.", "model.visual.blocks."),
    "qwen3_5": ("model.visual.patch_embed.", "model.visual.pos_embed.", "model.visual.blocks."),
    "smolvlm": ("model.vision_model.",),
    "llama4": ("vision_model.",),
}


class Keys(NamedTuple):
    """The keys of a recipe that the loop reads."""

    global_batch_size: int = 8
    max_steps: int = 6
    seed: int = 0
    learning_rate: float = 0.1
    freeze_vision_tower: bool = True
    use_peft: bool = False
    adapts_tower: bool = False
    load_in_4bit: bool = False
    use_rslora: bool = False
    use_dora: bool = False


class Sample(NamedTuple):
    """One sample. inputs: forward()'s arguments, each of a batch of one; labels: (tokens,), -100 where nothing is learned"""

    inputs: dict[str, Any]
    labels: torch.Tensor


def sample_of(processor: Any, row: Row, folder: Path) -> Sample:
    """Return a row's only answer as a sample. folder: where the paths of images begin"""
    chat = [turn | {"content": parts_of(turn["content"])} for turn in row["messages"]]
    paths = [part["image"] for turn in chat for part in turn["content"] if part["type"] == "image"]
    images = [Image.open(folder / path).convert("RGB") for path in paths]

    marked = [
        turn | {"content": [{k: v for k, v in part.items() if k != "image"} for part in turn["content"]]}
        for turn in chat
    ]
    text = processor.tokenizer.apply_chat_template(marked, tokenize=False)
    asked = processor.tokenizer.apply_chat_template(marked[:-1], add_generation_prompt=True, tokenize=False)
    # LLaVA-OneVision's template writes what comes before an answer otherwise than before one that is generated; its own
    # generation marks begin with the answer's line.
    begin = len(asked) if text.startswith(asked) else text.rindex(chat[-1]["content"][0]["text"]) - 1

    def read(text: str) -> dict[str, Any]:
        given = {"images": [images]} if images else {}
        return dict(processor(text=[text], **given, add_special_tokens=False, return_tensors="pt"))

    whole, first = read(text), read(text[:begin])["input_ids"].shape[1]
    ids = whole["input_ids"][0]
    end = len(ids)
    while processor.tokenizer.decode(ids[end - 1]).isspace():  # some templates put a line's end behind the turn's
        end -= 1
    labels = torch.full_like(ids, -100)
    labels[first:end] = ids[first:end]
    return Sample({key: value for key, value in whole.items() if key != "attention_mask"}, labels)


def parts_of(content: str | list[Row]) -> list[Row]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def loss_of(model: Any, sample: Sample) -> torch.Tensor:
    """Return the sum of the cross-entropies of a sample's supervised tokens, in nats."""
    logits = model(**sample.inputs, use_cache=False).logits[0, :-1].float()
    return cross_entropy(logits, sample.labels[1:], reduction="sum")


def supervised(samples: Sequence[Sample]) -> int:
    return sum(int((sample.labels[1:] != -100).sum()) for sample in samples)


def load(folder: str | Path, freeze_vision_tower: bool = True) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():
        if freeze_vision_tower and name.startswith(TOWERS[model.config.model_type]):
            parameter.requires_grad_(False)
    return model


def with_adapters(model: Any, keys: Keys) -> Any:
    """Return the model with PEFT's adapters on all linear layers of its language model, or of its tower, too. With load_in_4bit
    the values of the former are those that NF4 has of them, computed once, in fp32. Neither the output layer nor Llama 4's
    router, a linear layer that returns two things, gets any."""
    from peft import LoraConfig, get_peft_model

    linears = {module for module in model.get_decoder().modules() if isinstance(module, torch.nn.Linear)}
    head = model.get_output_embeddings()  # which lies in what Llama 4 calls its decoder
    inside = {module for module in linears if module is not head and not type(module).__name__.endswith("Router")}
    for module in inside if keys.load_in_4bit else ():
        module.weight.data = _in_4bit(module.weight.data)
    tower = TOWERS[model.config.model_type] if keys.adapts_tower else ()
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    names = [name for name, module in linear if module in inside or name.startswith(tower)]
    more = {"use_rslora": keys.use_rslora, "use_dora": keys.use_dora}
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=names, **more)  # type: ignore[arg-type]
    torch.manual_seed(keys.seed)
    return get_peft_model(model, lora).eval()


def _in_4bit(weight: torch.Tensor) -> torch.Tensor:
    """Return the values that NF4 with nested constants has of a matrix."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))


def train(rows: list[Row], folder: Path, model: str | Path, processor: Any, **keys: Any) -> tuple[list[Row], Any]:
    """Train by SGD; return what each step says before its update, loss and grad_norm, and the model.

    folder: where the paths of images begin; model: its directory; keys: of Keys
    """
    settings = Keys(**keys)
    trained = load(model, settings.freeze_vision_tower)
    if settings.use_peft:
        trained = with_adapters(trained, settings)
    samples = [sample_of(processor, row, folder) for row in rows]
    optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], settings.learning_rate)
    history = []
    for items in steps_of(len(rows), settings):  # type: ignore[arg-type]  # it reads keys that both have
        of_step, total = [samples[item] for item in items], 0.0
        count = supervised(of_step)
        for sample in of_step:
            loss = loss_of(trained, sample) / count
            loss.backward()
            total += float(loss.detach())
        history.append({"loss": total, "grad_norm": float(norm_of(trained))})
        optimizer.step()
        optimizer.zero_grad()
    return history, trained


@torch.no_grad()
def held_out(rows: list[Row], folder: Path, model: Any, processor: Any) -> float:
    """Return the mean cross-entropy of the supervised tokens of rows."""
    samples = [sample_of(processor, row, folder) for row in rows]
    return math.fsum(float(loss_of(model, sample)) for sample in samples) / supervised(samples)
