"""What a run leaves behind, how it continues and repeats, and what it logs."""

import importlib.metadata
import json
import math
import shutil
import threading

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train
from brigade.errors import UserError
from brigade.train.checkpoint import saving
from brigade.train.engines.engine import Engine
from testing.run_files import losses
from testing.runs_of_one import Ruin

FIGURES = {
    "loss", "grad_norm", "learning_rate", "tokens_per_second", "tokens_per_second_per_gpu", "step_time", "data_time",
    "peak_memory_gib",
}  # fmt: skip


def test_the_output_directory_holds_what_the_readme_says(done):
    output, history = done
    state = json.loads((output / "trainer_state.json").read_text())
    assert losses(state["log_history"]) == losses(history)
    assert list((output / "tensorboard").rglob("events*"))
    record = yaml.safe_load((output / "run.yaml").read_text())
    assert record["run"]["ranks"] == 1 and record["run"]["versions"]["torch"] == importlib.metadata.version("torch")
    assert record["training"]["max_steps"] == 6 and "auto" not in str(record["run"]["batch"])
    kernels = {"attention": "varlen", "optim": "adamw_torch", "torch_compile": False, "use_liger_kernel": False}
    assert record["run"]["kernels"] == kernels  # what was taken, whether the recipe names it or says auto
    success = json.loads((output / "success.json").read_text())
    assert success["steps"] == 6 and success["identity"] == record["run"]["identity"]
    assert success["held_out_loss"] < success["held_out_loss_before"]


def test_the_saved_model_is_the_trained_one(done):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from brigade.eval import held_out_loss
    from brigade.train.data.prepare import prepare
    from brigade.train.recipe import flags as brigade_flags

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


def test_auto_for_kernels_is_the_same_run_on_a_cpu(flags, tmp_path):
    """Its default optimizer is another one than `flags` name, so it is compared with a run that says nothing of kernels."""
    plain = [word for word in flags if word not in ("--optim", "adamw_torch", "--optim=adamw_torch")]
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


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_saved_model_that_lacks_a_tensor_is_no_success(adapted, flags, tmp_path, raises, monkeypatch):
    """As DeepSpeed's tensor groups left out buffers: from_pretrained would make them anew, and say so in a warning alone."""

    def lacking_one(self, trainer):
        state = trainer.model.state_dict()
        del state[next(name for name in state if ("lora_B" in name if adapted else "norm" in name))]
        return state

    monkeypatch.setattr(Engine, "whole_state", lacking_one)
    short = ["--max_steps", "1", "--save_steps", "1000", "--eval_steps", "1000", "--output_dir", str(tmp_path)]
    with pytest.raises(UserError) as caught:
        train.main([*flags, *short, *(["--use_peft"] if adapted else [])])
    assert ("lora_B" if adapted else "norm.weight") in caught.value.problem and "export" in caught.value.cure
    assert not (tmp_path / "success.json").exists()


@pytest.mark.parametrize("ruined, told, kept", [
    (3, "step 3\n  the weight model.embed_tokens.weight is not finite", []),
    (4, "step 5\n  the loss is nan in micro-batch 1 of rank 0", [3]),
])  # fmt: skip
def test_a_run_that_became_nan_stops_and_keeps_what_was_good(
    ruined, told, kept, flags, tmp_path, raises, monkeypatch, capsys
):
    """Transformers' own filter would log the loss of a model whose weights are NaN as 0.0, and go on."""
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
