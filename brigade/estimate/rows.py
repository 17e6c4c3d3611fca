"""A row of a CSV of published runs as a configuration to estimate."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .job import Checkpointing, Job, Loss
from .layer import EAGER, FUSED, MEGATRON
from .names import known_shape
from .shape import FAMILIES, LLAMA, Family, ModelShape, lora_parameters

# How a framework computes: the first name that is found in the row's `framework`.
FRAMEWORKS: list[tuple[str, dict[str, Any]]] = [
    ("composer", {"engine": "fsdp2", "kernels": FUSED, "stage": 3, "attention": "flash1", "loss": "kernel"}),
    ("nanotron", {"engine": "nanotron", "kernels": frozenset(("norm", "rotary"))}),
    ("megatron-deepspeed", {"engine": "megatron-2022", "kernels": MEGATRON, "attention": "eager", "sequence_parallel": False,
                            "dropout": True}),
    ("megatron-lm", {"engine": "megatron-2022", "kernels": MEGATRON, "attention": "eager", "dropout": True}),
    ("megatron", {"engine": "megatron", "kernels": MEGATRON, "attention": "flash3", "stage": 1, "loss": "kernel"}),
    ("automodel", {"engine": "fsdp2", "kernels": FUSED, "stage": 3, "attention": "flash3"}),
    ("torchtitan", {"engine": "fsdp2", "kernels": EAGER, "stage": 3}),
    ("fsdp1", {"engine": "fsdp-bf16", "kernels": EAGER, "stage": 3}),
    ("torchtune", {"engine": "pure", "kernels": EAGER}),
    ("deepspeed", {"engine": "zero"}),
    ("", {}),  # whatever runs on Transformers: the strategy says the engine
]  # fmt: skip
# Architectures of models that a table describes by their widths alone.
BY_NAME: list[tuple[str, Family]] = [
    ("mpt", FAMILIES["mpt"]), ("gpt-|gpt3|megatron|turing", replace(FAMILIES["gpt2"], positions=2048)), ("", LLAMA),
]  # fmt: skip


class Inexpressible(Exception):
    """Why a row has no estimate."""


def integer(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    text = (row.get(key) or "").strip()
    if not text:
        if default is None:
            raise Inexpressible(f"{key} is not given")
        return default
    try:
        return int(float(text))
    except ValueError:
        raise Inexpressible(f"{key} {text!r} is not a number") from None


def shape_of_row(row: Mapping[str, str]) -> ModelShape:
    name = row["model"]
    if not (row.get("hidden") or "").strip():
        if shape := known_shape(name):
            return shape
        raise Inexpressible(f"the row does not give the dimensions of {name!r}, and no recipe here has its config.json")
    family = next(family for pattern, family in BY_NAME if re.search(pattern, name, re.I))
    hidden, heads = integer(row, "hidden"), integer(row, "heads")
    tied = "tied" in name or family.tied or "llama3.2" in name
    return ModelShape(name, integer(row, "layers"), hidden, integer(row, "ffn"), heads, integer(row, "kv_heads", heads),
                      hidden // heads, integer(row, "vocab", 51200), tied=tied, family=family)  # fmt: skip


def _offload(strategy: str) -> str:
    """What a strategy like `ZeRO-3 + CPU offload (optimizer and parameters)` leaves outside of the GPU."""
    if "nvme" in strategy:
        return "nvme"
    return ("all" if "param" in strategy else "optimizer") if "offload" in strategy else ""


def checkpointing_of(text: str, whole_layers: bool = False) -> tuple[Checkpointing, int, bool]:
    """(what is computed again, of how many layers one, whether what is kept goes to the host)."""
    text = text.lower()
    if match := re.search(r"layer\((\d+)\)", text):
        return "full", int(match[1]), False
    if "selective-layer" in text or (whole_layers and text == "selective"):
        return "full", 2, False
    if text.startswith("full"):
        return "full", 1, "offload" in text
    if "op" in text.split("-"):
        return "half", 1, False
    return ("attention" if text.startswith("selective") else "none"), 1, False


def job_of_row(row: Mapping[str, str]) -> Job:
    """The configuration that a row of published.csv's format states. Raises Inexpressible."""
    shape = shape_of_row(row)
    traits = dict(next(traits for name, traits in FRAMEWORKS if name in row["framework"].lower()))
    strategy = row["strategy"].lower()
    zero = re.search(r"zero-?(\d)", strategy)
    if "engine" not in traits:
        traits["engine"] = "zero" if zero and zero[1] != "0" else "ddp" if "ddp" in strategy else "fsdp2"
    if traits["engine"] == "zero":
        traits |= {"stage": int(zero[1]) if zero else 0, "offload": _offload(strategy)}
    kernels, precision = (row.get(key, "").lower() for key in ("kernels", "precision"))
    if "unpacked" in kernels:
        raise Inexpressible("samples are padded, and their lengths are not given")
    how, every, offloaded = checkpointing_of(row.get("act_ckpt", ""), "fsdp1 + compile" in row["framework"].lower())
    if "compile" in kernels:
        traits["kernels"] = FUSED
    loss: Loss = "chunked" if "chunk" in kernels else "compiled" if "compile" in kernels else traits.pop("loss", "full")
    traits.pop("loss", None)
    data, tensor, pipeline, context = (integer(row, key, 1) for key in ("dp", "tp", "pp", "cp"))
    if not (row.get("dp") or "").strip():
        data = max(1, integer(row, "n_gpus") // (tensor * pipeline * context))
    stage = integer(row, "zero", traits.pop("stage", 3 if "fsdp" in strategy else 0))
    if match := re.search(r"FSDP=(\d+)", row["strategy"]):
        stage = 3 if int(match[1]) > 1 else stage
    micro, batch = integer(row, "mbs"), integer(row, "gbs_seqs", 0)
    accumulation = integer(row, "grad_acc", max(1, batch // (micro * data)) if batch else 1)
    if batch and accumulation * micro * data != batch:
        raise Inexpressible(
            f"{data} (dp) x {micro} (mbs) x {accumulation} (grad_acc) are not its {batch} sequences (gbs)"
        )
    shard = 8 if "hsdp" in row["strategy"].lower() else 0
    cumulative = "torchtune" in row["framework"].lower()  # its rows are a ladder: each adds to those above it
    if (cumulative and micro and "+packed" not in kernels) or "lora" in kernels:
        traits["kernels"], loss = FUSED, ("compiled" if "compile" in kernels and "lora" not in kernels else "chunked")
    method = row["task"] if row["task"] in ("lora", "qlora") else "full"
    if method != "full":
        traits |= {"method": method, "trained": lora_parameters(shape, 16)}
    optimizer = row["optimizer"].lower()
    if "8bit" in optimizer:
        traits["optimizer"] = "paged_adamw_8bit" if "paged" in optimizer else "adamw_8bit"
    if (cumulative and "optimizer-in-bwd" in kernels) or "in backward" in optimizer or offloaded:
        traits["step_in_backward"] = True
    if traits["engine"] == "zero" and stage == 0:
        traits["engine"] = "ddp"
    return Job(shape, integer(row, "seq_len"), micro, accumulation, stage=stage, data=data, tensor=tensor, pipeline=pipeline,
               context=context, virtual=integer(row, "vp", 1), shard=shard, checkpointing=how, every=every,
               offload_activations=offloaded, gpu=row["gpu"], link=row.get("inter_node", ""), loss=loss,
               expert=integer(row, "ep", 1), fp8="fp8" in precision or "float8" in precision, **traits)  # fmt: skip


# The two models of the Ultra-Scale Playbook's own table (playbook_h100.csv), which gives their parameters alone.
PLAYBOOK = {
    "1.34B": {
        "model": "llama-like-1.34B-tied",
        "layers": "16",
        "hidden": "2048",
        "ffn": "8192",
        "heads": "32",
        "vocab": "131072",
    },
    "8.86B": {
        "model": "llama-like-8.86B",
        "layers": "32",
        "hidden": "4096",
        "ffn": "14336",
        "heads": "32",
        "vocab": "131072",
    },
}


def as_published(row: Mapping[str, str]) -> Mapping[str, str]:
    """A row of either format in published.csv's columns; measured columns are left behind."""
    if "n_gpus" in row:
        return row
    if row["model"] not in PLAYBOOK:
        raise Inexpressible(f"model {row['model']!r} is none of the table's {' and '.join(PLAYBOOK)}")
    return PLAYBOOK[row["model"]] | {
        "n_gpus": row["gpus"], "gpu": "H100-80GB", "inter_node": "EFA (AWS P5, 3200Gb/s per node)", "framework": "nanotron v0.5",
        "task": "pretrain", "strategy": "", "dp": row["dp"], "tp": row["tp"], "pp": row["pp"], "zero": row["zero"],
        "mbs": row["mbs"], "grad_acc": row["grad_acc"], "gbs_seqs": row.get("gbs", ""),
        "seq_len": "4096", "precision": "bf16", "optimizer": "AdamW",
    }  # fmt: skip
