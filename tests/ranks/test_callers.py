"""What somebody relies on who calls train.main() from Python, with callbacks of his own, on several ranks."""

import pytest

from testing import local_steps, parity, resume, runs


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    """The folder of two runs in one group of two ranks, and how the second ended: FSDP2's, and replicas of which one fails."""
    folder = tmp_path_factory.mktemp("called")
    shared = runs.write_inputs(folder)
    fsdp2 = [*resume.SHARED, *parity.STRATEGIES["fsdp2"], "--max_steps", "2"]
    replicas = local_steps.exact(2, "ddp", local_steps.DILOCO)[0]["flags"]
    cases = [
        {"name": "fsdp2", "flags": fsdp2, "saves_to": str(folder / "elsewhere")},
        {"name": "replicas", "flags": replicas, "fails": (1, 3)},
    ]
    return folder, runs.run_all(2, [runs.prepared(case, folder, shared) for case in cases], folder)[1]


@pytest.mark.slow
def test_a_model_that_a_caller_saves_is_the_whole_one(called):
    """Transformers' own save_model writes nothing of a model in shards."""
    folder, _ = called
    saved, own = (path / "model.safetensors" for path in (folder / "elsewhere", folder / "outputs" / "fsdp2"))
    assert saved.read_bytes() == own.read_bytes()


@pytest.mark.slow
def test_a_rank_of_a_replica_fails_by_the_number_that_its_launcher_gave(called):
    _, done = called
    assert done.returncode != 0 and "rank 1 of 2" in done.stderr
