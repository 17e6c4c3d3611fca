"""LoRA, DoRA and QLoRA give under every strategy the losses of one process (docs/methods.md has the table)."""

import json

import pytest

from brigade.train.strategy import refusal
from testing import marks, parity, runs
from testing.methods import METHODS, REHEARSED, UNDER


def case(method, strategy, ranks=2):
    micro = "4" if ranks == 2 else "16"
    flags = [*METHODS[method], *parity.STRATEGIES.get(strategy, []), "--per_device_train_batch_size", micro]
    flags = ["--max_steps", "6", "--optim", "sgd", *flags]
    return {"name": f"{method}-{strategy}", "ranks": ranks, "method": method, "flags": flags}


CASES = [
    case(method, strategy)
    for method in METHODS
    for strategy in UNDER[method]
    if not refusal(method=method, kind=strategy.partition("_")[0])
]


BY_NAME = {case["name"]: case for case in CASES}


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """By name, also of the single process that each case is compared with. A model that ties its two ends cannot train them
    apart from each other."""
    folder = tmp_path_factory.mktemp("methods")
    untied = folder / "untied"
    untied.mkdir()
    runs.write_inputs(folder)
    config = json.loads((folder / "model" / "config.json").read_text()) | {"tie_word_embeddings": False}
    (untied / "config.json").write_text(json.dumps(config))
    chosen = [BY_NAME[name] for name in sorted(asked_for("name"))]
    cases = [*(case(one["method"], "single", 1) for one in chosen), *chosen]
    named = [one | {"flags": [str(untied) if word == "UNTIED" else word for word in one["flags"]]} for one in cases]
    return runs.run_each(named, folder)


@pytest.mark.parametrize("name", marks.cases(
    *("lora-zero3", "parts-fsdp2", "dora-zero2", "qlora-fsdp2"),
    slow=[
        "lora+lamb-fsdp2",
        "lora-fsdp2",
        "parts-zero3",
        "qlora-zero3",
        "qdora-fsdp2",
        "tokens-fsdp2",
        "tokens-zero3",
        "tokens+untied-fsdp2",
    ],
    matrix=BY_NAME,
))  # fmt: skip
def test_method_under_a_strategy_equals_one_process(name, results):
    parity.assert_equal(results[name], results[f"{BY_NAME[name]['method']}-single"])


REHEARSALS = {
    f"{method}-{strategy}": [
        *parity.STRATEGIES[strategy],
        "--use_peft",
        "--bf16",
        "--activation_checkpointing",
        *(["--load_in_4bit"] if method == "qlora" else []),
        *(["--trainable_token_indices", "5,7,<|im_end|>"] if method == "tokens" else []),
    ]
    for method, strategies in REHEARSED.items()
    for strategy in strategies
} | {"lora-power_sgd": ["--use_peft", "--ddp_comm_hook", "power_sgd"]}


@pytest.fixture(scope="module")
def said(tmp_path_factory, asked_for):
    cases = [{"name": name, "flags": [*REHEARSALS[name], "--rehearse"]} for name in sorted(asked_for("rehearsal"))]
    return runs.run_all(2, cases, tmp_path_factory.mktemp("rehearsals"), timeout=900)


@pytest.mark.parametrize("rehearsal", marks.cases(matrix=REHEARSALS))
def test_rehearsal_resumes_and_shards(rehearsal, said):
    """In bf16 with activation checkpointing: the same losses after an interruption, and frozen weights in shards."""
    found, done = said
    assert rehearsal in found, done.stderr[-3000:]
    text = found[rehearsal]["said"]
    assert "The rehearsal went well" in text and "parameters are trained" in text
