"""A finished run is lengthened at its end, or says why it cannot be."""

import json
import math
import shutil

import pytest
import yaml

import train
from brigade.errors import UserError
from brigade.train.distributed import ranks
from testing.run_files import losses
from testing.runs_of_one import Ruin


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
