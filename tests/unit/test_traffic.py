"""What a node sends per step, for shapes whose sums can be done by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.communication import STRATEGIES
from benchmarks.published.traffic import per_node, traffic, unreleased
from brigade.plan.costs.job import Job, axis_fields
from brigade.plan.shape.find import named_shape
from brigade.train.strategy.axes import Axes

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
    assert traffic("fsdp2", 100, 2, 2, 4, gloo=True, kept=10).gathered == pytest.approx(4 * share * 2 * 190)
    assert traffic("zero3", 100, 2, 2, 4, whole=10, kept=90).gathered == pytest.approx(share * 2 * (4 * 90 + 10))
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
        # A Llama of hidden 256, 4 layers and a head of 4096 words: ZeRO-3's norms; what is not released after the forward pass.
        whole = 9 * 256 if of.kind == "zero3" else 0
        kept = 4096 * 256 + 256 if of.kind == "fsdp2" else (psi - whole) * of.keeps
        how = {"shard": of.shard, "hpz": of.hpz, "kept": kept, "whole": whole, "gloo": True}
        found = traffic(of.kind, psi, row["hosts"], of.per_host, row["accumulation"], **how)
        assert row["payload"] == pytest.approx(found.total, rel=0.05), row


# ---- axes besides data parallelism --------------------------------------------------------------------------------
def job(axes, nodes=2, model="llama-3.1-8b", **options):
    given = {"engine": "zero", "stage": 1, "micro_batch": 1, "accumulation": 8} | options
    return Job(named_shape(f"recipes/{model}"), 4096, **(given | axis_fields(axes, 8 * nodes)))


@pytest.mark.parametrize("engine, stage, kind, gloo", [
    ("ddp", 0, "ddp", False), ("zero", 1, "zero1", True), ("zero", 2, "zero2", False), ("zero", 3, "zero3", True),
    ("fsdp2", 3, "fsdp2", False),
])  # fmt: skip
def test_without_an_axis_every_node_sends_the_same(engine, stage, kind, gloo):
    of = job(Axes(), engine=engine, stage=stage)
    kept = unreleased(of.shape) if kind == "fsdp2" else 0
    assert per_node(of, gloo=gloo) == [traffic(kind, of.shape.parameters, 2, 8, 8, kept=kept, gloo=gloo)] * 2


def test_divided_sequences_change_nothing_between_nodes():
    assert per_node(job(Axes(sequence=8), stage=3)) == per_node(job(Axes(), stage=3))


def test_stages_across_nodes_hand_on_a_border_s_activations_and_nothing_else():
    """In fp32, of each micro-batch from every rank: the first node forward, the last one back, the others both."""
    one = 8 * 8 * 4096 * 4096 * 4
    found = per_node(job(Axes(stages=4), nodes=4, stage=0))
    assert [node.total for node in found] == [one, 2 * one, 2 * one, one] == [node.handed for node in found]
    inside = per_node(job(Axes(stages=8), nodes=4))  # two stages on each node, four ranks each
    assert [node.total for node in inside] == [one / 2, one, one, one / 2]
    assert all(node.total == 0 for node in per_node(job(Axes(stages=8), nodes=1)))


def test_two_nodes_of_one_stage_reduce_what_it_has():
    of = job(Axes(stages=2), nodes=4, stage=0)
    first, _, _, last = per_node(of)
    psi = of.shape.embedding + 16 * of.shape.dense_layer
    assert first.reduced == pytest.approx(2 * 15 / 16 * 4 * psi, rel=0.1) and first.gathered == last.gathered == 0
    owned = per_node(job(Axes(stages=2), nodes=4, stage=1))[0]
    assert owned.reduced == first.reduced and owned.gathered == first.reduced / 2


def test_a_tied_embedding_s_gradient_goes_to_the_other_end():
    found = per_node(job(Axes(stages=4), nodes=4, model="qwen3-4b"))
    words = found[0].reduced / (8 * 4)
    assert words == 151936 * 2560 and [bool(node.reduced) for node in found] == [True, False, False, True]


def test_each_rank_of_a_tensor_group_has_a_ring_of_its_own():
    """Eight rings of two ranks: of each matrix half of what one ring of sixteen would send less than."""
    plain, divided = (per_node(job(axes))[0].total for axes in (Axes(), Axes(tensor=8)))
    # The embedding is whole eight times.
    assert divided / plain == pytest.approx((1 / 2) / (15 / 16) * (1 + 7 * 0.068), rel=0.05)


def test_experts_are_gathered_by_those_that_have_the_same():
    of = {size: job(Axes(experts=size), model="qwen3-30b-a3b", engine="fsdp2", stage=3) for size in (1, 8)}
    plain, divided = (per_node(of[size])[0].total for size in (1, 8))
    assert divided / plain == pytest.approx((1 / 2) / (15 / 16), rel=0.08)
