"""Brigade answers each question of the court like a plain loop, and the court sees faults."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from benchmarks.court import jobs, verdicts
from benchmarks.court.peers import record
from benchmarks.court.questions import read
from testing import marks
from testing.ranks import run_ranks

QUESTIONS = read()
BRIGADE = jobs.PEERS["brigade"]
QUICK = ("masks", "accumulation", "lora", "last-batch")  # those in which faults are planted below


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    """Return a function from a question's name to its job and the results of its ranks; questions of one number of ranks share
    their processes."""
    folder = tmp_path_factory.mktemp("court")
    (folder / "brigade").mkdir()
    done = {}

    def ask(name):
        if name not in done:
            question, quick = QUESTIONS[name], name in QUICK
            if question.dies_after:  # in a process of its own
                jobs.run(BRIGADE, [question], folder, sys.executable)
                job = jobs.job_of(question, BRIGADE, folder)
                return done.setdefault(name, (job, jobs.results_of(job)))
            asked = [each for each in QUESTIONS.values() if (each.name in QUICK) == quick and not each.dies_after]
            asked = [each for each in asked if each.ranks == question.ranks]
            given = {each.name: jobs.job_of(each, BRIGADE, folder) for each in asked}
            file = folder / f"jobs-{QUESTIONS[name].ranks}-{quick}.json"
            file.write_text(json.dumps(list(given.values())))
            ended = run_ranks("benchmarks.court.peers", "brigade", str(file), ranks=QUESTIONS[name].ranks, timeout=300)
            assert not ended.returncode, ended.stderr[-4000:]
            done.update({of: (job, jobs.results_of(job)) for of, job in given.items()})
        return done[name]

    return ask


@pytest.mark.parametrize("name", marks.cases(*QUICK, slow=[name for name in QUESTIONS if name not in QUICK]))
def test_brigade_answers_like_the_plain_loop(answers, name):
    verdict = verdicts.judge(QUESTIONS[name], *answers(name))
    assert verdict.kind == verdicts.EQUAL, verdict


def damaged(results, change):
    found = copy.deepcopy(results)
    change(found[0]["records"][0])
    return found


def test_the_court_sees_a_token_that_is_not_learned(answers):
    job, results = answers("masks")

    def forget(run):
        for step in run["steps"]:
            labels = step[0][0]["labels"]
            labels[max(at for at, label in enumerate(labels) if label != -100)] = -100

    verdict = verdicts.judge(QUESTIONS["masks"], job, damaged(results, forget))
    assert verdict.kind == verdicts.WRONG and "learns 1 tokens fewer ('<|im_end|>')" in verdict.said


def test_the_court_tells_a_newline_at_the_end_from_other_tokens(answers):
    job, results = answers("masks")

    def cut(run):
        for step in run["steps"]:
            for sample in step[0]:
                sample["ids"].pop()
                sample["labels"].pop()

    verdict = verdicts.judge(QUESTIONS["masks"], job, damaged(results, cut))
    assert verdict.kind == verdicts.OTHER and verdict.said == "leaves out '\\n' at the end of rows"


def test_names_of_trained_tensors_are_those_without_wrappers():
    model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"_checkpoint_wrapped_module": torch.nn.Linear(2, 2)})})
    assert list(record.whole(model)) == ["layer.weight", "layer.bias"]


def test_a_loop_that_is_continued_leaves_out_what_it_only_reads_again():
    job = {"accumulation": 2, "dies_after": 1, "died": True, "records": []}
    loader = DataLoader([5, 6, 7, 0], batch_size=1, collate_fn=lambda rows: torch.tensor([[3, 4, *rows]]))
    with record.loop(job) as loop:
        loop.watch(loader, lambda tokens: record.padded(tokens, torch.where(tokens == 0, -100, tokens), padding=0))
        assert len(list(loader)) == 4
        loop.log.append({"step": 2})
    last = [{"ids": [3, 4, 7], "labels": [-100, 4, 7]}], [{"ids": [3, 4], "labels": [-100, 4]}]
    assert job["records"] == [{"steps": [list(last)], "log": [{"step": 2}]}]


def test_the_norm_of_a_loop_is_that_of_all_gradients_before_the_step():
    weights = [torch.nn.Parameter(torch.tensor([1.0])), torch.nn.Parameter(torch.tensor([1.0]))]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    loop = record.Loop({})
    with register_optimizer_step_pre_hook(loop.measure):
        (3 * weights[0] + 4 * weights[1]).sum().backward()
        optimizer.step()
    assert loop.norm == 5.0


def test_the_court_sees_a_row_that_is_left_out_and_one_that_comes_twice(answers):
    job, results = answers("last-batch")
    question = QUESTIONS["last-batch"]
    less = verdicts.judge(question, job, damaged(results, lambda run: run["steps"][0][0].pop()))
    assert "1 of 5 rows are not trained on" in less.said
    more = verdicts.judge(question, job, damaged(results, lambda run: run["steps"][0][0].append(run["steps"][0][0][0])))
    assert "1 of 5 rows is trained on twice" in more.said


def test_the_court_tells_a_mean_of_means_from_a_mean_over_tokens(answers):
    job, results = answers("accumulation")
    steps = verdicts.steps_of(QUESTIONS["accumulation"], results)
    means = verdicts.plain.train(QUESTIONS["accumulation"], job["model_path"], steps, "micro-batches")
    tokens = verdicts.plain.train(QUESTIONS["accumulation"], job["model_path"], steps)
    assert abs(means.losses[0] - tokens.losses[0]) > 1e-3

    def log(run):
        for entry, loss, norm in zip(run["log"], means.losses, means.norms, strict=True):
            entry |= {"loss": loss, "grad_norm": norm}

    verdict = verdicts.judge(QUESTIONS["accumulation"], job, damaged(results, log))
    assert (
        verdict.kind == verdicts.WRONG and "loss" in verdict.said
    )  # the weights are still those of a mean over tokens


def test_the_court_sees_half_of_an_adapter(answers, tmp_path):
    job, results = answers("lora")
    saved = load_file(Path(results[0]["saved"]) / "adapter_model.safetensors")
    halves = {name: tensor[: len(tensor) // 2].contiguous() for name, tensor in saved.items()}
    save_file(halves, tmp_path / "adapter_model.safetensors")
    found = copy.deepcopy(results)
    found[0]["saved"] = str(tmp_path)
    verdict = verdicts.judge(QUESTIONS["lora"], job, found)
    assert verdict.kind == verdicts.WRONG
    assert "tensors are missing in what is saved, or have other shapes" in verdict.said
