"""A model that learns from a teacher has under every strategy the losses of a plain loop over two models."""

import functools

import numpy as np
import pytest

from brigade.train.run.success import SUCCESS
from testing import distilling, marks, preferences
from testing.distilling import BATCH, Case, worst
from testing.preferences import TRAINED
from testing.ranks import run_ranks

EXACT = (*distilling.FIGURES, "eval_loss", "eval_divergence")
TOLERANCE = 1e-5  # relative
QUICK = [Case("forward", "fsdp2", 2), Case("reverse", "zero3", 2), Case("few", "fsdp2", 2)]
SLOW = [
    *(Case(form) for form in ("jsd", "warm")),
    Case("weighed", "fsdp2", 2),
    *(Case("forward", variant=variant) for variant in ("packed", "padded", "tiles", "recomputed")),
    *(Case("forward", strategy, 2) for strategy in ("ddp", "zero2", "ddp_pp2", "zero3_sp2", "fsdp2_ep2")),
    *(Case("forward", strategy, 4) for strategy in ("hsdp", "fsdp2_tp2")),
    *(Case(form) for form in ("few reverse", "few jsd")),
    *(Case("few", variant=variant) for variant in ("packed", "padded")),
    *(Case("few", strategy, 2) for strategy in ("zero3_sp2", "ddp_pp2", "fsdp2_ep2")),
]
MATRIX = [
    *(Case("forward", strategy, 2) for strategy in ("zero1", "zero1_pp2", "ddp_sp2", "fsdp2_sp2", "ddp_tp2")),
    *(Case("few", strategy, 2) for strategy in ("ddp", "zero2", "zero3", "fsdp2_sp2", "ddp_tp2")),
    *(Case("few", strategy, 4) for strategy in ("hsdp", "fsdp2_tp2")),
    *(Case(form, strategy, 3) for form in ("forward", "reverse", "jsd", "warm")
      for strategy in ("ddp", "zero2", "zero3", "fsdp2")),
    *(Case("forward", strategy, 2, variant) for strategy in ("zero3", "fsdp2") for variant in ("packed", "padded", "recomputed")),
]  # fmt: skip
# What a plain loop does not compute is that of one process.
ADAPTED = [Case("forward", strategy, 2, "LoRA") for strategy in ("ddp", "zero3", "fsdp2")]
QUANTISED = Case("forward", "fsdp2", 2, "4 bits")
LIVE = [Case("forward", "single", 1, "singly"), Case("warm", "ddp", 2, "singly")]
KEPT = {str(case): case._replace(variant="all kept") for case in LIVE}
BY_NAME = {str(case): case for case in [*QUICK, *SLOW, *MATRIX, *ADAPTED, QUANTISED, *LIVE]}


@pytest.fixture(scope="module")
def logs(folder, asked_for):
    asked = [BY_NAME[name] for name in sorted(asked_for("name") | asked_for("alone") | asked_for("live"))]
    kept = [KEPT[name] for name in sorted(asked_for("live"))]
    alone = {Case("forward", variant=BY_NAME[name].variant) for name in asked_for("alone")}
    return distilling.run_cases(folder, [*asked, *sorted(alone), *kept])


@pytest.fixture(scope="module")
def plain(folder):
    return functools.cache(functools.partial(distilling.plain, folder))


def differences(case, logs, plain):
    steps, held_out = plain(case.form, case.model, TRAINED if case.variant == "packed" else BATCH)
    own = preferences.held_out_of(logs[case])
    apart = {f"eval_{key}": abs(own[key] - value) / value for key, value in held_out.items()}
    return worst(preferences.steps_of(logs[case]), steps) | apart


@pytest.mark.parametrize("name", marks.named(QUICK, SLOW, MATRIX))
def test_losses_and_gradients_are_those_of_a_plain_loop_over_two_models(name, logs, plain):
    found = differences(BY_NAME[name], logs, plain)
    assert all(difference <= TOLERANCE for difference in found.values()), found


@pytest.mark.parametrize("alone", marks.named([], ADAPTED[1:], [ADAPTED[0], QUANTISED]))
def test_adapters_and_a_teacher_in_4_bits_learn_what_one_process_does(alone, logs):
    case = BY_NAME[alone]
    of_one = logs[Case("forward", variant=case.variant)]
    found = worst(preferences.steps_of(logs[case]), preferences.steps_of(of_one))
    assert all(difference <= TOLERANCE for difference in found.values()), found


@pytest.mark.parametrize("live", marks.named(LIVE[:1], LIVE[1:], []))
def test_all_words_kept_before_training_teach_what_the_teacher_itself_does_bit_for_bit(live, logs):
    """Where both read the same micro-batches: of one sequence."""
    own, other = (
        [{key: entry.get(key) for key in EXACT} for entry in logs[case]] for case in (BY_NAME[live], KEPT[live])
    )
    assert own == other and any(entry["eval_divergence"] for entry in own)


@pytest.mark.slow
def test_ranks_share_what_the_teacher_reads_and_go_on_with_what_is_missing(tmp_path, monkeypatch):
    distilling.write_inputs(tmp_path)
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))

    def asked(strategy, *more):
        flags = [*Case("few", strategy, 2).run(tmp_path)["flags"], *more]
        done = run_ranks("testing.asking", str(tmp_path), *flags, ranks=2, timeout=200)
        assert done.returncode == 0, done.stderr
        return [int((tmp_path / f"asked-{rank}").read_text()) for rank in range(2)]

    first = asked("ddp", "--prepare")
    (output,) = (tmp_path / "outputs").iterdir()
    assert not (output / SUCCESS).exists() and not list(output.glob("*.safetensors"))
    assert sum(asked("ddp")) == 0 and (output / SUCCESS).exists()  # the same command goes on from there
    (file,) = (tmp_path / "cache").rglob("*-teacher-*.npy")
    whole = np.load(file)
    assert sum(first) == len(whole) and min(first) > 0.3 * len(whole)
    known = whole.copy()
    known[: len(whole) // 2] = np.zeros((), known.dtype)  # as a run leaves it that ends before
    np.save(file, known)
    rest = asked("zero1_pp2")  # whose ranks read the same samples in training
    assert len(whole) // 2 <= sum(rest) < 0.6 * len(whole) and min(rest) > 0.3 * sum(rest)
    assert np.load(file)["values"] == pytest.approx(whole["values"], abs=1e-5)


@pytest.mark.cases(name=str(QUICK[0]))
def test_a_teacher_that_reads_another_sample_is_caught(logs, plain, folder, monkeypatch):
    """The comparison sees a teacher whose tokens are shifted by one."""
    sound = distilling.Categorical

    def shifted(**given):
        return sound(**{key: value if value.requires_grad else value.roll(1, 0) for key, value in given.items()})

    monkeypatch.setattr(distilling, "Categorical", shifted)
    steps, _ = distilling.plain(folder, QUICK[0].form)
    assert worst(preferences.steps_of(logs[QUICK[0]]), steps)["divergence"] > 100 * TOLERANCE
