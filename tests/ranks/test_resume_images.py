"""A run with images that died goes on bit for bit; under another strategy with the losses of the undisturbed run."""

import pytest

from testing import image_runs as images
from testing import marks
from testing.image_runs import ADAPTERS, EVERYWHERE, PACKED, TOWER, Case, run_group

SAVED = 2  # an epoch has three steps
SHARED = [
    *["--optim", "adamw_torch", "--learning_rate", "3e-3", "--weight_decay", "0.1", "--max_grad_norm", "1"],
    *["--lr_scheduler_type", "cosine", "--save_steps", str(SAVED), "--save_total_limit", "9"],
]
RATE = ["--learning_rate", "1e-2", "--lora_dropout", "0.2"]  # whose random numbers belong to a rank
READERS = ["--dataloader_num_workers", "2"]
ALONE, READ_AHEAD = Case("qwen3_vl", variant=TOWER), "with readers"
# Each dies in the middle of an epoch and at the beginning of the next.
EXACT = {
    str(case): case
    for case in [
        ALONE,
        Case("gemma3", variant=TOWER),
        Case("qwen3_5", variant=TOWER),
        Case("qwen3_vl", variant=PACKED),
        *(Case("qwen3_vl", strategy, 2, TOWER) for strategy in ("ddp", "zero2", "zero3", "fsdp2")),
        *(Case("qwen3_vl", strategy, 2, EVERYWHERE) for strategy in ("ddp", "zero3", "fsdp2")),
    ]
} | {f"{ALONE}, {READ_AHEAD}": ALONE}
RESHARDED = {
    f"{before} to {after.strategy} on {after.ranks}": (before, after)
    for before, after in [
        (Case("qwen3_vl", "zero3", 2, TOWER), Case("qwen3_vl", "fsdp2", 2, TOWER)),
        (Case("qwen3_vl", "fsdp2", 2, TOWER), Case("qwen3_vl", variant=TOWER)),
        (Case("gemma3", "ddp", 2, TOWER), Case("gemma3", "zero3", 3, TOWER)),
        (Case("qwen3_vl", "zero2", 2, TOWER), Case("qwen3_vl", "zero3", 3, TOWER)),
        (Case("internvl", "fsdp2", 2, EVERYWHERE), Case("internvl", "zero3", 2, EVERYWHERE)),
        (Case("qwen3_vl", "zero3", 2, ADAPTERS), Case("qwen3_vl", "ddp", 2, ADAPTERS)),
    ]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, asked_for):
    folder = tmp_path_factory.mktemp("resumed")
    named = [EXACT[name] for name in asked_for("name")] + [RESHARDED[change][0] for change in asked_for("change")]
    images.write_inputs(folder, {case.model for case in named})
    return folder


def whole(folder, case, *further, dropout=False, **more):
    """An undisturbed run."""
    adapted = RATE if dropout else RATE[:2]
    rate = adapted if case.variant in (ADAPTERS, EVERYWHERE) else []
    return case.run(folder, *SHARED, *rate, *further, **more)


@pytest.fixture(scope="module")
def exact(folder, asked_for):
    """What undisturbed and stopped runs logged. All of one number of ranks are one group."""
    found, names = {}, sorted(asked_for("name"))
    for ranks in sorted({EXACT[name].ranks for name in names}):
        todo = {}
        for name in (name for name in names if EXACT[name].ranks == ranks):
            readers = READERS if name.endswith(READ_AHEAD) else []
            for which, more in ("whole", {}), ("stopped", {"stops": (SAVED, 3)}):
                run = whole(folder, EXACT[name], *readers, dropout=True, name=f"{name}, {which}", **more)
                todo[name, which] = run
        found |= run_group(folder, ranks, todo)
    return found


@pytest.mark.parametrize(
    "name",
    marks.cases(slow=[*map(str, (ALONE, Case("qwen3_vl", "zero3", 2, TOWER))), f"{ALONE}, {READ_AHEAD}"], matrix=EXACT),
)
def test_a_run_that_died_twice_goes_on_bit_for_bit(name, exact, folder):
    for key in ("loss", "grad_norm", "eval_loss"):
        logs = [exact[name, which] for which in ("whole", "stopped")]
        undisturbed, stopped = ([entry[key] for entry in log if key in entry] for log in logs)
        assert stopped == undisturbed and len(undisturbed) > 2, key
    outputs = [folder / "outputs" / f"{name}, {which}" for which in ("whole", "stopped")]
    files = [sorted(path.name for path in output.glob("*model*.safetensors")) for output in outputs]
    assert files[0] and files[0] == files[1]
    assert all((outputs[0] / file).read_bytes() == (outputs[1] / file).read_bytes() for file in files[0])


@pytest.fixture(scope="module")
def resharded(folder, asked_for):
    """(what undisturbed runs logged, what runs logged that went on from their checkpoints)."""
    pairs = [RESHARDED[change] for change in sorted(asked_for("change"))]
    runs = {before: whole(folder, before) for before, _ in pairs}, {}
    for before, after in pairs:
        checkpoint = folder / "outputs" / str(before) / f"checkpoint-{SAVED}"
        further = ["--resume_from_checkpoint", str(checkpoint)]
        runs[1][before, after] = whole(folder, after, *further, name=f"{before} to {after}")
    found = []
    for side, ranks_of in ((runs[0], lambda key: key.ranks), (runs[1], lambda key: key[1].ranks)):
        logs = {}
        for ranks in sorted({ranks_of(key) for key in side}):
            logs |= run_group(folder, ranks, {key: run for key, run in side.items() if ranks_of(key) == ranks})
        found.append(logs)
    return found


@pytest.mark.parametrize("change", marks.cases(slow=list(RESHARDED)[:3], matrix=RESHARDED))
def test_another_strategy_has_the_losses_of_the_undisturbed_run(change, resharded):
    before, after = RESHARDED[change]
    logs = resharded[0][before], resharded[1][before, after]
    undisturbed, further = ([entry["loss"] for entry in log if "loss" in entry] for log in logs)
    assert further[SAVED:] == pytest.approx(undisturbed[SAVED:], rel=images.TOLERANCE)
    assert len(further) == images.STEPS
    assert images.held_out(logs[1]) == pytest.approx(images.held_out(logs[0]), rel=images.TOLERANCE)
    assert undisturbed[-1] != pytest.approx(undisturbed[0], rel=0.02)
