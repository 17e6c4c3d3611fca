"""A run of preferences that died goes on bit for bit; under another strategy with the losses of the undisturbed run."""

import pytest

from testing import marks, preferences
from testing.preferences import ADAPTERS, Case

SAVED = 2  # an epoch has three steps
SHARED = [
    *["--optim", "adamw_torch", "--learning_rate", "3e-3", "--weight_decay", "0.1", "--max_grad_norm", "1"],
    *["--lr_scheduler_type", "cosine", "--save_steps", str(SAVED), "--save_total_limit", "9"],
]
RATE = ["--learning_rate", "1e-2", "--lora_dropout", "0.2"]  # whose random numbers belong to a rank
# Each dies in the middle of an epoch and at the beginning of the next.
EXACT = {
    str(case): case
    for case in [
        Case("sigmoid"),
        *(Case("sigmoid", "zero3", 2, variant) for variant in ("", ADAPTERS)),
        *(Case("kto", strategy, 2) for strategy in ("fsdp2", "zero2", "zero1_pp2")),
        *(Case("reward", strategy, 2) for strategy in ("zero2", "zero3", "fsdp2")),
        *(Case("sigmoid", strategy, 2, ADAPTERS) for strategy in ("ddp", "fsdp2")),
    ]
}
# The other side has an empty cache: it computes its reference again, from the weights at the start. A pipeline, beside which no
# second model stands, gets the first side's.
DIVIDED = ("zero1_pp2",)
RESHARDED = {
    f"{before} to {after.strategy} on {after.ranks}": (before, after)
    for before, after in [
        (Case("sigmoid", "zero3", 2), Case("sigmoid", "fsdp2", 2)),
        (Case("sigmoid", "ddp", 2), Case("sigmoid")),
        (Case("sigmoid", "ddp", 2, ADAPTERS), Case("sigmoid", "zero3", 2, ADAPTERS)),
        (Case("reward", "zero2", 2), Case("reward", "fsdp2", 2)),
        (Case("kto", "fsdp2", 2), Case("kto", "zero3", 2)),
        (Case("kto", "zero3", 2), Case("kto", "zero1_pp2", 2)),
        (Case("reward", "zero3", 2), Case("reward")),
        (Case("sigmoid", "zero1_pp2", 2), Case("sigmoid", "zero2", 3)),
        (Case("sigmoid", "fsdp2", 2, ADAPTERS), Case("sigmoid", "ddp", 3, ADAPTERS)),
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    preferences.write_inputs(folder)
    return folder


def whole(folder, case, dropout=False, **more):
    """An undisturbed run."""
    adapted = RATE if dropout else ["--learning_rate", "1e-2"]
    return case.run(folder, *SHARED, *(adapted if case.variant == ADAPTERS else []), **more)


@pytest.fixture(scope="module")
def exact(folder, asked_for):
    """What undisturbed and stopped runs logged."""
    found = {}
    cases = [EXACT[name] for name in sorted(asked_for("name"))]
    for ranks in sorted({case.ranks for case in cases}):
        todo = {}
        for case in (case for case in cases if case.ranks == ranks):
            todo[case, ""] = whole(folder, case, dropout=True, name=f"{case}, whole")
            todo[case, "stopped"] = whole(folder, case, dropout=True, name=f"{case}, stopped", stops=(SAVED, 3))
        found |= preferences.run_group(folder, ranks, todo)
    return found


@pytest.mark.parametrize(
    "name", marks.cases(slow=["sigmoid, single on 1", "sigmoid, zero3 on 2", "sigmoid, zero3 on 2, LoRA"], matrix=EXACT)
)
def test_a_run_that_died_twice_goes_on_bit_for_bit(name, exact, folder):
    logs = [exact[EXACT[name], which] for which in ("", "stopped")]
    for key in preferences.FIGURES:
        for of_log in (preferences.steps_of, lambda log: [entry for entry in log if "eval_loss" in entry]):
            undisturbed, stopped = ([entry.get(key, entry.get(f"eval_{key}")) for entry in of_log(log)] for log in logs)
            assert stopped == undisturbed and len(undisturbed) > 2, key
    outputs = [folder / "outputs" / f"{name}, {which}" for which in ("whole", "stopped")]
    files = [sorted(path.name for path in output.glob("*model*.safetensors")) for output in outputs]
    assert files[0] and files[0] == files[1]
    assert all((outputs[0] / file).read_bytes() == (outputs[1] / file).read_bytes() for file in files[0])


@pytest.fixture(scope="module")
def resharded(folder, asked_for):
    """(what undisturbed runs logged, what runs logged that went on from their checkpoints)."""
    pairs = [RESHARDED[name] for name in sorted(asked_for("change"))]
    runs = {before: whole(folder, before) for before, _ in pairs}, {}
    for before, after in pairs:
        run = whole(folder, after, name=f"{before} to {after}")
        checkpoint = folder / "outputs" / str(before) / f"checkpoint-{SAVED}"
        runs[1][before, after] = run | {"flags": [*run["flags"], "--resume_from_checkpoint", str(checkpoint)]}
        if after.strategy in DIVIDED:
            runs[1][before, after]["cache"] = str(folder / "caches" / str(before))
    found = []
    for side, ranks_of in ((runs[0], lambda key: key.ranks), (runs[1], lambda key: key[1].ranks)):
        logs = {}
        for ranks in sorted({ranks_of(key) for key in side}):
            logs |= preferences.run_group(
                folder, ranks, {key: run for key, run in side.items() if ranks_of(key) == ranks}
            )
        found.append(logs)
    return found


@pytest.mark.parametrize("change", marks.cases(slow=list(RESHARDED)[:4], matrix=RESHARDED))
def test_another_strategy_has_the_losses_of_the_undisturbed_run(change, resharded):
    before, after = RESHARDED[change]
    undisturbed, further = (preferences.steps_of(log) for log in (resharded[0][before], resharded[1][before, after]))
    differences = preferences.worst(further[SAVED:], undisturbed[SAVED:])
    assert preferences.is_equal(differences), differences
    held_out = [preferences.held_out_of(log) for log in (resharded[1][before, after], resharded[0][before])]
    differences = preferences.worst([held_out[0]], [held_out[1]])
    assert preferences.is_equal(differences), differences
    assert undisturbed[-1]["loss"] != pytest.approx(undisturbed[0]["loss"], rel=0.02)
