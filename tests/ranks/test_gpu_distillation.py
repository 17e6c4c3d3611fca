"""On fake GPUs (testing/fake_gpu/) a teacher teaches what it does in a plain loop on the CPU, and answers are scored alike."""

import pytest

from testing import axes, distilling, marks, parity, preferences, run_files, runs, waits
from testing.command_line import as_flags
from testing.distilling import Case

# Of losses and divergences, of gradient norms, whose sums another kernel rounds otherwise, and of all of them in bf16.
TOLERANCE, OF_NORMS, IN_HALF = 1e-5, 1e-4, 5e-3
QUICK = [Case("few", "fsdp2", 2)]
SLOW = [*(Case(form, "zero3", 2) for form in ("forward", "few", "half")), Case("forward", "fsdp2", 2)]
MATRIX = [Case("forward", "ddp", 2), Case("forward", "ddp_pp2", 2), Case("few", "ddp_tp2", 2)]
BY_NAME = {str(case): case for case in [*QUICK, *SLOW, *MATRIX]}
ONE = "one process"
SCORED = ("zero3", "fsdp2", "ddp_tp2")
OWN = """
import difflib

def likeness(answer, reference):
    return difflib.SequenceMatcher(None, answer, reference, autojunk=False).ratio()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return distilling.write_inputs(tmp_path_factory.mktemp("distilling"))


@pytest.fixture(scope="module")
def found(folder, asked_for):
    cases = [BY_NAME[name] for name in sorted(asked_for("name"))]
    todo = [case.run(folder) | {"waits": distilling.STEPS} for case in cases]
    for case in todo:
        case["flags"] += ["--attn_implementation", "varlen", "--dataloader_num_workers", "0"]
    return runs.run_well(2, todo, folder, 450, gpus=True)


@pytest.mark.parametrize("name", marks.named(QUICK, SLOW, MATRIX))
def test_a_teacher_on_gpus_teaches_what_a_plain_loop_does_and_waits_for_nothing_in_each_micro_step(name, found, folder):
    steps, held_out = distilling.plain(folder, BY_NAME[name].form)
    log = found[name]["log"]
    apart = distilling.worst(preferences.steps_of(log), steps)
    own = preferences.held_out_of(log)
    apart |= {f"eval_{key}": abs(own[key] - value) / value for key, value in held_out.items()}
    exact = IN_HALF if BY_NAME[name].form == "half" else TOLERANCE
    assert all(apart[key] <= (max(exact, OF_NORMS) if key == "grad_norm" else exact) for key in apart), apart
    waited = waits.read(folder / runs.waits_of(name), 2)
    assert waited["micro_steps"] > 1 and not waits.in_each_micro_step(waited), waited


def score_of(run):
    (entry,) = [entry for entry in run_files.history(run) if "eval_answer_score" in entry]
    return entry["eval_answer_score"]


@pytest.mark.slow
def test_answers_on_gpus_have_the_scores_of_one_process(tmp_path_factory):
    """The model has learned a little before, so that its answers are texts."""
    alone, on_gpus = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("gpus")
    for folder in (alone, on_gpus):
        runs.write_inputs(folder)
        (folder / "own.py").write_text(OWN)
    shared = ["--recipe", str(alone / "full.yaml"), "--attn_implementation", "varlen", "--max_grad_norm", "0"]
    learned = ["--optim", "adamw_torch", "--learning_rate", "0.01", "--max_steps", "30", "--eval_steps", "30"]
    base = str(alone / "base")
    scored = as_flags(model_name_or_path=base, from_scratch=False, optim="sgd", eval_answers=5)
    scored += ["--learning_rate", "1e-3", "--max_steps", "2", "--eval_steps", "2", "--answer_score", "own.py:likeness"]
    strategies = parity.STRATEGIES | axes.STRATEGIES | {ONE: []}

    def case(name, *flags):
        return {"name": name, "flags": [*shared, *flags, "--output_dir", name]}

    def asking(name):
        return case(name, *scored, *strategies[name], "--per_device_eval_batch_size", "2")

    runs.run_well(1, [case("base", *learned), asking(ONE)], alone, longest_answer=8)
    runs.run_well(2, [asking(name) for name in SCORED], on_gpus, longest_answer=8, gpus=True)
    wanted = score_of(alone / ONE)
    answers = [entry["answer"] for entry in run_files.answers(alone / ONE)]
    assert 0 < wanted < 1 and len(answers) == 5
    for name in SCORED:
        assert [entry["answer"] for entry in run_files.answers(on_gpus / name)] == answers, name
        assert score_of(on_gpus / name) == wanted, name
