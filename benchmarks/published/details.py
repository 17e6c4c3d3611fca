"""Read what a row says beside its columns: of nodes, sequence parallelism, dropout, gradients and losses.

A word counts as it is said: `no sequence parallel` and `sequence_parallel: false` are not sequence parallelism. What no formula
covers makes a row inexpressible (parse_columns.py: Inexpressible).
"""

import re
from collections.abc import Mapping

from brigade.plan import hardware
from brigade.plan.hardware.network import node_gbit
from brigade.plan.shape.model_shape import ModelShape

from .job import HALF_GRADIENTS
from .parse_columns import Inexpressible
from .shapes import size

NEGATED_BEFORE = r"(?:\bno|\bnot|\bnon|without|w/o|disabled?|-no)[ _-]*$"
NEGATED_BEHIND = r"(?:[ _]\w+)?[ ]?[:=]?[ ]?(?:\boff|false|disabled|\bnone|\b0)(?![\w.])"
EVERYWHERE = ("strategy", "kernels", "act_ckpt", "precision", "optimizer", "notes")

NODE_SIZES = (
    r"\bnvl[ -]?(\d+)\b",
    r"\bgpus?[_ ]per[_ ]node\W{0,3}(\d+)",
    r"(\d+) ?(?:\w+ )?(?:gpus?|cards|ranks|devices|[abhv]\d00s?) (?:per|(?:in |on )?(?:a|each)) (?:node|host|machine|server)",
    r"\b(?:nodes?|hosts?|machines?) (?:of|with) (\d+)\b(?! ?[gt]i?b)",
    r"\b\d+ ?(?:nodes?|hosts?) ?[x\u00d7*] ?(\d+)\b",
    r"(\d+)-gpu (?:node|host|machine|server)s?",
    r"dgx[ -]?gb[23]00()",  # a rack of 72 GPUs under one NVLink
)
RACK = 72
LARGEST_NODE = 576
SEQUENCE_PARALLEL = r"sequence[ _-]?parallel(?:ism)?|(?<![\w-])sp\b"
DETERMINISTIC = r"(?<![a-z])deterministic(?! (?:data|order|shuffl\w*|seed|sampl\w*|split))|cublas_workspace_config"
EXPERT_TENSOR = (
    r"(?:\betp\b|expert[ _-]tensor[ _-](?:model[ _-])?parallel(?:ism)?(?:[ _-](?:size|degree))?)\W{0,3}(\d+)?"
)
IN_16_BITS = (
    r"(?:bf16|bfloat16|16.bit)[ _-]*(?:main[ _-])?(?:grad(?:ient)?s?\b|reduc\w*|grad[ _-]\w+)",
    r"(?:grad\w*|reduc\w*)(?:[ _-](?:reduc\w*|d?type|accum\w*|all.?reduce))?[ _-]*(?:in|:|=)[ _-]*(?:bf16|bfloat16)",
    r"grad_reduce_in_fp32[:= ]*(?:false|off)",
)
WHOLE_GRADIENTS = r"no_sync|gradients? (?:are |stay |kept )*whole"
UNFUSED_LOSS = (
    r"(?:\bno|\bnot|without|w/o|\bun|\bnon)[ -]?fused[ -]*(?:linear[ -]*)?(?:ce\b|loss|(?:softmax )?cross)",
    r"(?:ce|cross.entropy)(?:[ _-]loss)?[ _-]fusion[:= ]*(?:false|off)",
    r"(?:vanilla|naive|plain|eager|torch'?s?) (?:ce\b|cross|loss)",
)
# What drops from adapters' inputs unless it is told not to: lora_dropout is 0.05 (ms-swift, swift/llm/argument/tuner_args.py;
# LitGPT, finetune/lora.py; TRL, trainer/model_config.py). PEFT itself, LLaMA-Factory and torchtune drop nothing.
DROPS = r"swift|lit-?gpt|\btrl\b"


def stated(row: Mapping[str, str], pattern: str, *columns: str) -> bool | None:
    """Return whether the columns say that something is there, or that it is not; None where they do not mention it."""
    text = " ; ".join((row.get(column) or "").lower() for column in columns or EVERYWHERE)
    match = re.search(pattern, text)
    if match is None:
        return None
    before, behind = text[: match.start()], text[match.end() :]
    return not (re.search(NEGATED_BEFORE, before) or re.match(NEGATED_BEHIND, behind))


def refuse_details(row: Mapping[str, str]) -> None:
    """Raise Inexpressible for what no formula covers, unless the row says that it is not there."""
    if stated(row, DETERMINISTIC, *EVERYWHERE, "framework"):
        raise Inexpressible("how fast deterministic kernels are is not modelled")


def node_size_of(row: Mapping[str, str]) -> int:
    """Return the GPUs of a node: those that share its links. 0 where the row does not say."""
    if (row.get("gpus_per_node") or "").strip():
        return _held(size(row, "gpus_per_node"))
    text = " ; ".join(
        (row.get(column) or "").lower() for column in ("gpu", "inter_node", "strategy", "framework", "notes")
    )
    match = next(filter(None, (re.search(pattern, text) for pattern in NODE_SIZES)), None)
    return _held(int(match[1] or RACK)) if match else 0


def _held(ranks: int) -> int:
    if not 1 <= ranks <= LARGEST_NODE:
        raise Inexpressible(f"no node has {ranks} GPUs")
    return ranks


def link_of(row: Mapping[str, str], node_size: int) -> str:
    """Return the network's name, with a rate for nodes of another size than eight where it states none.

    A kind's usual rate (hardware.yaml: node_gbit) is that of eight cards; where it is as much as a card for each GPU has, smaller
    and larger nodes have as many for each.
    """
    named = row.get("inter_node", "")
    device = hardware.gpu(row["gpu"])
    if node_size == 8 or device.node_gbit < 800 or node_gbit(named, node_size) is not None:
        return named
    return f"{named.strip(' -')} {device.node_gbit / 8 * node_size:g} Gb/s".strip()


def divides_norms(row: Mapping[str, str], usual: bool) -> bool:
    """Return whether tensor groups divide what stands between blocks, too. usual: where the row does not say"""
    said = stated(row, SEQUENCE_PARALLEL, "strategy", "kernels", "act_ckpt", "notes")
    return usual if said is None else said


def hold_expert_tensor(row: Mapping[str, str], tensor: int) -> None:
    """Raise Inexpressible where experts are divided over other tensor groups than all else is."""
    text = " ; ".join((row.get(column) or "").lower() for column in ("strategy", "kernels", "notes"))
    column, match = (row.get("etp") or "").strip(), re.search(EXPERT_TENSOR, text)
    if not column and match is None:
        return
    number = column or (match[1] if match else None)
    ranks = (
        int(number)
        if number and number.isdigit()
        else tensor
        if stated(row, EXPERT_TENSOR, "strategy", "kernels", "notes")
        else 1
    )
    if ranks != tensor:
        raise Inexpressible(
            f"expert tensor parallelism by {ranks} under tensor parallelism by {tensor} is not modelled"
        )


def has_half_gradients(row: Mapping[str, str], engine: str) -> bool:
    """Return whether a row says that its gradients are in 16 bits. Raises Inexpressible for engines that are not modelled so."""
    columns = [(row.get(column) or "").lower() for column in ("precision", "optimizer", "strategy", "kernels", "notes")]
    if not any(re.search(pattern, " ; ".join(columns)) for pattern in IN_16_BITS):
        return False
    if engine not in HALF_GRADIENTS:
        raise Inexpressible(f"gradients in bf16 are not modelled under the engine {engine}")
    return True


def whole_gradients_of(row: Mapping[str, str], reduced: float) -> float:
    """Return PublishedJob.whole_gradients. reduced: the bytes in which the engine reduces a gradient; FSDP keeps a sum in them
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py: to_accumulated_grad_if_needed)"""
    if not stated(row, WHOLE_GRADIENTS, "strategy", "kernels", "notes"):
        return 0.0
    return 4.0 if re.search(r"reduced in fp32|fp32 reduc", (row.get("precision") or "").lower()) else reduced


def is_unfused_loss(row: Mapping[str, str]) -> bool:
    """Return whether a row says that no kernel fuses its loss, where its framework's usually is."""
    text = " ; ".join((row.get(column) or "").lower() for column in ("kernels", "strategy", "notes"))
    return any(re.search(pattern, text) for pattern in UNFUSED_LOSS)


def drops(row: Mapping[str, str], shape: ModelShape, usual: bool) -> bool:
    """Return whether layers drop scores and what they add to the residual stream, where all weights are trained.

    usual: of the framework. GPT-2's and OPT's configurations drop a tenth, and so does Megatron-LM unless it is told not to
    (megatron/training/arguments.py: hidden_dropout, attention_dropout), as its examples of Llama do and those of GPT-3 do not.
    """
    text = " ; ".join((row.get(column) or "").lower() for column in ("strategy", "kernels", "notes"))
    if (share := _dropped(text)) is not None:
        return share > 0
    framework = row["framework"].lower()
    gpt = shape.family.layer_norm and shape.family.positions > 0
    return usual or (gpt and bool(re.search(r"megatron-lm|transformers|trainer|\bhf\b|hugging", framework)))


def adapters_drop(row: Mapping[str, str]) -> bool:
    """Return whether adapters drop from their inputs."""
    text = " ; ".join((row.get(column) or "").lower() for column in ("task", "strategy", "kernels", "notes"))
    share = _dropped(text)
    return share > 0 if share is not None else bool(re.search(DROPS, row["framework"].lower()))


def _dropped(text: str) -> float | None:
    """Return the share that a text says is dropped, None where it does not say."""
    if re.search(r"(?:\bno|without|w/o)[ -](?:\w+[ _-])?dropout|dropout[ :=]*(?:off|false|disabled|none)\b", text):
        return 0.0
    match = re.search(r"dropout\w*[ :=]*(?:of )?(\d*\.?\d+)", text)
    return float(match[1]) if match else None
