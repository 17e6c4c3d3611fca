"""fp16 on a CPU: scaled losses give the gradients of fp32, and an overflow on one rank skips the step on all of them alike."""

import json

import pytest
import torch

from testing import marks, nonfinite, runs
from testing.command_line import as_flags

# DeepSpeed trains in fp16 on CPUs that have instructions for it (accelerator/cpu_accelerator.py: is_fp16_supported); on others a
# run is refused, and tests/unit/test_attention.py holds that.
ZERO = ("zero1", "zero2", "zero3") if torch.ops.mkldnn._is_mkldnn_fp16_supported() else ()
STRATEGIES = ("ddp", *ZERO, "fsdp2")
QUICK = [name for name in ("zero2", "fsdp2") if name in STRATEGIES]
OTHERS = ["ddp+adamw_torch_fused", "fsdp2+adamw_torch_fused"]  # which is told of an overflow, and skips by itself
OTHERS += ["ddp+adamw_torch_fused+biases"]  # routers' follow each step
SOUND, STEPS = nonfinite.SOUND, 6  # in the last two the loss of rank 1 alone is far beyond fp16
# No epoch ends in these steps, where a rank may have nothing to learn from.
SHARED = as_flags(
    optim="sgd",
    learning_rate=0.6,
    lr_scheduler_type="constant",
    max_steps=STEPS,
    global_batch_size=8,
    max_grad_norm=0,
    save_steps=None,
)


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    folder = tmp_path_factory.mktemp("fp16")
    cases = {"fp32": ("ddp", "overflow", SHARED)}
    for name in sorted(asked_for("strategy")):
        strategy, optim, *biases = [*name.split("+"), "", ""][:3]
        further = ["--optim", optim, "--learning_rate", "1e-3"] if optim else []
        if any(biases):
            model = runs.write_model(folder / "minimax_m2", "minimax_m2")
            further += as_flags(from_scratch=False, router_bias_update_rate=0.1, model_name_or_path=str(model))
        cases[f"fp16-{name}"] = (strategy, "overflow", [*SHARED, *further, "--fp16"])
    nonfinite.run_group(folder, cases, 2)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in cases}


@pytest.mark.parametrize("strategy", marks.cases(*QUICK, slow=["ddp"], matrix=STRATEGIES))
def test_scaled_gradients_are_those_of_fp32(strategy, results):
    for key in ("loss", "grad_norm"):
        half, full = ([*results[name][key].values()][:SOUND] for name in (f"fp16-{strategy}", "fp32"))
        assert half == pytest.approx(full, rel=5e-3) and half != full, key  # fp16 has 11 bits
    assert "fp16 (slow on a CPU: for trials)" in " ".join(results[f"fp16-{strategy}"]["said"].split())


@pytest.mark.parametrize("strategy", marks.cases(*QUICK, slow=["ddp", *OTHERS], matrix=STRATEGIES))
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy, results):
    found = results[f"fp16-{strategy}"]
    changed = [[held[step] != held[step - 1] for step in range(1, STEPS + 1)] for held in found["held"]]
    assert changed == [[True] * SOUND + [False] * (STEPS - SOUND)] * 2
    scales, other = found["scales"]
    assert scales == other
    assert len(set(scales[:SOUND])) == 1 and scales[-1] < scales[SOUND - 1]  # DeepSpeed halves at the second in a row
