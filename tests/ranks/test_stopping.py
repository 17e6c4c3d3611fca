"""A run that is asked to stop on one rank: all ranks finish that step, and the next start continues as if nothing had been."""

import json

import pytest

from brigade.train.run import events
from testing import marks
from testing.command_line import as_flags
from testing.parity import STRATEGIES
from testing.runs import STEPS, run_cases

KINDS = marks.cases("ddp", slow=["zero1", "zero3", "fsdp2"])
AT = 5  # the step in which rank 1 is asked


@pytest.fixture(scope="module")
def ran(asked_for, tmp_path_factory):
    """name -> what each run logged, and the folder: of each strategy one run from its beginning to its end, one that is stopped,
    and that one again. Only the last checkpoint and the best are kept, and the best is what is loaded at the end."""
    folder = tmp_path_factory.mktemp("stopping")
    cases = []
    for kind in asked_for("kind"):
        flags = [*STRATEGIES[kind], *as_flags(eval_steps=2, eval_answers=0, save_steps=2, save_total_limit=1)]
        flags += as_flags(optim="adamw_torch", learning_rate=3e-3, load_best_model_at_end=True)
        cases += [{"name": f"{kind}-whole", "flags": flags}]
        cases += [{"name": f"{kind}-stopped", "flags": flags, "stop": (1, AT)}]
    found = run_cases(2, cases, folder)
    markers = {
        kind: json.loads((folder / f"outputs/{kind}-stopped/stopped.json").read_text()) for kind in asked_for("kind")
    }
    ends = {kind: (folder / f"outputs/{kind}-stopped/success.json").exists() for kind in asked_for("kind")}
    again = [{"name": case["name"], "flags": case["flags"]} for case in cases if "stop" in case]
    return found, run_cases(2, again, folder), markers, ends, folder


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_stop_after_one_step_and_go_on_exactly(ran, kind):
    stopped, continued, markers, ended_well, folder = ran
    output, whole = folder / f"outputs/{kind}-stopped", stopped[f"{kind}-whole"]
    marker = markers[kind]
    assert (marker["step"], marker["checkpoint"], marker["by"]) == (AT, f"checkpoint-{AT}", "SIGTERM to rank 1")
    assert not ended_well[kind], "a run that was stopped has not succeeded"
    assert stopped[f"{kind}-stopped"]["loss"] == whole["loss"][:AT]
    assert continued[f"{kind}-stopped"]["loss"] == whole["loss"] and len(whole["loss"]) == STEPS
    assert continued[f"{kind}-stopped"]["eval_loss"] == whole["eval_loss"]
    assert (output / "success.json").exists() and not (output / "stopped.json").exists()
    told = [(event["event"], event.get("step")) for event in events.read(output)]
    kept = [name for name, _ in told if name in ("started", "stopped", "end")]
    assert kept == ["started", "stopped", "started", "end"]
    assert [step for name, step in told if name == "step"] == list(range(1, STEPS + 1))
    assert ("evaluation", 2) in told and events.read(output)[-1]["held_out_loss"] > 0
