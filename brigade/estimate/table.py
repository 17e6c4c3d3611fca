"""Estimates for the rows of a CSV of published runs: which of them can be expressed, and as what."""

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from .estimate import Estimate, estimate
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


# ---- whole tables ------------------------------------------------------------------------------------------------
PREDICTED = (
    "pred_mem_gib",
    "pred_mem_allocated_gib",
    "pred_step_time_s",
    "pred_tok_s_gpu",
    "pred_mfu_pct",
    "fits",
    "reason",
)
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


def expressed(row: Mapping[str, str]) -> Estimate:
    """The estimate of a row. Raises Inexpressible, or UserError for a GPU that is not known or sizes that do not fit together."""
    job = job_of_row(as_published(row))
    result = estimate(job)
    if result.fits or (row.get("act_ckpt") or "").strip() or "n_gpus" not in row:
        return result
    # The row does not say what was computed again: as few layers as it takes to fit.
    tried = (estimate(replace(job, checkpointing="full", every=every)) for every in (8, 4, 3, 2))
    return next((found for found in tried if found.fits), estimate(replace(job, checkpointing="full")))


def predict(row: Mapping[str, str]) -> dict[str, Any]:
    """PREDICTED for one row; for one that cannot be expressed, the reason alone."""
    try:
        result = expressed(row)
    except Inexpressible as error:
        return dict.fromkeys(PREDICTED, "") | {"reason": str(error)}
    except UserError as error:
        return dict.fromkeys(PREDICTED, "") | {"reason": f"{error.place}: {error.problem}"}
    kind = row.get("mem_kind", "").lower()
    seen = result.device_gib if "smi" in kind or "device" in kind else result.reserved_gib
    return {
        "pred_mem_gib": f"{seen:.2f}", "pred_mem_allocated_gib": f"{result.allocated_gib:.2f}",
        "pred_step_time_s": f"{result.time.total:.4f}", "pred_tok_s_gpu": f"{result.tokens_per_second_per_gpu:.1f}",
        "pred_mfu_pct": f"{result.mfu:.2f}", "fits": "yes" if result.fits else "no", "reason": "",
    }  # fmt: skip


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file. Raises UserError for a file that is none, or of another format."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(str(path), f"it cannot be read: {error.strerror}", "name a CSV file") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(str(path), "it is not text in CSV", "name a CSV file") from None
    if not rows:
        raise UserError(str(path), "it has no rows", "name a CSV file with a header and rows")
    formats = {"framework", "gpu", "seq_len"} if "n_gpus" in rows[0] else {"gpus", "zero"}
    if missing := sorted(({"model", "dp", "tp", "pp", "mbs", "grad_acc"} | formats) - rows[0].keys()):
        raise UserError(str(path), f"it lacks the columns {', '.join(missing)}",
                        "give the columns of benchmarks/data/published.csv or benchmarks/data/playbook_h100.csv")  # fmt: skip
    return rows


def predict_file(path: Path, out: Path) -> list[dict[str, str]]:
    """Every row of `path` with its prediction, written to `out`. Raises UserError for a table of another format."""
    rows = read(path)
    if out.exists() and out.resolve() == path.resolve():
        raise UserError(str(out), "it is the table itself", "name another file for --out")
    done = [row | predict(row) for row in rows]
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [*rows[0], *(name for name in PREDICTED if name not in rows[0])], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(done)
    return done


def figure(row: Mapping[str, str], *names: str) -> float | None:
    """The first of the columns that holds a number above 0."""
    for name in names:
        try:
            if (value := float(row.get(name) or 0)) > 0:
                return value
        except ValueError:
            continue
    return None


def counts_allocated(row: Mapping[str, str]) -> bool:
    """Whether a row says that its memory is what torch allocated, against reserved or not said."""
    return any(word in row.get("mem_kind", "").lower() for word in ("alloc", "active", "analytic"))


def errors(row: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Relative errors (predicted / measured - 1) of memory and of speed, where the row has them and its run was ok."""
    memory = speed = None
    if row.get("status", "ok") == "ok" and not row.get("reason"):
        seen, want = (
            figure(row, "peak_mem_gib", "mem_gb"),
            "pred_mem_allocated_gib" if counts_allocated(row) else "pred_mem_gib",
        )
        memory = float(row[want]) / seen - 1 if seen else None
        seen = figure(row, "tok_s_gpu")
        speed = float(row["pred_tok_s_gpu"]) / seen - 1 if seen else None
    return memory, speed


def quantiles(values: Iterable[float | None]) -> tuple[int, float, float]:
    """(how many, median, p90) of absolute values, in percent."""
    known = sorted(100 * abs(value) for value in values if value is not None)
    if not known:
        return 0, float("nan"), float("nan")
    return len(known), statistics.median(known), known[min(len(known) - 1, int(0.9 * len(known)))]


def summary(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Per set: rows, median and p90 of absolute errors, and what was said of runs that did not fit."""
    sets: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        sets[row.get("set") or row["model"]].append(row)
    table = []
    for name, members in sets.items():
        memory, speed = zip(*(errors(row) for row in members), strict=True)
        told = [row for row in members if not row.get("reason")]
        table.append({
            "set": name, "rows": len(members), "expressed": len(told), "memory": quantiles(memory), "speed": quantiles(speed),
            "failed": sum(row.get("status", "ok") != "ok" for row in told),
            "failed_told": sum(row.get("status", "ok") != "ok" and row["fits"] == "no" for row in told),
            "ran": sum(row.get("status", "ok") == "ok" for row in told),
            "ran_refused": sum(row.get("status", "ok") == "ok" and row["fits"] == "no" for row in told),
        })  # fmt: skip
    return table
