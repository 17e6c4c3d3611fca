"""Layers of different sizes, as Gemma 4 has them: what is counted of them, against the trace."""

from dataclasses import replace

import pytest
import torch
import yaml

from brigade.plan.choice import job_record
from brigade.plan.choice.search import undivided
from brigade.plan.costs.activations import activation_bytes, logit_bytes
from brigade.plan.costs.job import FUSED, Job
from brigade.plan.costs.step_time import layer_seconds
from brigade.plan.hardware import gpu
from brigade.plan.shape.built import build
from brigade.plan.shape.find import described
from testing.small_configs import LENGTH, config
from testing.trace_settings import settings_of
from testing.traced_model import measure

pytestmark = pytest.mark.usefixtures("digests")


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


@pytest.mark.parametrize("kernels", [frozenset(), FUSED], ids=["torch", "fused"])
@pytest.mark.parametrize("name", OWN_SIZES)
def test_layers_of_different_sizes_agree(name, kernels):
    """What all layers keep within 4 %, what one needs at its peak within 20 %; windows are hidden by masks, as SDPA has them."""
    document = config("gemma4_text", **GEMMA | OWN_SIZES[name])
    shape = described(document, "x")
    with torch.device("meta"):
        assert shape.parameters == sum(p.numel() for p in build(document).parameters())
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
    assert job_record.job_of_record(yaml.safe_load(yaml.safe_dump(job_record.record(job))), "run.yaml") == job
