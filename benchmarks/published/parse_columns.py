"""Read what the free text of a table's row says of strategy, optimizer, precision, kernels and adapters.

Tables of (pattern, meaning): the first pattern found in the small letters counts. Text that no pattern knows makes a row
inexpressible: nothing is estimated as something else.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from brigade.plan.costs.job import FUSED, Attention, Checkpointing, Kernels

T = TypeVar("T")
Words = tuple[tuple[str, T], ...]


class Inexpressible(Exception):
    """A row has no estimate: its message says why."""


# (columns, pattern, why no formula covers it)
REFUSED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("framework", "strategy", "act_ckpt", "kernels", "notes"), r"unsloth", "unsloth's kernels are not modelled"),
    (("framework", "gpu"), r"\bjax\b|maxtext|paxml|\bxla\b|neuron|colossal|alpa\b|fairscale|\bmlx\b",
     "its framework is none whose states and kernels are known here"),
    (("kernels", "notes"), r"unpacked|\bpadded\b|dynamic padding", "samples are padded, and their lengths are not given"),
    (("strategy", "kernels"), r"\bmics\b", "MiCS is not modelled"),
    (("strategy", "kernels"), r"zenflow", "states that are stepped later are not modelled"),
    (("strategy", "kernels"), r"async\w*[ -]?tp\b", "tensor parallelism behind products is not modelled"),
    (("framework", "strategy", "kernels"), r"graph.?trainer|simple.?fsdp", "its compiler places gathers, which is not modelled"),
    (("kernels", "act_ckpt"), r"saved by sac", "a list of its own of what is not computed again is not modelled"),
    (("kernels",), r"(float8|fp8) eager", "products in FP8 that nothing fuses are not modelled"),
    (("task", "strategy", "kernels"), r"\b(q?dora|adalora|lora[-+]fa|ia3|reft|vera|prefix|prompt.tuning|badam|lisa)\b",
     "of adapters, only LoRA is modelled"),
    (("task", "strategy", "kernels"), r"\b(galore|q-galore|apollo|lomo)\b", "its optimizer is not modelled"),
    (("task",), r"\b(dpo|ppo|grpo|rlhf|kto|orpo|simpo|reward|distil\w*|inference|generation)\b",
     "it does more than a forward and a backward pass of one model"),
    (("task", "model"), r"\bmlm\b|\bencoders?\b|seq2seq|\b\w*bert|\b(flan-?)?u?m?t5\b|whisper|wav2vec|\bvit\b",
     "only decoders are modelled"),
    (("kernels",), r"\b(own|custom|in.?house|hand.?written|proprietary)\b.*kernels?", "its kernels are not known"),
    (("strategy", "kernels", "notes"), r"ring.?(flash.?)?att\w*|cp.?offload", "it is not modelled"),
    (("notes",), r"(optimizer|param\w*|weights?|cpu|nvme|activations?)[ -]*offload|offload\w* (the )?(optimizer|param|weights)",
     "its notes say what its columns leave out"),
    (("precision",), r"fp4|int8|(?:\b|_)8.?bit", "of products, those in 16 bits and in FP8 are modelled"),
)  # fmt: skip

# Optimizer -> a key of engines.OPTIMIZER_BYTES. What pages its states out keeps none that torch counts.
OPTIMIZERS: Words[str] = (
    (r"galore|apollo|lomo|muon|shampoo|soap|sophia|came\b|adopt|schedule.?free|adam-?atan|ademamix", ""),
    (r"adam.?mini", "adam_mini"), (r"lamb", "lamb"), (r"lars", "lars"),
    (r"lion.?8.?bit|8.?bit.?lion", ""), (r"paged.*8.?bit|8.?bit.*paged", "paged_adamw_8bit"),
    (r"8.?bit", "adamw_8bit"), (r"4.?bit", ""), (r"paged", "paged_adamw"),
    (r"adafactor.*(momentum|beta1)", ""), (r"adafactor", "adafactor"), (r"adam.*fused|fused.*adam", "adamw_torch_fused"),
    (r"adamw_torch|foreach", "adamw_torch"), (r"adam", "default"),
    (r"lion", "lion"), (r"sgd.*momentum|momentum.*sgd|^momentum", "sgd_momentum"), (r"sgd", "sgd"),
)  # fmt: skip
PURE = r"pure|true|\bno master|\bfull(y)? bf16|\ball bf16"
PRECISIONS: Words[str] = (
    (r"fp8|float8|mxfp8", "fp8"), (PURE, "pure"),
    (r"bf16|fp16|bfloat16|float16|\b16\b|16-|amp|mixed|half|nf4|4.?bit|int4", "mixed"),
)  # fmt: skip
ATTENTIONS: Words[Attention] = (
    (r"(no|without|w/o) (flash|fa)|eager.?att|att\w*[ =:_-]*eager|naive attention|vanilla attention", "eager"),
    (r"flash.?(attn|attention)?.?v?4|\bfa.?4", "flash4"),
    (r"flash.?(attn|attention)?.?v?3|\bfa.?3", "flash3"), (r"flash.?(attn|attention)?.?v?1\b|\bfa.?1|xformers|triton", "flash1"),
    (r"flash|\bfa.?2|sdpa|flex|varlen", "flash2"),
)  # fmt: skip
# What computes the loss: with the head in one kernel, with it in tiles (TRL: chunked_nll), in tiles, by one kernel over logits.
LOSSES: Words[str] = (
    (r"loss in (bf16|16 bits)", "half"),
    (r"liger|fused.?linear|\bflce|cut.?(cross|ce\b)|\bcce\b", "fused"),
    (r"chunk\w*.?nll|chunk\w* loss (incl\w*\.?|with) (the )?(lm.?)?head|tiled.?(loss|logits|ce\b|cross)", "tiled"),
    (r"chunk", "chunked"), (r"fused.?(ce\b|cross)", "kernel"),
)  # fmt: skip
# What stays there through the backward pass, because a loop of a framework's own holds what the model gave.
HELD: Words[str] = ((r"logits in fp32, which the caller holds", "held"), (r"the caller holds the outputs", "full"))
FUSED_KERNELS: Words[Kernels] = (
    (r"compile", FUSED | {"experts"}), (r"liger", FUSED), (r"fused.?(rms)?norm|apex", frozenset(("norm",))),
    (r"fused.?(rope|rotary)", frozenset(("rotary",))), (r"fused.?(swiglu|geglu|mlp)", frozenset(("mlp",))),
)  # fmt: skip
CHECKPOINTED: Words[Checkpointing] = (
    (r"^(no|none|false|off|0|disabled|without|w/o|-|n/a)\b|^-$|^$|^[\u00d7✗✘]$", "none"),
    # After the key: `gradient_checkpointing: false`, `GC off`.
    (r"[=: ](no|none|false|off|0|disabled)\b(?![.]\d|[ -]*offload)", "none"),
    (r"selective.?op|\bsac\b|\bop\b", "half"), (r"^select|attention|attn", "attention"),
    (r"^(full|yes|true|on|1|enabled|all|block|uniform|every layer|gc|gradient|activation|checkpoint|recomp|hf|use_|ac\b|[√✓✔])",
     "full"),
)  # fmt: skip
# Of a layer, parts besides attention that may be computed again alone (Megatron's --recompute-modules).
MODULES = r"(layer|rms|batch)?[ _-]?norms?\b|\bmlp\b|\bmoe(_act)?\b|shared_experts|mla_up_proj|activation (func|only)"
TARGETS: Words[str] = (
    (r"all.?linear|all (linear )?(layers|modules|projections)|qkvo.*mlp|attn.*mlp|attention.*mlp", "qkvom"),
    (r"\bq(_proj)?[ ,/+&]+k(_proj)?[ ,/+&]+v(_proj)?[ ,/+&]+o(_proj)?[ ,/+&]+(gate|up|down|mlp)", "qkvom"),
    (r"\bqkvo\b|\bq(_proj)?[ ,/+&]+k(_proj)?[ ,/+&]+v(_proj)?[ ,/+&]+o|attention.only|attn.only|attention (layers|projections)",
     "qkvo"),
    (r"\bqkv\b|\bq(_proj)?[ ,/+&]+k(_proj)?[ ,/+&]+v", "qkv"),
    (r"\b(gate|up|down)_proj\b|\bmlp[ -](layers |modules |projections )?only", "m"),
    (r"\bqv\b|\bq(_proj)?([ ,/+&]|and)+v|queries and values|query and value", "qv"), (r"", "qkvom"),
)  # fmt: skip
RANK = re.compile(r"\b(?:lora_r|lora_rank|lora rank|rank|r)\s*[=:_]?\s*(\d+)\b")
STAGE = re.compile(
    # Not a version of DeepSpeed; ds_z3_config.json is LLaMA-Factory's name.
    r"(?:zero(?:\+\+)?|deepspeed|\bds)[\s_:-]*(?:stage)?[\s_:-]*([0-3])(?!\d|\.\d)|(?:\b|_)z([0-3])(?=\b|_)|stage[\s_:-]*([0-3])\b"
)
SHARDED = r"fsdp|full.?shard|shard.?grad.?op|hsdp|hybrid.?shard"


def told(row: Mapping[str, str], *columns: str) -> str:
    """Return the columns in small letters, without what they say is not there (`no offload`, `compile: off`)."""
    text = " ; ".join((row.get(column) or "").strip().lower() for column in columns)
    text = re.sub(r"[\w.-]+( offload)? ?[:=]? ?\b(false|off|disabled)\b", "", text)
    return re.sub(r"\b(no|without|w/o)[ -]+(cpu |activation |gradient |torch\.)?[\w.-]+", "", text).strip(" ;")


def first(words: Words[T], text: str, default: T) -> T:
    return next((meaning for pattern, meaning in words if re.search(pattern, text)), default)


def refuse(row: Mapping[str, str]) -> None:
    """Raise Inexpressible for what no formula covers."""
    for columns, pattern, why in REFUSED:
        text = told(row, *columns)
        if found := re.search(pattern, text):
            raise Inexpressible(f"{why}: {found[0]!r} in {' or '.join(columns)}")


def optimizer_of(row: Mapping[str, str], adam: str = "adamw_torch_fused") -> str:
    """adam: which of torch's Adams it is where the row does not say."""
    text = told(row, "optimizer")
    if found := first(OPTIMIZERS, text, "") if text else "default":
        return adam if found == "default" else found
    raise Inexpressible(f"optimizer {row['optimizer']!r}: how many bytes it keeps is not known here")


def precision_of(row: Mapping[str, str]) -> str:
    """Return "fp8", "pure" or "mixed"; fp16 takes the bytes of bf16."""
    text = told(row, "precision")
    if "fp8" in (kernels := told(row, "kernels")) or "float8" in kernels:
        return "fp8"
    if found := first(PRECISIONS, text, "" if text else "mixed"):
        return found
    raise Inexpressible(f"precision {row['precision']!r}: 16 bits and FP8 are modelled, fp32 is not")


def keeps_no_fp32(row: Mapping[str, str]) -> bool:
    """Return whether weights and moments are in 16 bits, whatever products are in."""
    return bool(re.search(rf"{PURE}|\b(weights|param\w*) in (bf16|fp16|16 bits)", told(row, "precision")))


def in_fp32_under_autocast(row: Mapping[str, str], engine: str, method: str) -> bool:
    """Return whether frozen weights not in four bits are in fp32. Raises Inexpressible where autocast reads sharded ones."""
    text = told(row, "precision")
    if method == "qlora" and re.search(r"rest of (the base|it) in fp32", text):
        return True
    if not re.search(r"(over|on) (weights in )?fp32|(weights|base|model) (is |are |stays? |loaded )*in fp32", text):
        return False
    if method == "full" and not re.search(r"\b(amp|autocast)\b", text):
        return False  # which FSDP2 casts when it gathers them
    if method == "qlora" or engine not in ("ddp", "pure"):
        raise Inexpressible(f"precision {row['precision']!r}: autocast over sharded fp32 weights is not modelled")
    return method == "lora"


def method_of(row: Mapping[str, str]) -> str:
    text = told(row, "task", "strategy", "kernels")
    if not re.search(r"lora", text):
        return "full"
    return "qlora" if "qlora" in text or re.search(r"nf4|4.?bit|int4", told(row, "precision")) else "lora"


def adapters_of(row: Mapping[str, str]) -> tuple[int, str]:
    """Return (rank, targets) of a row's LoRA; 16 on every linear layer by default. targets: of q, k, v, o and m, the MLP"""
    text = told(row, "task", "strategy", "kernels", "notes")
    rank = int(found[1]) if (found := RANK.search(text)) else 16
    if not 1 <= rank <= 4096:
        raise Inexpressible(f"LoRA's rank {rank} is none")
    return rank, first(TARGETS, text, "")


def checkpointing_of(text: str, whole_layers: bool = False) -> tuple[Checkpointing, int, bool]:
    """Return (what is computed again, in every how many layers, whether what is kept goes to the host)."""
    text = text.strip().lower()
    if match := re.search(r"layer\((\d+)\)|every (\d+)|1/(\d+)", text):
        return "full", max(1, int(next(filter(None, match.groups())))), False
    if "selective-layer" in text or (whole_layers and text == "selective"):
        return "full", 2, False
    found = next((how for pattern, how in CHECKPOINTED if re.search(pattern, text)), None)
    if found and found != "none" and (named := re.search(MODULES, text)):
        raise Inexpressible(f"act_ckpt {text!r}: to compute only {named[0]} again is not modelled")
    if found is None:
        raise Inexpressible(f"act_ckpt {text!r}: what is computed again is not clear")
    return found, 1, found == "full" and bool(re.search(r"(?<!no )(?<!without )offload", text))


def engine_of(row: Mapping[str, str], gpus: int, stage: int | None) -> dict[str, Any]:
    """Return engine and stage of what runs on Transformers. stage: the column `zero`, if it is filled"""
    framework = told(row, "framework")
    strategy = re.sub(r"stage[\s_-]*(i{1,3})\b", lambda roman: f"stage {len(roman[1])}", told(row, "strategy"))
    named = next((int(next(filter(None, m.groups()))) for m in [STAGE.search(f"{strategy} ; {framework}")] if m), None)
    sharded = re.search(SHARDED, strategy) or (re.search(SHARDED, framework) and not strategy)
    if sharded:
        if "no_shard" in strategy:
            return {"engine": "ddp", "stage": 0}
        engine = "fsdp2" if "fsdp2" in strategy + framework or "fsdp v2" in strategy else "fsdp-bf16"
        default = 2 if re.search(r"shard.?grad.?op", strategy) else 3
        return {"engine": engine, "stage": default if stage is None else stage}
    if named is not None and stage is not None and named != stage:
        raise Inexpressible(f"its strategy says ZeRO-{named}, and the column zero {stage}")
    usual = (
        3 if re.search(r"infinity|zero ?\+\+|hpz", strategy) else 2 if re.search(r"zero.?offload", strategy) else None
    )
    found = next((one for one in (named, stage, usual) if one is not None), None)
    if found:
        return {"engine": "zero", "stage": found}
    plain = re.sub(r"q?lora.*|full.?(parameter )?(fine.?)?tun\w*|\bsft\b", "", strategy).strip(" +,;")
    if found == 0 or re.search(r"\bd?dp\d*\b|data.?parallel|single|\b(1|one) gpu|^none$|^-$", plain):
        return {"engine": "ddp", "stage": 0}
    if not plain and gpus == 1:
        return {"engine": "ddp", "stage": 0}
    raise Inexpressible(f"strategy {row.get('strategy', '')!r} of {gpus} GPUs is not known here, or has no ZeRO stage")


def offload_of(row: Mapping[str, str], engine: str) -> str:
    """Return what leaves the GPU of the states. Raises Inexpressible for engines other than DeepSpeed's."""
    text = re.sub(r"act\w*[ -]*(cpu[ -]*)?offload\w*", "", told(row, "strategy", "optimizer", "kernels"))
    if not re.search(r"offload|infinity|nvme|cpu.?adam", text):
        return ""
    if engine != "zero":
        raise Inexpressible(f"offload without DeepSpeed is not modelled (engine {engine})")
    if "nvme" in text or "infinity" in text:
        return "nvme"
    # Lightning's and LLaMA-Factory's names for both: deepspeed_stage_3_offload, ds_z3_offload.
    return "all" if re.search(r"param|offload[_ ]all|(stage_|z)3_offload", text) else "optimizer"
