"""Which models tensor parallelism divides, and how; no ranks are needed for that."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from brigade.train.engines.fsdp2_engine import TensorHSDP
from brigade.train.engines.parallel import tensor, tensor_plan, tensor_trial
from brigade.train.model import parts
from brigade.train.model.tiny import shrink
from brigade.train.recipe.images import LANGUAGE
from brigade.train.recipe.value_types import Recomputation
from brigade.train.strategy import Strategy, axis_rules, refusal
from brigade.train.strategy.axes import Axes
from testing.vision_models import write_vision_model


def config(name, **changes):
    return CONFIG_MAPPING[name].from_dict(shrink(CONFIG_MAPPING[name]().to_dict()) | changes)


def model(name, **changes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(name, num_key_value_heads=2, **changes))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi", "gemma3_text", "gemma4_text"])
def test_the_recipes_dense_models_divide(name):
    assert tensor.check(config(name, num_key_value_heads=2), 2) is None


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3", "gemma4", "smolvlm", "internvl"])
def test_only_the_language_model_is_divided_beside_a_tower(kind, tmp_path):
    """Also where its decoder is no language model by itself, and where the tower has a plan of its own."""
    path = write_vision_model(tmp_path, kind, divisor=4)
    assert tensor.check(AutoConfig.from_pretrained(path), 2) is None
    whole = AutoModelForImageTextToText.from_pretrained(path)
    language = {*parts.parts_of(whole)[LANGUAGE]}
    plan = tensor_plan.plan_of(whole, frozenset())
    assert {f"{name}.weight" for name in plan} <= language and len(plan) >= 14
    assert (kind == "gemma4") == bool(parts.why_undivided(whole.config))


@pytest.mark.parametrize("changes, size, said", [
    ({"num_key_value_heads": 1}, 2, "num_key_value_heads 1"),
    ({"num_key_value_heads": 2}, 4, "num_key_value_heads 2"),
    ({"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}, 4, "num_attention_heads 6"),
    ({"intermediate_size": 129}, 2, "intermediate_size 129"),
    ({"vocab_size": 4097}, 2, "vocab_size 4097"),
])  # fmt: skip
def test_what_does_not_divide_is_told(changes, size, said):
    problem, cure = tensor.check(config("llama", **changes), size)
    assert said in problem and f"{size} ranks" in problem and cure


@pytest.mark.parametrize("change, said", [
    ({"num_key_value_heads": 1}, "num_key_value_heads 1"), ({"head_dim": 12}, "key_value_heads x head_dim 24"),
])  # fmt: skip
def test_sizes_of_single_layers_are_looked_at(change, said):
    of_layers = {"num_key_value_heads": 2, "per_layer_config": {1: {"head_dim": 32} | change}}
    problem, _ = tensor.check(config("gemma4_text", **of_layers), 2, shards=8)
    assert said in problem


def test_a_width_for_each_layer_is_looked_at():
    problem, _ = tensor.check(config("gemma3n_text", num_key_value_heads=2, intermediate_size=[128] * 5 + [129]), 2)
    assert "intermediate_size 1 " in problem
    problem, _ = tensor.check(config("gemma3n_text", num_key_value_heads=2), 2)
    assert "not to be trusted" in problem


def test_the_cure_names_a_size_that_fits():
    _, cure = tensor.check(config("llama", num_key_value_heads=2), 4)
    assert cure == "set it to 2"


def test_tied_embeddings_need_no_vocabulary_that_divides():
    assert tensor.check(config("llama", num_key_value_heads=2, vocab_size=4097, tie_word_embeddings=True), 2) is None


@pytest.mark.parametrize("name, said", [("gpt2", "no tensor-parallel plan"), ("qwen3_moe", "moe")])
def test_models_without_a_plan_or_with_another_kind_of_it(name, said):
    problem, _ = tensor.check(CONFIG_MAPPING[name](), 2)
    assert said in problem


def test_a_plan_that_divides_the_embedding_alone_is_none(monkeypatch):
    """As many have, Qwen3-VL's and gpt-oss's among them: each rank would compute every layer whole."""
    monkeypatch.setattr(CONFIG_MAPPING["gpt2"], "base_model_tp_plan", {"wte": "embedding_rowwise"})
    assert "no tensor-parallel plan" in tensor.check(CONFIG_MAPPING["gpt2"](), 2)[0]


def test_a_mixture_of_experts_is_told_that_both_axes_together_divide_it():
    _, cure = tensor.check(config("qwen3_moe", num_key_value_heads=2), 2)
    assert "parallelism_config_ep_size" in cure


def test_a_plan_names_every_module_that_is_divided():
    plan = tensor_plan.plan_of(model("qwen3"), ())
    assert plan["model.layers.1.self_attn.o_proj"] == "rowwise"
    assert plan["model.layers.0.self_attn.q_norm"] == tensor_plan.NORMS
    assert plan["lm_head"] == "colwise_gather_output" and "model.norm" not in plan


def test_tied_embeddings_stay_whole():
    plan = tensor_plan.plan_of(model("qwen3", tie_word_embeddings=True), ())
    assert "lm_head" not in plan and "model.embed_tokens" not in plan


def test_of_an_adapter_the_divided_side_is_divided():
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model("llama"), LoraConfig(target_modules="all-linear"))
    plan = tensor_plan.plan_of(adapted, ())
    layer = "base_model.model.model.layers.0.self_attn"
    assert plan[f"{layer}.q_proj.base_layer"] == plan[f"{layer}.q_proj.lora_B.default"] == "colwise"
    assert plan[f"{layer}.o_proj.base_layer"] == plan[f"{layer}.o_proj.lora_A.default"] == "rowwise"
    assert f"{layer}.q_proj.lora_A.default" not in plan and f"{layer}.o_proj.lora_B.default" not in plan
    assert all(adapted.get_submodule(name) is not None for name in plan)


@pytest.mark.parametrize("facts", [
    {"kind": "zero3", "method": "qlora"},
    {"kind": "zero1", "method": "qdora"},
    {"kind": "fsdp2", "method": "full", "torch_compile": True},
    {"kind": "zero1", "method": "full", "tiled_loss": True},
])  # fmt: skip
def test_what_does_not_run_is_refused(facts):
    assert refusal(tensor=True, **facts)


@pytest.mark.parametrize("facts", [
    *({"kind": kind, "method": "full"} for kind in ("zero1", "zero2", "zero3", "fsdp2", "hsdp")),
    *({"kind": kind, "method": "lora"} for kind in ("zero1", "zero2", "zero3")),
    *({"kind": "fsdp2", "method": method} for method in ("lora", "dora", "qlora", "qdora")),
    *({"kind": "zero1", "stages": True, "method": method} for method in ("lora", "dora", "qlora", "qdora")),
], ids=str)  # fmt: skip
def test_what_runs_is_not(facts):
    assert refusal(tensor=True, **facts) is None


def test_no_group_divides_a_block_of_4_bit_weights():
    wide = config("llama", num_attention_heads=4, head_dim=32, intermediate_size=192)
    assert tensor.check(wide, 2) is None
    problem, cure = tensor.check(wide, 2, in_4bit=True)
    assert "intermediate_size 192" in problem and "96 for each" in problem and "load_in_4bit" in cure
    wide = config("llama", num_attention_heads=4, head_dim=32, intermediate_size=256)
    assert tensor.check(wide, 2, in_4bit=True) is None


@pytest.mark.parametrize("sequence", [1, 2])
def test_ddp_between_tensor_groups_shards_nothing(sequence, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # it is set, and taken back after the test
    said = Strategy("ddp", "ddp", "flag", axes=Axes(tensor=2, sequence=sequence))
    training = SimpleNamespace(activation_checkpointing=False, recomputation=Recomputation())
    settings = SimpleNamespace(recipe=SimpleNamespace(training=training))
    engine = TensorHSDP(SimpleNamespace(world=SimpleNamespace(size=8), strategy=said, settings=settings))
    mesh = engine.arguments()["parallelism_config"]
    assert (mesh.dp_replicate_size, mesh.dp_shard_size, mesh.tp_size) == (4, 1, 2)


NORMS_OF_PHI = [f"layers.*.self_attn.{of}_layernorm.{key}" for of in "kq" for key in ("bias", "weight")]


@pytest.mark.parametrize("name, changes, summed, why", [
    ("llama", {}, (), ""),
    ("qwen3", {}, (), ""),
    ("glm4", {}, (), ""),
    ("falcon_h1", {}, (), ""),  # whose config holds an infinity, which JSON has not
    ("qwen3_moe", {}, (), ""),
    ("apertus", {}, ("layers.*.mlp.act_fn.alpha_n", "layers.*.mlp.act_fn.alpha_p"), ""),
    ("phi", {"qk_layernorm": True}, NORMS_OF_PHI, ""),
    ("cohere", {"use_qk_norm": True}, (), "must match the size"),
    ("doge", {}, (), "must match the size"),
    ("gemma3n_text", {}, (), "then has a loss of"),  # its sparsity is measured over all neurons of a layer
])  # fmt: skip
def test_parameters_outside_a_plan_that_lie_on_divided_activations_are_found(name, changes, summed, why):
    found, said = tensor_trial.summed(config(name, **changes))
    assert sorted(found) == list(summed) and why in said and bool(why) == bool(said)


def test_a_plan_that_leaves_a_gradient_in_parts_is_refused(monkeypatch):
    """A gate of all heads, computed on every rank from whole states, whose gradient nobody sums up on its way back."""
    plan = CONFIG_MAPPING["llama"].base_model_tp_plan | {"layers.*.mlp.up_proj": "rowwise_split_input"}
    monkeypatch.setattr(CONFIG_MAPPING["llama"], "base_model_tp_plan", plan)
    problem, cure = tensor.check(config("llama", num_key_value_heads=2), 2)
    assert "is not to be trusted" in problem and "ZeRO-3" in cure


@pytest.mark.parametrize("name", ["apertus", "phi"])
def test_what_is_summed_has_its_name_in_a_model_that_adapters_wrap(name):
    from peft import LoraConfig, get_peft_model

    whole = model(name, **({"qk_layernorm": True} if name == "phi" else {}))
    last = "act_fn" if name == "apertus" else "q_layernorm"
    adapted = get_peft_model(whole, LoraConfig(target_modules="all-linear", modules_to_save=[last]))
    plan = tensor_plan.plan_of(adapted, tensor_trial.summed(whole.config)[0])
    parameters = {key for key, _ in adapted.named_parameters() if f".{last}." in key}
    assert len(parameters) == 8 and all(plan[key] == tensor_plan.NORMS for key in parameters)


@pytest.mark.parametrize("sizes, tensor_size, shards, fits", [
    ({"q": 4096}, 8, 3, "DDP, ZeRO"),  # Qwen3-8B on three hosts of eight
    ({"q": 4096}, 4, 6, "HSDP (dp_replicate_size 3, dp_shard_size 2)"),
    ({"q": 4096}, 1, 3, ""),
    ({"q": 4096, "ffn": 12288}, 8, 4, ""),
    ({"q": 24}, 8, 3, ""),
])  # fmt: skip
def test_a_divided_matrix_is_sharded_evenly_or_refused(sizes, tensor_size, shards, fits):
    mistake = axis_rules.uneven_parts(sizes, tensor_size, shards)
    assert bool(mistake) == bool(fits) and (not mistake or fits in mistake[1])


@pytest.mark.parametrize("strategy, world, shards", [
    (Strategy("fsdp2", "", "", axes=Axes(tensor=2)), 6, 3),
    (Strategy("hsdp", "", "", replicate=3, shard=2, axes=Axes(tensor=2)), 12, 2),
    (Strategy("ddp", "", "", axes=Axes(tensor=2)), 6, 1),
    (Strategy("zero1", "", "", ds_config={}, axes=Axes(tensor=2)), 6, 1),
])  # fmt: skip
def test_over_how_many_ranks_fsdp2_shards(strategy, world, shards):
    assert strategy.shards(world) == shards


@pytest.mark.slow
@pytest.mark.matrix  # half a minute, and it changes only with Transformers
def test_every_architecture_with_a_plan_of_dense_layers_is_exact_or_known():
    refused, sums = set(), set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.suppress(Exception):  # some have no defaults, or tiny sizes that do not go together
            tiny = config(name)
            plan = getattr(tiny.get_text_config(), "base_model_tp_plan", None)
            if not plan or set(plan.values()) - {*tensor_plan.WEIGHTS, tensor_plan.NORMS}:
                continue
            summed, why = tensor_trial.summed(tiny)
            refused |= {name} if why and "cannot be tried" not in why else set()
            sums |= {name} if summed else set()
    assert sums == {"apertus", "apertus1p5_text"} and refused == {"doge", "gemma3n", "gemma3n_text"}
