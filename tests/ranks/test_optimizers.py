"""Optimizers under every strategy that carries them: the losses of one process.

Muon's Newton-Schulz computes in bfloat16: gradients that differ in their last bit round otherwise there, and norms
of later gradients differ more than losses do. With Newton-Schulz in fp32 all agree to 2e-7.
"""

import pytest

from testing import marks, parity, runs
from testing.command_line import as_flags

MUON = as_flags(optim="muon", learning_rate="1e-3", weight_decay=0.1, learning_rates={"embed_tokens|lm_head": 3e-3})
BY_RANKS = {
    2: ("ddp", "zero1", "zero2", "zero3", "fsdp2", "zero2_offload", "zero3_offload"),
    4: ("hsdp", "zero1", "zero3", "fsdp2"),
}
RATES = {"adafactor": "1e-2", "lion_32bit": "1e-3", "paged_adamw_32bit": "3e-3", "schedule_free_adamw": "1e-2"}
# What stands behind a strategy's `+` is another optimizer than Muon, or a model.
OTHERS = {
    "ddp": (*RATES, "qwen3_moe"),
    **dict.fromkeys(("zero1", "zero2", "zero3"), (*list(RATES)[1:], "qwen3_moe")),
    **dict.fromkeys(("fsdp2", "hsdp"), ("schedule_free_adamw", "qwen3_moe")),
    **dict.fromkeys(("zero2_offload", "zero3_offload"), ("schedule_free_adamw", "qwen3_moe")),
}


def case(strategy, ranks=1, of=""):
    """One process, whose strategy is "single", or a strategy on so many ranks."""
    micro = ["--per_device_train_batch_size", str(runs.GLOBAL_BATCH // ranks)]
    chosen = ["--optim", of, "--learning_rate", RATES[of]] if of in RATES else MUON
    flags = [*chosen, *parity.STRATEGIES.get(strategy, []), *micro]
    name = f"{strategy}-w{ranks}{f'+{of}' if of else ''}"
    return {"name": name, "ranks": ranks, "of": of, "model": None if of in RATES else of, "flags": flags}


CASES = [
    case(strategy, ranks, of)
    for ranks, strategies in BY_RANKS.items()
    for strategy in strategies
    for of in ("", *OTHERS.get(strategy, ("qwen3_moe",)))
]
BY_NAME = {case["name"]: case for case in CASES}


def alone(name):
    return case("single", of=BY_NAME[name]["of"])


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """By name, also of the single process that each case is compared with."""
    names = sorted(asked_for("name"))
    cases = [*map(alone, names), *(BY_NAME[name] for name in names)]
    return runs.run_each(cases, tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("name", marks.cases(
    "zero1-w2",
    slow=[
        "fsdp2-w2+qwen3_moe",
        "ddp-w2",
        "zero3-w2",
        "zero2_offload-w2",
        "hsdp-w4",
        "zero3-w2+qwen3_moe",
        "ddp-w2+adafactor",
        "zero2-w2+lion_32bit",
        "zero3-w2+paged_adamw_32bit",
        "zero3-w2+schedule_free_adamw",
    ],
    matrix=BY_NAME,
))  # fmt: skip
def test_losses_are_those_of_one_process(name, results):
    reference = results[alone(name)["name"]]
    differences = parity.worst(results[name], reference)
    assert reference["loss"][-1] < 0.97 * reference["loss"][0]
    assert differences["loss"] <= parity.TOLERANCE and differences["eval_loss"] <= parity.TOLERANCE, differences
    assert differences["grad_norm"] <= 100 * parity.TOLERANCE, differences
