"""Find the model of a row of published runs: by its name, or by the widths that the row gives."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from brigade.plan.shape.find import described, known_config
from brigade.plan.shape.model_shape import FAMILIES, LLAMA, Family, ModelShape
from brigade.train.model.config_json import read_config

from .parse_columns import Inexpressible

# Nemotron 3 and 4 and Minitron, whose MLP squares a ReLU; Nemotron-H is a hybrid, and NVIDIA's Llamas by that name are Llamas.
NEMOTRON = r"^(?!.*(llama|nano|-h\b|mistral|qwen)).*(nemotron|minitron)"
# Architectures of models that a table describes only by their widths.
BY_NAME: list[tuple[str, Family]] = [
    ("mpt", FAMILIES["mpt"]), ("neox|pythia", FAMILIES["gpt_neox"]),
    (NEMOTRON, replace(LLAMA, gated=False, squared=True, layer_norm=True, norm_bias=True)),
    ("gpt-|gpt3|megatron|turing", replace(FAMILIES["gpt2"], positions=2048)), ("gpt2|opt-", FAMILIES["gpt2"]),
    ("qwen-?3", FAMILIES["qwen3"]), ("qwen", FAMILIES["qwen2"]), ("gemma-?2", FAMILIES["gemma2"]),
    ("gemma-?3", FAMILIES["gemma3_text"]), ("gemma", FAMILIES["gemma"]), ("phi-?[34]", FAMILIES["phi3"]), ("", LLAMA),
]  # fmt: skip
# DeepSeek's own V2, V3 and R1 are mixtures; its first models, its coders and what is distilled from R1 are dense.
MIXTURE = re.compile(
    r"moe|-a\d+b|mixtral|dbrx|grok|\d+x\d+b|deepseek[-_ ]?(v[2-9]|(coder|math|prover|vl)[-_ ]?v?2|r1(?!.*distill)|chat[-_ ]v)",
    re.I,
)
SQUARED = r"squared[ -]?relu|relu[ -]?squared|\brelu ?(\^|\*\*)? ?2\b|sqr?d?[ -]relu"  # whose MLP has no gate


def integer(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    """Return a whole number of at least 0, `4,096` and `8.0` too."""
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
    """Return an integer above 0."""
    if value := integer(row, key, default):
        return value
    raise Inexpressible(f"{key}: 0 is not a whole number above 0")


def _billions(row: Mapping[str, str]) -> tuple[float, float]:
    """Return (params_b, how far from it a count may be: 3 %, or what its last digit leaves open); (0, 0) without one."""
    text = (row.get("params_b") or "").strip().rstrip("bB").strip()
    if not text:
        return 0.0, 0.0
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise Inexpressible(f"params_b {text!r} is not a number above 0")
    return float(text), max(0.03 * float(text), 0.5 * 10.0 ** -len(text.partition(".")[2]))


def shape_of_row(row: Mapping[str, str]) -> ModelShape:
    """Return the model by its name, if a recipe has it with the row's widths, or else by the widths.

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
        ungated = [replace(shape, tied=tied, family=replace(shape.family, gated=False)) for tied in (True, False)]
        near = [other for other in ungated if abs(other.parameters / 1e9 - billions) <= open_]
        if shape.family.gated and not shape.experts and near:
            raise Inexpressible(
                f"params_b {billions:g} is right for an MLP without a gate, and the row does not name its activation"
            )
        raise Inexpressible(
            f"its dimensions make {shape.parameters / 1e9:.2f} billion parameters, and params_b says {billions:g}"
        )
    return shape


def _by_widths(row: Mapping[str, str], name: str) -> ModelShape:
    family = next(family for pattern, family in BY_NAME if re.search(pattern, name, re.I))
    if re.search(SQUARED, " ; ".join((row.get(key) or "").lower() for key in ("model", "kernels", "notes"))):
        family = replace(family, gated=False, squared=True)
    hidden, heads, layers = size(row, "hidden"), size(row, "heads"), size(row, "layers")
    if layers > 10_000:
        raise Inexpressible(f"layers {layers} are more than any model has")
    groups, billions = size(row, "kv_heads", heads), _billions(row)[0]
    if heads % groups:
        raise Inexpressible(f"{groups} kv_heads do not divide {heads} heads")
    experts: dict[str, Any] = {}
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
