"""Hybrids: layers with a state beside attention, layers of one part each, and what is counted of them, against the trace."""

from contextlib import nullcontext

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model

from brigade.plan.choice import job_of_run
from brigade.plan.choice.search import undivided
from brigade.plan.costs.activations import activation_bytes, logit_bytes
from brigade.plan.costs.job import Job
from brigade.plan.costs.layer import layer_ops
from brigade.plan.costs.step_time import layer_seconds
from brigade.plan.hardware import gpu
from brigade.plan.runs import calibrate
from brigade.plan.shape.built import build, decoder_layers
from brigade.plan.shape.find import described
from brigade.plan.shape.lora import all_linears, lora_parameters
from brigade.train.upstream.experts import beside_mamba
from testing import marks, traced_model
from testing.small_configs import EXPERTS, LENGTH, config
from testing.trace_settings import TraceSettings, settings_of
from testing.traced_model import measure, parameters

pytestmark = pytest.mark.usefixtures("digests")


# Hybrids: three layers of four without attention, as Qwen3.5 has them, and LFM2's convolutions.
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
STATE = {"linear_num_value_heads": 8, "linear_num_key_heads": 4}
STATE |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
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


@pytest.mark.parametrize("checkpointing", marks.cases("none", slow=["full"]))
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_hybrids_agree(family, checkpointing):
    """The rule and the convolution stand in both for what their kernels keep; a layer by itself takes the most of its kind."""
    document = config(family, **{"num_hidden_layers": 4} | HYBRIDS[family])
    shape = described(document, "x")
    assert shape.mixer and shape.mixer.layers == 3 and shape.attending == 0.25
    job = Job(shape, LENGTH, checkpointing=checkpointing)
    found = measure(document, settings_of(job))
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
        model = build(document)
    layers = decoder_layers(model)[2]
    linears = [module for module in layers.modules() if isinstance(module, torch.nn.Linear)]
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    own = ("attention", "rule", "scan")  # products that read no weight
    flops = sum(op.share * op.flops for op in layer_ops(Job(shape, LENGTH), False) if op.name not in own)
    assert 4 * flops == 2 * sum(module.weight.numel() for module in linears)
    widths = [count * (inner + outer) for count, inner, outer in all_linears(shape)]
    assert sum(widths) == shape.adapted == lora_parameters(shape, 1)
    named = [module for name, module in layers.named_modules() if name.endswith(".q_proj")]
    assert lora_parameters(shape, 1, "q") == sum(module.in_features + module.out_features for module in named)


@pytest.mark.parametrize("targets", marks.cases("qkvom", slow=["q"]))
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


@pytest.mark.parametrize("checkpointing", marks.cases("full", slow=["none"]))
def test_kimi_linears_layers_agree(checkpointing):
    """Delta rules with a gate for each channel, latent attention, and mixtures behind one dense layer, which is wider."""
    document = config(
        "kimi_linear", **HYBRIDS["kimi_linear"] | MIXTURES | {"num_hidden_layers": 4, "mlp_layer_types": None}
    )
    shape = described(document, "x")
    assert shape.parameters == parameters(document)
    sizes = (shape.ffn, shape.expert_ffn, shape.shared_ffn, shape.moe_layers, shape.top_k)
    assert sizes == (352, 64, 64, 3, 2) and shape.family.fp32_router
    job = Job(shape, LENGTH, checkpointing=checkpointing)
    found = measure(document, settings_of(job))
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
    assert shape.parameters == parameters(document)
    assert (shape.attending, shape.mixing, shape.moe_layers, shape.expert_ffn) == (0.25, 0.75, 4, 352)
    job = Job(shape, LENGTH)
    found = measure(document, settings_of(job))
    assert len(found.layers) == 3  # without experts, with them, and attention, which has experts here
    layers = sum(count * each for count, each in zip((4, 2, 2), found.layers, strict=True))
    assert 8 * activation_bytes(job)[0] == pytest.approx(layers, rel=0.03)


@pytest.mark.parametrize("engine, checkpointing", marks.cases(
    ("ddp", "none"), ("fsdp2", "full"), slow=[("ddp", "full"), ("fsdp2", "none")]
))  # fmt: skip
def test_layers_with_a_state_space_beside_attention_agree(engine, checkpointing):
    """Falcon-H1's: each of the two reads a copy of its own, and under autocast multipliers in fp32 widen the space's input."""
    document = config("falcon_h1", **SPACE, mamba_d_ssm=256)
    shape = described(document, "x")
    assert shape.parameters == parameters(document)
    assert shape.mixer and shape.mixer.beside and (shape.attending, shape.mixing) == (1, 1)
    assert shape.attended(1000) == 1000
    job = Job(shape, LENGTH, engine=engine, checkpointing=checkpointing, loss="released")
    found = measure(document, settings_of(job))
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


@pytest.mark.parametrize("engine, checkpointing", marks.cases(
    ("fsdp2", "full"), ("ddp", "none"), slow=[("fsdp2", "none")]
))  # fmt: skip
@pytest.mark.parametrize("name", PATTERNS)
def test_layers_of_one_part_each_agree(name, engine, checkpointing):
    """Nemotron-H's: each part in the layers that are of it, with one norm, an MLP without a gate, and a router in fp32."""
    types = PATTERNS[name]
    document = {"model_type": "nemotron_h", **APART, "layers_block_type": types}
    shape = described(document, "x")
    assert shape.parameters == parameters(document)
    assert shape.mixer and shape.apart and not shape.family.gated and shape.family.norms == 1 and shape.kv_heads == 2
    counts = [types.count(one) for one in ("full_attention", "linear_attention", "mlp", "moe")]
    assert [round(share * len(types)) for share in (shape.attending, shape.mixing)] == counts[:2]
    assert [shape.mlp_layers, shape.moe_layers] == counts[2:]
    if engine == "ddp" and shape.moe_layers:
        return  # the experts' product takes bf16 alone
    job = Job(shape, LENGTH, engine=engine, checkpointing=checkpointing, loss="released")
    found = measure(document, settings_of(job))
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
    assert (shape.layers, shape.moe_layers, shape.experts) == (52, 23, 128)
    assert (shape.expert_ffn, shape.shared_ffn) == (1856, 3712)


def test_experts_that_read_a_latent_vector_are_refused(mistake):
    document = {"model_type": "nemotron_h", **APART, "layers_block_type": PATTERNS["moe"], "moe_latent_size": 32}
    assert "its read 32 numbers" in mistake(described, document, "x")


def test_a_hybrid_attends_in_some_layers_only(mistake):
    shape = described(config("qwen3_5_text", **HYBRIDS["qwen3_5_text"] | {"num_hidden_layers": 4}), "x")
    assert shape.attended(1000) == 250 and Job(shape, 1000).scored == 1000
    for axis in ("tensor", "context"):
        assert "gated delta rule" in mistake(Job, shape, 1000, **{axis: 2})
    assert undivided(shape, "tensor") and undivided(shape, "sequence") and not undivided(shape, "stages")


def test_a_hybrids_job_is_kept_with_its_run_and_needs_the_kernels_it_is_counted_with(monkeypatch):
    """run.yaml has it as plain values; and a host without the packages has no figure, instead of a wrong one."""
    shape = described(config("qwen3_5_text", **HYBRIDS["qwen3_5_text"] | {"num_hidden_layers": 4}), "x")
    job = Job(shape, 1000)
    kept = yaml.safe_load(yaml.safe_dump(calibrate.record(job)))
    assert calibrate.job_of_record(kept, "run.yaml") == job
    with pytest.raises(job_of_run.NotCovered, match="flash-linear-attention and causal-conv1d, which this host lacks"):
        job_of_run.check_kernels(shape)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    job_of_run.check_kernels(shape)


@pytest.mark.parametrize("family", ["kimi_linear", "jamba", "falcon_h1", "nemotron_h"])
def test_jobs_of_other_hybrids_are_kept_too(family):
    parts = APART | {"layers_block_type": PATTERNS["both"]} if family == "nemotron_h" else SPACE | {"mamba_d_ssm": 256}
    job = Job(described(config(family, **{"num_hidden_layers": 4} | HYBRIDS.get(family, parts)), "x"), 1000)
    assert calibrate.job_of_record(yaml.safe_load(yaml.safe_dump(calibrate.record(job))), "run.yaml") == job


def test_torchs_own_recurrence_keeps_more_than_its_kernel(monkeypatch):
    """What a run without flash-linear-attention takes, of which the plan warns."""
    document = config("qwen3_5_text", **HYBRIDS["qwen3_5_text"] | {"num_hidden_layers": 4})
    with_kernels = measure(document, TraceSettings(LENGTH)).layers[0]
    monkeypatch.setattr(traced_model, "mixers", lambda model: nullcontext())
    assert measure(document, TraceSettings(LENGTH)).layers[0] > 2 * with_kernels
