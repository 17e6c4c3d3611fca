"""The trace of a model's own code: what it counts, that the formulas agree with it, and that it is remembered."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import moe

from brigade.errors import UserError
from brigade.plan.choice.search import undivided
from brigade.plan.costs.activations import activation_bytes, logit_bytes
from brigade.plan.costs.job import FUSED, Job
from brigade.plan.costs.step_time import layer_seconds
from brigade.plan.hardware import gpu
from brigade.plan.runs import calibrate
from brigade.plan.shape.find import described
from brigade.plan.shape.from_code import shape_from_model
from brigade.plan.shape.from_config import shape_of
from testing import marks, stand_ins, traced_model
from testing.small_configs import EXPERTS, LENGTH, NEOX, SMALL, SPARSE, config
from testing.trace_settings import TraceSettings, settings_of
from testing.traced_model import measure, parameters

pytestmark = pytest.mark.usefixtures("digests")


# ---- counting ----------------------------------------------------------------------------------------------------
def test_live_counts_what_a_hand_can():
    """relu(x @ a) @ b of 8 rows: the product is freed, relu's output (8 x 32) stays for both backward passes."""
    with FakeTensorMode():
        x, a, b = torch.empty(8, 16), torch.empty(16, 32, requires_grad=True), torch.empty(32, 4, requires_grad=True)
        saved: dict[int, int] = {}

        def pack(tensor):
            if tensor.untyped_storage()._cdata not in {t.untyped_storage()._cdata for t in (x, a, b)}:
                saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with traced_model.Live([x, a, b]) as live, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = torch.relu(x @ a) @ b
            assert live.now == 4 * (8 * 32 + 8 * 4)
            assert live.peak == 4 * (2 * 8 * 32)  # product and relu's output, before the small result
            assert live.now - out.untyped_storage().nbytes() == sum(saved.values())
            live.reset()
            out.sum().backward(inputs=[a])
            assert live.peak > 4 * (8 * 32 + 8 * 4)
            a.grad = None
            del out
        assert live.now == 0


def test_a_view_is_its_storage_and_a_weight_is_no_activation():
    with FakeTensorMode():
        weight = torch.empty(64, 64)
        with traced_model.Live([weight]) as live:
            halves = torch.empty(10, 8).chunk(2, dim=1)
            turned = weight.t()
            half = weight.to(torch.bfloat16)  # autocast's copy, which the formulas count with the weights
            assert live.now == 10 * 8 * 4
            del halves
            assert live.now == 0
            del turned, half


def test_flash_keeps_what_its_kernels_keep():
    """Queries, keys, values, output in bf16, and per head and token a log-sum-exp in fp32; SDPA on a CPU keeps the same."""
    rows, heads, kv_heads, size = 2, 4, 2, 16

    def kept(attend):
        with FakeTensorMode():
            q, k, v = (
                torch.empty(rows, n, LENGTH, size, dtype=torch.bfloat16, requires_grad=True)
                for n in (heads, kv_heads, kv_heads)
            )
            with traced_model.Live([]) as live:
                out = attend(q.clone(), k.clone(), v.clone())
                found = live.now
            del out
        return found

    by_hand = rows * LENGTH * (2 * size * (heads + 2 * kv_heads + heads) + 4 * heads)
    assert kept(lambda q, k, v: stand_ins.flash(None, q, k, v, None)[0]) == by_hand
    # The CPU's kernel pads nothing here and saves the same five tensors, where no mask makes it take another.
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert kept(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True)) == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize("autocast", [False, True])
def test_fake_tensors_count_as_real_ones(autocast):
    """The same model with data, on a CPU: every storage of the trace is one that a run allocates."""
    settings = TraceSettings(64, autocast, attention="eager")
    with torch.device("cpu"):
        real = traced_model.run(config(), settings)
    assert real == measure(config(), settings)


# ---- formula against trace ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("kernels", [frozenset(), FUSED], ids=["torch", "fused"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_formula_and_trace_agree(family, engine, checkpointing, kernels):
    """Within 2 % of what the layers keep, and 10 % of the rest, where small terms (row sums, the final norm) weigh most."""
    document = config(family)
    job = Job(shape_of(document, "x"), LENGTH, 3, engine=engine, checkpointing=checkpointing, kernels=kernels)
    job = replace(job, loss="released")
    found = measure(document, settings_of(job)).times(job.micro_batch)
    kept, back = activation_bytes(job)
    assert found.layers[0] == pytest.approx(kept, rel=0.02)
    # What layers share is in found.kept: the rotary tables, and the embeddings where the first norm copies them.
    shared = 3 * LENGTH * (SMALL["hidden_size"] * 8 + 2 * 4 * SMALL["head_dim"])
    assert job.shape.layers * found.layers[0] <= found.kept <= job.shape.layers * found.layers[0] + shared
    assert back == pytest.approx(found.back, rel=0.1)
    assert logit_bytes(job) == pytest.approx(found.loss, rel=0.1)


@pytest.mark.parametrize("family, values", [
    ("gemma3_text", {"sliding_window": 64}),
    ("phi3", {"pad_token_id": 0}),
    ("qwen3_moe", EXPERTS),
    ("gpt_oss", SPARSE),
    ("gpt_neox", NEOX),
])  # fmt: skip
def test_layers_of_other_families_agree(family, values):
    document = {"model_type": family, **(values if values is NEOX else SMALL | values)}
    for attention in ("flash2", "eager"):
        job = Job(shape_of(document, "x"), LENGTH, attention=attention)
        found = measure(document, settings_of(job))
        assert activation_bytes(job)[0] == pytest.approx(sum(found.layers) / len(found.layers), rel=0.06), attention


def test_mixed_layers_are_counted_by_kind():
    document = config("qwen3_moe", **EXPERTS, mlp_only_layers=[0, 3])
    dense, moe = measure(document, TraceSettings(LENGTH)).layers
    assert dense != moe
    whole = measure(document, TraceSettings(LENGTH)).kept
    fewer = measure(document | {"num_hidden_layers": 4}, TraceSettings(LENGTH)).kept  # the fifth has experts
    assert whole - fewer == moe


def test_rows_of_a_micro_batch_are_as_many_times_one():
    one = measure(config(), TraceSettings(LENGTH))
    two = one.times(2)
    assert two.kept == 2 * one.kept and two.loss == 2 * one.loss


def test_what_no_trace_can_stand_for():
    job = Job(shape_of(config(), "x"), LENGTH, 2, loss="released")
    assert settings_of(replace(job, tensor=2)) is None and settings_of(replace(job, checkpointing="half")) is None


# ---- remembering what is read off a model -------------------------------------------------------------------------
READ = """
import json, sys
from brigade.plan.shape.from_code import shape_from_model
print(shape_from_model(json.loads(sys.argv[1])).parameters, "torch" in sys.modules)
"""


def test_a_second_call_imports_no_torch(digests):
    document = config()
    shape = shape_from_model(document)
    command = [sys.executable, "-c", READ, json.dumps(document)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(shape.parameters), "False"]


def test_a_model_leaves_its_config_as_it_was():
    document = config(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=1e4)
    before = json.dumps(document)
    measure(document, TraceSettings(LENGTH))
    shape_from_model(document)
    assert json.dumps(document) == before


def test_another_config_or_version_is_read_again(digests, monkeypatch):
    def files():
        return len(list(digests.iterdir()))

    shape_from_model(config())
    shape_from_model(config())
    assert files() == 1
    shape_from_model(config(intermediate_size=384))
    assert files() == 2
    monkeypatch.setattr("brigade.plan.shape.built.version", lambda package: "0")
    shape_from_model(config())
    assert files() == 3


def test_code_that_cannot_be_traced(request):
    # Transformers' own, whatever an earlier test has trained with: it takes bf16 alone.
    moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] = moe.grouped_mm_experts_forward  # before what register() gave to all
    request.addfinalizer(lambda: moe.ALL_EXPERTS_FUNCTIONS.pop("grouped_mm"))
    document = config("qwen3_moe", **EXPERTS)
    with pytest.raises(UserError, match="cannot be traced"):
        measure(document, TraceSettings(LENGTH, autocast=True))  # the experts' product takes bf16 alone


def test_a_broken_cache_is_made_anew(digests):
    shape = shape_from_model(config())
    next(digests.iterdir()).write_text("{")
    assert shape_from_model(config()) == shape


# ---- sizes -----------------------------------------------------------------------------------------------------------
# Gemma 4's three kinds of model: keys and values of an earlier layer, with a second embedding; keys that are the values; experts
# beside a dense MLP. One in three layers sees all tokens, by wider heads.
TURNS = ["sliding_attention", "sliding_attention", "full_attention"] * 4
GEMMA = {"layer_types": TURNS, "num_hidden_layers": 12, "sliding_window": 128, "hidden_size": 256, "global_head_dim": 512,
         "head_dim": 64, "final_logit_softcapping": 30.0, "vocab_size": 8000}  # fmt: skip
KEYS = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
MIXED = {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 96}
OWN_SIZES = {
    "shared": {"num_kv_shared_layers": 6, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 1000,
               "use_double_wide_mlp": True},
    "keys": KEYS,
    "experts": KEYS | MIXED,
}  # fmt: skip


@pytest.mark.parametrize("name, kernels", marks.cases(
    ("shared", frozenset()), ("keys", FUSED), ("experts", FUSED),
    slow=[("shared", FUSED), ("keys", frozenset()), ("experts", frozenset())],
))  # fmt: skip
def test_layers_of_different_sizes_agree(name, kernels):
    """What all layers keep within 4 %, what one needs at its peak within 20 %; windows are hidden by masks, as SDPA has them."""
    document = config("gemma4_text", **GEMMA | OWN_SIZES[name])
    shape = described(document, "x")
    assert shape.parameters == parameters(document)
    assert sum(one.layers for one in shape.sizes) == 12 and shape.masked
    job = Job(shape, LENGTH, loss="released", kernels=kernels)
    found = measure(document, settings_of(job))
    kept = activation_bytes(job)[0]
    assert 12 * kept == pytest.approx(found.kept, rel=0.04) and logit_bytes(job) == pytest.approx(found.loss, rel=0.05)
    again = replace(job, checkpointing="full")
    found = measure(document, settings_of(again))
    assert activation_bytes(again)[1] == pytest.approx(found.back, rel=0.2)
    assert layer_seconds(job, gpu("H100 80GB"), shape.moe_layers > 0)[0] > 0


def test_layers_that_differ_in_something_else_are_refused(mistake):
    heads = [4, 8] * 2
    document = {"model_type": "laguna", "num_hidden_layers": 4, "num_attention_heads_per_layer": heads}
    assert "its layers differ in num_attention_heads" in mistake(described, document, "x")


def test_layers_of_different_sizes_are_counted_by_kind(mistake):
    shape = described(config("gemma4_text", **GEMMA | OWN_SIZES["shared"]), "x")
    assert [(one.layers, one.head_dim, one.window, one.made, one.ffn) for one in shape.sizes] == [
        (4, 64, 128, 2, 352), (2, 512, 0, 2, 352), (4, 64, 128, 0, 704), (2, 512, 0, 0, 704),
    ]  # fmt: skip
    assert [(one.layers, one.head_dim, one.made) for one in described(config("gemma4_text", **GEMMA | KEYS), "x").sizes] == [
        (8, 64, 2), (4, 512, 1),
    ]  # fmt: skip
    # Two in three layers see 128 tokens, by heads of which eight are as wide as one of the others'.
    assert shape.attended(1024) == pytest.approx((8 * 128 / 8 + 4 * 1024) / 12)
    for axis in ("tensor", "context", "pipeline"):
        assert "layers of different sizes" in mistake(Job, shape, 1000, **{axis: 2})
    assert all(undivided(shape, axis) for axis in ("tensor", "sequence", "stages"))
    job = Job(shape, 1000)
    assert calibrate.job_of_record(yaml.safe_load(yaml.safe_dump(calibrate.record(job))), "run.yaml") == job
