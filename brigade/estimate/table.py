"""Estimates for the rows of a CSV of published runs: which of them can be expressed, and as what."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .job import Checkpointing, Job, Loss
from .layer import EAGER, FUSED
from .shape import FAMILIES, LLAMA, Family, ModelShape

# How a framework computes: the first name that is found in the row's `framework`.
FRAMEWORKS: list[tuple[str, dict[str, Any]]] = [
    ("composer", {"engine": "fsdp2", "kernels": FUSED, "stage": 3, "attention": "flash1"}),
    ("nanotron", {"engine": "nanotron", "kernels": frozenset(("norm", "rotary"))}),
    ("megatron-deepspeed", {"engine": "megatron-2022", "kernels": FUSED, "attention": "eager", "sequence_parallel": False, "dropout": True}),
    ("megatron-lm", {"engine": "megatron-2022", "kernels": FUSED, "attention": "eager", "dropout": True}),
    ("megatron", {"engine": "megatron", "kernels": FUSED, "attention": "flash3"}),
    ("torchtitan", {"engine": "fsdp2", "kernels": EAGER, "stage": 3}),
    ("fsdp1", {"engine": "fsdp-bf16", "kernels": EAGER, "stage": 3}),
    ("torchtune", {"engine": "pure", "kernels": EAGER}),
    ("", {"engine": "fsdp2"}),
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
    family = next(family for pattern, family in BY_NAME if re.search(pattern, name, re.I))
    hidden, heads = integer(row, "hidden"), integer(row, "heads")
    tied = "tied" in name or family.tied or "llama3.2" in name
    return ModelShape(name, integer(row, "layers"), hidden, integer(row, "ffn"), heads, integer(row, "kv_heads", heads),
                      hidden // heads, integer(row, "vocab", 51200), tied=tied, family=family)  # fmt: skip


def lora_parameters(shape: ModelShape, rank: int = 16) -> int:
    """Of adapters of `rank` on every linear layer but the head."""
    h, q, kv, f = shape.hidden, shape.query_width, shape.key_value_width, shape.ffn
    return shape.layers * rank * ((h + q) + 2 * (h + kv // 2) + (q + h) + 3 * (h + f))


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
    kernels, precision = (row.get(key, "").lower() for key in ("kernels", "precision"))
    if "unpacked" in kernels:
        raise Inexpressible("samples are padded, and their lengths are not given")
    how, every, offloaded = checkpointing_of(row.get("act_ckpt", ""), "fsdp1 + compile" in row["framework"].lower())
    if "compile" in kernels:
        traits["kernels"] = FUSED
    loss: Loss = "chunked" if "chunk" in kernels else "compiled" if "compile" in kernels else "full"
    data, tensor, pipeline, context = (integer(row, key, 1) for key in ("dp", "tp", "pp", "cp"))
    if not (row.get("dp") or "").strip():
        data = max(1, integer(row, "n_gpus") // (tensor * pipeline * context))
    stage = integer(row, "zero", traits.pop("stage", 0))
    micro, batch = integer(row, "mbs"), integer(row, "gbs_seqs", 0)
    accumulation = integer(row, "grad_acc", max(1, batch // (micro * data)) if batch else 1)
    shard = 8 if "hsdp" in row["strategy"].lower() else 0
    cumulative = "torchtune" in row["framework"].lower()  # its rows are a ladder: each adds to those above it
    if cumulative and micro and "+packed" not in kernels or "lora" in kernels:
        traits["kernels"], loss = FUSED, ("compiled" if "compile" in kernels and "lora" not in kernels else "chunked")
    method = row["task"] if row["task"] in ("lora", "qlora") else "full"
    if method != "full":
        traits |= {"method": method, "trained": lora_parameters(shape)}
    if "8bit" in row["optimizer"].lower():
        traits["moments"] = 2.0
    if cumulative and "optimizer-in-bwd" in kernels or offloaded:
        traits["step_in_backward"] = True
    return Job(shape, integer(row, "seq_len"), micro, accumulation, stage=stage, data=data, tensor=tensor, pipeline=pipeline,
               context=context, virtual=integer(row, "vp", 1), shard=shard, checkpointing=how, every=every,
               offload_activations=offloaded, gpu=row["gpu"], link=row.get("inter_node", ""), loss=loss,
               expert=integer(row, "ep", 1), fp8="fp8" in precision or "float8" in precision, **traits)  # fmt: skip
