"""A mixture of experts answers alike wherever its experts lie: who has no token left has experts that others' tokens visit."""

import pytest

from testing import axes_experts, run_files, runs
from testing.command_line import as_flags

LONGEST = 8  # tokens of an answer
STRATEGIES = {
    "hsdp": (axes_experts.OVER_2, "hsdp"),
    "ddp": (axes_experts.OVER_4, "ddp"),
    "tensor": (axes_experts.TENSOR, "fsdp2"),
    "stages": (axes_experts.STAGES, "zero1"),
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answers on four ranks from equal weights, of each strategy and of plain DDP: name -> lines of answers.jsonl."""
    folder = tmp_path_factory.mktemp("answers")
    shared = [*runs.write_inputs(folder), "--model_name_or_path", str(runs.write_model(folder / "moe", "qwen3_moe"))]
    still = ["--from_scratch", "false", "--learning_rate", "1e-12", "--per_device_train_batch_size", "4"]
    still += as_flags(max_steps=1, eval_steps=1, eval_answers=5)
    todo = {name: axes_experts.flags_of(strategy, 4) for name, strategy in ({"none": "ddp"} | STRATEGIES).items()}
    cases = [{"name": name, "flags": [*shared, *still, *flags, "--output_dir", name]} for name, flags in todo.items()]
    runs.run_well(4, cases, folder, longest_answer=LONGEST)
    return {name: run_files.answers(folder / name) for name in todo}


@pytest.mark.parametrize("name", STRATEGIES)
def test_answers_are_those_without_expert_parallelism(name, answers):
    assert len(answers[name]) == 5 and all(answer["answer"] for answer in answers[name])
    assert answers[name] == answers["none"]
