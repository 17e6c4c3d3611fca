"""A mixture of experts answers alike wherever its experts lie: who has no token left has experts that others' tokens visit."""

import json

import pytest

from testing import axes_experts, runs
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
    still = as_flags(
        from_scratch=False,
        learning_rate=1e-12,
        max_steps=1,
        eval_steps=1,
        eval_answers=5,
        per_device_train_batch_size=4,
    )
    todo = {name: axes_experts.flags_of(strategy, 4) for name, strategy in ({"none": "ddp"} | STRATEGIES).items()}
    cases = [{"name": name, "flags": [*shared, *still, *flags, "--output_dir", name]} for name, flags in todo.items()]
    _, done = runs.run_all(4, cases, folder, timeout=300, longest_answer=LONGEST)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: (folder / name / "answers.jsonl").read_text().splitlines() for name in todo}


@pytest.mark.parametrize("name", STRATEGIES)
def test_answers_are_those_without_expert_parallelism(name, answers):
    assert len(answers[name]) == 5 and all(json.loads(line)["answer"] for line in answers[name])
    assert answers[name] == answers["none"]
