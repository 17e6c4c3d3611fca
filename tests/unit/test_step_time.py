"""How long a step takes by formula: what communicates, what waits for Python, and what a network's name says of its rate;
and very long rows."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import long_context, pages
from brigade.plan.costs import activations, memory
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.job import Job
from brigade.plan.costs.step_time import step_time
from brigade.plan.hardware import gpu
from brigade.plan.hardware.network import hold_name, links, node_gbit
from brigade.plan.shape.find import named_shape

LLAMA_8B = named_shape(str(Path(__file__).parents[2] / "recipes" / "llama-3.1-8b"))


def job(**options) -> Job:
    return Job(LLAMA_8B, **({"sequence": 4096, "data": 8, "stage": 3} | options))


def test_zero_plus_plus_sends_less_over_slow_networks_and_takes_no_memory():
    plain = job(engine="zero", data=16, hpz=8, link="100 Gb/s")
    rounded = replace(plain, quantised=True)
    assert 2 * step_time(rounded).across < step_time(plain).across
    assert estimate(rounded).memory == estimate(plain).memory


def test_under_zero_3_small_micro_batches_wait_for_python_and_longer_on_more_ranks():
    """A layer took 16 ms on two A100s with 256 tokens as with 512 (collected.csv, qwen-019 and 020)."""
    few = {"engine": "zero", "sequence": 512, "checkpointing": "full"}
    waits = [step_time(job(data=ranks, **few)).launches for ranks in (8, 64, 512)]
    assert waits[0] > 5 * step_time(job(**few | {"stage": 2})).launches
    assert waits == sorted(waits) and waits[2] > 2 * waits[0]
    many = step_time(job(**few | {"sequence": 2**16}))
    assert many.launches < 0.01 * many.compute


def test_adapters_gradients_fill_few_buckets_under_zero_3():
    lora = job(engine="zero", method="lora", trained=42_000_000, data=512, sequence=4096)
    with_scatters, without = step_time(lora).across, step_time(replace(lora, trained=1)).across
    assert with_scatters < 1.05 * without  # 3 buckets of hidden^2 elements, not five in each of 32 layers


def test_zero_3_over_hundreds_of_ranks_with_little_to_compute_is_told():
    many = job(engine="zero", gpu="A100 80GB", data=1024)
    assert estimate(many).crowded
    assert not estimate(replace(many, engine="fsdp2")).crowded and not estimate(replace(many, data=64)).crowded
    assert not estimate(replace(many, micro_batch=16)).crowded


def test_adapters_cost_time_where_they_lie():
    job = Job(LLAMA_8B, 2**12, method="lora", trained=10**5)
    costs = [
        step_time(replace(job, targets=targets, adapter_dropout=dropout)).compute
        for targets, dropout in (("qv", False), ("qkvo", False), ("qkvom", False), ("qkvom", True))
    ]
    assert costs == sorted(costs) and len(set(costs)) == 4
    assert step_time(replace(job, engine="zero", stage=2)).compute < costs[2]  # no copies in fp32


# ---- links -------------------------------------------------------------------------------------------------------
def test_a_ring_over_several_nodes_takes_as_much_longer_as_it_has_ranks():
    one = links(gpu("A100 80GB"), "800 Gb/s", 8)
    hops = [one.ring(ranks, 1)[1] for ranks in (16, 128, 1024)]
    assert hops[1] > 8 * hops[0] and hops[2] == pytest.approx(8 * hops[1], rel=0.02)


def test_rings_side_by_side_share_a_node_s_cards():
    device = gpu("H100")
    net = links(device, "3200 Gb/s", 8)
    rates = [net.ring(256 // stride, stride)[0] for stride in (1, 4, 8)]
    assert rates == pytest.approx([8 * rates[2], 2 * rates[2], rates[2]])
    assert net.gbit == pytest.approx(3200 * device.network / device.efficiency)


@pytest.mark.parametrize("named, gbit", [
    ("3200 Gb/s", 3200), ("EFA (AWS P5, 3200Gb/s per node)", 3200), ("RoCE 1600Gb/s per node", 1600), ("8x400 Gbit/s", 3200),
    ("8 x 200Gbps HDR", 1600), ("3.2 Tb/s", 3200), ("1,600 Gb/s", 1600), ("100 GbE", 100), ("25Gbps", 25), ("50 GB/s", 400),
    ("4 * 100Gb RoCE", 400), ("8x 400G IB", 3200), ("InfiniBand HDR 200Gb", 200), ("4*100GbE", 400),
    ("400 Gb/s per GPU", 3200), ("DGX NDR IB (assumed)", None), ("-", None), ("", None),
])  # fmt: skip
def test_a_network_s_name_states_its_rate(named, gbit):
    assert node_gbit(named, 8) == gbit


@pytest.mark.parametrize(
    "named", ["0 Gb/s", "foo", "0x400 Gb/s", "1.2.3 Gb/s", "3200", "InfiniBand", "-5 Gb/s", "1e9 Gb/s"]
)
def test_a_network_without_a_rate_is_refused(named, user_error):
    assert "3200 Gb/s" in user_error(hold_name, named, "flag --network").cure


# ---- very long rows --------------------------------------------------------------------------------------------------
ROWS = pages.read(long_context.RESULTS)


def name(row):
    return f"{row['model']}, {row['objective']}, {row['tiles']}, {row['ranks']}"


@pytest.mark.parametrize("row", [row for row in ROWS if row["tiles"] != "loss"], ids=name)
def test_long_rows_take_what_traces_of_the_models_code_say(row):
    """With and without tiles of loss and MLPs, of a row in parts and whole: what a layer and the loss need at their peaks."""
    tiles = {"loss": "tiled", "tiled_mlp": True} if row["tiles"] != "none" else {"loss": "released"}
    tokens = row["tokens"] * long_context.ANSWERS[row["objective"]]
    job = Job(named_shape(row["model"]), tokens, context=row["ranks"], checkpointing="full", **tiles)
    kept, back = activations.activation_bytes(job)
    assert kept * job.shape.layers == pytest.approx(row["kept"], rel=0.05)
    assert back == pytest.approx(row["back"], rel=0.01)
    assert activations.logit_bytes(job) == pytest.approx(row["loss"], abs=memory.GIB / 8)


def test_an_mlp_in_tiles_is_computed_once_more():
    plain = Job(named_shape("llama-3.1-8b"), 131_072, checkpointing="full", loss="tiled")
    tiled = replace(plain, tiled_mlp=True)
    assert 1.03 < step_time(tiled).compute / step_time(plain).compute < 1.10
