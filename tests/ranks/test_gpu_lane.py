"""Strategies on fake GPUs (testing/fake_gpu/) give the losses of one process on the CPU (docs/gpu.md)."""

import pytest

from testing import gpu_lane, parity, runs


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return runs.run_cases(1, [gpu_lane.reference()], tmp_path_factory.mktemp("reference"))["reference"]


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    todo = [gpu_lane.run_case(strategy) for strategy in sorted(asked_for("strategy"))]
    return runs.run_cases(gpu_lane.RANKS, todo, tmp_path_factory.mktemp("gpus"), gpus=True)


@pytest.mark.parametrize("strategy", gpu_lane.CASES)
def test_a_gpu_gives_the_losses_of_the_cpu(strategy, reference, results):
    differences = parity.worst(results[strategy], reference)
    tolerance = gpu_lane.TOLERANCE[gpu_lane.CASES[strategy]]
    assert all(differences[key] <= tolerance for key in ("loss", "eval_loss")), differences
