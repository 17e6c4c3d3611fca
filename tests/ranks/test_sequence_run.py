"""A run with rows in parts is a run like others: it dies and goes on, also on other ranks or undivided, answers questions, is
exported and rehearsed."""

import pytest
from safetensors.torch import load_file

from brigade.__main__ import main
from testing import axes_sequence as cases
from testing import marks, parity, resume, run_files, runs

KINDS = ("zero3", "fsdp2", "ddp")
_LORA = ["--use_peft", "--learning_rate", "3e-2", "--lora_dropout", "0.2"]
MICRO = ["--per_device_train_batch_size", "4"]
EXACT = {
    **{f"{kind}-sp2": [*cases.strategy(kind, 2, 2)] for kind in KINDS},
    "zero3-sp2+lora": [*cases.strategy("zero3", 2, 2), *_LORA],
    "fsdp2-sp2+packing": [*cases.strategy("fsdp2", 2, 2), "--packing", "true"],
}
ASKED = ["--eval_answers", "3"]
# From what a run of two ranks has saved, under this name: (ranks, strategy) that go on.
OTHERS = {
    "zero3-sp2 to zero3 on 2": (2, parity.STRATEGIES["zero3"]),
    "zero3-sp2 to ddp on 1": (1, parity.DDP),
    "fsdp2-sp2 to fsdp2-sp4 on 4": (4, cases.strategy("fsdp2", 4, 4)),
    "zero3-sp2 to zero3-sp2 on 4": (4, cases.strategy("zero3", 2, 4)),
    "ddp-sp2 to zero3-sp2 on 2": (2, cases.strategy("zero3", 2, 2)),
    "ddp to fsdp2-sp2 on 2": (2, cases.strategy("fsdp2", 2, 2)),
}


def run(name, *flags, ranks=2, **more):
    return {"name": name, "ranks": ranks, "flags": [*resume.SHARED, *flags, *MICRO], **more}


@pytest.fixture(scope="module")
def done(tmp_path_factory, asked_for):
    """name -> what it logged; and the folder."""
    folder = tmp_path_factory.mktemp("runs")
    names, others, asking = (asked_for(argument) for argument in ("name", "other", "asking"))
    first = {other: other.split(" to ")[0] for other in sorted(others)}
    cases = [run(name, *EXACT.get(name, parity.DDP)) for name in sorted({*names, *first.values()})]
    cases += [run(f"{name}, stopped", *EXACT[name], stops=resume.STOPS) for name in sorted(names)]
    cases += [
        run(f"{name}, asked", *EXACT.get(name, parity.DDP), *ASKED)
        for name in sorted({*asking, "ddp"} if asking else ())
    ]
    found = runs.run_each(cases, folder)
    further = []
    for other, name in first.items():
        ranks, strategy = OTHERS[other]
        checkpoint = folder / "outputs" / name / f"checkpoint-{resume.SAVED}"
        further.append(run(other, *strategy, "--resume_from_checkpoint", str(checkpoint), ranks=ranks))
    return found | runs.run_each(further, folder), folder


@pytest.mark.parametrize("name", marks.cases(slow=["zero3-sp2"], matrix=EXACT))
def test_a_run_that_died_twice_goes_on_bit_for_bit(name, done):
    found, folder = done
    resume.assert_same(found[name], found[f"{name}, stopped"])
    run_files.assert_same_models(folder, name, f"{name}, stopped")


@pytest.mark.parametrize("other", marks.cases(slow=["zero3-sp2 to ddp on 1", "ddp to fsdp2-sp2 on 2"], matrix=OTHERS))
def test_it_goes_on_with_other_parts_or_none(other, done):
    found, _ = done
    assert resume.worst(found[other], found[other.split(" to ")[0]]) <= resume.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("asking", ["zero3-sp2", "fsdp2-sp2"])
def test_answers_are_those_of_undivided_rows(asking, done):
    found, folder = done
    ours, theirs = (run_files.answers(folder / "outputs" / f"{name}, asked") for name in (asking, "ddp"))
    assert ours == theirs and len(ours) == 6
    assert resume.worst(found[f"{asking}, asked"], found["ddp, asked"]) <= resume.TOLERANCE


@pytest.mark.slow
@pytest.mark.cases(name="zero3-sp2")
def test_the_export_of_a_checkpoint_is_a_whole_model(done, tmp_path):
    _, folder = done
    output = folder / "outputs" / "zero3-sp2"
    assert main(["export", str(output), str(tmp_path / "out"), "--step", str(resume.SAVED)]) == 0
    exported, saved = load_file(tmp_path / "out" / "model.safetensors"), load_file(output / "model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {name: t.shape for name, t in saved.items()}


@pytest.mark.parametrize("kind", marks.cases(slow=["zero3"], matrix=["fsdp2"]))
def test_a_rehearsal_takes_two_ranks_for_eight(kind, tmp_path):
    flags = [*cases.strategy(kind, 8, 8), "--rehearse", "--activation_checkpointing", "--bf16"]
    found, ended = runs.run_all(2, [{"name": kind, "flags": flags}], tmp_path, timeout=300)
    assert kind in found, ended.stderr[-3000:]
    assert "The rehearsal went well" in found[kind]["said"] and "sequence 2" in found[kind]["said"]
