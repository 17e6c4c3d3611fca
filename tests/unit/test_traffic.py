"""What a node sends per step, for shapes whose sums can be done by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.communication import STRATEGIES
from benchmarks.published.traffic import traffic, unreleased
from brigade.planner.models.find_model import named_shape

MANY = 10**6  # ranks, so that (n-1)/n is 1


@pytest.mark.parametrize("kind, k, elements", [
    ("ddp", 1, 2 * 2), ("ddp", 8, 2 * 2),  # fp32 gradients count twice
    ("zero1", 1, 3), ("zero1", 8, 3), ("zero2", 1, 3), ("zero2", 8, 17), ("zero3", 1, 3), ("zero3", 8, 24),
    ("fsdp2", 1, 2 + 2), ("fsdp2", 8, 32),
])  # fmt: skip
def test_many_ranks_over_nccl_are_what_ds_configs_readme_says(kind, k, elements):
    assert traffic(kind, 1, MANY, 1, k).total / 2 == pytest.approx(elements, rel=1e-5)


def test_two_nodes_of_two_over_gloo():
    share = 3 / 4
    assert traffic("ddp", 100, 2, 2).total == 2 * share * 400
    assert traffic("zero1", 100, 2, 2, 4).total == 3 * share * 200
    assert traffic("zero3", 100, 2, 2, 4, gloo=True).total == pytest.approx(4 * 4 * share * 200)
    assert traffic("zero3", 100, 2, 2, 4, gloo=True, whole=10).gathered == pytest.approx(share * 2 * (8 * 90 + 10))
    assert traffic("fsdp2", 100, 2, 2, 4, gloo=True, whole=10).gathered == pytest.approx(4 * share * 2 * 190)
    assert traffic("fsdp2", 100, 2, 2, 4, gloo=True).reduced == pytest.approx(4 * 2 * share * 400)


def test_a_second_copy_in_the_node_spares_all_gathers_but_the_first():
    plain, second = (traffic("zero3", 100, 2, 8, 4, hpz=hpz) for hpz in (0, 8))
    assert second.gathered == plain.gathered / 8 and second.reduced == plain.reduced


def test_groups_inside_nodes_send_what_ddp_sends_and_across_nodes_more():
    assert traffic("fsdp2", 100, 4, 8, 4, shard=8).total == pytest.approx(2 * 3 / 4 * 400)
    assert traffic("fsdp2", 100, 4, 8, 4, shard=16).total > traffic("ddp", 100, 4, 8, 4).total


def test_nothing_leaves_a_single_node():
    assert all(traffic(kind, 100, 1, 8, 4).total == 0 for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2"))


def test_what_stays_gathered():
    assert unreleased(named_shape("recipes/llama-3.1-8b")) == 128256 * 4096 + 4096


def test_what_was_counted_on_network_cards():
    text = (Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "communication.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert {row["strategy"] for row in rows} == set(STRATEGIES)
    for row in rows:
        of, psi = STRATEGIES[row["strategy"]], row["parameters"]
        # A Llama of hidden 256, 4 layers and a head of 4096 words: what FSDP2 does not release, and ZeRO-3's norms.
        whole = 4096 * 256 + 256 if of.kind == "fsdp2" else 9 * 256
        found = traffic(
            of.kind,
            psi,
            row["hosts"],
            of.per_host,
            row["accumulation"],
            shard=of.shard,
            hpz=of.hpz,
            whole=whole,
            gloo=True,
        )
        assert row["payload"] == pytest.approx(found.total, rel=0.05), row
