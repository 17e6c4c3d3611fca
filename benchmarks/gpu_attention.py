"""Check that packed samples get the logits and gradients that each has by itself, by attention implementation, on this device.

    python -m benchmarks.gpu_attention qwen3 varlen      # one comparison; the last line it prints is its row

It is the comparison by which a device proves its kernels (brigade/kernels/compare.py), of two small models: in both precisions
that train.py has, bf16 weights (LoRA's base), and fp32 weights under autocast (full fine-tuning on one GPU).
"""

import argparse
import json
import sys
from typing import Any

Row = dict[str, Any]

IMPLEMENTATIONS = ("eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention")
SHAPE: Row = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1}  # fmt: skip
FAMILIES: dict[str, Row] = {"qwen3": {}, "mistral": {"sliding_window": 48}}  # tokens that a layer sees


def compare(family: str, how: str) -> Row:
    """{"status", "reason", "differences": {precision: {"logits", "gradients", "logits_allowed", "gradients_allowed",
    "moved"}}} of an implementation on this machine's device. Raises UserError where it cannot be used."""
    import torch

    from brigade.kernels import compare, models

    _check(how)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = SHAPE | FAMILIES[family] | {"model_type": family}
    proof, (told, _) = compare.Proof(config, "bf16", device), models.way_to_tell(config, how)
    differences, wrong = {}, []
    for row in proof.compare(lambda model: model, told):
        precision, off, allowed = row["form"], row["errors"], row["allowed"]
        differences[precision] = {key: off[key] for key in ("logits", "gradients", "moved")}
        differences[precision] |= {f"{key}_allowed": allowed[key] for key in ("logits", "gradients")}
        wrong += [f"{precision}: {why}" for why in [compare.in_words(row)] if why]
    return {"status": "failed" if wrong else "ok", "reason": "; ".join(wrong), "differences": differences}


def _check(how: str) -> None:
    """train.py's own judgement whether this host has an implementation."""
    from brigade.train.host.cluster import world_from_environment
    from brigade.train.recipe import flags
    from brigade.train.step import preflight
    from brigade.train.strategy import choose

    settings = flags.load(["--attn_implementation", how, "--bf16"])
    world = world_from_environment()
    preflight.check_host(settings, choose(settings, world), world)


def main() -> int:
    from brigade.errors import UserError

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("implementation", choices=IMPLEMENTATIONS)
    options = parser.parse_args()
    try:
        print(json.dumps(compare(options.family, options.implementation)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
