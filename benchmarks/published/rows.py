"""A row of a CSV of published runs as a configuration to estimate."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from brigade.planner.choice.job import EAGER, FUSED, Job
from brigade.planner.choice.job_of_run import attention_of
from brigade.planner.costs.engines import OPTIMIZER_BYTES
from brigade.shape.config_json import read_config
from brigade.shape.find import described, known_config
from brigade.shape.lora import lora_parameters
from brigade.shape.model_shape import FAMILIES, LLAMA, Family, ModelShape

from .parse_columns import (
    ATTENTIONS,
    FUSED_KERNELS,
    LOSSES,
    Inexpressible,
    adapters_of,
    checkpointing_of,
    engine_of,
    first,
    method_of,
    offload_of,
    optimizer_of,
    precision_of,
    refuse,
    told,
)

# What trains with Transformers and PEFT, whose adapters are in fp32 over weights in bf16.
TRANSFORMERS = r"trainer|\btrl\b|axolotl|llama-?factory|\bhf\b|hugging|transformers|peft"
# What computes a compiled loss in one pass.
ONLINE = r"torch ?2\.([89]|\d\d)|torchtitan (2025-(0[4-9]|1\d)|202[6-9])"
# Whose Adam is fused without a word (transformers 4.56, training_args.py: with torch 2.8); DeepSpeed's own is, too.
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
    ("megatron-lm", {"engine": "megatron-2022", "kernels": MEGATRON, "attention": "eager", "dropout": True}),
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
# How products in FP8 are scaled: in blocks, by rows, by torch's own dynamic scales, or by Transformer Engine's, one for a tensor.
SCALED = ((r"mx", "mx"), (r"row.?wise", "row"), (r"float8", "torch"))
# Architectures of models that a table describes by their widths alone.
BY_NAME: list[tuple[str, Family]] = [
    ("mpt", FAMILIES["mpt"]), ("neox|pythia", FAMILIES["gpt_neox"]),
    ("gpt-|gpt3|megatron|turing", replace(FAMILIES["gpt2"], positions=2048)), ("gpt2|opt-", FAMILIES["gpt2"]),
    ("qwen-?3", FAMILIES["qwen3"]), ("qwen", FAMILIES["qwen2"]), ("gemma-?2", FAMILIES["gemma2"]),
    ("gemma-?3", FAMILIES["gemma3_text"]), ("gemma", FAMILIES["gemma"]), ("phi-?[34]", FAMILIES["phi3"]), ("", LLAMA),
]  # fmt: skip
MIXTURE = re.compile(r"moe|-a\d+b|mixtral|deepseek|dbrx|grok|\d+x\d+b", re.I)


def integer(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    """A whole number of at least 0, `4,096` and `8.0` too."""
    text = (row.get(key) or "").strip()
    if not text or text == "-":
        if default is None:
            raise Inexpressible(f"{key} is not given")
        return default
    try:
        value = float(text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", text) else text)
    except ValueError:
        raise Inexpressible(f"{key} {text!r} is not a number") from None
    if not math.isfinite(value) or value != int(value) or not 0 <= value < 1e12:
        raise Inexpressible(f"{key} {text!r} is not a whole number")
    return int(value)


def size(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    """An integer above 0."""
    if value := integer(row, key, default):
        return value
    raise Inexpressible(f"{key}: 0 is not a whole number above 0")


def _billions(row: Mapping[str, str]) -> tuple[float, float]:
    """(params_b, how far from it a count may be: 3 %, or what its last digit leaves open); (0, 0) where it is not given."""
    text = (row.get("params_b") or "").strip().rstrip("bB").strip()
    if not text:
        return 0.0, 0.0
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise Inexpressible(f"params_b {text!r} is not a number above 0")
    return float(text), max(0.03 * float(text), 0.5 * 10.0 ** -len(text.partition(".")[2]))


def shape_of_row(row: Mapping[str, str]) -> ModelShape:
    """The model by its name, if a recipe has it with the row's widths, or by the widths alone.

    What widths do not say (a tied head, a head's own width, learned positions) is as it comes nearest to `params_b`, where the
    usual is more than 1 % off.
    """
    name, wide = row["model"], (row.get("hidden") or "").strip()
    plain = re.sub(
        r"[- ](instruct|chat|base|it|hf)$", "", re.sub(r"^meta-", "", name.rpartition("/")[2], flags=re.I), flags=re.I
    )
    path = next(filter(None, map(known_config, (name, plain, f"{plain}-it"))), None)
    known = described(read_config(path), str(path), path.parent.name) if path else None
    if known and (
        not wide or (integer(row, "hidden"), integer(row, "layers", known.layers)) == (known.hidden, known.layers)
    ):
        shape = replace(known, name=name) if wide else known
    elif wide:
        shape = _by_widths(row, name)
    else:
        raise Inexpressible(f"the row does not give the dimensions of {name!r}, and no recipe here has its config.json")
    billions, open_ = _billions(row)
    if billions and abs(shape.parameters / 1e9 - billions) > open_:
        raise Inexpressible(
            f"its dimensions make {shape.parameters / 1e9:.2f} billion parameters, and params_b says {billions:g}"
        )
    return shape


def _by_widths(row: Mapping[str, str], name: str) -> ModelShape:
    family = next(family for pattern, family in BY_NAME if re.search(pattern, name, re.I))
    hidden, heads, layers = size(row, "hidden"), size(row, "heads"), size(row, "layers")
    if layers > 10_000:
        raise Inexpressible(f"layers {layers} are more than any model has")
    groups, billions = size(row, "kv_heads", heads), _billions(row)[0]
    if heads % groups:
        raise Inexpressible(f"{groups} kv_heads do not divide {heads} heads")
    experts = {}
    if found := re.search(r"mixtral.*?(\d+)x\d+b", name, re.I):  # the only mixture whose name says all: of so many, two
        experts = {"experts": int(found[1]), "top_k": 2, "expert_ffn": size(row, "ffn"), "moe_layers": layers}
    elif MIXTURE.search(name):
        raise Inexpressible(f"{name!r} is a mixture of experts, of which no column tells")
    vocab = size(row, "vocab", None if family.gated else 51200)
    said = (row.get("tied") or "").strip().lower()
    tied = (
        said in ("yes", "true", "1")
        if said
        else ("tied" in name and "untied" not in name) or family.tied or "llama3.2" in name
    )
    widths = [hidden // heads] if hidden % heads == 0 else []
    widths += [128, 256] if family.qk_norm or "gemma" in name.lower() else [128]
    if not widths:
        raise Inexpressible(f"{heads} heads do not divide the width {hidden}")
    positions = (
        (size(row, "seq_len"), 0) if "mpt" in name else (family.positions,)
    )  # MPT learns as many as it is trained on
    ways = [
        ModelShape(
            name,
            layers,
            hidden,
            size(row, "ffn", None if family.gated else 4 * hidden),
            heads,
            groups,
            width,
            vocab,
            tied=shared,
            family=replace(family, positions=learned),
            **experts,
        )
        for shared in ((tied,) if said else (tied, not tied))
        for width in widths
        for learned in positions
    ]
    off = [abs(shape.parameters / 1e9 / billions - 1) if billions else 0.0 for shape in ways]
    return ways[off.index(min(off))] if off[0] > 0.01 else ways[0]


def job_of_row(row: Mapping[str, str]) -> Job:
    """The configuration that a row of published.csv's format states. Raises Inexpressible."""
    refuse(row)
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
    fused = native or traits["engine"] == "zero" or re.search(FUSED_BY_DEFAULT, framework)
    optimizer = optimizer_of(row, "adamw_torch_fused" if fused else "adamw_torch")
    own = native and traits["engine"] != "fsdp2"
    if precision == "pure" and not own and not (method != "full" and re.search(TRANSFORMERS, framework)):
        if traits["engine"] == "zero":
            raise Inexpressible("DeepSpeed keeps an fp32 copy of the weights, and the row says that there is none")
        traits["engine"] = "pure-fsdp1" if traits["engine"] == "fsdp-bf16" else "pure"
    _hold_optimizer(traits["engine"], optimizer, row.get("optimizer", "").lower())
    how, every, offloaded = checkpointing_of(row.get("act_ckpt", ""), "fsdp1 + compile" in framework)
    if re.search(r"act\w*[ -]*(cpu[ -]*)?offload", kernels + strategy) and how != "full":
        raise Inexpressible("activations are offloaded without checkpointing")
    text = told(row, "kernels", "strategy", "framework")
    for pattern, fused in FUSED_KERNELS:
        if re.search(pattern, text):
            traits["kernels"] = traits.get("kernels", EAGER) | fused
    usual: str = traits.pop("loss", "full")
    if "compile" in kernels:
        usual = "online" if re.search(ONLINE, framework) else "compiled"
    loss = first(LOSSES, text, usual)
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
    node = min(8, gpus)
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
    if sequence % context:
        raise Inexpressible(f"a sequence of {sequence} does not divide over cp {context}")
    offload = offload_of(row, traits["engine"])
    if traits["engine"] == "zero" and stage == 0:
        traits["engine"] = "ddp"
    job = Job(
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
        shard=node if re.search("hsdp|hybrid.?shard", strategy) else 0,
        hpz=node if re.search(r"hpz|zero ?\+\+", strategy) else 0,
        quantised=bool(re.search(r"q[wg]z|quanti[sz]ed (weight|gradient|comm)|zero ?\+\+(?!.*hpz)", strategy)),
        checkpointing=how,
        every=every,
        offload_activations=offloaded,
        gpu=row["gpu"],
        link=row.get("inter_node", ""),
        loss=loss,
        expert=expert,
        tiled_mlp=bool(re.search(r"tiled.?mlp|mlp.{0,12}tiles|\balst\b", text)),
        fp8=first(SCALED, f"{row['precision']} {kernels}".lower(), "tensor") if precision == "fp8" else "",
        offload=offload,
        ours=bool(re.search(r"ulysses|\balst\b", f"{strategy} {kernels}")) and tensor * pipeline == 1,
        optimizer=optimizer,
        **traits,
    )
    if job.gpus != gpus:
        raise Inexpressible(f"{data} (dp) x {tensor} (tp) x {pipeline} (pp) x {context} (cp) are not its {gpus} GPUs")
    return job


def _adapters(row: Mapping[str, str], shape: ModelShape) -> dict[str, Any]:
    """What a Job says of a row's adapters."""
    framework, (rank, targets) = row["framework"].lower(), adapters_of(row)
    new = re.search(r"transformers ?(v|==)? ?([5-9]|\d\d)\b", framework)
    return {
        "trained": lora_parameters(shape, rank, targets),
        "targets": targets,
        "linear_experts": bool(re.search(TRANSFORMERS, framework)) and not new,
        "adapter_dropout": bool(re.search(r"dropout[ =:]*0?\.\d*[1-9]", row.get("notes", "").lower())),
    }


def _hold_optimizer(engine: str, optimizer: str, text: str) -> None:
    """Raises Inexpressible for an optimizer whose states the engine's formula does not cover."""
    own = OPTIMIZER_BYTES[optimizer]
    if re.search(r"bf16|bfloat16", text) and not engine.startswith("pure"):
        raise Inexpressible(f"moments in bf16 are modelled where all is bf16 (engine {engine})")
    if own != 8 and (engine.startswith(("megatron", "nanotron")) or (engine.startswith("pure") and own > 2)):
        raise Inexpressible(f"{optimizer} under the engine {engine} is not modelled")


WIDTHS = ("params_b", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "tied")
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
