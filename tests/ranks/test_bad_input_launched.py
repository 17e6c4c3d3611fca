"""Whatever is wrong ends with exit code 2 and one short message by one rank, before the model is built, and leaves
no process behind; a fault in training ends all ranks with one traceback."""

import pytest

from testing import marks
from testing.command_line import as_flags
from testing.train_command import GOOD, HOST, assert_one_message, train

TRACEBACK_LINES = 45

TYPO = (["--lerning_rate", "3"], ["--lerning_rate", "did you mean 'learning_rate'?"])
CONTRADICTION = (
    ["--ds_config", "clip.json"], ["clip.json: gradient_clipping", "0.5", "max_grad_norm is ", '"auto"'],
)  # fmt: skip
BROKEN_LINE = (["--dataset_name=", "--train_file", "broken.jsonl"], ["broken.jsonl, line 3", "not JSON", "fix"])

NO_GPU = (["--attn_implementation", "flash_attention_2"], ["flag --attn_implementation", "needs a GPU", "sdpa"])
CASES = {  # one mistake of each stage under each launcher; "late": rank 0, which tells it, comes four seconds late
    "flag": (TYPO, ["python", "torchrun", "deepspeed", "accelerate"], ""),
    "ds_config": (CONTRADICTION, ["python"], ""),
    "ds_config, late": (CONTRADICTION, ["torchrun", "deepspeed", "accelerate"], "slow"),
    "device": (NO_GPU, ["python", "torchrun", "deepspeed", "accelerate"], ""),
    "data": (BROKEN_LINE, ["python", "torchrun", "deepspeed", "accelerate"], ""),
}


@pytest.mark.parametrize("case, launcher", marks.cases(
    ("ds_config", "python"),
    slow=[("device", "python"), ("flag", "accelerate"), ("ds_config, late", "torchrun"), ("data", "deepspeed")],
    matrix=[(case, launcher) for case in CASES for launcher in CASES[case][1]],
))  # fmt: skip
def test_one_rank_tells_a_mistake_that_all_make(case, launcher, place):
    (flags, words), _, fault = CASES[case]
    ended = train(launcher, place, *flags, fault=fault)
    assert_one_message(ended, launcher, 0, *words)
    assert not (place / "run").exists()
    assert not fault or ended.seconds > 4


@pytest.mark.parametrize("launcher", marks.cases(slow=["torchrun"], matrix=["deepspeed", "accelerate"]))
def test_the_only_rank_that_sees_a_mistake_tells_it(launcher, place):
    ended = train(launcher, place, "--dataset_name=", "--train_file", "good.jsonl", fault="elsewhere")
    assert_one_message(ended, launcher, 1, "--train_file", "no data file 'good.jsonl'", "spelling")
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    "launcher, strategy", marks.cases(("torchrun", "none"), slow=[("deepspeed", "ds_configs/zero2.json")])
)
def test_a_fault_in_training_ends_all_ranks_with_one_traceback(launcher, strategy, place):
    flags = [*GOOD, *as_flags(max_steps=30, global_batch_size=4, save_steps=None, eval_steps=None)]
    ended = train(launcher, place, *flags, "--ds_config", strategy, fault="step")
    told = "\n".join(ended.told)
    assert ended.code == 1, ended.stderr
    starts = [n for n, line in enumerate(ended.told) if line.startswith("error on ")]
    assert len(starts) == 1 and told.count("Traceback (most recent call last)") == 1, told
    assert ended.told[starts[0]].startswith(f"error on {HOST}, rank 1 of 2: ValueError"), told
    assert "ValueError: the third step fails on this rank" in told
    others = [line for line in ended.told if line.startswith("rank 0 ")]
    assert len(others) <= 1 and all("another rank failed first" in line for line in others), told
    assert len(ended.told) - len(others) <= TRACEBACK_LINES, told
    assert not (place / "run" / "success.json").exists()
    assert ended.at - float((place / "failed_at").read_text()) < 30


@pytest.mark.parametrize(
    "launcher, strategy", marks.cases(slow=[("deepspeed", "ds_configs/zero2.json")], matrix=[("accelerate", "none")])
)
def test_a_rank_that_hangs_is_named_under_launchers_that_know_nothing_of_it(launcher, strategy, place):
    flags = [*GOOD, *as_flags(max_steps=30, global_batch_size=4, save_steps=None, eval_steps=None, hang_timeout=10)]
    ended = train(launcher, place, *flags, "--ds_config", strategy, fault="sleeping-data")
    assert ended.code == 1, ended.stderr
    assert f"error: rank 1 on {HOST} has waited in data loading since step 3; rank 0 waits for it in " in ended.stderr
