"""A recipe's header and `plan RECIPE` say what is so: commands can be typed, batches multiply, figures are the planner's."""

import argparse
import re
import shlex
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from brigade.__main__ import main
from brigade.plan import command as plan_command
from brigade.plan.choice.job_of_recipe import load_plan, published_models
from brigade.plan.choice.search import candidates, chosen
from brigade.plan.hardware import calibration
from brigade.plan.output.objective import WORDS
from brigade.plan.output.write import recipe_plans, refresh
from brigade.plan.shape.find import named_config, named_shape
from brigade.plan.shape.tower import described_with_tower, towers
from brigade.train.host.cluster import World
from brigade.train.model import adapters, parts
from brigade.train.model.sizes import parameter_count, untaught
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.files import read_yaml
from brigade.train.recipe.hostfile import read_hostfile
from brigade.train.recipe.method import method_of
from brigade.train.strategy import choose
from brigade.train.strategy.axes import NAMES
from brigade.train.strategy.state_bytes import model_states
from brigade.train.upstream.experts import taken_for_experts
from testing import marks
from testing.shipped import shipped

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("in_the_repository")
RECIPES = [str(path.relative_to(ROOT)) for path in shipped("recipes/*/*.yaml")]
# They name no GPU, and `plan` has no part in them.
ANYWHERE = {"recipes/tiny", "recipes/tiny-vision", "recipes/smollm2-135m", "recipes/smollm2-81m"}
PLANNED = [recipe for recipe in RECIPES if str(Path(recipe).parent) not in ANYWHERE]
FOLDERS = {str(path.parent.relative_to(ROOT)) for path in shipped("recipes/*/config.json")} - ANYWHERE
every_planned = pytest.mark.parametrize("recipe", PLANNED)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def header(recipe):
    """The comment's lines."""
    return re.match(r"(#.*\n)+", Path(recipe).read_text()).group().splitlines()


@cache
def shown(recipe):
    """{"batch": [its lines], ...} of `plan RECIPE`"""
    with redirect_stdout(StringIO()) as out:
        assert main(["plan", recipe]) == 0
    first, *lines = out.getvalue().splitlines()
    found, label = {"first": first}, ""
    for line in lines:
        label = line[:9].strip() or label
        found.setdefault(label, []).append(line[9:])
    return found


def batch(recipe):
    """(tokens of a pack, or None; sequences of a step; [(micro-batch, accumulation, ranks), ...])"""
    size, *variants = shown(recipe)["batch"][0].split(" = ")
    counts, *tokens = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", size))
    return tokens[0] if tokens else None, counts, [tuple(map(int, re.findall(r"\d+", variant))) for variant in variants]


def settings_and_strategy(recipe, ranks):
    settings = flags.load(["--recipe", recipe])
    return settings, choose(settings, World(0, 0, ranks, min(ranks, 8), "here", "torchrun"), env={})


@every_planned
def test_the_batch_multiplies(recipe):
    tokens, size, variants = batch(recipe)
    settings = flags.load(["--recipe", recipe])
    data, training = settings.recipe.data, settings.recipe.training
    assert size == training.global_batch_size and [prod(variant) for variant in variants] == [size] * len(variants)
    micro, accumulation, ranks = variants[0]
    found = batch_arithmetic(training, ranks, "")
    assert (found.micro, found.accumulation) == (micro, accumulation)
    assert data.packing is (tokens is not None) and tokens in (None, data.max_length)


def ranks_of(words):
    """How many ranks a command starts."""
    given = dict(pairwise(words))
    if "--hostfile" in given:
        return sum(read_hostfile(Path(given["--hostfile"])).values())
    if "--config_file" in given:
        return read_yaml(Path(given["--config_file"]))["num_processes"]
    return int(given.get("--num_gpus") or given.get("--nproc_per_node") or 1)


@every_recipe
def test_the_commands_can_be_typed(recipe):
    lines = [line for line in header(recipe) if re.search("train.py|launch", line)]
    commands = [line.removeprefix("# Start:").strip("# ") for line in lines]
    typed = commands if recipe not in PLANNED else shown(recipe)["start"]
    assert typed[: len(commands)] == commands
    for line in typed:
        words = shlex.split(line, comments=True)
        assert all((ROOT / word).exists() for word in words if "/" in word or word.endswith(".py")), line
        if "train.py" in words:
            settings = flags.load(words[words.index("train.py") + 1 :])
        else:
            assert words[:4] == ["python", "-m", "brigade", "launch"]
            settings = flags.load(["--recipe", words[4]])
        assert settings.recipe_path.samefile(recipe)
        training = settings.recipe.training
        if not settings.rehearse:
            shares = settings_and_strategy(recipe, ranks_of(words))[1].axes.data(ranks_of(words))
            assert training.global_batch_size % (shares * training.per_device_train_batch_size) == 0
            assert recipe not in PLANNED or shares in [ranks for _, _, ranks in batch(recipe)[2]], line


@every_recipe
def test_a_header_is_short_and_its_paths_are_there(recipe):
    lines = header(recipe)
    paths = re.findall(r"[\w./-]+/[\w.-]+\.(?:yaml|json)", " ".join(lines))
    assert len(lines) <= 8 and paths and all((ROOT / path).is_file() for path in paths)


@every_planned
def test_it_fits_with_a_margin_that_plan_states(recipe):
    result = load_plan(Path(recipe)).estimate
    assert result.spare_gib >= 0.05 * result.gpu.memory_gib
    share = f"{result.spare_gib / result.gpu.memory_gib:.0%}"
    assert f"{result.spare_gib:.1f} GiB ({share}) to spare" in shown(recipe)["first"]
    memory = f"{result.device_gib:.1f} of {result.gpu.memory_gib:.1f} GiB on each GPU"
    expected = f"{memory}, {result.time.total:.2f} s per step"
    assert expected in " ".join(header(recipe)) and "estimates, not measured" in " ".join(header(recipe))


@pytest.mark.parametrize(
    "recipe", marks.cases(*PLANNED[::6], slow=[each for each in PLANNED if each not in PLANNED[::6]])
)
def test_the_states_are_those_of_the_model_that_transformers_builds(recipe):
    """Counted on the model itself, on the meta device; the planner counts by formula."""
    states = shown(recipe)["model"][0]
    ranks = load_plan(Path(recipe)).estimate.job.gpus
    settings, strategy = settings_and_strategy(recipe, ranks)
    section = settings.recipe.model
    model = adapters.empty_model(settings, AutoConfig.from_pretrained(str(Path(recipe).parent)))
    whole = parameter_count(model)
    parts.freeze(model, settings)
    outside = whole - parameter_count(model, trained=True)
    trained, frozen = whole - outside, outside * (4 if strategy.kind in ("fsdp2", "ddp", "single") else 2)
    assert f"{whole:,} parameters" in states
    if section.use_peft:
        head = model.get_output_embeddings()
        taken = taken_for_experts(model, adapters.linear_layers(model))
        named = [
            (name.rpartition(".")[2], m)
            for name, m in model.named_modules()
            if isinstance(m, torch.nn.Linear) and m is not head
        ]
        beside = {id(m) for part in untaught(model).values() for m in part.modules()}
        layers = [m for name, m in named if name not in taken and id(m) not in beside]
        linear = sum(m.weight.numel() for m in layers)
        frozen = linear * (4 + 0.127) / 8 + 2 * (whole - linear) if section.load_in_4bit else 2 * whole
        trained = section.lora_r * sum(m.in_features + m.out_features for m in layers)
        trained += len(section.lora_modules_to_save) * head.weight.numel()
        if whole < 1e10:  # PEFT says the same, but takes half a minute for the largest
            assert parameter_count(adapters.wrap(model, settings, ""), trained=True) == trained
        assert f"{trained:,} trained beside them" in states
    stated = float(re.search(r"([\d.]+) GiB of model states", states)[1])
    if (
        axes := strategy.axes
    ).stages > 1:  # weights and gradients in fp32; of the first stage, which has the embedding too
        experts = sum(n.numel() for name, n in model.named_parameters() if ".experts." in name and axes.experts > 1)
        of_stage = ranks // axes.stages if strategy.kind == "zero1" else 1
        each, of_expert = (8 + 8 / max(1, of_stage // size) for size in (axes.tensor * axes.sequence, axes.experts))
        held = each * (trained - experts) / axes.model + of_expert * experts / axes.experts / axes.stages
        mean = held / 2**30
        assert 0.7 * mean < stated < 1.8 * mean
        return
    held = model_states(
        strategy.kind, trained, ranks, settings.recipe.training.bf16, frozen=frozen, adapters=section.use_peft
    )
    assert stated == pytest.approx(held.total / 2**30, rel=0.005, abs=0.06)


DIVIDED = [recipe for recipe in PLANNED if load_plan(ROOT / recipe).strategy.axes]
OFFLOADED = [
    recipe for recipe in DIVIDED if load_plan(ROOT / recipe).estimate.job.inputs_on_host
]  # which `plan` does not search


@pytest.mark.parametrize("recipe", [recipe for recipe in DIVIDED if recipe not in OFFLOADED])
def test_axes_are_what_plan_chooses_for_that_cluster(recipe, capsys, monkeypatch):
    """By the command that anybody types for that model, those rows and that cluster."""
    monkeypatch.setenv(calibration.VARIABLE, "")
    plan = load_plan(Path(recipe))
    named, training = plan.settings.recipe.cluster, plan.settings.recipe.training
    words = [Path(recipe).parent.name, "--hostfile", named.hostfile, "--gpu", named.gpu]
    words += ["--network", named.network or "", "--max_length", plan.settings.recipe.data.max_length]
    words += ["--global_batch_size", training.global_batch_size, "--method", method_of(plan.settings.recipe.model)]
    parser = argparse.ArgumentParser()
    plan_command.add_arguments(parser)
    winner = chosen(candidates(*plan_command.asked(parser.parse_args(list(map(str, words))))))
    assert winner.name == plan.strategy_name
    assert winner.estimate.job == replace(plan.estimate.job, shape=winner.estimate.job.shape)
    assert winner.seconds == pytest.approx(plan.estimate.time.total)


def test_every_axis_has_a_recipe():
    used = [load_plan(Path(recipe)).strategy.axes.used for recipe in DIVIDED]
    assert {axis for axes in used for axis in axes} == set(NAMES)
    in_three = [recipe for recipe, axes in zip(DIVIDED, used, strict=True) if {"tensor", "stages"} <= axes.keys()]
    assert len(in_three) >= 4 and all(load_plan(Path(recipe)).estimate.job.data > 1 for recipe in in_three)


@pytest.mark.parametrize("folder", ["llama-3.1-8b", "mistral-7b-v0.3"])
def test_lora_of_a_base_model_fits_one_card_of_24_gb(folder):
    """At the upper end of its interval too, with adapters alone and a template of tokens that the base has learned."""
    plan = load_plan(Path(f"recipes/{folder}/lora.yaml"))
    result, recipe = plan.estimate, plan.settings.recipe
    assert result.gpu.memory_gib < 24 and result.job.gpus == 1 and result.fits and not result.job.offload
    assert recipe.model.lora_modules_to_save == [] and recipe.data.chat_template == "tulu"


def test_headers_and_table_are_the_planners():
    """`python -m brigade plan --headers` writes them."""
    assert refresh(check=True, recipes=shipped("recipes/*/*.yaml")) == []


def test_recipes_cover_sizes_methods_and_clusters():
    planned = recipe_plans(shipped("recipes/*/*.yaml"))
    assert len({(p.estimate.job.shape.name, p.estimate.job.method, p.cluster) for p in planned}) >= 24
    assert {p.estimate.job.gpus for p in planned} >= {1, 8, 16, 32, 128}
    sizes = [p.estimate.job.shape.parameters for p in planned]
    assert min(sizes) < 0.6e9 and max(sizes) > 400e9


@pytest.mark.parametrize("folder", sorted({str(Path(recipe).parent) for recipe in PLANNED} | FOLDERS))
def test_parameters_are_the_published_number(folder):
    source = published_models()[Path(folder).name]
    config, place, name = named_config(folder)
    images = "text" in towers().get(config["model_type"], {})  # Transformers has no causal language model of that kind
    counted = (described_with_tower(config, place, name)[0] if images else named_shape(folder)).parameters
    assert counted == pytest.approx(source.parameters, rel=1e-3) or (
        source.beside and 0.9 * source.parameters < counted < source.parameters
    )
    assert source.config in WORDS["config"] and source.published in ("keras", "kvfit", "gptqmodel", "hub", "notes")
    assert source.revision


def test_a_hybrids_recipe_says_with_which_packages_it_is_counted():
    said = shown("recipes/qwen3.5-9b/lora.yaml")["model"]
    assert "with its vision tower" in said[0]
    assert any("24 layers" in line and "flash-linear-attention and causal-conv1d" in line for line in said)


def test_a_config_of_unclear_origin_says_so():
    assert "compare it with the one on the model's page" in shown("recipes/phi-4/lora.yaml")["model"][1]
    assert "from one public copy; no hash" in shown("recipes/llama-3.1-405b/full.yaml")["model"][1]


def test_a_rate_of_adapters_is_as_many_times_that_of_all_weights_as_its_comment_says():
    says = re.compile(r"^  learning_rate: (\S+) .*# (\d+) times full.yaml's", re.M)
    found = [(path, match) for path in map(Path, RECIPES) if (match := says.search(path.read_text()))]
    assert len(found) > 20
    for path, match in found:
        full = read_yaml(path.with_name("full.yaml"))["training"]["learning_rate"]
        assert float(match[1]) == pytest.approx(int(match[2]) * full), path
