"""One process: what a run leaves behind, how it continues and repeats, and what it logs."""

import json
import math
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback

import train
from brigade.checkpoint import choosing, manifest, saving
from brigade.cluster import World
from brigade.distributed import ranks
from brigade.errors import UserError
from brigade.run.directory import Run
from brigade.strategy import Strategy
from testing import runs

FIGURES = {
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "step_time",
    "data_time",
    "peak_memory_gib",
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    shared = runs.write_inputs(folder)
    return [
        *shared,
        *[
            "--max_steps",
            "6",
            "--save_steps",
            "3",
            "--optim",
            "adamw_torch",
            "--learning_rate",
            "1e-3",
            "--report_to",
            "tensorboard",
        ],
    ]


@pytest.fixture(scope="module")
def done(flags, tmp_path_factory):
    """A finished run: its directory and its log."""
    output = tmp_path_factory.mktemp("runs") / "run"
    return output, train.main([*flags, "--output_dir", str(output)]).state.log_history


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What train.main sets for a group of one rank, as ZeRO needs it, is not left to later tests: they would start one too."""
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)


def losses(history):
    return [entry["loss"] for entry in history if "loss" in entry]


def test_the_output_directory_holds_what_the_readme_says(done):
    output, history = done
    state = json.loads((output / "trainer_state.json").read_text())
    assert losses(state["log_history"]) == losses(history)
    assert list((output / "tensorboard").rglob("events*"))
    record = yaml.safe_load((output / "run.yaml").read_text())
    assert record["run"]["ranks"] == 1 and record["run"]["versions"]["torch"].startswith("2.13")
    assert record["training"]["max_steps"] == 6 and "auto" not in str(record["run"]["batch"])
    kernels = {"attention": "varlen", "optim": "adamw_torch", "torch_compile": False, "use_liger_kernel": False}
    assert record["run"]["kernels"] == kernels  # what was taken, whether the recipe names it or says auto
    success = json.loads((output / "success.json").read_text())
    assert success["steps"] == 6 and success["identity"] == record["run"]["identity"]
    assert success["held_out_loss"] < success["held_out_loss_before"]


def test_the_saved_model_is_the_trained_one(done):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from brigade.commands.evaluate import held_out_loss
    from brigade.data.prepare import prepare
    from brigade.recipe import flags as brigade_flags

    output, _ = done
    tokenizer = AutoTokenizer.from_pretrained(output)
    heldout = prepare(brigade_flags.load(["--recipe", str(output / "run.yaml")]), tokenizer).heldout
    heldout = [row for rows in heldout.values() for row in rows]
    loss = held_out_loss(AutoModelForCausalLM.from_pretrained(output), heldout, tokenizer.pad_token_id)
    assert loss == pytest.approx(json.loads((output / "success.json").read_text())["held_out_loss"], rel=1e-6)


def test_a_finished_run_is_not_trained_again(done, flags, capsys):
    output, _ = done
    assert train.main([*flags, "--output_dir", str(output)]) is None
    assert "finished" in capsys.readouterr().out


def test_the_same_command_continues_an_interrupted_run(done, flags, tmp_path, capsys):
    output, history = done
    copy = tmp_path / "run"
    shutil.copytree(output, copy)
    for leftover in ("success.json", "trainer_state.json", "model.safetensors"):
        (copy / leftover).unlink()
    # The newest checkpoint was being written when the run died: Trainer writes trainer_state.json last.
    (copy / "checkpoint-6" / "trainer_state.json").unlink()
    again = train.main([*flags, "--output_dir", str(copy)]).state.log_history
    assert losses(again) == losses(history)
    assert "continues" in (said := capsys.readouterr().out) and "one sample" not in said, (
        "it was shown when the run began"
    )
    assert again[-1]["step"] == 6 and next(entry["step"] for entry in again if "eval_loss" in entry) == 0
    shown = EventAccumulator(str(copy / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("train/loss")] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(losses(history), 1)
    ]
    assert [event.step for event in shown.Scalars("eval/loss")] == [0, 6]


def test_a_finished_run_is_lengthened_in_place(done, flags, tmp_path, capfd):
    """Under a constant learning rate it ends as if it had been that long from the beginning, bit for bit."""
    output, history = done
    run, at_once = tmp_path / "run", tmp_path / "at_once"
    shutil.copytree(output, run)
    longer = [*flags, "--max_steps", "-1", "--num_train_epochs", "2", "--save_steps", "4"]  # 10 steps
    again = train.main([*longer, "--output_dir", str(run)]).state.log_history
    said = " ".join(capfd.readouterr().out.split())
    assert "from 6 to 10 steps" in said and "0.001 at step 7, after 0.001 at step 6" in said
    train.main([*flags, "--max_steps", "10", "--output_dir", str(at_once)])
    assert (run / "model.safetensors").read_bytes() == (at_once / "model.safetensors").read_bytes()
    assert losses(again)[:6] == losses(history) and len(losses(again)) == 10
    assert (run / "checkpoint-8").exists(), "a run that continues has its own intervals, not those of its checkpoint"
    success, whole = (json.loads((folder / "success.json").read_text()) for folder in (run, at_once))
    assert success["steps"] == success["saved_step"] == 10
    for figure in ("held_out_loss_before", "held_out_loss"):
        assert success[figure] == whole[figure]
    kept = yaml.safe_load((run / "run.yaml").read_text())
    assert kept["training"]["num_train_epochs"] == 2 and kept["run"]["identity"] == success["identity"]
    (lengthened,) = kept["run"]["lengthened"]
    assert lengthened["steps"] == 6 and "from 6 to 10" in lengthened["how"]
    assert train.main([*longer, "--output_dir", str(run)]) is None
    assert "finished" in capfd.readouterr().out
    with pytest.raises(SystemExit):
        train.main([*flags, "--output_dir", str(run)])
    assert "asks for 6 steps" in (said := capfd.readouterr().err) and "has 10 already" in said


@pytest.mark.parametrize("strategy", ["none", "ds_configs/zero2.json"])
def test_a_lengthened_run_follows_the_schedule_of_its_new_length(strategy, flags, tmp_path, monkeypatch, capfd):
    """Also where it dies before its next checkpoint: the last one still has the rate that it had come down to."""
    cosine = [*flags, "--lr_scheduler_type", "cosine", "--warmup_steps", "0.25", "--eval_steps", "null"]
    cosine += ["--ds_config", strategy, "--output_dir", str(tmp_path)]
    train.main([*cosine, "--max_steps", "4"])
    with monkeypatch.context() as broken:
        broken.setattr(ranks, "fail", lambda error, *_: (_ for _ in ()).throw(error))
        with pytest.raises(UserError):
            train.main([*cosine, "--max_steps", "8"], callbacks=(Ruin(5),))
    assert not (tmp_path / "success.json").exists()
    history = train.main([*cosine, "--max_steps", "8"]).state.log_history
    rates = [entry["learning_rate"] for entry in history if "loss" in entry]
    curve = [0.5 * 1e-3 * (1 + math.cos(math.pi * step / 6)) for step in range(2, 6)]  # after 2 steps of warm-up
    assert rates[4:] == pytest.approx(curve) and rates[3] < rates[4]
    assert f"{rates[4]:.3g} at step 5, after {rates[3]:.3g} at step 4" in " ".join(capfd.readouterr().out.split())
    assert len(yaml.safe_load((tmp_path / "run.yaml").read_text())["run"]["lengthened"]) == 1


LENGTHS = {  # files that are gone, flags, what is said
    "shorter": ([], ["--max_steps", "4"], ["flag --max_steps", "asks for 4 steps", "has 6 already", "above 6"]),
    "no checkpoint": (["checkpoint-*"], ["--max_steps", "9"], ["kept no checkpoint", "--model_name_or_path"]),
    "not its last": (
        ["checkpoint-6"],
        ["--max_steps", "9"],
        ["checkpoint-3 is at step 3 of 6", "--model_name_or_path"],
    ),
    "unfinished": (["checkpoint-6", "success.json"], ["--max_steps", "9"], ["step 3 of 6", "let it end first"]),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_run_that_cannot_be_lengthened_says_why(name, done, flags, tmp_path, capfd):
    gone, longer, words = LENGTHS[name]
    shutil.copytree(done[0], tmp_path / "run")
    for path in (path for pattern in gone for path in (tmp_path / "run").glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(SystemExit) as left:
        train.main([*flags, *longer, "--output_dir", str(tmp_path / "run")])
    said = capfd.readouterr().err
    assert left.value.code == 2 and all(word in said for word in words), said
    assert "--fresh" not in said and sorted((tmp_path / "run").rglob("*")) == before


def left_alone(run):
    for leftover in ("success.json", "trainer_state.json", "model.safetensors"):
        (run / leftover).unlink()


def without(*names):
    return lambda checkpoint: [(checkpoint / name).unlink() for name in names]


def cut(name):
    def shorten(checkpoint):
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[:-1])

    return shorten


def garbage(checkpoint):
    """Without checksums only what is no safetensors at all is seen."""
    without("brigade.json")(checkpoint)
    file = checkpoint / "model.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)


def flipped(checkpoint):
    file = checkpoint / "optimizer.pt"
    there = bytearray(file.read_bytes())
    there[len(there) // 2] ^= 1
    file.write_bytes(there)


DAMAGE = {  # what happens to a checkpoint; what is said of it
    "no optimizer": (without("optimizer.pt"), "optimizer.pt is missing"),
    "no optimizer, by an earlier version": (without("optimizer.pt", "brigade.json"), "optimizer.pt is missing"),
    "no scheduler, by an earlier version": (without("scheduler.pt", "brigade.json"), "scheduler.pt is missing"),
    "no random state": (without("rng_state.pth"), "rng_state.pth is missing"),
    "cut short": (cut("optimizer.pt"), "optimizer.pt has "),
    "no safetensors, by an earlier version": (garbage, "cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_a_checkpoint_lacks_is_seen(name, done, tmp_path):
    shutil.copytree(done[0] / "checkpoint-6", tmp_path / "checkpoint-6")
    assert manifest.flaw(tmp_path / "checkpoint-6") is None
    damage, told = DAMAGE[name]
    damage(tmp_path / "checkpoint-6")
    assert told in manifest.flaw(tmp_path / "checkpoint-6")


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_taken(done, flags, tmp_path, capfd):
    output, history = done
    run = tmp_path / "run"
    shutil.copytree(output, run)
    left_alone(run)
    flipped(run / "checkpoint-6")
    assert losses(train.main([*flags, "--output_dir", str(run)]).state.log_history) == losses(history)
    said = " ".join(capfd.readouterr().out.split())
    assert (
        "checkpoint-6: optimizer.pt is not what was written" in said
        and "checkpoint-3" in said.partition("continues")[2]
    )
    assert manifest.flaw(run / "checkpoint-6") is manifest.damage(run / "checkpoint-6") is None, "it is written anew"
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    assert not (run / ".saving").exists()

    left_alone(run)
    for step in (3, 6):
        (run / f"checkpoint-{step}" / "scheduler.pt").unlink()
    with pytest.raises(SystemExit):
        train.main([*flags, "--output_dir", str(run)])
    said = capfd.readouterr().err
    assert "checkpoint-6" in said and "scheduler.pt is missing" in said and "--fresh moves this run aside" in said


def test_data_that_changed_since_the_run_stopped_is_not_trained_on(done, flags, tmp_path, capfd):
    shutil.copytree(done[0], tmp_path / "run")
    left_alone(tmp_path / "run")
    data = Path(yaml.safe_load((done[0] / "run.yaml").read_text())["data"]["train_file"])
    text = data.read_text()
    try:
        data.write_text(text.replace(" a ", " the ", 1))
        with pytest.raises(SystemExit) as left:
            train.main([*flags, "--output_dir", str(tmp_path / "run")])
    finally:
        data.write_text(text)
    said = capfd.readouterr().err
    assert left.value.code == 2 and "the data or the tokenizer changed since this run began" in said


@pytest.mark.parametrize(
    "others, told",
    [
        (["--learning_rate", "2e-3"], "training.learning_rate is 0.001 there and 0.002 here"),
        (["--max_train_samples", "50"], "data.max_train_samples is None there and 50 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(others, told, done, flags, tmp_path, capfd):
    named = ["--resume_from_checkpoint", str(done[0] / "checkpoint-3"), "--output_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as left:
        train.main([*flags, *others, *named])
    said = capfd.readouterr().err
    assert left.value.code == 2 and told in said and "error on " in said and "run.yaml" in said
    assert not (tmp_path / "run").exists()


def refused(folder, strategy, world_size, base=(), peft=False, named=True, optim="sgd"):
    """What is said of continuing from `folder` under this strategy."""
    recipe = SimpleNamespace(model=SimpleNamespace(use_peft=peft), training=SimpleNamespace(optim=optim))
    settings = SimpleNamespace(resume_from_checkpoint=str(folder) if named else None, fresh=False, recipe=recipe)
    world = World(0, 0, world_size, world_size, "h", "torchrun")
    run = Run(settings, strategy, world, None, "", folder.parent)
    with pytest.raises(UserError) as caught:
        choosing.choose(run, "data", dict(base))
    return str(caught.value)


NVME = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}


def test_what_cannot_be_carried_over_is_refused_before_anything_is_loaded(tmp_path):
    """As DeepSpeed lays its files out; an earlier version wrote no record beside them."""
    folder = tmp_path / "checkpoint-3"
    for rank in range(4):
        for kind in ("optim", "model"):
            file = folder / "global_step3" / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    for name, text in (("latest", "global_step3"), ("trainer_state.json", "{}"), ("scheduler.pt", "")):
        (folder / name).write_text(text)
    for named in (True, False):
        told = refused(folder, Strategy("zero3", "zero3_nvme", "", ds_config=NVME), 2, named=named)
        assert "DeepSpeed on 4 ranks" in told and "zero3_nvme on 2 ranks" in told and "swap files" in told
        assert "cure: continue with DeepSpeed on 4 ranks" in told
    ddp = Strategy("ddp", "ddp", "")
    assert "adamw_8bit quantises its states in blocks" in refused(folder, ddp, 4, optim="adamw_8bit")
    (folder / "brigade.json").write_text(json.dumps({"base": {"model.safetensors": "old"}, "files": {}}))
    told = refused(folder, ddp, 4, {"model.safetensors": "new"}, peft=True)
    assert "another base: model.safetensors changed" in told


def test_auto_for_kernels_is_the_same_run_on_a_cpu(done, flags, tmp_path):
    """Its default optimizer is another one than this run's, so it is compared with a run that says nothing of kernels."""
    plain = [word for word in flags if word not in ("--optim", "adamw_torch")]
    auto = ["--optim", "auto", "--use_liger_kernel", "auto", "--torch_compile", "auto"]
    found = [
        (train.main([*plain, *more, "--output_dir", str(tmp_path / str(number))]), tmp_path / str(number) / "run.yaml")
        for number, more in enumerate(([], auto))
    ]
    assert losses(found[0][0].state.log_history) == losses(found[1][0].state.log_history)
    records = [yaml.safe_load(path.read_text()) for _, path in found]
    assert records[0]["run"]["identity"] == records[1]["run"]["identity"]
    assert records[0]["run"]["kernels"] == records[1]["run"]["kernels"]
    assert {records[1]["training"][key] for key in ("optim", "use_liger_kernel", "torch_compile")} == {"auto"}


def test_run_yaml_repeats_the_run_elsewhere(done, tmp_path):
    output, history = done
    again = train.main(["--recipe", str(output / "run.yaml"), "--output_dir", str(tmp_path / "again")])
    assert losses(again.state.log_history) == losses(history)
    identities = [
        yaml.safe_load((path / "run.yaml").read_text())["run"]["identity"] for path in (output, tmp_path / "again")
    ]
    assert identities[0] == identities[1]


def test_each_log_entry_has_the_figures_that_are_promised(done):
    _, history = done
    entries = [entry for entry in history if "loss" in entry]
    assert all(entry.keys() >= FIGURES for entry in entries)
    assert all(entry["tokens_per_second"] > 0 and "token_spread" not in entry for entry in entries)
    assert all(0 <= entry["data_time"] <= entry["step_time"] for entry in entries)
    assert "mfu" not in entries[0]  # an unknown device gets none


def test_8_bit_adamw_learns_what_adamw_does_in_a_quarter_of_its_memory(done, flags, tmp_path):
    """bitsandbytes quantises states of 4,096 elements and more, but for embeddings'."""
    run = train.main([*flags, "--optim", "adamw_8bit", "--output_dir", str(tmp_path / "run")])
    assert losses(run.state.log_history) == pytest.approx(losses(done[1]), rel=0.02)
    states = run.optimizer.state
    ends = {id(run.model.get_input_embeddings().weight), id(run.model.get_output_embeddings().weight)}
    large = [parameter for parameter in states if parameter.numel() >= 4096 and id(parameter) not in ends]
    assert large and all(states[parameter]["state1"].dtype == torch.uint8 for parameter in large)


class Ruin(TrainerCallback):
    """Makes one weight NaN after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            next(model.parameters()).data[0, 0] = math.nan


@pytest.mark.parametrize(
    "ruined, told, kept",
    [
        (3, "step 3\n  the weight model.embed_tokens.weight is not finite", []),
        (4, "step 5\n  the loss is nan in micro-batch 1 of rank 0", [3]),
    ],
)
def test_a_run_that_became_nan_stops_and_keeps_what_was_good(ruined, told, kept, flags, tmp_path, monkeypatch, capsys):
    """Transformers' own filter would log the loss of a model whose weights are NaN as 0.0, and go on."""

    def fail(error, *_):
        raise error

    awaited, bring, let_finish = threading.Event(), saving.Saving._brought, saving.Saving.let_finish

    def on_its_way(self, job):
        """A checkpoint in the background that is whole only once somebody waits for it."""
        assert awaited.wait(60)
        return bring(self, job)

    def wait_for_it(self):
        awaited.set()
        let_finish(self)

    monkeypatch.setattr(saving.Saving, "_brought", on_its_way)
    monkeypatch.setattr(saving.Saving, "let_finish", wait_for_it)
    monkeypatch.setattr(ranks, "fail", fail)  # it would end this process
    with pytest.raises(UserError) as caught:
        train.main([*flags, "--output_dir", str(tmp_path)], callbacks=(Ruin(ruined),))
    assert told in str(caught.value) and "learning_rate" in caught.value.cure
    assert (f"checkpoint-{kept[0]} is from before" if kept else "no checkpoint") in caught.value.problem
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{step}" for step in kept]
    assert not (tmp_path / "success.json").exists()
    assert "loss nan" not in capsys.readouterr().out  # the step before it is the last that is logged
    if kept:
        entry = json.loads((tmp_path / "bad_steps.jsonl").read_text())
        assert entry["step"] == 5 and entry["action"] == "stop" and "--nonfinite skip" in caught.value.cure


def test_the_learning_rate_follows_the_global_batch(flags, tmp_path):
    scaled = [*flags, "--global_batch_size", "64", "--learning_rate_scaling", "sqrt", "--max_steps", "1"]
    history = train.main([*scaled, "--output_dir", str(tmp_path / "scaled")]).state.log_history
    assert [entry["learning_rate"] for entry in history if "loss" in entry] == [
        pytest.approx(1e-3 * math.sqrt(64 / 16))
    ]
