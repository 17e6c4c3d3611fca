"""After ten steps a run says what was predicted of it, and keeps it in run.yaml; a run of less says nothing."""

import shutil

import pytest
import yaml

import train
from brigade.__main__ import main
from brigade.plan.hardware import calibration
from brigade.train.recipe import flags as brigade_flags
from testing import runs

CPU = {"driver": "cpu", "memory_gib": 16, "bf16_tflops": 0.05, "hbm_gb_s": 20, "peer_gb_s": 5, "pcie_gb_s": 5, "sms": 1}
LINE = "after 10 steps: "


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    shared = runs.write_inputs(tmp_path_factory.mktemp("inputs"))
    return [*shared, "--max_steps", "12", "--save_steps", "6", "--eval_steps", "6", "--eval_answers", "0"]


@pytest.fixture
def known(tmp_path, monkeypatch):
    """The CPU as a kind of GPU that the user describes."""
    file = tmp_path / "calibration.yaml"
    file.write_text(yaml.safe_dump({"gpus": {"This CPU": CPU}}))
    monkeypatch.setenv(calibration.VARIABLE, str(file))
    return file


def prediction(output):
    return yaml.safe_load((output / "run.yaml").read_text())["run"].get("prediction")


def line(capsys):
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(LINE)]
    return lines[0] if len(lines) == 1 else f"{len(lines)} lines"


def test_of_a_cpu_nothing_is_predicted_and_nothing_said(flags, tmp_path, capsys):
    train.main([*flags, "--output_dir", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "step 12/12" in said and not any(
        word in said for word in (LINE, "promise", "prediction", "spread", "ranks' tokens", "per rank")
    )
    kept = prediction(tmp_path / "run")
    assert "'cpu'" in kept["none"] and kept["measured"]["step_time"] > 0 and kept["measured"]["steps"] == 10


def test_nor_does_fp32(flags, known, tmp_path, capsys):
    train.main([*flags, "--max_steps", "10", "--save_steps", "null", "--output_dir", str(tmp_path / "run")])
    assert line(capsys).endswith("and this run computes in fp32")


def test_predicted_and_measured_are_told_kept_and_calibrate_the_next_prediction(flags, known, tmp_path, capsys):
    flags, first = [*flags, "--bf16"], tmp_path / "first"
    train.main([*flags, "--output_dir", str(first)])
    said, kept = line(capsys), prediction(first)
    assert " s per step (estimated " in said and kept["gpu"] == "This CPU"
    measured, predicted = kept["measured"], kept["predicted"]
    assert measured["step_time"] > measured["data_time"] > 0 and predicted["allocated_gib"] > 0
    assert predicted["step_time_between"][0] < predicted["step_time"] < predicted["step_time_between"][1]
    job = kept["job"]
    assert job["accumulation"] * job["micro_batch"] == runs.GLOBAL_BATCH and job["sequence"] <= 64

    # run.yaml is still a recipe, of the same run ...
    again = brigade_flags.load(["--recipe", str(first / "run.yaml")])
    assert again.recipe == brigade_flags.load(flags).recipe.model_copy(update={"cluster": again.recipe.cluster})
    # ... which continues as before, and keeps what was measured where it ends before ten steps more.
    for leftover in ("success.json", "trainer_state.json", "model.safetensors"):
        (first / leftover).unlink()
    shutil.rmtree(first / "checkpoint-12")
    assert train.main([*flags, "--output_dir", str(first)]).state.global_step == 12
    assert line(capsys) == "0 lines" and prediction(first) == kept

    # Calibrated by this run, the same prediction would have been what it measured.
    assert main(["plan", "--calibrate", str(first)]) == 0
    assert "This CPU: efficiency none -> " in capsys.readouterr().out
    train.main([*flags, "--output_dir", str(tmp_path / "second")])
    predicted = prediction(tmp_path / "second")["predicted"]
    assert predicted["step_time"] == pytest.approx(measured["step_time"], rel=0.02) and predicted["efficiency"] != 1.0


def test_a_broken_file_is_told_and_trains_all_the_same(flags, known, tmp_path, capsys):
    """It is the planner's: what it says of a cluster changes no loss. `plan`, which reads it for the user, refuses it."""
    known.write_text("gpus: 3\n")
    assert main(["plan", "qwen3-8b", "--gpu", "A100 80GB"]) == 2 and "calibration.yaml: gpus" in capsys.readouterr().err
    train.main([*flags, "--max_steps", "1", "--save_steps", "null", "--output_dir", str(tmp_path / "run")])
    told = [line for line in capsys.readouterr().err.splitlines() if "calibration.yaml: gpus: 3 is not keys" in line]
    assert len(told) == 1 and told[0].startswith("warning on ") and (tmp_path / "run" / "success.json").exists()
