"""Evaluation while training, on two ranks: losses per source, answers, the best checkpoint, stopping early."""

import hashlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

import train
from brigade.__main__ import main
from brigade.train.step import sample_answers
from testing import marks, parity, run_files, runs

LONGEST = 12  # tokens of an answer, else these are most of the time
STRATEGIES = marks.cases(
    "ddp",
    slow=["zero2", "zero3_offload_param", "fsdp2"],
    matrix=["zero1", "zero3", "zero2_offload", "zero3_offload", "zero3_hpz"],
)
SHORT = ["--optim", "adamw_torch", "--report_to", "tensorboard"]
# One warm-up step leaves the weights as they are. Then each step moves every weight by about 1, fifty times its size: the
# held-out loss rises from 7 to hundreds, on whatever machine, and cannot come back.
RISING = ["--learning_rate", "1", "--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "1", "--eval_steps", "1",
          "--save_steps", "1", "--save_total_limit", "2", "--max_steps", "6", "--early_stopping_patience", "2",
          "--load_best_model_at_end", *SHORT]  # fmt: skip

SCORED = ["--model_name_or_path", "base", "--from_scratch", "false", "--learning_rate", "1e-3", "--max_steps", "4",
          "--eval_steps", "2", "--eval_answers", "11", "--per_device_eval_batch_size", "3",
          "--answer_score", "own.py:likeness", *SHORT]  # fmt: skip
LIKENESS = """
import difflib

def likeness(answer, reference):
    return difflib.SequenceMatcher(None, answer, reference, autojunk=False).ratio()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, asked_for):
    """Each strategy with answers and without: directories of runs, from one model that has learned a little."""
    folder = tmp_path_factory.mktemp("answers")
    shared = runs.write_inputs(folder)
    recipe = json.loads((folder / "full.yaml").read_text())
    for key in ("train_file", "validation_file"):  # a quarter of the samples are of the source `first`
        lines = Path(recipe["data"].pop(key)).read_text().splitlines(keepends=True)
        for name, part in (("first", lines[::4]), ("second", [line for i, line in enumerate(lines) if i % 4])):
            (folder / f"{name}.{key}.jsonl").write_text("".join(part))
    recipe["data"]["datasets"] = [
        {"name": name, **{key: str(folder / f"{name}.{key}.jsonl") for key in ("train_file", "validation_file")}}
        for name in ("first", "second")
    ]
    (folder / "full.yaml").write_text(json.dumps(recipe))
    config = folder / "model" / "config.json"
    drawing = {"attention_dropout": 0.1}  # random numbers, which answers must not advance
    config.write_text(json.dumps(json.loads(config.read_text()) | drawing))
    cases = {"base": [*shared, *SHORT, "--max_steps", "30", "--learning_rate", "0.01"]}
    known = [*shared, *RISING, "--model_name_or_path", "base", "--from_scratch", "false"]
    for name in ("ddp", *sorted(asked_for("name") - {"ddp"})):
        cases[f"{name}-silent"] = [*known, *parity.STRATEGIES[name]]
        cases[name] = [*cases[f"{name}-silent"], "--eval_answers", "3"]
    (folder / "own.py").write_text(LIKENESS)
    for name in sorted(asked_for("scored")):
        cases[f"{name}-scored"] = [*shared, *SCORED, *parity.STRATEGIES[name]]
    (folder / "cases.json").write_text(json.dumps(cases))
    todo = [{"name": name, "flags": [*flags, "--output_dir", name]} for name, flags in cases.items()]
    for name, result in runs.run_well(2, todo, folder, longest_answer=LONGEST).items():
        (folder / f"{name}.txt").write_text(result["said"])
    return folder


def plain_sums(model, samples):
    """(sum of the cross-entropy, supervised tokens), one sample at a time by the model's own forward pass."""
    total, count = 0.0, 0
    for sample in samples:
        labels = torch.tensor(sample["labels"])[1:]
        with torch.no_grad():
            logits = model(torch.tensor(sample["input_ids"])[None].long()).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels != -100).sum())
    return total, count


@pytest.fixture(scope="module")
def plain(folder):
    """Per source: what a single process computes of the model that all runs began with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from brigade.train.data.prepare import prepare
    from brigade.train.recipe import flags

    settings = flags.load(["--recipe", str(folder / "base" / "run.yaml")])
    heldout = prepare(settings, AutoTokenizer.from_pretrained(folder / "base")).heldout
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    return {name: plain_sums(model, [samples[i] for i in range(len(samples))]) for name, samples in heldout.items()}


@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_per_source_are_those_of_a_plain_forward_pass(name, folder, plain):
    entry = next(entry for entry in run_files.history(folder / name) if "eval_loss" in entry)
    for source, (total, count) in plain.items():
        assert entry[f"eval_{source}_loss"] == pytest.approx(total / count, rel=1e-6)
        assert entry[f"eval_{source}_perplexity"] == pytest.approx(math.exp(entry[f"eval_{source}_loss"]))
    weighted = sum(entry[f"eval_{source}_loss"] * count for source, (_, count) in plain.items())
    assert entry["eval_loss"] == pytest.approx(weighted / sum(count for _, count in plain.values()), rel=1e-12)
    assert entry["eval_perplexity"] == pytest.approx(math.exp(entry["eval_loss"]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_equal_weights_answer_alike_under_every_strategy(name, folder):
    """And as the plain model does, in one process."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = [entry for entry in run_files.answers(folder / name) if entry["step"] == 1]
    assert ours == [entry for entry in run_files.answers(folder / "ddp") if entry["step"] == 1]
    assert [entry["source"] for entry in ours] == ["first", "second", "first"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    for entry in ours:
        question = entry["question"]
        assert question.startswith("<|im_start|>user\n") and question.endswith("<|im_start|>assistant\n")
        assert entry["reference"].endswith("<|im_end|>"), "control tokens stay, everywhere"
        prompt = tokenizer(entry["question"], return_tensors="pt")
        told = model.generate(**prompt, max_new_tokens=LONGEST, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert entry["answer"] == tokenizer.decode(told) != ""


@pytest.mark.parametrize("name", STRATEGIES)
def test_answering_changes_nothing_else(name, folder):
    keys = ("loss", "grad_norm", "eval_loss")
    figures = [
        [entry[key] for entry in run_files.history(folder / run) for key in keys if key in entry]
        for run in (name, f"{name}-silent")
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 10  # three steps, four evaluations
    assert not (folder / f"{name}-silent" / "answers.jsonl").exists()


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_best_checkpoint_is_kept_and_saved_and_the_run_stops_early(name, folder, plain):
    from safetensors.torch import load_file

    assert sorted(path.name for path in (folder / name).glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]
    success = json.loads((folder / name / "success.json").read_text())
    expected = sum(total for total, _ in plain.values()) / sum(count for _, count in plain.values())
    assert success["steps"] == 3 and success["saved_step"] == 1
    assert success["held_out_loss"] == pytest.approx(expected, rel=1e-6)
    saved, begun = (load_file(folder / run / "model.safetensors") for run in (name, "base"))
    assert all(torch.equal(saved[key], begun[key]) for key in begun)
    text = (folder / f"{name}.txt").read_text()
    assert "Stopping at step 3 of 6: no held-out loss below" in text and "Stopped early at step 3 of 6." in text
    assert f"at step 1: {name}/checkpoint-1" in text


@pytest.mark.parametrize("checkpoint", marks.cases(3, slow=[2]))
def test_a_resumed_run_stops_at_the_same_step(checkpoint, folder, tmp_path, monkeypatch):
    """From before it stopped, and from the checkpoint with which it stopped."""
    monkeypatch.chdir(folder)
    run = tmp_path / "run"
    flags = [*json.loads((folder / "cases.json").read_text())["ddp-silent"], "--save_total_limit", "null"]
    whole = train.main([*flags, "--output_dir", str(run)])
    (run / "success.json").unlink()
    for step in range(checkpoint + 1, 4):
        shutil.rmtree(run / f"checkpoint-{step}")
    again = train.main([*flags, "--output_dir", str(run)])
    assert train.main([*flags, "--output_dir", str(run)]) is None  # finished
    assert again.state.global_step == whole.state.global_step == 3
    assert run_files.losses(again.state.log_history) == run_files.losses(whole.state.log_history)
    assert json.loads((run / "success.json").read_text())["saved_step"] == 1


def scores(folder):
    return {entry["step"]: entry for entry in run_files.history(folder) if "eval_answer_score" in entry}


def evaluated(output, capsys, monkeypatch):
    """The score by `brigade eval` of a run's saved model."""
    monkeypatch.setattr(sample_answers, "LONGEST", LONGEST)
    file = output.parent / "own.py"
    permitted = f"own.py={hashlib.sha256(file.read_bytes()).hexdigest()}"
    capsys.readouterr()
    assert main(["eval", str(output), "--exact", "0", "--answers", "0", "--allow_code", permitted]) == 0
    return float(re.search(r"Score of 11 held-out answers \(own.py:likeness\): ([\d.]+);", capsys.readouterr().out)[1])


@pytest.mark.parametrize("scored", marks.cases("fsdp2", "zero3"))
def test_a_score_is_that_of_the_saved_model(scored, folder, capsys, monkeypatch):
    """Two ranks answer three questions at a time, and one process answers all of them together."""
    monkeypatch.chdir(folder)
    found = scores(folder / f"{scored}-scored")
    assert list(found) == [2, 4], "the untrained model answers nothing"
    assert all(entry["eval_answers"] == 11 and entry["eval_answers_runtime"] > 0 for entry in found.values())
    score = found[4]["eval_answer_score"]
    assert 0 < score < 1 and score != found[2]["eval_answer_score"]
    assert evaluated(folder / f"{scored}-scored", capsys, monkeypatch) == pytest.approx(score, abs=6e-5)
    assert len(run_files.answers(folder / f"{scored}-scored")) == 22


def test_the_best_score_is_kept_and_stops_the_run(folder, capsys, monkeypatch):
    """In one process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sample_answers, "LONGEST", LONGEST)
    flags = [*json.loads((folder / "cases.json").read_text())["ddp-silent"], "--eval_answers", "11"]
    flags += ["--answer_score", "own.py:likeness", "--metric_for_best_model", "eval_answer_score"]
    done = train.main([*flags, "--output_dir", "best"])
    found = {step: entry["eval_answer_score"] for step, entry in scores(folder / "best").items()}
    assert max(found, key=found.get) == done.state.best_global_step == 1, "the weights are still the first ones"
    assert done.state.best_metric == found[1] and done.state.global_step == 3
    assert f"no held-out score of answers above {found[1]:.4f} in 2 evaluations" in capsys.readouterr().out
    assert evaluated(folder / "best", capsys, monkeypatch) == pytest.approx(found[1], abs=6e-5)
