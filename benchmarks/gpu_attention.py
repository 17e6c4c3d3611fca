"""Check that packed samples get the logits and gradients that each has by itself, by attention implementation, on this device.

    python -m benchmarks.gpu_attention qwen3 varlen      # one comparison; the last line it prints is its row

The reference is each sample by itself through Transformers' eager attention in fp32, which nobody told of packing. What is
compared goes through Brigade's own collator, attention and loss, in both precisions that train.py has: bf16 weights (LoRA's
base), and fp32 weights under autocast (full fine-tuning on one GPU).
"""

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

Row = dict[str, Any]

IMPLEMENTATIONS = ("eager", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex_attention")
SHAPE: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"qwen3": {}, "mistral": {"sliding_window": 48}}  # tokens that a layer sees
PRECISIONS = ("bf16", "autocast")
# How far the packed samples may be off, in differences that only rounding makes: eager attention's in the same precision,
# each sample by itself. Two and three, as FlashAttention's own tests allow (tests/test_flash_attn.py).
LOGITS_FACTOR, GRADIENTS_FACTOR = 2, 3
SEED = 3


# ---- models and samples ------------------------------------------------------------------------------------------------
def samples() -> list[Row]:
    """The samples by which a device proves its kernels (brigade/kernels/models.py)."""
    from brigade.kernels import models

    return models.samples(SHAPE["vocab_size"])


def build(family: str, how: str, precision: str, device: Any) -> Any:
    """A model of random weights that are exact in bf16, the same each time; precision: fp32, autocast or bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def config() -> Any:  # a new one for each model, which writes its attention into it
        return AutoConfig.for_model(family, **SHAPE | FAMILIES[family])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        weights = AutoModelForCausalLM.from_config(config(), attn_implementation="eager").state_dict()
        # Norms begin as ones, and hide what they do.
        weights = {name: (value + 0.05 * torch.randn_like(value)).bfloat16() for name, value in weights.items()}
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config(), attn_implementation=how, dtype=dtype)
    model.load_state_dict(weights)
    return model.to(device).train()


def batch_of(some: list[Row], how: str, device: Any) -> Row:
    """The samples packed into rows, end to end, as train.py's collator gives them to a model."""
    from brigade.kernels import models
    from brigade.train.data.collate import ABOUT

    batch = models.batch(some, models.PACKED, models.Told(how, ""), device)
    del batch[ABOUT]
    return batch


# ---- what is compared --------------------------------------------------------------------------------------------------
def logits_of(model: Any, batch: Row) -> list[Any]:
    """The logits of each sample of a packed batch."""
    from brigade.kernels.models import LENGTHS

    inputs = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels", "logits_to_keep")}
    return list(model(**inputs, use_cache=False).logits[0].detach().float().split(LENGTHS))


def together(model: Any, some: list[Row], how: str, device: Any) -> tuple[list[Any], Row]:
    """(logits of each sample, gradients of the loss of Brigade's Trainer) of packed samples."""
    from brigade.train.data.store import IGNORED
    from brigade.train.model import packed_samples
    from brigade.train.step.trainer import Trainer

    batch = batch_of(some, how, device)
    supervised = sum(int((sample["labels"] != IGNORED).sum()) for sample in some)
    trainer: Any = object.__new__(Trainer)  # only its loss: no arguments, no data, no optimizer
    trainer.model, trainer.engine = model, SimpleNamespace(averaged_over=1)
    trainer.sample_boundaries = packed_samples.POSITIONS
    logits = logits_of(model, batch)
    trainer.compute_loss(model, batch, num_items_in_batch=supervised).backward()
    return logits, _gradients(model)


def alone(model: Any, some: list[Row], device: Any) -> tuple[list[Any], Row]:
    """Return the same for samples that never meet: no position ids, no masks, no cumulative lengths."""
    from contextlib import nullcontext

    from brigade.kernels import compare

    return compare.alone(model, some, device, nullcontext())


def _gradients(model: Any) -> Row:
    return {name: value.grad.float() for name, value in model.named_parameters() if value.grad is not None}


def moved(model: Any, some: list[Row], how: str, device: Any) -> float:
    """How far any sample's logits move, relative to the largest, when another sample's tokens are replaced. It is 0: what
    is not looked at cannot move anything, in any precision."""
    import torch

    def found(number: int | None) -> list[Any]:
        changed = [dict(sample) for sample in some]
        if number is not None:
            changed[number]["input_ids"] = (some[number]["input_ids"] - 3 + 7) % (SHAPE["vocab_size"] - 3) + 3
        with torch.no_grad():
            return logits_of(model, batch_of(changed, how, device))

    before, largest = found(None), 0.0
    for number in range(len(some)):
        after = found(number)
        others = (i for i in range(len(some)) if i != number)
        largest = max(largest, *(_difference(after[i], before[i]) for i in others))
    return largest


def _difference(ours: Any, theirs: Any) -> float:
    from brigade.kernels import compare

    return compare.difference(ours, theirs)


def _worst(ours: tuple[list[Any], Row], theirs: tuple[list[Any], Row]) -> tuple[float, float]:
    """The largest relative difference of any sample's logits, and of any parameter's gradient."""
    if ours[1].keys() != theirs[1].keys():
        raise RuntimeError(f"gradients of other parameters: {sorted(ours[1].keys() ^ theirs[1].keys())}")
    return (
        max(map(_difference, ours[0], theirs[0])),
        max(_difference(ours[1][name], gradient) for name, gradient in theirs[1].items()),
    )


def compare(family: str, how: str) -> Row:
    """{"status", "reason", "differences": {precision: {"logits", "gradients", "logits_allowed", "gradients_allowed",
    "moved"}}} of an implementation on this machine's device. Raises UserError where it cannot be used."""
    import torch

    from brigade.train.model import attention

    _check(how)
    attention.register()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    some, differences, wrong = samples(), {}, []
    reference = alone(build(family, "eager", "fp32", device), some, device)
    for precision in PRECISIONS:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast"):
            rounding = _worst(alone(build(family, "eager", precision, device), some, device), reference)
            model = build(family, how, precision, device)
            logits, gradients = _worst(together(model, some, how, device), reference)
            row = {
                "logits": logits,
                "logits_allowed": LOGITS_FACTOR * rounding[0],
                "gradients": gradients,
                "gradients_allowed": GRADIENTS_FACTOR * rounding[1],
                "moved": moved(model, some, how, device),
            }
        differences[precision] = row
        wrong += [
            f"{precision} {key}: {row[key]:.1e}"
            for key in ("logits", "gradients")
            if not row[key] <= row[f"{key}_allowed"]
        ]
        wrong += [f"{precision}: a sample moves another by {row['moved']:.1e}"] if row["moved"] else []
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
