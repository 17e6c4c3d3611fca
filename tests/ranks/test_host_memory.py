"""What a rank holds while a model loads (benchmarks/loading.py), and checkpoints of the planner's size (benchmarks/hosts.py)."""

import pytest

from benchmarks import hosts, loading, planner_hosts

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["DDP", "FSDP2"])
def test_no_host_holds_a_model_while_it_loads(strategy, tmp_path):
    """Of 34 million parameters the embedding is half, and the most that is made at a time."""
    shared = hosts.write_model(tmp_path, hosts.MODEL | SMALL)
    row = loading.measure("dense", strategy, "full", shared, tmp_path)
    embedding = 4 * hosts.MODEL["vocab_size"] * SMALL["hidden_size"]
    assert max(row["first_rank"], row["other_rank"]) < 1.5 * embedding < 3.5 * row["parameters"]


def test_checkpoints_are_of_the_size_that_the_formula_says():
    """Of full runs within a hundredth."""
    full = [one for one in planner_hosts.checkpoints() if ", full" in one.what]
    assert len(full) >= 9 and all(one.measured == pytest.approx(one.predicted, rel=0.01) for one in full)
