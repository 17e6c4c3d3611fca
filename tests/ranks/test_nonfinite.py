"""A sample whose loss or gradient is NaN, in one rank's micro-batch: the step changes nothing anywhere, and the sample is named.

The poisoned sample is one line of the data. Whoever computes on it gets NaN, once in each epoch.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

import train
from brigade.errors import UserError
from brigade.train.distributed import ranks
from brigade.train.loop import bad_steps
from brigade.train.loop.pipeline_trainer import PipelineTrainer
from brigade.train.loop.trainer import Trainer
from brigade.train.model.tiny import shrink
from testing import marks, parity, runs
from testing.ranks import run_ranks

STEPS, STEP, BATCH, MICRO = 8, 4, 16, 4
SEED, SAMPLES = 42, 67
ORDER = np.random.default_rng((SEED, 0)).permutation(SAMPLES)[: 4 * BATCH].reshape(4, BATCH // MICRO, MICRO)
POISONED = int(ORDER[STEP - 1, -1, 1])  # in the last micro-batch of the last rank
MIXTURE = "mixture"
STRATEGIES = parity.STRATEGIES | {
    "ddp+lora": [*parity.DDP, "--use_peft", "true"],
    "zero3+lora": [*parity.STRATEGIES["zero3"], "--use_peft", "true"],
    "fsdp2+lora": [*parity.STRATEGIES["fsdp2"], "--use_peft", "true"],
    "ddp+bf16": [*parity.DDP, "--bf16"],
    "zero1+bf16": [*parity.STRATEGIES["zero1"], "--bf16"],
    "zero3+bf16": [*parity.STRATEGIES["zero3"], "--bf16"],
    "fsdp2+bf16": [*parity.STRATEGIES["fsdp2"], "--bf16"],
    "ddp+power_sgd": [*parity.DDP, "--ddp_comm_hook", "power_sgd"],
    "pipeline": ["--ds_config", "ds_configs/zero1_pp2.json"],
    "ddp+sgd": [*parity.DDP, "--optim", "sgd"],
    # Experts over both ranks: tokens of one rank's NaN lie on the other rank, too. The model lies in inputs()'s folder.
    "fsdp2+experts": ["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml", "--model_name_or_path", MIXTURE],
    "fsdp2+lamb": [*parity.STRATEGIES["fsdp2"], "--optim", "lamb"],
    "single": [],
}
SKIPPED = [
    f"{name} skip loss" for name in sorted(STRATEGIES, key=lambda name: name not in ("ddp", "zero2", "zero3", "fsdp2"))
]
SKIPPED += [f"{name} skip gradient" for name in ("single", "ddp", "zero2", "zero3", "pipeline")]
GONE_BACK = [f"{name} rollback loss" for name in ("zero3", "fsdp2", "ddp", "zero2_offload", "zero3_nvme", "hsdp", "ddp+lora",
             "zero3+lora", "fsdp2+lora", "fsdp2+experts", "pipeline", "ddp+power_sgd", "zero1+bf16", "fsdp2+bf16")]  # fmt: skip
SPIKES = [f"{name} stop spike" for name in ("ddp", "zero2", "zero3", "fsdp2", "pipeline")]


SPIKE = {"spike": ("--loss_spike", "3")}


class Watch(TrainerCallback):
    """A digest of this rank's weights and optimizer states after each step, from 0, and the learning rates."""

    def __init__(self):
        self.held, self.rates = [], []

    def look(self, model, optimizer):
        digest = hashlib.sha256()
        for tensor in states(model, optimizer):
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            digest.update(tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.held.append(digest.hexdigest())

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **_):
        if not self.held:
            self.look(model, optimizer)

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        self.look(model, optimizer)
        self.rates += lr_scheduler.get_last_lr()[:1]


def states(model, optimizer):
    yield from (getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters())
    while not isinstance(optimizer, torch.optim.Optimizer):  # accelerate's and DeepSpeed's stand before it
        for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):
            yield from getattr(optimizer, name, [])
        optimizer = optimizer.optimizer
    for state in optimizer.state.values():
        yield from (torch.as_tensor(value) for value in state.values() if value is not None)


class Litter(TrainerCallback):
    """NaN after each step in what ZeRO-3 appends to the last rank's parts: memory that nobody wrote may hold it."""

    def on_step_end(self, args, state, control, model=None, **_):
        littered = 0
        for parameter in model.parameters():
            part = parameter.ds_tensor
            own = min(max(parameter.ds_numel - int(os.environ["RANK"]) * part.numel(), 0), part.numel())
            part.data[own:] = math.nan
            littered += part.numel() - own
        assert sum(ranks.gather(littered)), "these shapes have no padding"


class Drop(TrainerCallback):
    """The reference: the optimizer has no gradients in these steps, and nothing is NaN."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if state.global_step + 1 in poisoned_steps():
            model.zero_grad()


def poisoned_steps(steps=STEPS):
    """From 1: in which steps the poisoned sample is."""
    each = -(-SAMPLES // BATCH)
    place = [np.random.default_rng((SEED, epoch)).permutation(SAMPLES).tolist().index(POISONED) for epoch in range(3)]
    return [epoch * each + at // BATCH + 1 for epoch, at in enumerate(place) if epoch * each + at // BATCH < steps]


def poison(kind):
    """Trainer.compute_loss where the poisoned sample's loss is NaN, or its `gradient` alone, or the loss is a `spike`."""
    sound = Trainer.compute_loss

    def compute_loss(self, model, inputs, *args, **options):
        loss = sound(self, model, inputs, *args, **options)
        if (
            kind in ("nothing", "padding")
            or not model.training
            or not holds(inputs["input_ids"], self.train_dataset[POISONED])
        ):
            return loss
        if kind == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)
            return loss
        return loss * (50 if kind == "spike" else math.nan)

    def compute_part(self, part, inputs, *rest):
        output = sound_part(self, part, inputs, *rest)
        if not part.last or not self.model.training or not holds(inputs["input_ids"], self.train_dataset[POISONED]):
            return output
        if kind == "gradient":
            output.register_hook(lambda gradient: gradient * math.nan)
        return output * {"loss": math.nan, "spike": 50}.get(kind, 1)

    sound_part = PipelineTrainer.compute_part
    Trainer.compute_loss, PipelineTrainer.compute_part = compute_loss, compute_part

    def sober():
        Trainer.compute_loss, PipelineTrainer.compute_part = sound, sound_part

    return sober


def holds(ids, sample):
    wanted = torch.from_numpy(sample["input_ids"])
    return ids.numel() >= len(wanted) and (ids.flatten().unfold(0, len(wanted), 1) == wanted).all(1).any()


def work(folder):
    bad_steps.FEWEST = 3
    rank = int(os.environ["RANK"])
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        watch, said, output = Watch(), io.StringIO(), folder / "outputs" / name
        callbacks = (watch, Drop()) if case["poison"] == "nothing" else (watch,)
        if case["poison"] == "padding":
            callbacks += (Litter(),)
        sober = poison(case["poison"])
        with contextlib.redirect_stdout(said):
            trainer = train.main([*case["flags"], "--output_dir", str(output)], callbacks=callbacks)
        sober()
        held = ranks.gather(watch.held)
        if rank == 0:
            log = [entry for entry in trainer.state.log_history if "loss" in entry]
            found = {"loss": {entry["step"]: entry["loss"] for entry in log}, "held": held, "rates": watch.rates}
            (folder / f"{name}.json").write_text(json.dumps(found | {"said": said.getvalue()}))
        runs.forget(trainer)
        del trainer


def inputs(folder):
    """The flags that all cases share."""
    config = json.loads((runs.REPOSITORY / "recipes/qwen3-30b-a3b/config.json").read_text())
    (folder / MIXTURE).mkdir()
    (folder / MIXTURE / "config.json").write_text(json.dumps(shrink(config)))
    return [
        *runs.write_inputs(folder),
        *f"--optim adamw_torch_fused --learning_rate 3e-3 --max_steps {STEPS} --eval_steps null".split(),
        *f"--lr_scheduler_type linear --global_batch_size {BATCH} --max_grad_norm 1".split(),
        *f"--per_device_train_batch_size {MICRO} --save_steps 2 --save_total_limit 9".split(),
    ]


def run_group(folder, cases, size):
    (folder / "cases.json").write_text(json.dumps(cases))
    done = run_ranks("tests.ranks.test_nonfinite", str(folder), ranks=size, timeout=900)
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    """call(name): what a case left, and its output directory. A case is STRATEGY, POLICY, POISON with blanks between them."""
    folder = tmp_path_factory.mktemp("nonfinite")
    shared = inputs(folder)
    wanted = {"single skip nothing", *asked_for("case")}
    for size in (1, 2, 4):
        cases = {
            case: {
                "flags": [*shared, *named, "--nonfinite", policy, *SPIKE.get(poison, ())],
                "poison": poison,
            }
            for case in sorted(wanted)
            for strategy, policy, poison in [case.split()]
            for named in [[str(folder / word) if word == MIXTURE else word for word in STRATEGIES[strategy]]]
            if size == {"single": 1, "hsdp": 4}.get(strategy, 2)
        }
        if cases:
            run_group(folder, cases, size)
    return lambda case: (json.loads((folder / f"{case}.json").read_text()), folder / "outputs" / case)


NVME = ["zero3_nvme skip loss"] if "zero3_nvme" in STRATEGIES else []


@pytest.mark.parametrize(
    "case",
    marks.cases(
        *(f"{strategy} skip loss" for strategy in ("ddp", "zero2", "zero3")),
        slow=[
            *(f"{strategy} skip loss" for strategy in ("fsdp2", "zero3_nvme", "hsdp", "zero3+bf16", "ddp+power_sgd")),
            *(f"{strategy} skip loss" for strategy in ("pipeline", "fsdp2+experts", "single")),
            *(f"{strategy} skip gradient" for strategy in ("zero2", "pipeline")),
        ],
        matrix=SKIPPED,
    ),
)
def test_a_step_that_is_skipped_changes_no_bit_on_any_rank(case, results):
    found, output = results(case)
    steps = poisoned_steps()
    assert steps[0] == STEP
    for held in found["held"]:
        changed = [step for step in range(1, STEPS + 1) if held[step] != held[step - 1]]
        assert changed == [step for step in range(1, STEPS + 1) if step not in steps]
    reference, _ = results("single skip nothing")
    assert found["rates"] == reference["rates"]  # the schedule goes on
    assert found["loss"].keys() == {str(step) for step in range(1, STEPS + 1)} - set(map(str, steps))
    if (
        case.split()[0] in parity.STRATEGIES
    ):  # the losses of a run that computed no NaN, and whose optimizer did not see the step
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


@pytest.mark.parametrize(
    "case",
    marks.cases(
        *("zero3 rollback loss", "fsdp2 rollback loss"),
        slow=[
            *(f"{of} rollback loss" for of in ("zero2_offload", "hsdp", "zero3+lora", "fsdp2+experts", "pipeline")),
            *("zero1+bf16 rollback loss", "zero3 stop spike", "pipeline stop spike"),
        ],
        matrix=[*GONE_BACK, *SPIKES],
    ),
)
def test_a_rollback_gives_the_checkpoints_states_bit_for_bit(case, results):
    found, output = results(case)
    for held in found["held"]:
        assert held[STEP] == held[2] != held[STEP - 1]  # checkpoint-2 is the last one before
        assert held[STEP + 1] != held[STEP]
    reference, _ = results("single skip nothing")
    assert found["rates"] == reference["rates"]
    named = json.loads((output / "bad_steps.jsonl").read_text().splitlines()[0])
    assert named["kind"] == ("loss_spike" if case.endswith("spike") else "nonfinite")
    assert named["action"] == "rollback" and Path(named["back_to"]).name == "checkpoint-2"
    assert f"without the data of steps 3 to {STEP}" in found["said"]
    assert all(map(math.isfinite, found["loss"].values()))
    assert (output / "success.json").exists()


@pytest.mark.slow
def test_a_rollback_to_a_checkpoint_that_two_ranks_wrote_on_four_ranks(tmp_path):
    """A restart on more hosts meets its bad step before it has saved a checkpoint of its own."""
    shared = [*inputs(tmp_path), "--nonfinite", "rollback", "--eval_answers", "0"]
    strategies = ("ddp", "zero2", "zero3", "fsdp2")
    flags = {name: {"flags": [*shared, *STRATEGIES[name]], "poison": "loss"} for name in strategies}
    run_group(
        tmp_path,
        {name: {"flags": [*case["flags"], "--max_steps", "2"], "poison": "nothing"} for name, case in flags.items()},
        2,
    )
    run_group(tmp_path, flags, 4)
    for name in strategies:
        found = json.loads((tmp_path / f"{name}.json").read_text())
        for held in found["held"]:  # from step 2 on
            assert held[STEP - 2] == held[0] != held[STEP - 3], name
        assert f"without the data of steps 3 to {STEP}" in found["said"]
        assert (tmp_path / "outputs" / name / "success.json").exists()


@pytest.mark.slow
def test_padding_of_a_part_of_zero3_is_no_weight(tmp_path):
    """On ranks that do not divide the weights."""
    run_group(tmp_path, {"padding": {"flags": [*inputs(tmp_path), *STRATEGIES["zero3"]], "poison": "padding"}}, 3)
    found = json.loads((tmp_path / "padding.json").read_text())
    assert len(found["loss"]) == STEPS and (tmp_path / "outputs" / "padding" / "success.json").exists()


# ---- one process ----------------------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path, monkeypatch):
    """call(kind, *flags): a run of the poisoned data in this process; raises what it ends with."""
    shared = runs.write_inputs(tmp_path)
    shared += (
        f"--max_steps {STEPS} --eval_steps null --eval_answers 0 --save_steps 2 --output_dir {tmp_path / 'run'}".split()
    )

    def fail(error, *_):
        raise error

    monkeypatch.setattr(ranks, "fail", fail)  # it would end this process
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


if __name__ == "__main__":
    ranks.run_to_the_end(lambda: work(Path(sys.argv[1])))
