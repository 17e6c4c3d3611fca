"""Architectures without formulas are described by their own code, and what cannot be described says so; and what
docs/evidence/architectures.md says of a run."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig

from benchmarks import architectures, architectures_tables
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.job import Job
from brigade.plan.costs.layer import layer_ops
from brigade.plan.shape import from_code as shape_from_code
from brigade.plan.shape.built import build, decoder_layers
from brigade.plan.shape.find import described
from brigade.plan.shape.from_config import shape_of, windows
from brigade.plan.shape.lora import lora_parameters
from brigade.plan.shape.model_shape import FAMILIES
from testing.small_configs import EXPERTS, LENGTH, NEOX, OLD, SMALL
from testing.trace_settings import TraceSettings
from testing.traced_model import measure, parameters

pytestmark = pytest.mark.usefixtures("digests")


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
    assert shape.parameters == parameters(document)
    assert 0 <= shape.final_norm <= 4 * shape.hidden  # nothing is left that is neither embedding, head nor layer
    assert shape.layers == values["num_hidden_layers"] and shape.active <= shape.parameters
    assert estimate(Job(shape, LENGTH)).memory.activations > 0 and lora_parameters(shape, 8) == 8 * shape.adapted
    assert measure(document, TraceSettings(LENGTH)).kept > 0


def test_products_of_latent_attention_are_counted():
    """DeepSeek-V3's: queries, keys and values by way of narrower vectors; its first layers' MLPs are wider than its experts."""
    document = {"model_type": "deepseek_v3", **DEEPSEEK, "intermediate_size": 320}
    shape = described(document, "x")
    with torch.device("meta"):
        layers = decoder_layers(build(document))[2]
    dense = sum(module.weight.numel() for module in layers[0].modules() if isinstance(module, torch.nn.Linear))
    flops = sum(op.flops for op in layer_ops(Job(shape, LENGTH), False) if op.name != "attention")
    assert flops == 2 * dense and shape.ffn == 320
    linears = [module for module in layers[0].modules() if isinstance(module, torch.nn.Linear)]
    widths = sum(module.in_features + module.out_features for module in linears)
    assert lora_parameters(replace(shape, adapted=0, moe_layers=0), 1) == 3 * widths


def test_experts_of_an_unknown_architecture():
    shape = described({"model_type": "deepseek_v3", **DEEPSEEK}, "x")
    assert (shape.experts, shape.top_k, shape.moe_layers, shape.expert_ffn, shape.shared_ffn) == (8, 2, 2, 64, 64)
    assert (shape.head_dim, shape.kv_heads) == (32, 4)
    assert shape.parameters - shape.active == 2 * 6 * 3 * 64 * 64


@pytest.mark.parametrize("family, values", [
    ("llama", SMALL),
    ("qwen3", SMALL),
    ("gpt2", OLD),
    ("qwen3_moe", SMALL | EXPERTS),
    ("gpt_neox", NEOX),
    ("phi3", SMALL | {"pad_token_id": 0}),
])  # fmt: skip
def test_measured_and_known_shapes_agree(family, values):
    document = {"model_type": family, **values}
    known, seen = shape_of(document, "x"), shape_from_code.shape_from_model(document)
    for name in ("parameters", "active", "embedding", "head", "kv_heads", "head_dim", "ffn", "expert", "layer_matmul"):
        assert getattr(known, name) == getattr(seen, name), name
    assert known.family.gated == seen.family.gated and known.family.layer_norm == seen.family.layer_norm
    assert lora_parameters(known, 8) == lora_parameters(seen, 8)


@pytest.mark.parametrize("kind", [*FAMILIES])
def test_a_window_is_in_the_layers_in_which_transformers_has_it(kind):
    document = {"model_type": kind, "num_hidden_layers": 8, "sliding_window": 16}
    known = AutoConfig.for_model(**document)
    layers = (getattr(known, "layer_types", None) or ["sliding_attention"] * 8).count("sliding_attention")
    assert windows(document, 8, family=FAMILIES[kind])[1] == (layers if known.sliding_window else 0)


def test_a_window_that_nothing_places_is_refused(mistake):
    document = {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}
    assert "layer_types" in mistake(windows, document, 8, family=FAMILIES["qwen2"])
    listed = document | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 5}
    assert windows(listed, 8, family=FAMILIES["qwen2"]) == (16, 5)


def test_a_name_with_three_letters_of_a_state_space_model_is_none():
    assert described({"model_type": "seed_oss", **SMALL}, "x").layers == 5  # its MLP is a SeedOssMLP


def test_norms_without_weights_are_described():
    assert described({"model_type": "diffllama"}, "x").family.norms == 2


@pytest.mark.parametrize("family, says", [
    ("mamba", "linear_attention"),
    ("rwkv", "RwkvBlock"),
    ("t5", "has an encoder and a decoder"),
    ("none", "not known"),
])  # fmt: skip
def test_what_cannot_be_described_says_so(family, says, mistake):
    assert says in mistake(described, {"model_type": family}, "x")


# ---- architectures ---------------------------------------------------------------------------------------------------
LOG = [{"loss": 2.0, "grad_norm": 1.0}, {"eval_loss": 3.0}]


def of(loss):
    return {"log": [{"loss": loss, "grad_norm": 1.0}, {"eval_loss": 3.0}], "said": ""}


@pytest.mark.parametrize("loss, rounding, expected", [
    (2.0 * (1 + 9e-6), 0, "equal"),
    (2.0 * (1 + 2e-5), 0, "differs"),
    (2.0 * (1 + 2e-5), 1e-5, "equal"),  # as far as it is from itself in smaller micro-batches
    (2.0 * (1 + 2e-4), 1e-1, "differs"),  # which excuses no more than 1e-4
])  # fmt: skip
def test_a_difference_is_held_to_what_rounding_moves(loss, rounding, expected):
    row = architectures.verdict(of(loss), of(2.0), rounding)
    assert row["verdict"] == expected and row["difference"] == pytest.approx(abs(loss - 2) / 2)


@pytest.mark.parametrize("result, verdict, why", [
    ({"refused": "error in here\n  it has no heads\n  cure: none"}, "refused", "it has no heads"),
    ({"failed": "Traceback\nRuntimeError: a size\nends here"}, "fails", "RuntimeError: a size"),
    ({"failed": "error on vm, rank 0 of 1: a flag\n  a mean\n  cure: another model"}, "refused", "a mean"),
    ({"log": LOG, "said": "samples   padded: nothing tells it\n"}, "trains", "padded: nothing tells it"),
])  # fmt: skip
def test_a_run_without_anything_to_compare_it_with(result, verdict, why):
    assert architectures.verdict(result, None) == {"verdict": verdict, "difference": None, "why": why}


def row(verdict, why="", difference=None):
    return {"verdict": verdict, "why": why, "difference": difference, "machine": "here", "versions": "torch 2"}


TRIED = {
    "ab_text": (row("builds"), row("trains", "end to end: and so on"), row("differs", difference=3e-4)),
    "cd": (row("builds"), row("trains", "padded: nothing tells it"), row("refused", "heads of cd and of CdConfig")),
    "ef": (row("builds"), row("trains"), row("refused", "heads of /tmp/x/ef and of EfConfig")),
    "gg": (row("builds"), row("refused", "it is an encoder"), row("refused", "it is an encoder")),
    "gh": (row("fails", "an encoder and a decoder"),),
}
WAYS = ("builds", "one process", "DDP")
ROWS = {(name, way): each for name, found in TRIED.items() for way, each in zip(WAYS, found, strict=False)}


def test_the_page_has_a_line_for_each_type_that_can_be_built_and_each_reason_once():
    tables = architectures_tables.tables(ROWS, ["one process", "DDP"])
    assert tables["architectures"].splitlines()[2:] == [
        "| `ab_text` | end to end | **3e-04** |",
        "| `cd` | padded | no |",
        "| `ef` | yes | no |",
    ]
    assert tables["architectures-count"].splitlines()[2:] == [
        "| builds | 4 | 0 | 0 | 1 |",
        "| one process | 3 | 0 | 1 | 0 |",
        "| DDP | 0 | 1 | 3 | 0 |",
    ]
    reasons = tables["architectures-why"].splitlines()[2:]
    assert "| DDP | heads of it and of it | `cd`, `ef` |" in reasons and len(reasons) == 4
    assert tables["architectures-measured"] == "5 types of config, measured on here; torch 2."
