"""What a checkpoint lacks is seen, the one before it is taken, and another run's is refused; a finished run is lengthened at its
end, or says why it cannot be."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import train
from brigade.errors import UserError
from brigade.train.checkpoint import manifest, resume
from brigade.train.distributed import ranks
from brigade.train.host.cluster import World
from brigade.train.run.directory import Run
from brigade.train.strategy import Strategy
from testing.run_files import losses
from testing.runs_of_one import Ruin, left_alone


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


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_taken(done, flags, refused, tmp_path, capfd):
    output, history = done
    run = tmp_path / "run"
    shutil.copytree(output, run)
    left_alone(run)
    flipped(run / "checkpoint-6")
    assert losses(train.main([*flags, "--output_dir", str(run)]).state.log_history) == losses(history)
    said = " ".join(capfd.readouterr().out.split())
    assert "checkpoint-6: optimizer.pt is not what was written" in said
    assert "checkpoint-3" in said.partition("continues")[2]
    assert manifest.flaw(run / "checkpoint-6") is manifest.damage(run / "checkpoint-6") is None, "it is written anew"
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    assert not (run / ".saving").exists()

    left_alone(run)
    for step in (3, 6):
        (run / f"checkpoint-{step}" / "scheduler.pt").unlink()
    said = refused("--output_dir", str(run))
    assert "checkpoint-6" in said and "scheduler.pt is missing" in said and "--fresh moves this run aside" in said


def test_data_that_changed_since_the_run_stopped_is_not_trained_on(done, refused, tmp_path):
    shutil.copytree(done[0], tmp_path / "run")
    left_alone(tmp_path / "run")
    data = Path(yaml.safe_load((done[0] / "run.yaml").read_text())["data"]["train_file"])
    text = data.read_text()
    try:
        data.write_text(text.replace(" a ", " the ", 1))
        said = refused("--output_dir", str(tmp_path / "run"))
    finally:
        data.write_text(text)
    assert "the data or the tokenizer changed since this run began" in said


@pytest.mark.parametrize("others, told", [
    (["--learning_rate", "2e-3"], "training.learning_rate is 0.001 there and 0.002 here"),
    (["--max_train_samples", "50"], "data.max_train_samples is None there and 50 here"),
])  # fmt: skip
def test_a_checkpoint_of_another_run_is_refused(others, told, done, refused, tmp_path):
    named = ["--resume_from_checkpoint", str(done[0] / "checkpoint-3"), "--output_dir", str(tmp_path / "run")]
    said = refused(*others, *named)
    assert told in said and "error on " in said and "run.yaml" in said
    assert not (tmp_path / "run").exists()


def told_of(folder, strategy, world_size, base=(), peft=False, named=True, optim="sgd"):
    """What is said of continuing from `folder` under this strategy."""
    recipe = SimpleNamespace(model=SimpleNamespace(use_peft=peft), training=SimpleNamespace(optim=optim))
    settings = SimpleNamespace(resume_from_checkpoint=str(folder) if named else None, fresh=False, recipe=recipe)
    world = World(0, 0, world_size, world_size, "h", "torchrun")
    run = Run(settings, strategy, world, None, "", folder.parent)
    with pytest.raises(UserError) as caught:
        resume.choose(run, "data", dict(base))
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
        told = told_of(folder, Strategy("zero3", "zero3_nvme", "", ds_config=NVME), 2, named=named)
        assert "DeepSpeed on 4 ranks" in told and "zero3_nvme on 2 ranks" in told and "swap files" in told
        assert "cure: continue with DeepSpeed on 4 ranks" in told
    ddp = Strategy("ddp", "ddp", "")
    assert "adamw_8bit quantises its states in blocks" in told_of(folder, ddp, 4, optim="adamw_8bit")
    (folder / "brigade.json").write_text(json.dumps({"base": {"model.safetensors": "old"}, "files": {}}))
    told = told_of(folder, ddp, 4, {"model.safetensors": "new"}, peft=True)
    assert "another base: model.safetensors changed" in told


def foreign(done, folder):
    """As Transformers' own Trainer leaves a checkpoint: without a record, and beside no run.yaml."""
    shutil.copytree(done[0] / "checkpoint-3", folder)
    (folder / "brigade.json").unlink()


METHODS = {  # who wrote it, flags of the run that would continue from it; what is said
    "another tool's": (foreign, [], ["is another tool's: there is neither brigade.json in it"]),
    "another tool's, by LoRA": (foreign, ["--use_peft"], [
        "holds whole weights, and this run trains adapters", "by another tool"]),
    "a full run's, by LoRA": (lambda done, folder: shutil.copytree(done[0] / "checkpoint-3", folder), ["--use_peft"], [
        "belongs to another run: model.use_peft is False there and True here"]),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_of_another_tool_or_method_is_refused_before_a_model_is_loaded(name, done, refused, tmp_path):
    write, further, words = METHODS[name]
    write(done, folder := tmp_path / "elsewhere" / "checkpoint-3")
    named = ["--resume_from_checkpoint", str(folder), "--output_dir", str(tmp_path / "run")]
    said = refused(*further, *named)
    assert "flag --resume_from_checkpoint" in said and all(word in said for word in words), said
    assert f"to start from its weights: --model_name_or_path {folder} --from_scratch false" in said
    assert not (tmp_path / "run").exists()


def test_adapters_of_another_tool_are_no_checkpoint_of_a_full_run(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt"):
        (folder / name).touch()
    (folder / "trainer_state.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    said = told_of(folder, Strategy("ddp", "ddp", ""), 1)
    assert "holds adapters, and this run trains all weights" in said and "with the tool that wrote it" in said


# ---- runs that are lengthened ----------------------------------------------------------------------------------------
def test_a_finished_run_is_lengthened_in_place(done, flags, refused, tmp_path, capfd):
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
    said = refused("--output_dir", str(run))
    assert "asks for 6 steps" in said and "has 10 already" in said


@pytest.mark.parametrize("strategy, name, last", [
    ("none", "cosine", 0), ("ds_configs/zero2.json", "cosine_with_min_lr", 1e-4),  # which looks for DeepSpeed's first rate
])  # fmt: skip
def test_a_lengthened_run_follows_the_schedule_of_its_new_length(
    strategy, name, last, flags, tmp_path, monkeypatch, capfd
):
    """Also where it dies before its next checkpoint: the last one still has the rate that it had come down to."""
    cosine = [*flags, "--lr_scheduler_type", name, "--warmup_steps", "0.25", "--eval_steps", "null"]
    cosine += ["--lr_scheduler_kwargs", f"{{min_lr: {last}}}"] if last else []
    cosine += ["--ds_config", strategy, "--output_dir", str(tmp_path)]
    train.main([*cosine, "--max_steps", "4"])
    with monkeypatch.context() as broken:
        broken.setattr(ranks, "fail", lambda error, *_: (_ for _ in ()).throw(error))
        with pytest.raises(UserError):
            train.main([*cosine, "--max_steps", "8"], callbacks=(Ruin(5),))
    assert not (tmp_path / "success.json").exists()
    history = train.main([*cosine, "--max_steps", "8"]).state.log_history
    rates = [entry["learning_rate"] for entry in history if "loss" in entry]
    fall = [0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(2, 6)]  # after 2 steps of warm-up
    curve = [last + (1e-3 - last) * share for share in fall]
    assert rates[4:] == pytest.approx(curve) and rates[3] < rates[4]
    assert f"{rates[4]:.3g} at step 5, after {rates[3]:.3g} at step 4" in " ".join(capfd.readouterr().out.split())
    assert len(yaml.safe_load((tmp_path / "run.yaml").read_text())["run"]["lengthened"]) == 1


LENGTHS = {  # files that are gone, flags, what is said
    "shorter": (
        [],
        ["--max_steps", "4"],
        ["flag --max_steps", "asks for 4 steps", "has 6 already", "above 6", "/run-2"],
    ),
    "no checkpoint": (["checkpoint-*"], ["--max_steps", "9"], ["kept no checkpoint", "--model_name_or_path"]),
    "not its last": (
        ["checkpoint-6"],
        ["--max_steps", "9"],
        ["checkpoint-3 is at step 3 of 6", "--model_name_or_path"],
    ),
    "unfinished": (
        ["checkpoint-6", "success.json"],
        ["--max_steps", "9"],
        ["cannot change the length of an unfinished run to 9 steps", "step 3 of 6", "--max_steps 6", "/run-2"],
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_run_that_cannot_be_lengthened_says_why(name, done, refused, tmp_path):
    gone, longer, words = LENGTHS[name]
    shutil.copytree(done[0], tmp_path / "run")
    for path in (path for pattern in gone for path in (tmp_path / "run").glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = sorted((tmp_path / "run").rglob("*"))
    said = refused(*longer, "--output_dir", str(tmp_path / "run"))
    assert all(word in said for word in words), said
    assert "--fresh" not in said and sorted((tmp_path / "run").rglob("*")) == before


def test_a_run_that_stopped_early_has_not_lost_its_last_checkpoint(done, refused, tmp_path):
    shutil.copytree(done[0], run := tmp_path / "run")
    shutil.rmtree(run / "checkpoint-6")
    success = json.loads((run / "success.json").read_text())
    (run / "success.json").write_text(json.dumps(success | {"steps": 3}))
    assert "it stopped early: checkpoint-3 is at step 3 of 6" in refused("--max_steps", "9", "--output_dir", str(run))


def test_a_run_that_went_back_says_which_checkpoint_is_its_own(done):
    """The same command would take the newest of those that the run had made before."""
    settings = SimpleNamespace(recipe_path=Path("mine.yaml"), fresh=False, resume_from_checkpoint="checkpoint-3")
    run = SimpleNamespace(directory=done[0], settings=settings)
    said = resume.how_to_continue(run, SimpleNamespace(global_step=4, max_steps=6))
    assert said == (
        f"at step 4 of 6. --resume_from_checkpoint {done[0]}/checkpoint-3 continues from here. The same command without "
        f"--resume_from_checkpoint continues from {done[0]}/checkpoint-6, 2 steps after this one."
    )
