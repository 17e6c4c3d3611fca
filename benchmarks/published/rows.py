"""Turn a row of a CSV of published runs into a configuration to estimate."""

import re
from collections.abc import Mapping
from typing import Any

from brigade.plan import hardware
from brigade.plan.choice.job_of_run import attention_of
from brigade.plan.costs.job import EAGER, FUSED
from brigade.plan.shape.lora import lora_parameters
from brigade.plan.shape.model_shape import ModelShape
from brigade.train.strategy.state_bytes import OPTIMIZER_BYTES

from .details import (
    adapters_drop,
    divides_norms,
    drops,
    has_half_gradients,
    hold_expert_tensor,
    is_unfused_loss,
    link_of,
    node_size_of,
    refuse_details,
    whole_gradients_of,
)
from .job import ENGINES, PublishedJob
from .parse_columns import (
    ATTENTIONS,
    FUSED_KERNELS,
    HELD,
    LOSSES,
    Inexpressible,
    adapters_of,
    checkpointing_of,
    engine_of,
    first,
    in_fp32_under_autocast,
    keeps_no_fp32,
    method_of,
    offload_of,
    optimizer_of,
    precision_of,
    refuse,
    told,
)
from .shapes import integer, shape_of_row, size

# What trains with Transformers and PEFT, whose adapters are in fp32 over weights in bf16.
TRANSFORMERS = r"trainer|\btrl\b|axolotl|llama-?factory|\bhf\b|hugging|transformers|peft"
# What computes a compiled loss in one pass.
ONLINE = r"torch ?2\.([89]|\d\d)|torchtitan (2025-(0[4-9]|1\d)|202[6-9])"
# Whose Adam is fused without a word (transformers 4.56, training_args.py: with torch 2.8); DeepSpeed's own is, too.
# Whose configurations of DeepSpeed name no optimizer, so that Transformers' own Adam steps what DeepSpeed has sharded
# (LLaMA-Factory: examples/deepspeed/ds_z3_config.json; ms-swift: swift/llm/ds_config/zero3.json).
UNNAMED = r"llama-?factory|swift"
FUSED_BY_DEFAULT = r"torch ?2\.([89]|\d\d)|transformers ?(v|==)? ?([5-9]|4\.5[6-9])"
# How a framework computes: the first pattern that is found in the row's `framework` and `gpu`.
MEGATRON = FUSED | {"experts", "softmax"}
MEGATRON_CORE = {"engine": "megatron", "kernels": MEGATRON, "attention": "flash3", "stage": 1, "loss": "kernel"}
FRAMEWORKS: list[tuple[str, dict[str, Any]]] = [
    ("composer|mosaic|llm-foundry", {"engine": "fsdp2", "kernels": FUSED, "stage": 3, "attention": "flash1", "loss": "kernel"}),
    ("nanotron", {"engine": "nanotron", "kernels": frozenset(("norm", "rotary"))}),
    ("megatron-deepspeed", {"engine": "megatron-2022", "kernels": MEGATRON, "attention": "eager", "sequence_parallel": False,
                            "dropout": True}),
    ("megatron.*(core|[hb][12]00)", MEGATRON_CORE),
    # Without --sequence-parallel (megatron/training/arguments.py)
    ("megatron-lm", {"engine": "megatron-2022", "kernels": MEGATRON, "attention": "eager", "sequence_parallel": False,
                     "dropout": True}),
    # NeMo AutoModel shards what it loads in bf16, and steps it so.
    ("automodel", {"engine": "pure", "kernels": FUSED, "stage": 3, "attention": "flash3"}),
    ("megatron|nemo", MEGATRON_CORE),
    # There the caller holds bf16 logits while fp32 ones are copied for the shift (transformers 4.48, loss/loss_utils.py).
    (r"transformers 4\.4[6-9]", {"loss": "full"}),
    (TRANSFORMERS, {"loss": "released"}),
    ("torchtitan", {"engine": "fsdp2", "kernels": EAGER, "stage": 3}),
    ("fsdp1", {"engine": "fsdp-bf16", "kernels": EAGER, "stage": 3}),
    ("torchtune", {"engine": "pure", "kernels": EAGER}),
    # What runs on Transformers: the strategy says the engine
    (r"deepspeed|accelerate|torch|fsdp|swift|lightning|lit-?gpt|xtuner|arctic|fastchat|alignment|lmflow|instruct|^ ", {}),
]  # fmt: skip
# Words of networks between hosts, by which a rate that is not told is the usual one of that kind of GPU.
NETWORKS = (
    r"omni.?path|\bopa\b|\d|^-$|unspecified|unknown|infini|\bib\b|[ehnx]dr\b|\befa\b|roce|ethernet|nvl|slingshot|tcp"
)
EMPTIED = r"empty_cache|expandable"  # with either, samples of varying length leave no blocks behind
LONGEST = 30_000_000  # tokens of a row
QUANTISED = r"q[wg]z|quanti[sz]ed (weight|gradient|comm)|int8 weight|int4 grad|zero ?\+\+(?!.*hpz)"  # of ZeRO++


def job_of_row(row: Mapping[str, str]) -> PublishedJob:
    """Return the configuration that a row of published.csv's format states. Raises Inexpressible."""
    refuse(row)
    refuse_details(row)
    shape, framework = shape_of_row(row), row["framework"].lower()
    device = f"{framework} {row['gpu'].lower()}"
    traits = next((dict(traits) for name, traits in FRAMEWORKS if re.search(name, device)), None)
    if traits is None:
        raise Inexpressible(f"the framework {row['framework']!r} is none whose states and kernels are known here")
    native, strategy, kernels = "engine" in traits, told(row, "strategy"), told(row, "kernels")
    data, tensor, pipeline, context = (size(row, key, 1) for key in ("dp", "tp", "pp", "cp"))
    gpus = size(row, "n_gpus", data * tensor * pipeline * context)
    if not (row.get("dp") or "").strip():
        data = max(1, gpus // (tensor * pipeline * context))
    column = integer(row, "zero", -1)
    if column > 3:
        raise Inexpressible(f"there is no ZeRO-{column}")
    if not native:
        traits |= engine_of(row, gpus, None if column < 0 else column)
    elif traits["engine"] == "fsdp2" and re.search(r"\bddp\b", strategy):
        traits |= {"engine": "ddp", "stage": 0}
    words = " ; ".join(row.get(column, "").lower() for column in ("strategy", "kernels", "notes"))
    if traits["engine"] == "megatron" and re.search(
        r"(no|without)[ -]overlap\b|overlap[\w ]*[:= ](off|false|none)\b", words
    ):
        traits["engine"] = "megatron-plain"
    stage = traits.pop("stage", 3 if "fsdp" in strategy else 0)
    stage = column if column >= 0 and traits["engine"] != "ddp" else stage
    if match := re.search(r"FSDP=(\d+)", row["strategy"]):
        stage = 3 if int(match[1]) > 1 else stage
    if traits["engine"] == "megatron-2022" and stage >= 2:
        traits["engine"] = "zero"
    precision, method = precision_of(row), method_of(row)
    own_adam = native or (traits["engine"] == "zero" and not re.search(UNNAMED, framework))
    is_fused = own_adam or re.search(FUSED_BY_DEFAULT, framework)
    optimizer = optimizer_of(row, "adamw_torch_fused" if is_fused else "adamw_torch")
    if keeps_no_fp32(row) and not (method != "full" and re.search(TRANSFORMERS, framework)):
        traits["engine"] = _pure(traits["engine"])
    _hold_optimizer(traits["engine"], optimizer, row.get("optimizer", "").lower())
    how, every, offloaded = checkpointing_of(row.get("act_ckpt", ""), "fsdp1 + compile" in framework)
    if re.search(r"act\w*[ -]*(cpu[ -]*)?offload", kernels + strategy) and how != "full":
        raise Inexpressible("activations are offloaded without checkpointing")
    text = told(row, "kernels", "strategy", "framework")
    for pattern, fused in FUSED_KERNELS:
        if re.search(pattern, text):
            traits["kernels"] = traits.get("kernels", EAGER) | fused
    usual: str = traits.pop("loss", "full")
    unfused = is_unfused_loss(row)
    if unfused and usual == "kernel":
        usual = "unfused" if traits["engine"].startswith("megatron") else "full"
    elif "compile" in kernels and not unfused:
        usual = "online" if re.search(ONLINE, framework) else "compiled"
    usual = first(HELD, told(row, "notes"), usual)
    loss = usual if unfused else first(LOSSES, text, usual)
    if loss == "kernel" and re.search(r"transformers 4\.([0-3]\d|4[0-5])\b", framework):
        loss = "upcast"
    said = " ; ".join(row.get(column, "").lower() for column in ("kernels", "strategy"))
    traits["attention"] = first(ATTENTIONS, said, traits.get("attention", attention_of(shape)))
    micro, batch = size(row, "mbs"), integer(row, "gbs_seqs", 0)
    accumulation = size(row, "grad_acc", max(1, batch // (micro * data)) if batch else 1)
    if batch and accumulation * micro * data != batch:
        raise Inexpressible(
            f"{data} (dp) x {micro} (mbs) x {accumulation} (grad_acc) are not its {batch} sequences (gbs)"
        )
    told_size = node_size_of(row)
    hpz = _copies(strategy, gpus, stage, told_size or 8)
    # hpZ's second copy lies in a node; where nothing is told, a node has eight GPUs
    node_size = told_size or max(8, hpz)
    traits["sequence_parallel"] = divides_norms(row, traits.get("sequence_parallel", True))
    traits["dropout"] = method == "full" and drops(row, shape, traits.get("dropout", False))
    if shape.experts:
        hold_expert_tensor(row, tensor)
    # torchtune's ladder: each of its rows adds to those above it
    cumulative = "ladder" in row.get("notes", "").lower()
    if cumulative and ("lora" in kernels or "+packed" not in kernels):
        traits["kernels"] = FUSED
        loss = "compiled" if "compile" in kernels and "lora" not in kernels else "chunked"
    if method != "full":
        traits |= {"method": method} | _adapters(row, shape)
    if re.search(r"in.backward|in.bwd", told(row, "optimizer", "kernels")) or (cumulative and offloaded):
        traits["step_in_backward"] = True
    expert = size(row, "ep", 1)
    if expert > 1 and (not shape.experts or shape.experts % expert):
        raise Inexpressible(f"its {shape.experts} experts do not divide over ep {expert}")
    sequence = size(row, "seq_len")
    if sequence > LONGEST:
        raise Inexpressible(f"seq_len {sequence:,} is more than anybody has trained with")
    _hold_cluster(row, gpus, node_size)
    if sequence % context:
        raise Inexpressible(f"a sequence of {sequence} does not divide over cp {context}")
    offload = offload_of(row, traits["engine"])
    if traits["engine"] == "zero" and stage == 0:
        traits["engine"] = "ddp"
    if traits["engine"] == "zero" and stage == 3 and _old_deepspeed(row):
        traits["engine"] = "zero-2021"
    job = PublishedJob(
        shape,
        sequence,
        micro,
        accumulation,
        stage=stage,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        virtual=size(row, "vp", 1),
        shard=min(node_size, gpus) if re.search("hsdp|hybrid.?shard", strategy) else 0,
        hpz=hpz,
        node_size=node_size,
        quantised=bool(re.search(QUANTISED, strategy)),
        checkpointing=how,
        every=every,
        offload_activations=offloaded,
        gpu=row["gpu"],
        link=link_of(row, node_size),
        loss=loss,
        expert=expert,
        tiled_mlp=bool(re.search(r"tiled.?mlp|mlp.{0,12}tiles|\balst\b", text)),
        fp8=("row" if re.search(r"row.?wise", kernels) else "tensor") if precision == "fp8" else "",
        offload=offload,
        half_gradients=has_half_gradients(row, traits["engine"]),
        ulysses=bool(re.search(r"ulysses|\balst\b", f"{strategy} {kernels}")) and tensor * pipeline == 1,
        optimizer=optimizer,
        native=native,
        fp32_base=in_fp32_under_autocast(row, traits["engine"], method),
        varying="lengths vary" in told(row, "notes") and not re.search(EMPTIED, told(row, "notes")),
        whole_gradients=whole_gradients_of(row, ENGINES[traits["engine"]].reduced),
        **traits,
    )
    if job.gpus != gpus:
        raise Inexpressible(f"{data} (dp) x {tensor} (tp) x {pipeline} (pp) x {context} (cp) are not its {gpus} GPUs")
    return job


def _old_deepspeed(row: Mapping[str, str]) -> bool:
    """Return whether a row is of DeepSpeed before 0.6 (February 2022), by its version, else its year or its paper's."""
    said = told(row, "framework", "strategy")
    if version := re.search(r"deepspeed\W{0,2}v?0\.(\d+)", said):
        return int(version[1]) < 6
    paper = re.search(r"arxiv\W{0,2}(org/(abs|pdf)/)?2[01]\d\d\.\d", row.get("source", "").lower())
    return bool(paper or re.search(r"\b202[01]\b", told(row, "framework")))


def _pure(engine: str) -> str:
    """Return the engine that an engine becomes where nothing is in fp32. Raises Inexpressible for one that keeps an fp32 copy."""
    if engine in ("fsdp-bf16", "pure-fsdp1"):
        return "pure-fsdp1"
    if engine in ("fsdp2", "ddp", "pure"):
        return "pure"
    keeps = "DeepSpeed" if engine == "zero" else engine.partition("-")[0].capitalize()
    raise Inexpressible(f"{keeps} keeps an fp32 copy of the weights, and the row says that there is none")


def _copies(strategy: str, gpus: int, stage: int, node_size: int) -> int:
    """Return the ranks that share hpZ's second copy of the weights; 0 without one. Raises Inexpressible."""
    if not re.search(r"hpz|zero ?\+\+", strategy):
        return 0
    number = re.search(r"hpz(?:_partition_size)?\W{0,3}(\d+)", strategy)
    ranks = int(number[1]) if number else min(node_size, gpus)
    if ranks <= 1:
        return 0
    if stage < 3 or gpus % ranks:
        raise Inexpressible(f"hpZ over {ranks} of {gpus} GPUs under ZeRO-{stage}")
    return ranks


def _adapters(row: Mapping[str, str], shape: ModelShape) -> dict[str, Any]:
    """Return the fields of a job that say what adapters a row has."""
    framework, (rank, targets) = row["framework"].lower(), adapters_of(row)
    new = re.search(r"transformers ?(v|==)? ?([5-9]|\d\d)\b", framework)
    return {
        "trained": lora_parameters(shape, rank, targets),
        "targets": targets,
        "linear_experts": bool(re.search(TRANSFORMERS, framework)) and not new,
        "adapter_dropout": adapters_drop(row),
    }


def _hold_cluster(row: Mapping[str, str], gpus: int, node_size: int) -> None:
    """Raise Inexpressible for a card of another size than its name's, and for a network between hosts that is none."""
    try:
        told, device = float(row.get("gpu_mem_gb") or 0), hardware.gpu(row["gpu"])
    except ValueError:
        raise Inexpressible(f"gpu_mem_gb {row['gpu_mem_gb']!r} is not a number") from None
    if told and not 0.85 < told / device.memory_gib < 1.18:
        raise Inexpressible(f"gpu_mem_gb {told:g}, and {row['gpu']!r} has {device.memory_gib:.0f} GiB")
    link = (row.get("inter_node") or "").strip()
    if gpus > node_size and link and not re.search(NETWORKS, link, re.I):
        raise Inexpressible(f"inter_node {link!r} is no network that is known here")


def _hold_optimizer(engine: str, optimizer: str, text: str) -> None:
    """Raises Inexpressible for an optimizer whose states the engine's formula does not cover."""
    own = OPTIMIZER_BYTES[optimizer]
    if re.search(r"bf16|bfloat16", text) and not engine.startswith("pure"):
        raise Inexpressible(f"moments in bf16 are modelled where all is bf16 (engine {engine})")
    if own != 8 and (engine.startswith(("megatron", "nanotron")) or (engine.startswith("pure") and own > 2)):
        raise Inexpressible(f"{optimizer} under the engine {engine} is not modelled")


WIDTHS = ("params_b", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "tied")
# The two models of the Ultra-Scale Playbook's own table (playbook_h100.csv), which gives only their parameters.
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
    """Return a row of either format in published.csv's columns; measured columns are left behind."""
    if "n_gpus" in row:
        return row
    widths = {"model": row["model"]} | {key: row[key] for key in WIDTHS if row.get(key)}
    if row["model"] not in PLAYBOOK and "hidden" not in widths:
        known = " and ".join(PLAYBOOK)
        raise Inexpressible(f"model {row['model']!r} is none of the table's {known}, and no column gives its widths")
    return PLAYBOOK.get(row["model"], widths) | {
        "n_gpus": row["gpus"],
        "gpu": "H100-80GB",
        "inter_node": "EFA (AWS P5, 3200Gb/s per node)",
        "framework": "nanotron v0.5",
        "task": "pretrain",
        "strategy": "",
        "dp": row["dp"],
        "tp": row["tp"],
        "pp": row["pp"],
        "zero": row["zero"],
        "mbs": row["mbs"],
        "grad_acc": row["grad_acc"],
        "gbs_seqs": row.get("gbs", ""),
        "seq_len": "4096",
        "precision": "bf16",
        "optimizer": "AdamW",
    }
