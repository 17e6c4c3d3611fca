"""A run with images that died goes on bit for bit; under another strategy with the losses of the undisturbed run."""

import pytest

from testing import image_runs as images
from testing import marks, resume, resume_rows, run_files
from testing.image_runs import ADAPTERS, EVERYWHERE, PACKED, TOWER, Case

READERS = ["--dataloader_num_workers", "2"]
ALONE, READ_AHEAD = Case("qwen3_vl", variant=TOWER), "with readers"
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


@pytest.fixture(scope="module")
def exact(folder, asked_for):
    names = sorted(asked_for("name"))
    readers = {name: READERS for name in names if name.endswith(READ_AHEAD)}
    return resume_rows.exact({name: EXACT[name] for name in names}, folder, readers)


@pytest.mark.parametrize(
    "name",
    marks.cases(slow=[*map(str, (ALONE, Case("qwen3_vl", "zero3", 2, TOWER))), f"{ALONE}, {READ_AHEAD}"], matrix=EXACT),
)
def test_a_run_that_died_twice_goes_on_bit_for_bit(name, exact, folder):
    resume.assert_same(*(run_files.figures(exact[name, which]) for which in ("whole", "stopped")))
    resume_rows.assert_same_files(name, folder)


@pytest.fixture(scope="module")
def resharded(folder, asked_for):
    return resume_rows.resharded([RESHARDED[change] for change in sorted(asked_for("change"))], folder)


@pytest.mark.parametrize("change", marks.cases(slow=list(RESHARDED)[:3], matrix=RESHARDED))
def test_another_strategy_has_the_losses_of_the_undisturbed_run(change, resharded):
    before, after = RESHARDED[change]
    logs = resharded[0][before], resharded[1][before, after]
    undisturbed, further = map(run_files.losses, logs)
    assert further[resume_rows.SAVED :] == pytest.approx(undisturbed[resume_rows.SAVED :], rel=images.TOLERANCE)
    assert len(further) == images.STEPS
    assert images.held_out(logs[1]) == pytest.approx(images.held_out(logs[0]), rel=images.TOLERANCE)
    assert undisturbed[-1] != pytest.approx(undisturbed[0], rel=0.02)
