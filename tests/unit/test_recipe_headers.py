"""A recipe's header says what is so: its commands can be typed, its batch multiplies, its figures are the formulas'."""

import re
import shlex
from itertools import chain, pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from brigade import adapters, flags, models
from brigade.cluster import World, read_hostfile
from brigade.estimate.states import model_states
from brigade.recipe import batch_arithmetic, read_yaml
from brigade.strategy import choose

ROOT = Path(__file__).parents[2]
RECIPES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("recipes/*/*.yaml"))
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def header(recipe):
    """{"Batch": its lines, ...}"""
    comment = re.match(r"(#.*\n)+", Path(recipe).read_text()).group()
    parts = re.split(r"^# (\w+): +", comment, flags=re.MULTILINE)
    return {
        name: [line.strip("# ") for line in text.splitlines()]
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def batch(recipe):
    """(tokens of a pack, or None; sequences of a step; [(micro-batch, accumulation, ranks), ...])"""
    size, *variants = " ".join(header(recipe)["Batch"]).partition(". ")[0].split(" = ")
    counts, *tokens = (int(number.replace(",", "")) for number in re.findall(r"[\d,]+", size))
    return tokens[0] if tokens else None, counts, [tuple(map(int, re.findall(r"\d+", variant))) for variant in variants]


def settings_and_strategy(recipe, ranks):
    settings = flags.load(["--recipe", recipe])
    return settings, choose(settings, World(0, 0, ranks, min(ranks, 8), "here", "torchrun"), env={})


@every_recipe
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
    for line in header(recipe)["Usage"]:
        words = shlex.split(line, comments=True)
        assert all((ROOT / word).exists() for word in words if "/" in word or word.endswith(".py")), line
        if "train.py" in words:
            settings = flags.load(words[words.index("train.py") + 1 :])
        else:
            assert words[:4] == ["python", "-m", "brigade", "launch"]
            settings = flags.load(["--recipe", words[4]])
        assert settings.recipe_path.samefile(recipe)
        if not settings.rehearse:
            assert ranks_of(words) in [ranks for _, _, ranks in batch(recipe)[2]], line


@every_recipe
def test_every_path_is_there(recipe):
    paths = re.findall(r"[\w./-]+/[\w.-]+\.(?:yaml|json)", " ".join(chain(*header(recipe).values())))
    assert paths and all((ROOT / path).is_file() for path in paths)


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "tiny" not in recipe])
def test_the_figures_are_the_formulas(recipe):
    hardware = " ".join(header(recipe)["Hardware"])
    assert "by formula, not measured" in hardware.lower()
    micro, _, ranks = batch(recipe)[2][0]
    settings, strategy = settings_and_strategy(recipe, ranks)
    section, frozen = settings.recipe.model, 0.0
    config = AutoConfig.from_pretrained(str(Path(recipe).parent))
    model = adapters.empty_model(settings, config)
    trained = whole = models.parameter_count(model)
    assert f"{whole / 1e9:.2f} B" in hardware or section.load_in_4bit
    if section.use_peft:
        head = model.get_output_embeddings()
        linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
        frozen = 2 * whole
        if section.load_in_4bit:
            frozen = linear * (4 + 0.127) / 8 + 2 * (whole - linear)
            assert f"{linear / 1e9:.2f} B" in hardware and f"{(whole - linear) / 1e9:.2f} B" in hardware
        trained = models.parameter_count(adapters.wrap(model, settings, ""), trained=True)
        assert f"{trained:,} trained parameters" in hardware
    states = model_states(strategy.kind, trained, ranks, settings.recipe.training.bf16, frozen=frozen)
    assert f"= {states.total / 2**30:.1f} GiB of model states" in hardware
    length = settings.recipe.data.max_length
    logits = f"{14.5 * config.vocab_size * micro * length / 2**30:.1f} GiB for the {f'{micro} x ' if micro > 1 else ''}{length:,}"
    assert f"{config.vocab_size:,} takes 14.5 bytes per token and word = {logits} tokens" in hardware
