"""Adapters by patterns of names: which layers have one, its rank and its scale; and LoRA+'s groups of the optimizer."""

import json
from pathlib import Path

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from brigade.train.engines import parameter_groups
from brigade.train.model import adapters
from brigade.train.model.location import load_config
from brigade.train.recipe import flags

TINY = json.loads((Path(__file__).resolve().parents[2] / "recipes/tiny/config.json").read_text())


@pytest.fixture
def settings_of(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return lambda *words: flags.load(["--model_name_or_path", str(tmp_path), "--use_peft", *words])


def wrapped(settings):
    model = adapters.empty_model(settings, load_config(settings))
    adapters.check_targets(settings, load_config(settings))
    return adapters.wrap(model, settings, "")


@pytest.mark.parametrize("target, layers", [
    (r"layers\.[01]\.self_attn\..*", {(layer, f"{name}_proj") for layer in "01" for name in "qkvo"}),
    (r"[qk]_proj", {(layer, name) for layer in "0123" for name in ("q_proj", "k_proj")}),
    (r"layers\.3\.mlp\.(up|down)_proj,v_proj", {("3", "up_proj"), ("3", "down_proj"), *((layer, "v_proj") for layer in "0123")}),
])  # fmt: skip
def test_a_regular_expression_is_for_the_end_of_a_name(target, layers, settings_of):
    model = wrapped(settings_of("--lora_target_modules", target))
    named = {name.partition(".layers.")[2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {(name[0], name.split(".lora_")[0].rpartition(".")[2]) for name in named} == layers


def test_ranks_and_scales_by_patterns_are_pefts(settings_of):
    patterns = [r"--rank_pattern={q_proj: 2, 'layers\.3\..*': 32}", "--alpha_pattern={down_proj: 4.5}"]
    settings = settings_of("--lora_r=8", "--lora_alpha=16", *patterns)
    model = wrapped(settings)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A") and module.r}
    for name, layer in layers.items():
        rank = 2 if name.endswith("q_proj") else 32 if ".layers.3." in name else 8
        alpha = 4.5 if name.endswith("down_proj") else 16
        assert (layer.r["default"], layer.scaling["default"]) == (rank, pytest.approx(alpha / rank)), name
    assert len(layers) == 28
    assert adapters.describe(settings.recipe.model, model)["method"].startswith(
        r"LoRA r 8, 2 on q_proj, 32 on layers\.3\..* on all linear layers"
    )


@pytest.mark.parametrize("words, said", [
    (["--lora_target_modules", r"layers\.9\..*"], ["fits no linear layer", "q_proj (4)"]),
    (["--lora_target_modules", r"layers\.(0"], ["is none (missing )"]),
    (["--rank_pattern", "{query: 4}"], ["rank_pattern", "'query' fits no layer with an adapter", "q_proj (4)"]),
    (["--rank_pattern", "{q_proj: 4}", "--lora_target_modules", "v_proj"], ["'q_proj' fits no layer", "v_proj (4)"]),
    (["--rank_pattern", "{'.*_proj': 4, q_proj: 8}"], ["'q_proj'", "no pattern before it", "put it first"]),
    (["--alpha_pattern", "{lm_head: 8}"], ["alpha_pattern", "'lm_head'"]),
    (["--rank_pattern", "{'(': 8}"], ["rank_pattern", "'(' is none"]),
    (["--rank_pattern", "{q_proj: 0}"], ["rank_pattern"]),
])  # fmt: skip
def test_a_pattern_that_decides_nothing_is_an_error(words, said, settings_of, mistake):
    message = mistake(lambda: wrapped(settings_of(*words)))
    assert all(word in message for word in said), message


@pytest.mark.parametrize("words", [[], ["--use_dora"]])
def test_the_groups_of_lora_plus_have_pefts_rates(words, settings_of):
    settings = settings_of(*words, "--lora_modules_to_save", "norm", "--use_peft", "true", "--from_scratch")
    model = wrapped(settings)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = {name for name in trained if "modules_to_save" in name}  # whose vectors PEFT counts to the matrices B
    theirs = create_loraplus_optimizer(model, torch.optim.SGD, lr=0.5, loraplus_lr_ratio=16)
    rates = {id(parameter): group["lr"] for group in theirs.param_groups for parameter in group["params"]}
    plain = list(trained)
    groups = [{"params": [trained[name] for name in part]} for part in (plain[:9], plain[9:])]
    ours = torch.optim.SGD(groups, lr=0.5)
    parameter_groups.divide_lora_plus(ours, model, 16)
    names = {id(parameter): name for name, parameter in trained.items()}
    stepped = [(names[id(parameter)], group["lr"]) for group in ours.param_groups for parameter in group["params"]]
    assert len(ours.param_groups) == 4 and len(stepped) == len(trained)
    assert {name: rate for name, rate in stepped if name not in whole} == {
        name: rates[id(trained[name])] for name in plain if name not in whole
    }
    assert {rate for name, rate in stepped if name in whole} == {0.5}
    assert [name for name, _ in stepped] == parameter_groups.order_lora_plus(plain)
