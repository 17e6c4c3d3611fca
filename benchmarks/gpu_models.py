"""What benchmarks/gpu.py trains: models of published shapes with random weights, on packed dialogues; FLOPs of a token.

    python -m benchmarks.gpu_models outputs/gpu qwen3-0.6b      # writes what is missing; says in JSON where it lies

A process of its own, so that none of the GPU's memory is held while a run is measured.
"""

import argparse
import json
import shutil
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import peers_data
from brigade.plan import hardware
from brigade.train.watch import flops

REPOSITORY = Path(__file__).resolve().parent.parent
# The makers' own config.json, with their revisions in the recipes' headers and in benchmarks/data/README.md.
CONFIGS = {
    "qwen3-0.6b": REPOSITORY / "recipes/qwen3-0.6b/config.json",
    "qwen3-1.7b": REPOSITORY / "benchmarks/data/qwen3-1.7b/config.json",
    "qwen3-8b": REPOSITORY / "recipes/qwen3-8b/config.json",
}
DIALOGUES = 4000  # of 343 tokens on average: 1.4 million, more than any run takes
TINY_DIALOGUES, TINY_LETTERS = 120, 250
HELD_OUT = 2  # train.py evaluates before and after; neither is measured
EXTRAS = ("bitsandbytes", "liger-kernel", "flash-attn", "flash-attn-3", "triton")
Row = dict[str, Any]


# ---- FLOPs ---------------------------------------------------------------------------------------------------------
def flops_per_token(shape: Row, adapters: int | None, attended_length: float) -> tuple[float, float]:
    """(counted, done): FLOPs for one token by the convention of full fine-tuning, and what the method truly computes.

    counted: 6 N + 12 L h s of flops.flops_per_token, N the model's own parameters, for LoRA as well
    done: 2 N forward, 2 N for gradients of inputs, and 2 N for those of weights only where they are trained; under LoRA
    4 N + 6 A, with A parameters of adapters (None: all weights are trained). The attention part is the same.
    """
    size = shape["parameters"]
    counted = flops.flops_per_token(size, shape["layers"], shape["hidden_size"], attended_length)
    return counted, counted if adapters is None else counted - 2 * size + 6 * adapters


def rates(entries: list[Row], shape: Row, adapters: int | None, device: str) -> Row:
    """What a run's measured log entries, one per step, say beyond tokens per second.

    step_time: seconds, the median; attended_length: mean over tokens of their sample's length
    mfu, mfu_of_work_done: percent of the device's dense bf16 peak (None where it is not known), as in flops_per_token
    tflops: counted, per second; memory in GiB: the most that the allocator had handed out, and had taken from the device
    """
    tokens = [entry["tokens_per_second"] * entry["step_time"] for entry in entries]
    rate = sum(tokens) / sum(entry["step_time"] for entry in entries)
    attended = sum(e["attended_length"] * count for e, count in zip(entries, tokens, strict=True)) / sum(tokens)
    known = hardware.gpu_of_device(device)
    peak = known and known.bf16_tflops
    counted, done = flops_per_token(shape, adapters, attended)
    return {
        "step_time": statistics.median(entry["step_time"] for entry in entries),
        "attended_length": round(attended, 1),
        "tflops": rate * counted / 1e12,
        "mfu": flops.utilisation(rate, counted, peak) if peak else None,
        "mfu_of_work_done": flops.utilisation(rate, done, peak) if peak else None,
        "reserved_memory_gib": entries[-1].get("reserved_memory_gib"),
    }


def adapter_parameters(shape: Row, rank: int) -> int:
    """Parameters of LoRA on all linear layers: rank rows of the input's width and rank columns of the output's."""
    return rank * shape["linear_widths"]


# ---- models --------------------------------------------------------------------------------------------------------
def config_of(name: str, tiny: bool) -> Row:
    """A model's config.json; tiny: the same architecture as a rehearsal shrinks it (2 layers, hidden size 64)."""
    from brigade.train.model.tiny import shrink

    config = json.loads(CONFIGS[name].read_text())
    return shrink(config) if tiny else config


def shape_of(config: Any) -> Row:
    """{"parameters", "layers", "hidden_size", "linear_widths"}: the last of them is the sum of inputs and outputs of
    all linear layers but the output layer. On the meta device, which takes no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from brigade.train.model import adapters
    from brigade.train.model.sizes import parameter_count
    from brigade.train.watch.throughput import model_shape

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [model.get_submodule(name) for name in adapters.linear_layers(model)]
    widths = sum(sum(layer.weight.shape) for layer in layers if layer is not model.get_output_embeddings())
    depth, hidden = model_shape(config)
    return {
        "parameters": parameter_count(model),
        "layers": depth,
        "hidden_size": hidden,
        "linear_widths": widths,
    }


def write_model(name: str, folder: Path, tiny: bool) -> Row:
    """Random weights in bf16, as published ones are, in Hugging Face format, unless they are there; returns its shape.

    On a GPU they are drawn there: eight billion random numbers take a CPU minutes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    complete = folder / "shape.json"
    if complete.exists():
        return json.loads(complete.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_of(name, tiny)))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(peers_data.SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    shape = shape_of(config)
    complete.write_text(json.dumps(shape))
    return shape


# ---- data, and where we are ----------------------------------------------------------------------------------------
def write_data(folder: Path, tiny: bool) -> Row:
    """The dialogues of benchmarks/peers_data.py and the built-in tokenizer; {"train", "heldout", "tokenizer", "sha256"}."""
    from brigade.train.data import builtin

    folder.mkdir(parents=True, exist_ok=True)
    pairs, heldout = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (builtin.TRAIN, builtin.HELDOUT)
    )
    short = [pair for pair in pairs if len(json.dumps(pair)) < TINY_LETTERS]  # several to a pack of 128 tokens
    chats = short[:TINY_DIALOGUES] if tiny else peers_data.dialogues(pairs, DIALOGUES, peers_data.SEED)
    digest = peers_data.write_jsonl(folder / "train.jsonl", chats)
    peers_data.write_jsonl(folder / "heldout.jsonl", heldout[:HELD_OUT])
    places = {"train": "train.jsonl", "heldout": "heldout.jsonl"}
    return {key: str(folder / name) for key, name in places.items()} | {
        "tokenizer": str(builtin.TOKENIZER),
        "sha256": digest,
        "dialogues": len(chats),
    }


def where() -> Row:
    """{"device", "device_memory_gib", "versions"}: of the GPU by its driver's name, or of this host's processor."""
    import torch

    from benchmarks.pages import machine
    from brigade.train.run.versions import of_packages

    found = dict(of_packages())
    for package in EXTRAS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if not torch.cuda.is_available():
        return {"device": machine(), "device_memory_gib": None, "versions": found}
    properties = torch.cuda.get_device_properties(0)
    found["cuda"] = str(torch.version.cuda)
    return {
        "device": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30, 1),
        "versions": found,
    }


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CONFIGS))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    load = {
        name: {"folder": str(options.folder / name), "shape": write_model(name, options.folder / name, options.tiny)}
        for name in options.models
    }
    data = write_data(options.folder / "data", options.tiny) if load else {}
    print(json.dumps({"where": where(), "models": load, "data": data}))


if __name__ == "__main__":
    main()
