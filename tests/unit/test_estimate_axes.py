"""Formulas of the axes besides data parallelism: what a rank holds, sends and waits for, and a run's own axes."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.published import traffic
from brigade.plan.constants import CONSTANTS
from brigade.plan.costs.activations import micro_batches_in_flight
from brigade.plan.costs.conventions import SCHEDULES
from brigade.plan.costs.division import division, stage_states, stages
from brigade.plan.costs.host_memory import host
from brigade.plan.costs.job import Job, axis_fields
from brigade.plan.costs.memory import moments
from brigade.plan.costs.step_time import step_time
from brigade.plan.hardware import gpu
from brigade.plan.hardware.network import links
from brigade.plan.runs.prediction import as_seen
from brigade.plan.shape.find import named_shape
from brigade.train.engines.parallel import pipeline_schedule
from brigade.train.strategy.axes import Axes
from testing.ranks import REPOSITORY as ROOT

LLAMA, LLAMA_70B, TIED, MOE = (
    named_shape(str(ROOT / "recipes" / name)) for name in ("llama-3.1-8b", "llama-3.1-70b", "qwen3-4b", "qwen3-30b-a3b")
)


def job(shape=LLAMA, axes=None, ranks=16, **options) -> Job:
    usual = {"sequence": 4096, "engine": "zero", "stage": 1, "accumulation": 16}
    return Job(shape, **(usual | options | axis_fields(axes or Axes(), ranks)))


# ---- states ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [LLAMA, TIED, MOE], ids=lambda shape: shape.name)
@pytest.mark.parametrize("axes", [
    *(Axes(stages=4), Axes(tensor=4), Axes(tensor=2, stages=4), Axes(experts=8), Axes(sequence=8)),
    *(Axes(tensor=2, experts=8), Axes(stages=4, experts=2), Axes(tensor=2, stages=2, experts=4)),
])  # fmt: skip
def test_parameters_over_all_ranks_are_the_model_and_what_is_whole_on_several(shape, axes):
    if axes.experts > 1 and not shape.experts:
        axes = replace(axes, experts=1)
    of = job(shape, axes, stage=3, engine="fsdp2")
    found = stages(of)
    again = (axes.tensor - 1) * sum(count * shape.undivided(moe) for moe, count in shape.kinds)
    if axes.tensor > 1:  # norms, router, and an embedding that is the head
        again += (axes.tensor - 1) * (shape.final_norm + shape.embedding * shape.tied)
    if axes.stages > 1 and shape.tied:  # a copy of the embedding on the last stage, which a tensor group has whole
        again += axes.tensor * shape.vocab * shape.hidden
    held = axes.tensor / axes.experts if axes.experts > 1 else 1  # each rank of a tensor group has whole ones
    experts = shape.moe_layers * shape.experts * shape.expert * (1 - held)
    assert axes.tensor * sum(stage.parameters for stage in found) == pytest.approx(shape.parameters + again - experts)
    assert sum(stage.layers for stage in found) == shape.layers


def test_sharded_states_over_all_ranks_are_once_those_of_the_model():
    """16 bytes per parameter under FSDP2, whatever the experts' ranks and the sequence's."""
    for axes in (Axes(), Axes(sequence=4), Axes(experts=4), Axes(experts=16)):
        of = job(MOE, axes, engine="fsdp2", stage=3)
        states, _ = stage_states(of, stages(of)[0])
        assert 16 * states.total == pytest.approx(16 * MOE.parameters, rel=1e-6)


def test_tensor_parallel_states_are_those_of_transformers_plan():
    """Llama 8B on two ranks, by hand: matrices and head are halved, norms and embedding are whole."""
    s = LLAMA
    layer = (s.dense_layer - 2 * s.hidden) / 2 + 2 * s.hidden
    by_hand = 32 * layer + s.vocab * s.hidden + s.vocab * s.hidden / 2 + s.hidden
    (stage,) = stages(job(axes=Axes(tensor=2)))
    assert stage.parameters == by_hand and (stage.embedding, stage.head) == (s.embedding, s.head / 2)


def test_zero3_shards_what_a_tensor_group_leaves_whole_over_all_ranks():
    """Llama 8B by hand on two ranks of a group and four of data, as docs/evidence/states.md measures: norms and embedding are
    in eighths, halves of matrices in fourths, and the two are stepped one after the other."""
    s = LLAMA
    whole = 32 * 2 * s.hidden + s.hidden + s.embedding
    divided = (s.parameters - whole) / 2
    of = job(axes=Axes(tensor=2), ranks=8, stage=3)
    states, held = stage_states(of, stages(of)[0])
    share = divided / 4 + whole / 8
    assert (states.parameters, states.optimizer) == pytest.approx((2 * share, 12 * share))
    assert states.gradients == pytest.approx(2 * share + 4 * divided / 4) and held == pytest.approx(2 * share)
    for stage in (1, 2):  # these shard all they have over the data's ranks
        of = job(axes=Axes(tensor=2), ranks=8, stage=stage)
        states, _ = stage_states(of, stages(of)[0])
        assert states.optimizer == pytest.approx(12 * (divided + whole) / 4)


def test_of_an_adapters_two_matrices_one_is_divided():
    s, rank = LLAMA, 8
    q, kv = s.query_width, s.key_value_width // 2
    outputs = [(s.hidden, q), (s.hidden, kv), (s.hidden, kv), (s.hidden, s.ffn), (s.hidden, s.ffn)]
    inputs = [(q, s.hidden), (s.ffn, s.hidden)]
    whole = s.layers * rank * (sum(i + o for i, o in outputs + inputs))
    one = s.layers * rank * (sum(i + o / 4 for i, o in outputs) + sum(i / 4 + o for i, o in inputs))
    (stage,) = stages(job(axes=Axes(tensor=4), method="lora", trained=whole))
    assert stage.trained == pytest.approx(one)


@pytest.mark.parametrize(
    "layers, stages_, head", [(32, 4, 2.4), (80, 8, 1.2), (6, 6, 3.0), (5, 2, 9.0), (12, 5, 0.6), (10, 4, 2.0)]
)
def test_stages_are_cut_by_cost(layers, stages_, head):
    """No other division of so many layers has a cheaper most costly stage, nor as cheap a one and evener others."""
    shape = replace(LLAMA, layers=layers, vocab=round(head * LLAMA.layer_matmul / LLAMA.hidden))
    counts = division(job(shape, Axes(stages=stages_), ranks=stages_, accumulation=64)).layers
    worth = shape.vocab * shape.hidden / shape.layer_matmul

    def cost(counts):
        every = [*counts[:-1], counts[-1] + worth]
        return max(every), sum(one * one for one in every)

    others = itertools.product(range(1, layers), repeat=stages_ - 1) if layers < 40 else [counts[:-1]]
    possible = ([*each, layers - sum(each)] for each in others if layers - sum(each) >= 1)
    assert sum(counts) == layers and min(counts) >= 1 and len(counts) == stages_
    assert cost(counts) == pytest.approx(min(map(cost, possible)))


# ---- pipelines ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stages_, micro_batches", [(2, 4), (4, 8), (8, 64)])
def test_the_bubble_is_that_of_the_textbook(stages_, micro_batches):
    """(p - 1) / (m + p - 1) of a step without communication, launches and an uneven head; v chunks divide it."""
    shape = replace(LLAMA, layers=32, vocab=8)
    of = job(shape, Axes(stages=stages_), ranks=stages_, accumulation=micro_batches, sequence=32768)
    time = step_time(of)
    share = time.bubble / (time.bubble + time.compute + time.launches)
    assert share == pytest.approx((stages_ - 1) / (micro_batches + stages_ - 1), rel=0.02)
    assert step_time(replace(of, schedule="interleaved1f1b", virtual=2)).bubble == pytest.approx(time.bubble / 2)
    assert step_time(replace(of, schedule="gpipe")).bubble == time.bubble
    assert step_time(replace(of, schedule="interleavedzerobubble")).bubble == pytest.approx(time.bubble / 3, rel=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages_, micro_batches", [(2, 4), (4, 8), (8, 64)])
def test_the_bubble_is_what_a_run_tells_and_was_measured(schedule, stages_, micro_batches):
    """train/engines/parallel/pipeline_schedule.py; docs/evidence/pipeline.md has it measured."""
    axes = Axes(stages=stages_, schedule=schedule, virtual=2 if schedule.startswith("interleaved") else 1)
    of = job(replace(LLAMA, vocab=8), axes, ranks=stages_, accumulation=micro_batches, sequence=32768)
    time = step_time(of)
    share = time.bubble / (time.bubble + time.compute + time.launches)
    assert of.schedule == schedule
    assert share == pytest.approx(pipeline_schedule.bubble(axes, micro_batches), rel=0.02)


def test_a_rank_with_several_stages_has_its_turns_of_them():
    of = job(axes=Axes(stages=4, virtual=2))
    chunks = division(job(axes=Axes(stages=8))).layers
    assert division(of).layers == [chunks[rank] + chunks[rank + 4] for rank in range(4)]
    assert of.axes == Axes(stages=4, virtual=2)
    assert of.order.bubble == 1 and of.schedule == "interleaved1f1b"


def test_schedules_keep_what_they_keep():
    of = job(axes=Axes(stages=4), accumulation=16)
    assert [micro_batches_in_flight(of, place) for place in range(4)] == [4, 3, 2, 1]
    assert [micro_batches_in_flight(replace(of, schedule="gpipe"), place) for place in range(4)] == [16] * 4
    assert set(SCHEDULES) == {"1f1b", "gpipe", "interleaved1f1b", "interleavedzerobubble"}


def test_embedding_and_head_lie_on_the_first_and_the_last_stage():
    first, *between, last = stages(job(TIED, Axes(stages=4)))
    words = TIED.vocab * TIED.hidden
    assert (first.embedding, first.head, last.embedding, last.head) == (words, 0, 0, words)  # a tied head is a copy
    assert all(stage.embedding == stage.head == 0 for stage in between)
    logits = {moment.logits > 0 for moment in moments(job(TIED, Axes(stages=2)))[:4]}
    assert logits == {False}


def test_less_goes_between_hosts_than_under_zero_3():
    """Over a slow network: a pipeline sends a row's activations, ZeRO-3 all weights in every micro-batch."""
    slow = {"gpu": "A100 80GB", "link": "25 Gb/s", "checkpointing": "full"}
    piped = step_time(job(LLAMA_70B, Axes(tensor=8, stages=2), accumulation=64, **slow))
    gathered = step_time(job(LLAMA_70B, stage=3, accumulation=4, **slow))
    assert 5 * piped.across < gathered.across


def test_a_pipeline_over_two_nodes_waits_for_the_border_between_them():
    """Most borders of 8 stages x 2 ranks lie inside a node; each micro-batch passes the one that does not, forward and back, and
    both ranks of that stage share the node's cards."""
    slow = {"ranks": 16, "gpu": "A100 80GB", "link": "25 Gb/s"}
    found = step_time(job(LLAMA, Axes(stages=8), **slow))
    sent = 4 * LLAMA.hidden * 4096  # bytes of a micro-batch: under autocast its states are fp32
    net = links(gpu("A100"), "25 Gb/s", 8)
    assert found.across == pytest.approx(
        16 * 2 * (CONSTANTS.call_latency + CONSTANTS.node_latency + 2 * sent / net.node), rel=1e-6
    )
    inside = step_time(job(LLAMA, Axes(stages=4), **slow | {"ranks": 8}))
    assert inside.across == pytest.approx(16 * 2 * (CONSTANTS.call_latency + sent / net.peer), rel=1e-6)


# ---- tensor and sequence parallelism, experts --------------------------------------------------------------------
def test_tensor_parallelism_sums_four_times_a_layer_and_six_where_it_computes_again():
    plain, again = (job(axes=Axes(tensor=8), ranks=8, accumulation=1, checkpointing=how) for how in ("none", "full"))
    net = links(gpu(plain.gpu), "", 8)
    one = 2 * net.half(2 * LLAMA.hidden * plain.tokens, 8)
    assert step_time(plain).inside == pytest.approx(4 * LLAMA.layers * one, rel=1e-6)
    assert step_time(again).inside == pytest.approx(6 * LLAMA.layers * one, rel=1e-6)


def test_a_tensor_group_sends_each_token_to_its_experts_once_and_gathers_what_comes_back():
    dense = job(MOE, axes=Axes(tensor=4), ranks=4, accumulation=1)
    divided = job(MOE, axes=Axes(tensor=4, experts=4), ranks=4, accumulation=1)
    net, tokens = links(gpu(divided.gpu), "", 8), 2 * MOE.hidden * divided.tokens
    one = 2 * net.exchange(tokens * MOE.top_k / 4, 4) + net.half(tokens, 4)
    more = step_time(divided).inside - step_time(dense).inside
    assert more == pytest.approx(2 * MOE.moe_layers * one, rel=1e-6)


@pytest.mark.parametrize("axes, engine, stage", [
    *((Axes(experts=size), "fsdp2", 3) for size in (1, 2, 8)),
    (Axes(tensor=4, experts=8), "fsdp2", 3),
    (Axes(stages=2, experts=8), "stages", 1),
])  # fmt: skip
def test_a_slow_network_takes_as_long_as_what_nodes_send_each_other(axes, engine, stage):
    """Over 32 ranks on four nodes: the bytes of docs/evidence/communication.md's formulas. Ranks with the same experts lie on
    different nodes, and their rings share a node's cards."""
    options = {"engine": engine, "stage": stage, "link": "1 Gb/s", "sequence": 512, "accumulation": 4}
    of = job(MOE, axes, ranks=32, **options)
    net = links(gpu(of.gpu), of.link, 8)
    sent = max(traffic.per_node(of), key=lambda one: one.total)
    assert step_time(of).across == pytest.approx(sent.total / net.node, rel=0.05)


def test_an_exchange_between_nodes_goes_through_their_cards():
    """Each of 16 ranks on two nodes sends half of its bytes to the other node, and eight of them share a node's cards."""
    net = links(gpu("H100"), "100 Gb/s", 8)
    payload = 1e9
    assert net.exchange(payload, 16) == pytest.approx(
        CONSTANTS.call_latency + CONSTANTS.node_latency + 8 * payload / 2 / net.node, rel=1e-6
    )
    assert net.exchange(payload, 8) == net.half(payload, 8) and net.exchange(payload, 1) == 0


def test_long_rows_are_divided_and_their_logits_never_whole():
    whole = job(stage=3, ranks=8, sequence=131_072)
    divided = replace(whole, **axis_fields(Axes(sequence=8), 8), loss="tiled")
    kept, more = moments(whole)[0], moments(divided)[0]
    assert 7 * more.activations < kept.activations and 20 * more.logits < kept.logits
    assert divided.tokens == 131_072 // 8 and divided.shard_ranks == whole.shard_ranks == 8
    heads = replace(divided, shape=replace(LLAMA, kv_heads=2))  # four ranks share a head of keys and values
    assert step_time(heads).inside > 0


# ---- a rank's part of the model -----------------------------------------------------------------------------------
def test_a_rank_s_tokens_are_a_part_of_its_rows():
    of = job(axes=Axes(sequence=4), stage=3)
    assert as_seen(of, tokens=1000, attended=500, labelled=1.0).tokens == 1000


@pytest.mark.parametrize(
    "name", ["llama-3.2-1b", "qwen3-4b", "gemma-3-1b-it", "qwen2.5-7b", "mistral-7b-v0.3", "qwen3-32b"]
)
def test_parameters_of_a_rank_are_those_of_the_model_that_transformers_builds(name):
    """Divided by Transformers' plan, and cut into stages: counted on the model itself, on the meta device."""
    folder = ROOT / "recipes" / name
    shape = named_shape(str(folder))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    styles = {k: v for k, v in model.tp_plan.items() if not (tied and k == "lm_head")}

    def share(key, size):
        module, _, kind = key.rpartition(".")
        style = styles.get(re.sub(r"\.\d+\.", ".*.", module), "")
        return 1 / size if style.startswith("colwise") or (style == "rowwise" and kind == "weight") else 1

    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    for size, engine in itertools.product((2, 4), ("zero", "fsdp2")):
        counted = sum(number * share(key, size) for key, number in sizes.items())
        if tied == (engine == "zero"):  # an embedding of its own by FSDP2, one that is the head by AutoTP
            counted -= shape.embedding * (1 - 1 / size)
        (stage,) = stages(job(shape, Axes(tensor=size), engine=engine))
        assert stage.parameters == pytest.approx(counted, rel=1e-9)
    divided = job(shape, Axes(stages=4))
    layers = list(itertools.accumulate(division(divided).layers, initial=0))
    for stage in stages(divided):
        own = range(*layers[stage.place : stage.place + 2])
        counted = sum(n for key, n in sizes.items() if (at := re.search(r"layers\.(\d+)\.", key)) and int(at[1]) in own)
        ends = {"embed": stage.place == 0 or (tied and stage.last), "lm_head": stage.last, "model.norm": stage.last}
        counted += sum(n for key, n in sizes.items() for end, has in ends.items() if end in key and has)
        assert stage.parameters == pytest.approx(counted, rel=1e-9)


def test_a_checkpoint_holds_the_whole_model():
    psi = LLAMA.parameters
    for axes in (Axes(tensor=2), Axes(stages=4), Axes(tensor=2, stages=4)):
        assert host(job(axes=axes)).checkpoint == (12 if axes.stages > 1 else 16) * psi
    assert host(job()).checkpoint == 16 * psi
    assert host(job(axes=Axes(tensor=2))).loading == host(job()).loading  # in bf16 it is pages of the model's files
