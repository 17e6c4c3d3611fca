"""A sample whose loss or gradient is NaN, in one rank's micro-batch: the step changes nothing anywhere, and the sample is named.

The poisoned sample is one line of the data. Whoever computes on it gets NaN, once in each epoch.
"""

import json
import math
from pathlib import Path

import pytest

import train
from brigade.errors import UserError
from brigade.train.step import bad_steps
from testing import marks, nonfinite, parity, runs
from testing.nonfinite import BATCH, MICRO, ORDER, POISONED, STEP, STEPS, STRATEGIES, poison, poisoned_steps

SKIPPED = [
    f"{name} skip loss" for name in sorted(STRATEGIES, key=lambda name: name not in ("ddp", "zero2", "zero3", "fsdp2"))
]
SKIPPED += [f"{name} skip gradient" for name in ("single", "ddp", "zero2", "zero3", "pipeline")]
GONE_BACK = [f"{name} rollback loss" for name in ("zero3", "fsdp2", "ddp", "zero2_offload", "zero3_nvme", "hsdp", "ddp+lora",
             "zero3+lora", "fsdp2+lora", *(f"{kind}+{what}" for what in ("biases", "free")
             for kind in ("ddp", "zero2", "zero3", "fsdp2")),
             "fsdp2+experts", "pipeline", "ddp+power_sgd", "zero1+bf16", "fsdp2+bf16")]  # fmt: skip
SPIKES = [f"{name} stop spike" for name in ("ddp", "zero2", "zero3", "fsdp2", "pipeline")]
SPIKE = {"spike": ("--loss_spike", "3")}


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """call(name): what a case left, and its output directory. A case is STRATEGY, POLICY, POISON with blanks between them."""
    folder = tmp_path_factory.mktemp("nonfinite")
    for size in (1, 2, 4):
        cases = {}
        for case in sorted({"single skip nothing", *asked_for("case")}):
            strategy, policy, poison = case.split()
            if size == {"single": 1, "hsdp": 4}.get(strategy, 2):
                cases[case] = (strategy, poison, ["--nonfinite", policy, *SPIKE.get(poison, ())])
        if cases:
            nonfinite.run_group(folder, cases, size)
    return lambda case: (json.loads((folder / f"{case}.json").read_text()), folder / "outputs" / case)


@pytest.mark.parametrize("case", marks.cases(
    "ddp skip loss",
    slow=[
        *(f"{strategy} skip loss" for strategy in ("zero2", "zero3", "fsdp2", "ddp+power_sgd")),
        *(f"{strategy} skip loss" for strategy in ("pipeline", "fsdp2+experts", "single")),
        "zero2 skip gradient",
        "ddp+biases skip loss",
    ],
    matrix=SKIPPED,
))  # fmt: skip
def test_a_step_that_is_skipped_changes_no_bit_on_any_rank(case, results):
    found, output = results(case)
    steps = poisoned_steps()
    assert steps[0] == STEP
    for held in found["held"]:
        changed = [step for step in range(1, STEPS + 1) if held[step] != held[step - 1]]
        assert changed == [step for step in range(1, STEPS + 1) if step not in steps]
    reference, _ = results("single skip nothing")
    assert "+free" in case or found["rates"] == reference["rates"]  # the schedule goes on
    assert found["loss"].keys() == {str(step) for step in range(1, STEPS + 1)} - set(map(str, steps))
    if case.split()[0] in parity.STRATEGIES:
        # The losses of a run that computed no NaN, and whose optimizer did not see the step.
        for step, loss in found["loss"].items():
            assert loss == pytest.approx(reference["loss"][step], rel=1e-5), step
    told = [line for line in found["said"].splitlines() if "it is left out" in line]
    assert [line.split(":")[0] for line in told] == [f"step {step}" for step in steps]
    named = [json.loads(line) for line in (output / "bad_steps.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in named] == steps
    size = 1 if case.startswith("pipeline") else len(found["held"])  # with different data
    for entry in named:
        samples = [sample for part in entry["micro_batches"] for sample in part["samples"]]
        assert {Path(sample["source"]).name for sample in samples} == {"train.jsonl"}
        assert POISONED + 1 in {sample["row"] for sample in samples}
        assert len(samples) <= (MICRO if case.endswith(" loss") else BATCH)
    first = named[0]["micro_batches"]
    if case.endswith(" loss"):
        assert [(part["rank"], part["micro_batch"]) for part in first] == [(size - 1, BATCH // MICRO // size)]
        assert {sample["row"] - 1 for sample in first[0]["samples"]} == set(ORDER[STEP - 1, -1].tolist())
    else:
        assert len(first) == BATCH // MICRO
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    faults = [event for event in events if event["event"] == "fault"]
    assert [(fault["step"], fault["action"]) for fault in faults] == [(step, "skip") for step in steps]


@pytest.mark.parametrize("case", marks.cases(
    "zero3 rollback loss",
    slow=[
        *(f"{of} rollback loss" for of in ("fsdp2", "zero2_offload", "zero3+lora", "fsdp2+experts", "pipeline")),
        *("zero1+bf16 rollback loss", "ddp+biases rollback loss", "pipeline stop spike"),
    ],
    matrix=[*GONE_BACK, *SPIKES],
))  # fmt: skip
def test_a_rollback_gives_the_checkpoints_states_bit_for_bit(case, results):
    found, output = results(case)
    for held in found["held"]:
        assert held[STEP] == held[2] != held[STEP - 1]  # checkpoint-2 is the last one before
        assert held[STEP + 1] != held[STEP]
    reference, _ = results("single skip nothing")
    assert "+free" in case or found["rates"] == reference["rates"]
    named = json.loads((output / "bad_steps.jsonl").read_text().splitlines()[0])
    assert named["kind"] == ("loss_spike" if case.endswith("spike") else "nonfinite")
    assert named["action"] == "rollback" and Path(named["back_to"]).name == "checkpoint-2"
    assert f"without the data of steps 3 to {STEP}" in found["said"]
    assert all(map(math.isfinite, found["loss"].values()))
    assert (output / "success.json").exists()


@pytest.mark.slow
def test_a_rollback_to_a_checkpoint_that_two_ranks_wrote_on_four_ranks(tmp_path):
    """A restart on more hosts meets its bad step before it has saved a checkpoint of its own."""
    rollback, strategies = ["--nonfinite", "rollback"], ("ddp", "zero2", "zero3", "fsdp2")
    first = {name: (name, "nothing", [*rollback, "--max_steps", "2"]) for name in strategies}
    nonfinite.run_group(tmp_path, first, 2)
    nonfinite.run_group(tmp_path, {name: (name, "loss", rollback) for name in strategies}, 4)
    for name in strategies:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        for held in found["held"]:  # from step 2 on
            assert held[STEP - 2] == held[0] != held[STEP - 3], name
        assert f"without the data of steps 3 to {STEP}" in found["said"]
        assert (tmp_path / "outputs" / name / "success.json").exists()


@pytest.mark.slow
def test_padding_of_a_part_of_zero3_is_no_weight(tmp_path):
    """On ranks that do not divide the weights."""
    nonfinite.run_group(tmp_path, {"padding": ("zero3", "padding", [])}, 3)
    found = json.loads((tmp_path / "padding.json").read_text())
    assert len(found["loss"]) == STEPS and (tmp_path / "outputs" / "padding" / "success.json").exists()


# ---- one process ----------------------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path, raises, monkeypatch):
    """call(kind, *flags): a run of the poisoned data in this process; raises what it ends with."""
    shared = runs.write_inputs(tmp_path)
    shared += (
        f"--max_steps {STEPS} --eval_steps null --eval_answers 0 --save_steps 2 --output_dir {tmp_path / 'run'}".split()
    )
    monkeypatch.setattr(bad_steps, "FEWEST", 3)

    def call(kind, *flags):
        sober = poison(kind)
        try:
            return train.main([*shared, *flags])
        finally:
            sober()

    return call


def actions(folder):
    return [json.loads(line)["action"] for line in (folder / "run" / "bad_steps.jsonl").read_text().splitlines()]


def test_a_step_more_than_the_limit_stops_the_run_that_a_checkpoint_continues(run, tmp_path):
    second = poisoned_steps()[1]
    with pytest.raises(UserError, match=f"step {second}\n.*the loss is nan") as caught:
        run("loss", "--nonfinite", "skip", "--nonfinite_limit", "1")
    assert "as nonfinite_limit allows (1)" in caught.value.cure
    assert actions(tmp_path) == ["skip", "stop"]
    with pytest.raises(UserError, match=f"step {second}\n"):  # the checkpoint knows how many there were
        run("loss", "--nonfinite", "skip", "--nonfinite_limit", "1")
    assert actions(tmp_path) == ["skip", "stop", "stop"]
    run("loss", "--nonfinite", "skip")
    assert actions(tmp_path) == ["skip", "stop", "stop", "skip"]
    assert (tmp_path / "run" / "success.json").exists()


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(run, tmp_path):
    with pytest.raises(UserError, match="no checkpoint to go back to"):
        run("loss", "--nonfinite", "rollback", "--save_steps", "null")
    assert run("spike", "--loss_spike", "3", "--save_steps", "null").state.global_step == STEPS
    assert actions(tmp_path) == ["stop", "none", "none"][: 1 + len(poisoned_steps())]
