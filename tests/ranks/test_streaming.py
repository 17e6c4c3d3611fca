"""Streamed runs: on two ranks the losses of one process, and after an interruption those of the run that had none.

67 chats of two sources: every window ends with a pass over one of them, and steps reach over windows' borders.
"""

import json

import pytest

import train
from testing import parity, run_files, runs
from testing.command_line import as_flags

STEPS, SAVED = 8, 5  # the first window is over by then
SHARED = as_flags(max_steps=STEPS, save_steps=SAVED, eval_steps=4, optim="sgd", learning_rate=0.4)
ALONE = [*SHARED, "--per_device_train_batch_size", "4"]
PACKED = [*SHARED, "--per_device_train_batch_size", "8", "--packing", "true"]
WORKERS = [*SHARED, "--per_device_train_batch_size", "2", "--dataloader_num_workers", "2"]
RUNS = {
    "alone": [*ALONE, *parity.STRATEGIES["ddp"]],
    "workers": [*WORKERS, *parity.STRATEGIES["ddp"]],
    "packed": [*PACKED, *parity.STRATEGIES["zero3"]],
}
CONTINUED = ("alone", "packed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recipe that streams two sources in shares of 3 to 1."""
    folder = tmp_path_factory.mktemp("streams")
    runs.write_inputs(folder)
    recipe = json.loads((folder / "full.yaml").read_text())
    del recipe["data"]["train_file"]
    held = recipe["data"].pop("validation_file")
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    sources = []
    for name, part, weight in (("much", lines[:50], 0.75), ("little", lines[50:], 0.25)):
        (folder / f"{name}.jsonl").write_text("".join(part))
        sources.append(
            {"train_file": str(folder / f"{name}.jsonl"), "validation_file": held, "weight": weight, "name": name}
        )
    recipe["data"] |= {"datasets": sources, "streaming": True}
    (folder / "streamed.yaml").write_text(json.dumps(recipe))
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder):
    """Each run, and some once more from the checkpoint in their middle."""
    shared = ["--recipe", str(folder / "streamed.yaml")]
    cases = [{"name": name, "flags": [*shared, *flags]} for name, flags in RUNS.items()]
    for name in CONTINUED:
        resumed = ["--resume_from_checkpoint", str(folder / "outputs" / name / f"checkpoint-{SAVED}")]
        cases.append({"name": f"{name}, continued", "flags": [*shared, *RUNS[name], *resumed]})
    return runs.run_cases(2, cases, folder, timeout=240)


@pytest.fixture(scope="module")
def one_process(folder, tmp_path_factory):
    """one_process(flags): what a run of one process logs."""

    def call(flags):
        output = tmp_path_factory.mktemp("runs") / "run"
        trainer = train.main(["--recipe", str(folder / "streamed.yaml"), *flags, "--output_dir", str(output)])
        history = trainer.state.log_history
        assert not trainer.train_dataset.folder.exists(), "its windows are deleted when it is done"
        runs.forget(trainer)
        return run_files.figures(history)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("name, flags", [("alone", ALONE), ("packed", PACKED)])
def test_two_ranks_have_the_losses_of_one_process(name, flags, two_ranks, one_process, capsys):
    reference = one_process(flags)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first window of the stream: ")]
    assert len(said) == 1 and "% supervised" in said[0] and ("packed into" in said[0]) == (name == "packed")
    assert len(reference["loss"]) == STEPS and min(reference["loss"]) < 0.95 * reference["loss"][0]
    parity.assert_equal(two_ranks[name], reference)


@pytest.mark.slow
def test_processes_that_load_change_nothing(two_ranks):
    parity.assert_equal(two_ranks["workers"], two_ranks["alone"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUED)
def test_a_continued_run_has_the_losses_of_the_uninterrupted_one(name, two_ranks, folder):
    checkpoint = folder / "outputs" / name / f"checkpoint-{SAVED}"
    window = json.loads((checkpoint / "stream.json").read_text())
    assert window["number"] > 0, "it begins behind what was read before"
    assert two_ranks[f"{name}, continued"] == two_ranks[name]


@pytest.mark.slow
def test_steps_differ(two_ranks):
    """Equal losses prove equal samples only where each step's are its own."""
    for name in RUNS:
        assert len(set(two_ranks[name]["loss"])) == len(set(two_ranks[name]["grad_norm"])) == STEPS
