"""A run that goes on with existing adapters (adapter_name_or_path): as plain PEFT would, under every kind of strategy."""

import json

import pytest

from testing import axes_sequence, marks, parity, runs

FIRST = ["--max_steps", "3", "--optim", "sgd", "--use_peft", "--per_device_train_batch_size", "16"]
KINDS = {
    "lora": ["--learning_rate", "2", "--lora_r", "4", "--lora_alpha", "12", "--rank_pattern", "{q_proj: 6}"],
    "whole": ["--learning_rate", "0.3", "--lora_target_modules", "q_proj,v_proj", "--use_dora", "--lora_modules_to_save", "norm",
              "--trainable_token_indices", "<|im_start|>,300"],
}  # fmt: skip
QLORA = ["--load_in_4bit"]
UNDER = {
    "lora": ("ddp", "zero2", "zero3", "fsdp2", "sequences", "stopped"),
    "whole": ("ddp", "zero3", "fsdp2"),
    "qlora": ("zero3", "fsdp2"),
}
STRATEGIES = parity.STRATEGIES | {
    "sequences": axes_sequence.strategy("fsdp2", 2, 2),
    "stopped": parity.STRATEGIES["fsdp2"],
}
CASES = [f"{kind}-{strategy}" for kind, strategies in UNDER.items() for strategy in strategies]


def second(kind, folder, name, ranks, *flags):
    """A run of three steps more, on adapters that say what they are."""
    words = ["--max_steps", "3", "--optim", "sgd", "--use_peft", "--learning_rate", KINDS[first_of(kind)][1]]
    words += ["--adapter_name_or_path", str(folder / "outputs" / first_of(kind))]
    words += ["--per_device_train_batch_size", "16" if ranks == 1 else "4"]
    return {"name": name, "ranks": ranks, "flags": [*words, *(QLORA if kind == "qlora" else []), *flags]}


def first_of(kind):
    return "lora" if kind == "qlora" else kind


@pytest.fixture(scope="module")
def results(folder, asked_for):
    """The first run of each kind, and second ones: in one process, and under strategies."""
    names = sorted(asked_for("name"))
    kinds = sorted({name.partition("-")[0] for name in names})
    firsts = dict.fromkeys(map(first_of, kinds))
    first = runs.run_cases(1, [{"name": kind, "flags": [*FIRST, *KINDS[kind]]} for kind in firsts], folder)
    cases = [second(kind, folder, f"{kind}-single", 1) for kind in kinds]
    for name in names:
        kind, strategy = name.split("-")
        stops = {"stops": (2,)} if strategy == "stopped" else {}  # and goes on from its checkpoint
        cases.append(second(kind, folder, name, 2, *STRATEGIES[strategy]) | stops)
    found = runs.run_each(cases, folder)
    for kind in {*kinds} - {"qlora"}:  # it begins where the first one ended
        assert found[f"{kind}-single"]["eval_loss"][0] == pytest.approx(first[kind]["eval_loss"][-1], rel=1e-6)
    return found


@pytest.mark.parametrize("name", marks.cases(
    slow=("lora-zero3", "whole-zero3", "whole-fsdp2", "qlora-fsdp2", "lora-sequences", "lora-stopped"), matrix=CASES
))  # fmt: skip
def test_continued_adapters_under_a_strategy_equal_one_process(name, results, folder):
    parity.assert_equal(results[name], results[f"{name.partition('-')[0]}-single"])
    before, after = (
        json.loads((folder / "outputs" / each / "adapter_config.json").read_text())
        for each in (first_of(name.partition("-")[0]), name)
    )
    assert {key for key in before if before[key] != after[key]} <= {"target_modules"}  # PEFT orders a set
    assert sorted(before["target_modules"]) == sorted(after["target_modules"])
