"""Forms of activation checkpointing: their values, what layers keep, and what the planner counts of them."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from brigade.errors import UserError
from brigade.plan.choice import job_of_run
from brigade.plan.costs.activations import activation_bytes, input_bytes, selectively_kept
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.host_memory import host
from brigade.plan.costs.job import Job
from brigade.plan.output.show import recomputes
from brigade.plan.runs import calibrate
from brigade.plan.shape.find import described
from brigade.train.engines import recomputing
from brigade.train.recipe.batch import Batch
from brigade.train.recipe.files import REPOSITORY
from brigade.train.recipe.value_types import Recomputation
from brigade.train.strategy import Strategy
from brigade.train.upstream.stateful_layers import checkpoint_by, recompute_within

TOKENS, LAYERS = 48, 4
CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, architectures=["LlamaForCausalLM"],
)  # fmt: skip
QWEN = json.loads((REPOSITORY / "recipes/qwen3-8b/config.json").read_text())
GIB = 2**30


@pytest.mark.parametrize("value, wanted", [
    (False, Recomputation()), (True, Recomputation(1)), ({"every_n": 2}, Recomputation(2)),
    ("selective", Recomputation(1, selective=True)), ("offload", Recomputation(1, offload=True)),
])  # fmt: skip
def test_values(load, value, wanted):
    training = load(training={"activation_checkpointing": value}).recipe.training
    assert training.activation_checkpointing == value and training.recomputation == wanted
    assert wanted.plain == (value is True)


@pytest.mark.parametrize("flag, value", [
    ([], True), (["true"], True), (["false"], False), (["{every_n: 3}"], {"every_n": 3}), (["offload"], "offload"),
])  # fmt: skip
def test_flags(load, flag, value):
    assert load("--activation_checkpointing", *flag).recipe.training.activation_checkpointing == value


@pytest.mark.parametrize(
    "value", [2, "most", {"every_n": 1}, {"every_n": True}, {"every": 2}, {"every_n": 2, "of": 3}, None]
)
def test_other_values_are_refused(load, value):
    with pytest.raises(UserError, match=r"true, false, selective, offload or \{every_n: LAYERS\}"):
        load(training={"activation_checkpointing": value})


def trained(load, value, dtype=torch.float32):
    """(loss and gradients, bytes that autograd keeps of a forward pass beside weights) with such a value."""
    training = load(training={"activation_checkpointing": value}).recipe.training
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=dtype, attn_implementation="sdpa").train()
    if training.activation_checkpointing:
        recomputing.enable(model, training)
    if training.recomputation.selective:
        recompute_within(model, recomputing.kept_contexts)
    if training.recomputation.offload:
        checkpoint_by(model, recomputing._keep_on_host)
    weights, kept = {weight.data_ptr() for weight in model.parameters()}, {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    words = torch.arange(TOKENS)[None] % 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(words, labels=words, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters())], sum(kept.values())


@pytest.mark.parametrize("kind, value, cure", [
    ("openai-gpt", True, "set it to false"), ("openai-gpt", "offload", "set it to false"), ("openai-gpt", False, None),
    ("llama", True, None), ("llama", {"every_n": 2}, None), ("gpt2", "selective", None),
])  # fmt: skip
def test_a_model_that_cannot_is_told_before_it_trains(load, kind, value, cure):
    settings = load(training={"activation_checkpointing": value})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind]())
    if cure is None:
        recomputing.check(model, settings)
    else:
        with pytest.raises(UserError, match=f"{type(model).__name__} has no activation checkpointing") as caught:
            recomputing.check(model, settings)
        assert caught.value.cure == cure


def test_every_form_computes_the_same(load):
    whole, _ = trained(load, False)
    for value in (True, {"every_n": 2}, "selective", "offload"):
        again, _ = trained(load, value)
        assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True)), value


def test_every_second_layer_keeps_half_of_what_layers_keep(load):
    kept = [trained(load, value)[1] for value in (False, {"every_n": 2}, True)]
    assert kept[2] < kept[1] < kept[0]
    assert (kept[0] - kept[1]) / (kept[0] - kept[2]) == pytest.approx(0.5, abs=0.02)


def test_selective_keeps_what_the_planner_counts(load, monkeypatch):
    make, kept = recomputing.create_selective_checkpoint_contexts, []

    def watched(policy):
        def watch(context, operator, *given, **options):
            decision = policy(context, operator, *given, **options)
            if decision == recomputing.CheckpointPolicy.MUST_SAVE:
                outputs = context.op_output if isinstance(context.op_output, tuple) else (context.op_output,)
                kept.extend(output.nbytes for output in outputs if isinstance(output, torch.Tensor))
            return decision

        return make(watch)

    monkeypatch.setattr(recomputing, "create_selective_checkpoint_contexts", watched)
    trained(load, "selective", torch.bfloat16)
    job = Job(described(CONFIG.to_dict(), "config.json", "tiny"), TOKENS)
    assert sum(kept) == LAYERS * TOKENS * selectively_kept(job)


def test_host_memory_holds_what_layers_begin_with(load, monkeypatch):
    moved = []
    monkeypatch.setattr(recomputing, "save_on_cpu", lambda **_: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: moved.append(tensor.nbytes) or tensor, lambda tensor: tensor))  # fmt: skip
    trained(load, "offload", torch.bfloat16)
    job = Job(described(CONFIG.to_dict(), "config.json", "tiny"), TOKENS)
    of_layers = [size for size in moved if size == input_bytes(job)]
    assert len(of_layers) == LAYERS and sum(moved) == sum(of_layers)


@pytest.fixture
def job(load):
    """job(value, ...): the Job of Qwen3-8B over 16 GPUs under FSDP2."""

    def make(value, model=None, fsdp=None, **training):
        half = {"bf16": True, "global_batch_size": 64, "activation_checkpointing": value}
        recipe = load(training=half | training, model=model or {}).recipe
        strategy, batch = Strategy("fsdp2", "fsdp2", "a test", fsdp=fsdp or {}, shard=16), Batch(64, 2, 2, 16, 1e-5)
        return job_of_run.job_of_run(recipe, strategy, batch, 16, 8, QWEN, "H100 80GB")

    return make


def test_the_planner_orders_the_forms(job):
    forms = {str(value): estimate(job(value)) for value in (False, {"every_n": 2}, "selective", True, "offload")}
    memory = [form.allocated_gib for form in forms.values()]
    seconds = [forms[name].time.total for name in ("False", "{'every_n': 2}", "True", "offload")]
    assert memory == sorted(memory, reverse=True) and seconds == sorted(seconds)


def test_the_planner_counts_every_second_layer(job):
    none, every, full = (job(value) for value in (False, {"every_n": 2}, True))
    kept = [activation_bytes(each)[0] for each in (none, every, full)]
    assert kept[1] == pytest.approx((kept[0] + kept[2]) / 2)
    assert recomputes(every) == "1 layer of 2" and calibrate.job_of_record(calibrate.record(every), "a test") == every


def test_the_planner_counts_offloaded_inputs(job):
    full, offload = job(True), job("offload")
    assert offload == replace(full, inputs_on_host=True) and "wait in host memory" in recomputes(offload)
    each = 2 * 2048 * 4096 * 2  # 32 MiB, a power of two
    assert host(offload).training - host(full).training == pytest.approx(8 * 36 * each)
    moved = estimate(offload).time.offload - estimate(full).time.offload
    assert moved == pytest.approx(2 * 2 * 36 * each / 55e9, rel=0.2)


def test_the_planner_counts_fsdp2_that_offloads(job):
    whole, offloads = job(True), job(True, fsdp={"cpu_offload": True})
    parameters = whole.shape.parameters
    assert offloads == replace(whole, offload="all")
    one, other = estimate(whole), estimate(offloads)
    assert other.memory.weights == other.memory.gradients == other.memory.optimizer == 0 < other.memory.buffers
    assert host(offloads).training - host(whole).training == pytest.approx(1.25 * 16 * parameters / 2)
    # Two micro-batches: the gradients of each go down, and the host steps what the node's ranks have of them.
    down, adam = 2 * 4 * parameters / 16 / 55e9, parameters / 2 / 4.0e9
    assert other.time.offload >= 0.9 * (down + adam) and other.time.total > one.time.total


@pytest.mark.parametrize("more, reason", [
    ({"model": {"use_peft": True}}, "adapters"), ({"tiled_mlp": "auto"}, "MLPs in tiles"),
    ({"model": {"attn_implementation": "eager"}}, "eager"),
])  # fmt: skip
def test_what_no_formula_knows_of_selective(job, more, reason):
    with pytest.raises(job_of_run.NotCovered, match=f"selective keeps of {reason}"):
        job("selective", **more)
