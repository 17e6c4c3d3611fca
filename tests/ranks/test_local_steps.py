"""Replicas that synchronise every H steps: with H = 1 they are DDP; a run that died goes on bit for bit; they learn."""

import json

import pytest

from testing import local_steps, marks, parity, resume, run_files, runs

TWO = ["ddp", "zero2", "fsdp2"]


@pytest.fixture(scope="module")
def each_step(tmp_path_factory, asked_for):
    chosen = (REPLICAS[replica] for replica in sorted(asked_for("replica")))
    cases = [case for size, name in chosen for case in local_steps.every_step(size, name, 2)]
    return runs.run_each(cases, tmp_path_factory.mktemp("replicas"))


REPLICAS = {f"{name} on {size}": (size, name) for size, names in ((2, TWO), (4, local_steps.INSIDE)) for name in names}


@pytest.mark.parametrize(
    "replica", marks.cases("ddp on 2", slow=["zero2 on 2", "zero3 on 4", "fsdp2 on 4"], matrix=REPLICAS)
)
def test_averaging_after_every_step_is_ddp(replica, each_step):
    """On unevenly masked answers, with accumulation, at the end of an epoch in the middle of a batch."""
    size, name = REPLICAS[replica]
    ours, ddp = (each_step[f"{name}-w{size}-k2, {which}"] for which in ("replicas", "reference"))
    norms = {"grad_norm": [1.0]}  # a replica's is of its own gradient
    differences = parity.worst(ours | norms, ddp | norms)
    assert ddp["loss"][-1] < 0.9 * ddp["loss"][0]
    assert all(difference <= parity.TOLERANCE for difference in differences.values()), differences


CASES = {
    "DiLoCo": (2, "ddp", local_steps.DILOCO),
    "streaming": (2, "ddp", local_steps.STREAM),
    "int8": (2, "ddp", [*local_steps.DILOCO, "--sync_precision", "int8"]),
    **{f"{name} inside": (4, name, local_steps.DILOCO) for name in ("ddp", "zero2", "zero3", "fsdp2", "hsdp")},
    **{f"{name} inside, streaming": (4, name, local_steps.STREAM) for name in ("ddp", "zero2", "fsdp2")},
}


@pytest.mark.parametrize("name", marks.cases(slow=["DiLoCo", "int8", "fsdp2 inside, streaming"], matrix=CASES))
def test_a_run_that_died_twice_goes_on_bit_for_bit(name, tmp_path):
    size, strategy, how = CASES[name]
    cases = local_steps.exact(size, strategy, how)
    whole, stopped = runs.run_cases(size, cases, tmp_path).values()
    assert whole["loss"][-1] < 0.95 * whole["loss"][0]
    resume.assert_same(whole, stopped)
    run_files.assert_same_models(tmp_path, *(case["name"] for case in cases))


def said(folder, name):
    return json.loads((folder / f"{name}.result.json").read_text())["said"]


@pytest.mark.slow
def test_more_replicas_go_on_from_what_fewer_left(tmp_path):
    """Weights and outer states are whole; who has no optimizer states takes the first replica's, and a line says it."""
    flags = local_steps.exact(2, "ddp", local_steps.DILOCO)[0]["flags"]
    case = {"name": "grows", "flags": flags, "stops": (8,), "dies": True}
    runs.run_cases(2, [case], tmp_path)
    grown = runs.run_cases(4, [{"name": "grows", "flags": flags}], tmp_path)["grows"]
    assert len(grown["loss"]) == local_steps.STEPS and grown["loss"][-1] < 0.95 * grown["loss"][0]
    line = "replica 2 takes the optimizer states of replica 0, replica 3 takes the optimizer states of replica 0"
    assert line in said(tmp_path, "grows")


def test_a_stop_of_one_replica_waits_for_the_next_synchronisation(tmp_path):
    flags = local_steps.exact(2, "ddp", local_steps.DILOCO)[0]["flags"]
    stopped = runs.run_cases(2, [{"name": "stops", "flags": flags, "stop": (1, 5)}], tmp_path)["stops"]
    output = tmp_path / "outputs" / "stops"
    assert len(stopped["loss"]) == 8
    assert json.loads((output / "stopped.json").read_text())["checkpoint"] == "checkpoint-8"
    assert (output / "replica-1" / "checkpoint-8" / "brigade.json").is_file()
    runs.run_cases(2, [{"name": "stops", "flags": flags}], tmp_path)
    assert (output / "success.json").is_file()


@pytest.mark.slow
def test_a_run_that_stops_early_saves_the_model_that_it_evaluated(tmp_path):
    """Streaming: the replicas are in the middle of a round then. At so high a rate the held-out loss rises."""
    more = ["--learning_rate", "1", "--eval_steps", "4", "--early_stopping_patience", "1"]
    flags = [*local_steps.exact(2, "ddp", local_steps.STREAM)[0]["flags"], *more]
    runs.run_cases(2, [{"name": "early", "flags": flags}], tmp_path)
    output = tmp_path / "outputs" / "early"
    step = json.loads((output / "trainer_state.json").read_text())["global_step"]
    assert step == 8
    kept = output / f"checkpoint-{step}"
    assert (output / "model.safetensors").read_bytes() == (kept / "model.safetensors").read_bytes()
    logged = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    tokens = [line["tokens"] for line in logged if line["event"] == "step" and line["step"] == step]
    folders = (kept, output / "replica-1" / kept.name)
    assert [json.loads((folder / "brigade.json").read_text())["tokens"] for folder in folders] == 2 * tokens
