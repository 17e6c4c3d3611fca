"""The trace of a model's own code: what it counts, that the formulas agree with it, and that it is remembered."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations import moe

from brigade.__main__ import main
from brigade.errors import UserError
from brigade.plan.choice import job_of_run
from brigade.plan.choice.search import KNOWN
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.job import FUSED, Job
from brigade.plan.costs.layer import layer_ops
from brigade.plan.costs.memory import activation_bytes, logit_bytes, settings_of
from brigade.plan.costs.step_time import layer_seconds
from brigade.plan.hardware import gpu
from brigade.plan.shape import from_code as shape_from_code
from brigade.plan.shape import stand_ins, traced_model
from brigade.plan.shape.find import described
from brigade.plan.shape.from_config import shape_of
from brigade.plan.shape.lora import all_linears, lora_parameters
from brigade.plan.shape.model_shape import FAMILIES
from brigade.plan.shape.trace import trace
from brigade.plan.shape.trace_settings import TraceSettings
from brigade.train.upstream.experts import beside_mamba

LENGTH = 512
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SPARSE = {"num_local_experts": 8, "num_experts_per_tok": 2}
OLD = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1000}
NEOX = OLD | {"intermediate_size": 256}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path))
    return tmp_path / "digests"


def config(family="llama", **values):
    return {"model_type": family, **SMALL, **values}


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
    assert real == traced_model.measure(config(), settings)


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
    found = trace(document, settings_of(job), job.micro_batch)
    kept, back = activation_bytes(job)
    assert found.layers[0] == pytest.approx(kept, rel=0.02)
    # What layers share is in found.kept: the rotary tables, and the embeddings where the first norm copies them.
    shared = 3 * LENGTH * (SMALL["hidden_size"] * 8 + 2 * 4 * SMALL["head_dim"])
    assert job.shape.layers * found.layers[0] <= found.kept <= job.shape.layers * found.layers[0] + shared
    assert back == pytest.approx(found.back, rel=0.1)
    assert logit_bytes(job) == pytest.approx(found.loss, rel=0.1)


@pytest.mark.parametrize(
    "family, values",
    [
        ("gemma3_text", {"sliding_window": 64}),
        ("phi3", {"pad_token_id": 0}),
        ("qwen3_moe", EXPERTS),
        ("gpt_oss", SPARSE),
        ("gpt_neox", NEOX),
    ],
)
def test_layers_of_other_families_agree(family, values):
    document = {"model_type": family, **(values if values is NEOX else SMALL | values)}
    for attention in ("flash2", "eager"):
        job = Job(shape_of(document, "x"), LENGTH, attention=attention)
        found = trace(document, settings_of(job))
        assert activation_bytes(job)[0] == pytest.approx(sum(found.layers) / len(found.layers), rel=0.06), attention


# Hybrids: three layers of four without attention, as Qwen3.5 has them, and LFM2's convolutions.
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
STATE = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SPACE = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_expand": 2, "mamba_chunk_size": 64}
HYBRIDS = {
    "qwen3_5_text": STATE | {"layer_types": LINEAR},
    "qwen3_next": STATE | EXPERTS | {"layer_types": LINEAR, "shared_expert_intermediate_size": 64},
    "olmo_hybrid": STATE | {"layer_types": LINEAR, "linear_num_value_heads": 4, "pad_token_id": 0, "eos_token_id": 1},
    "lfm2": {"layer_types": ["conv", "conv", "conv", "full_attention"]},
    "granitemoehybrid": SPACE | EXPERTS | {"layer_types": [*["mamba"] * 3, "attention"], "num_local_experts": 16,
                                           "shared_intermediate_size": 64, "position_embedding_type": "nope"},
    "bamba": SPACE | {"attn_layer_indices": [3]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1},
    "kimi_linear": LATENT | {"layer_types": LINEAR, "linear_num_heads": 8, "linear_head_dim": 32,
                             "mlp_layer_types": ["dense"] * 4},
}  # fmt: skip


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_hybrids_agree(family, checkpointing):
    """The rule and the convolution stand in both for what their kernels keep; a layer by itself takes the most of its kind."""
    document = config(family, **{"num_hidden_layers": 4} | HYBRIDS[family])
    shape = described(document, "x")
    assert shape.mixer and shape.mixer.layers == 3 and shape.attending == 0.25
    job = Job(shape, LENGTH, checkpointing=checkpointing)
    found = trace(document, settings_of(job))
    assert 4 * activation_bytes(job)[0] == pytest.approx(3 * found.layers[0] + found.layers[1], rel=0.08)
    if checkpointing == "none":
        assert layer_seconds(job, gpu("H100 80GB"), shape.moe_layers > 0)[0] > 0


@pytest.mark.parametrize(
    "family", [family for family, values in HYBRIDS.items() if "num_experts_per_tok" not in values]
)
def test_products_and_adapters_of_hybrids_are_counted(family):
    """Each product of each linear layer, and an adapter on each that the run adapts; all parameters exactly."""
    document = config(family, **{"num_hidden_layers": 4} | HYBRIDS[family])
    shape = described(document, "x")
    with torch.device("meta"):
        model = traced_model.build(document)
    layers = traced_model.decoder_layers(model)[2]
    linears = [module for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    own = ("attention", "rule", "scan")  # products that read no weight
    flops = sum(op.share * op.flops for op in layer_ops(Job(shape, LENGTH), False) if op.name not in own)
    assert 4 * flops == 2 * sum(module.weight.numel() for module in linears)
    widths = [count * (inner + outer) for count, inner, outer in all_linears(shape)]
    assert sum(widths) == shape.adapted == lora_parameters(shape, 1)
    named = [module for name, module in layers.named_modules() if name.endswith(".q_proj")]
    assert lora_parameters(shape, 1, "q") == sum(module.in_features + module.out_features for module in named)


@pytest.mark.parametrize("targets", ["qkvom", "q"])
@pytest.mark.parametrize("family", ["lfm2", "bamba", "jamba", "kimi_linear", "falcon_h1"])
def test_what_a_hybrid_keeps_with_adapters_agrees(family, targets):
    """In bf16, on all linear layers that take one, or only on queries: the mixers' weights are frozen, and some inputs unread."""
    document = config(family, **{"num_hidden_layers": 4} | HYBRIDS.get(family, SPACE | {"mamba_d_ssm": 256}))

    def adapt(model):
        linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        names = {name.rpartition(".")[2] for name in linears} - {"lm_head"} - beside_mamba(model, list(linears))
        chosen = [name for name in names if targets == "qkvom" or name == "q_proj"]
        wanted = f".*({'|'.join(chosen)})"
        get_peft_model(model, LoraConfig(r=1, target_modules=wanted), autocast_adapter_dtype=False)
        return {}

    with torch.device("cpu"):
        found = traced_model.run(document, TraceSettings(LENGTH), adapt)
    job = Job(described(document, "x"), LENGTH, method="lora", engine="zero", targets=targets)
    layers = 4 * found.layers[0] if len(found.layers) == 1 else 3 * found.layers[0] + found.layers[1]
    assert 4 * activation_bytes(job)[0] == pytest.approx(layers, rel=0.03)


MIXTURES = {"num_local_experts": 16, "num_experts_per_token": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_kimi_linears_layers_agree(checkpointing):
    """Delta rules with a gate for each channel, latent attention, and mixtures behind one dense layer, which is wider."""
    document = config(
        "kimi_linear", **HYBRIDS["kimi_linear"] | MIXTURES | {"num_hidden_layers": 4, "mlp_layer_types": None}
    )
    shape = described(document, "x")
    with torch.device("meta"):
        assert shape.parameters == sum(p.numel() for p in traced_model.build(document).parameters())
    sizes = (shape.ffn, shape.expert_ffn, shape.shared_ffn, shape.moe_layers, shape.top_k)
    assert sizes == (352, 64, 64, 3, 2) and shape.family.fp32_router
    job = Job(shape, LENGTH, checkpointing=checkpointing)
    found = trace(document, settings_of(job))
    kept, back = activation_bytes(job)
    dense, moe, attention = found.layers
    if checkpointing == "none":
        assert 4 * kept == pytest.approx(dense + 2 * moe + attention, rel=0.03)
    else:
        assert back == pytest.approx(found.back, rel=0.15)


def test_a_hybrids_mixtures_are_counted():
    """Jamba's: a selective scan in each layer but one, experts in each other one, with a router in bf16."""
    document = config(
        "jamba", **HYBRIDS["jamba"] | {"num_hidden_layers": 8, "num_experts": 8, "num_experts_per_tok": 2}
    )
    shape = described(document, "x")
    with torch.device("meta"):
        assert shape.parameters == sum(p.numel() for p in traced_model.build(document).parameters())
    assert (shape.attending, shape.mixing, shape.moe_layers, shape.expert_ffn) == (0.25, 0.75, 4, 352)
    job = Job(shape, LENGTH)
    found = trace(document, settings_of(job))
    assert len(found.layers) == 3  # without experts, with them, and attention, which has experts here
    layers = sum(count * each for count, each in zip((4, 2, 2), found.layers, strict=True))
    assert 8 * activation_bytes(job)[0] == pytest.approx(layers, rel=0.03)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_layers_with_a_state_space_beside_attention_agree(engine, checkpointing):
    """Falcon-H1's: each of the two reads a copy of its own, and under autocast multipliers in fp32 widen the space's input."""
    document = config("falcon_h1", **SPACE, mamba_d_ssm=256)
    shape = described(document, "x")
    with torch.device("meta"):
        assert shape.parameters == sum(p.numel() for p in traced_model.build(document).parameters())
    assert shape.mixer and shape.mixer.beside and (shape.attending, shape.mixing) == (1, 1)
    assert shape.attended(1000) == 1000
    job = Job(shape, LENGTH, engine=engine, checkpointing=checkpointing, loss="released")
    found = trace(document, settings_of(job))
    kept, back = activation_bytes(job)
    assert kept == pytest.approx(found.layers[0], rel=0.02) and logit_bytes(job) == pytest.approx(found.loss, rel=0.05)
    if checkpointing == "full":
        assert back == pytest.approx(found.back, rel=0.1)
    h, inner, wide, q, kv = 128, 256, 2 * 256 + 2 * 64 + 8, 128, 128
    parts = h * (q + kv) + q * h + h * wide + inner * h + 3 * h * 352  # of attention, mixer and MLP
    flops = sum(op.flops for op in layer_ops(job, False) if op.name not in ("attention", "scan"))
    assert flops == 2 * parts
    assert layer_seconds(job, gpu("H100 80GB"), False)[0] > 0


APART = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
         "vocab_size": 1000, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 64, "n_groups": 2, "chunk_size": 64,
         "n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
         "moe_shared_expert_intermediate_size": 128}  # fmt: skip
PATTERNS = {
    "mlp": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
    "moe": ["linear_attention", "moe", "full_attention", "linear_attention", "moe", "moe"],
    "both": ["linear_attention", "moe", "full_attention", "mlp"],
}


@pytest.mark.parametrize("engine, checkpointing", [("fsdp2", "none"), ("fsdp2", "full"), ("ddp", "none")])
@pytest.mark.parametrize("name", PATTERNS)
def test_layers_of_one_part_each_agree(name, engine, checkpointing):
    """Nemotron-H's: each part in the layers that are of it, with one norm, an MLP without a gate, and a router in fp32."""
    types = PATTERNS[name]
    document = {"model_type": "nemotron_h", **APART, "layers_block_type": types}
    shape = described(document, "x")
    with torch.device("meta"):
        assert shape.parameters == sum(p.numel() for p in traced_model.build(document).parameters())
    assert shape.mixer and shape.apart and not shape.family.gated and shape.family.norms == 1 and shape.kv_heads == 2
    counts = [types.count(one) for one in ("full_attention", "linear_attention", "mlp", "moe")]
    assert [round(share * len(types)) for share in (shape.attending, shape.mixing)] == counts[:2]
    assert [shape.mlp_layers, shape.moe_layers] == counts[2:]
    if engine == "ddp" and shape.moe_layers:
        return  # the experts' product takes bf16 alone
    job = Job(shape, LENGTH, engine=engine, checkpointing=checkpointing, loss="released")
    found = trace(document, settings_of(job))
    kept, back = activation_bytes(job)
    kinds = [types.count(one) for one in dict.fromkeys(types)]
    layers = sum(count * each for count, each in zip(kinds, found.layers, strict=True))
    assert shape.layers * kept == pytest.approx(layers, rel=0.03)
    if checkpointing == "full":
        assert back == pytest.approx(found.back, rel=0.2)


@pytest.mark.parametrize("name", PATTERNS)
def test_products_of_layers_of_one_part_each_are_counted(name):
    document = {"model_type": "nemotron_h", **APART, "layers_block_type": PATTERNS[name]}
    shape = described(document, "x")
    space, mlp = 128 * 776 + 256 * 128, 2 * 128 * 352
    moe = 2 * 128 * (2 * 64 + 128) + 128 * 16  # two experts and the shared one, and the router
    sizes = {"full_attention": 2 * 128 * (128 + 64), "linear_attention": space, "mlp": mlp, "moe": moe}
    job = Job(shape, LENGTH)
    flops = sum(
        count * op.share * op.flops
        for of_experts, count in shape.kinds
        for op in layer_ops(job, of_experts)
        if op.name not in ("attention", "scan")
    )
    assert flops == pytest.approx(2 * sum(sizes[one] for one in PATTERNS[name]))
    # Adapters lie on the layers that have what they are named after.
    assert lora_parameters(shape, 8, "qv") == 8 * (2 * 128 + 128 + 64) * PATTERNS[name].count("full_attention")
    assert layer_seconds(job, gpu("H100 80GB"), False)[0] > 0


# As nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 publishes them.
NANO = {"model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 131072, "tie_word_embeddings": False,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_num_heads": 64,
        "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "chunk_size": 128, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712}  # fmt: skip


def test_nemotron_3_nano_has_the_parameters_that_are_published():
    """31.6 billion, of which a token meets 3.6 (3.2 without the two ends, as NVIDIA's report counts)."""
    shape = described(NANO, "x")
    assert shape.parameters == 31_577_937_344
    assert shape.active == pytest.approx(3.58e9, rel=0.001)
    assert shape.active - shape.embedding == pytest.approx(3.23e9, rel=0.001)
    assert (shape.layers, shape.moe_layers, shape.experts, shape.expert_ffn, shape.shared_ffn) == (
        52,
        23,
        128,
        1856,
        3712,
    )


def test_experts_that_read_a_latent_vector_are_refused():
    document = {"model_type": "nemotron_h", **APART, "layers_block_type": PATTERNS["moe"], "moe_latent_size": 32}
    with pytest.raises(UserError, match="its read 32 numbers"):
        described(document, "x")


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
        assert shape.parameters == sum(p.numel() for p in traced_model.build(document).parameters())
    assert sum(one.layers for one in shape.sizes) == 12 and shape.masked
    job = Job(shape, LENGTH, loss="released", kernels=kernels)
    found = trace(document, settings_of(job))
    kept = activation_bytes(job)[0]
    assert 12 * kept == pytest.approx(found.kept, rel=0.04) and logit_bytes(job) == pytest.approx(found.loss, rel=0.05)
    again = replace(job, checkpointing="full")
    found = trace(document, settings_of(again))
    assert activation_bytes(again)[1] == pytest.approx(found.back, rel=0.2)
    assert layer_seconds(job, gpu("H100 80GB"), shape.moe_layers > 0)[0] > 0


def test_layers_that_differ_in_something_else_are_refused():
    heads = [4, 8] * 2
    document = {"model_type": "laguna", "num_hidden_layers": 4, "num_attention_heads_per_layer": heads}
    with pytest.raises(UserError, match="its layers differ in num_attention_heads"):
        described(document, "x")


def test_layers_of_different_sizes_are_counted_by_kind():
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
        with pytest.raises(UserError, match="layers of different sizes"):
            Job(shape, 1000, **{axis: 2})
    assert not any(KNOWN[axis](shape) for axis in ("tensor", "sequence", "stages"))
    job = Job(shape, 1000)
    assert job_of_run.job_of_record(yaml.safe_load(yaml.safe_dump(job_of_run.record(job))), "run.yaml") == job


def test_a_hybrid_attends_in_some_layers_only():
    shape = described(config("qwen3_5_text", **HYBRIDS["qwen3_5_text"] | {"num_hidden_layers": 4}), "x")
    assert shape.attended(1000) == 250 and Job(shape, 1000).scored == 1000
    for axis in ("tensor", "context"):
        with pytest.raises(UserError, match="gated delta rule"):
            Job(shape, 1000, **{axis: 2})
    assert not KNOWN["tensor"](shape) and not KNOWN["sequence"](shape) and KNOWN["stages"](shape)


def test_a_hybrids_job_is_kept_with_its_run_and_needs_the_kernels_it_is_counted_with(monkeypatch):
    """run.yaml has it as plain values; and a host without the packages has no figure, instead of a wrong one."""
    shape = described(config("qwen3_5_text", **HYBRIDS["qwen3_5_text"] | {"num_hidden_layers": 4}), "x")
    job = Job(shape, 1000)
    kept = yaml.safe_load(yaml.safe_dump(job_of_run.record(job)))
    assert job_of_run.job_of_record(kept, "run.yaml") == job
    with pytest.raises(job_of_run.NotCovered, match="flash-linear-attention and causal-conv1d, which this host lacks"):
        job_of_run.check_kernels(shape)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    job_of_run.check_kernels(shape)


@pytest.mark.parametrize("family", ["kimi_linear", "jamba", "falcon_h1", "nemotron_h"])
def test_jobs_of_other_hybrids_are_kept_too(family):
    parts = APART | {"layers_block_type": PATTERNS["both"]} if family == "nemotron_h" else SPACE | {"mamba_d_ssm": 256}
    job = Job(described(config(family, **{"num_hidden_layers": 4} | HYBRIDS.get(family, parts)), "x"), 1000)
    assert job_of_run.job_of_record(yaml.safe_load(yaml.safe_dump(job_of_run.record(job))), "run.yaml") == job


def test_torchs_own_recurrence_keeps_more_than_its_kernel(monkeypatch):
    """What a run without flash-linear-attention takes, of which the plan warns."""
    document = config("qwen3_5_text", **HYBRIDS["qwen3_5_text"] | {"num_hidden_layers": 4})
    with_kernels = traced_model.measure(document, TraceSettings(LENGTH)).layers[0]
    monkeypatch.setattr(traced_model, "mixers", lambda model: nullcontext())
    assert traced_model.measure(document, TraceSettings(LENGTH)).layers[0] > 2 * with_kernels


def test_mixed_layers_are_counted_by_kind():
    document = config("qwen3_moe", **EXPERTS, mlp_only_layers=[0, 3])
    dense, moe = trace(document, TraceSettings(LENGTH)).layers
    assert dense != moe
    whole = trace(document, TraceSettings(LENGTH)).kept
    fewer = trace(document | {"num_hidden_layers": 4}, TraceSettings(LENGTH)).kept  # the fifth has experts
    assert whole - fewer == moe


def test_rows_of_a_micro_batch_are_as_many_times_one():
    one, two = (trace(config(), TraceSettings(LENGTH), rows) for rows in (1, 2))
    assert two.kept == 2 * one.kept and two.loss == 2 * one.loss


def test_the_trace_stands_in_memory():
    document = config()
    job = Job(shape_of(document, "x"), LENGTH, 2, loss="released")
    found = trace(document, settings_of(job), 2)
    most = estimate(job, traced=replace(found, kept=1e9, loss=7e8)).memory
    assert (most.activations, most.logits) == (1e9, 7e8)
    assert settings_of(replace(job, tensor=2)) is None and settings_of(replace(job, checkpointing="half")) is None


# ---- remembering -------------------------------------------------------------------------------------------------
READ = """
import json, sys
from brigade.plan.shape.trace import trace
from brigade.plan.shape.trace_settings import TraceSettings
found = trace(json.loads(sys.argv[1]), TraceSettings(512))
print(found.kept, "torch" in sys.modules)
"""


def test_a_second_call_imports_no_torch(cache):
    document = config()
    found = trace(document, TraceSettings(LENGTH))
    command = [sys.executable, "-c", READ, json.dumps(document)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(found.kept), "False"]


def test_a_trace_leaves_the_config_as_it_was():
    document = config(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=1e4)
    before = json.dumps(document)
    trace(document, TraceSettings(LENGTH))
    assert json.dumps(document) == before


def test_another_config_or_version_is_traced_again(cache, monkeypatch):
    def files():
        return len(list(cache.iterdir()))

    trace(config(), TraceSettings(LENGTH))
    trace(config(), TraceSettings(LENGTH))
    assert files() == 1
    trace(config(intermediate_size=384), TraceSettings(LENGTH))
    trace(config(), TraceSettings(LENGTH, checkpointing=True))
    assert files() == 3
    monkeypatch.setattr("brigade.plan.shape.trace.version", lambda package: "0")
    trace(config(), TraceSettings(LENGTH))
    assert files() == 4


def test_a_refusal_is_remembered(cache, monkeypatch, request):
    # Transformers' own, whatever an earlier test has trained with: it takes bf16 alone.
    moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] = moe.grouped_mm_experts_forward  # before what register() gave to all
    request.addfinalizer(lambda: moe.ALL_EXPERTS_FUNCTIONS.pop("grouped_mm"))
    document = config("qwen3_moe", **EXPERTS)
    for _ in range(2):
        with pytest.raises(UserError, match="cannot be traced"):
            trace(document, TraceSettings(LENGTH, autocast=True))  # the experts' product takes bf16 alone
        monkeypatch.setattr(traced_model, "measure", None)
    assert len(list(cache.iterdir())) == 1


def test_a_plan_without_a_trace_imports_no_torch():
    code = "import sys; from brigade.__main__ import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "plan", "recipes/qwen3-8b", "--gpu", "H100 80GB"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_plan_shows_both_engines(capsys):
    assert main(["plan", "recipes/qwen3-0.6b", "--gpu", "H100 80GB", "--max_length", "1024", "--trace"]) == 0
    said = capsys.readouterr().out
    assert "formula" in said and "traced" in said and "kept by layers" in said


def test_a_broken_cache_is_made_anew(cache):
    found = trace(config(), TraceSettings(LENGTH))
    next(cache.iterdir()).write_text("{")
    assert trace(config(), TraceSettings(LENGTH)) == found


# ---- any architecture --------------------------------------------------------------------------------------------
DEEPSEEK = {**OLD, "intermediate_size": 96, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
            "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 2,
            "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip


@pytest.mark.parametrize("family, values", [
    ("falcon", OLD), ("starcoder2", SMALL), ("olmo2", SMALL), ("gpt_bigcode", OLD), ("bloom", OLD), ("cohere2", SMALL),
    ("deepseek_v3", DEEPSEEK), ("olmoe", SMALL | EXPERTS),
])  # fmt: skip
def test_an_unknown_architecture_is_described(family, values):
    document = {"model_type": family, **values}
    assert family not in FAMILIES
    shape = described(document, "x")
    with torch.device("meta"):
        assert shape.parameters == sum(p.numel() for p in traced_model.build(document).parameters())
    assert 0 <= shape.final_norm <= 4 * shape.hidden  # nothing is left that is neither embedding, head nor layer
    assert shape.layers == values["num_hidden_layers"] and shape.active <= shape.parameters
    assert estimate(Job(shape, LENGTH)).memory.activations > 0 and lora_parameters(shape, 8) == 8 * shape.adapted
    assert trace(document, TraceSettings(LENGTH)).kept > 0


def test_products_of_latent_attention_are_counted():
    """DeepSeek-V3's: queries, keys and values by way of narrower vectors; its first layers' MLPs are wider than its experts."""
    document = {"model_type": "deepseek_v3", **DEEPSEEK, "intermediate_size": 320}
    shape = described(document, "x")
    with torch.device("meta"):
        layers = traced_model.decoder_layers(traced_model.build(document))[2]
    dense = sum(module.weight.numel() for module in layers[0].modules() if isinstance(module, torch.nn.Linear))
    flops = sum(op.flops for op in layer_ops(Job(shape, LENGTH), False) if op.name != "attention")
    assert flops == 2 * dense and shape.ffn == 320
    assert lora_parameters(replace(shape, adapted=0, moe_layers=0), 1) == 3 * sum(
        module.in_features + module.out_features
        for module in layers[0].modules()
        if isinstance(module, torch.nn.Linear)
    )


def test_experts_of_an_unknown_architecture():
    shape = described({"model_type": "deepseek_v3", **DEEPSEEK}, "x")
    assert (shape.experts, shape.top_k, shape.moe_layers, shape.expert_ffn, shape.shared_ffn) == (8, 2, 2, 64, 64)
    assert (shape.head_dim, shape.kv_heads) == (32, 4)
    assert shape.parameters - shape.active == 2 * 6 * 3 * 64 * 64


@pytest.mark.parametrize(
    "family, values",
    [
        ("llama", SMALL),
        ("qwen3", SMALL),
        ("gpt2", OLD),
        ("qwen3_moe", SMALL | EXPERTS),
        ("gpt_neox", NEOX),
        ("phi3", SMALL | {"pad_token_id": 0}),
    ],
)
def test_measured_and_known_shapes_agree(family, values):
    document = {"model_type": family, **values}
    known, seen = shape_of(document, "x"), shape_from_code.shape_from_model(document)
    for name in ("parameters", "active", "embedding", "head", "kv_heads", "head_dim", "ffn", "expert", "layer_matmul"):
        assert getattr(known, name) == getattr(seen, name), name
    assert known.family.gated == seen.family.gated and known.family.layer_norm == seen.family.layer_norm
    assert lora_parameters(known, 8) == lora_parameters(seen, 8)


def test_a_name_with_three_letters_of_a_state_space_model_is_none():
    assert described({"model_type": "seed_oss", **SMALL}, "x").layers == 5  # its MLP is a SeedOssMLP


def test_norms_without_weights_are_described():
    assert described({"model_type": "diffllama"}, "x").family.norms == 2


@pytest.mark.parametrize(
    "family, says",
    [
        ("mamba", "linear_attention"),
        ("rwkv", "RwkvBlock"),
        ("t5", "has an encoder and a decoder"),
        ("none", "not known"),
    ],
)
def test_what_cannot_be_described_says_so(family, says):
    with pytest.raises(UserError, match=says):
        described({"model_type": family}, "x")
