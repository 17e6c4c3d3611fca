"""Keys that a recipe leaves to the memory of GPUs: what is decided, by which count, the same on all ranks and after a resume."""

import json
from dataclasses import replace

import pytest
import yaml
from transformers import AutoConfig

from brigade.offers import offers
from brigade.plan import hardware
from brigade.plan.choice import job_of_recipe
from brigade.plan.choice.job_of_recipe import job_of
from brigade.plan.choice.job_of_run import job_of_run
from brigade.plan.costs.estimate import estimate
from brigade.train.distributed import ranks
from brigade.train.host.cluster import World
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.files import REPOSITORY
from brigade.train.recipe.schema import BY_MEMORY, BY_PROOF, identity
from brigade.train.run.directory import Opened, open_directory
from brigade.train.run.offers import Offers
from brigade.train.step.memory import common, settle_memory
from brigade.train.strategy import Strategy
from testing.gpus import sees

CONFIG = json.loads((REPOSITORY / "recipes/qwen3-8b/config.json").read_text())
WORLD, SINGLE = World(0, 0, 1, 1, "here", "python"), Strategy("single", "single", "")
OPEN = dict.fromkeys(BY_MEMORY, "auto")
LORA = {
    "model": {"model_name_or_path": str(REPOSITORY / "recipes/qwen3-8b"), "use_peft": True},
    "data": {"max_length": 4096},
    "training": {"bf16": True, "per_device_train_batch_size": 1, **OPEN},
}


def of(load, **training):
    return load(**(LORA | {"training": LORA["training"] | training}))


def settled(settings, offered):
    """The settings as a run of one rank decides them."""
    batch, config = batch_arithmetic(settings.recipe.training, 1, ""), AutoConfig.for_model(**CONFIG)
    return settle_memory(settings, SINGLE, batch, WORLD, config, Opened(REPOSITORY), offered)


def test_auto_is_what_takes_the_least_memory_until_it_is_decided(load):
    settings = of(load)
    assert settings.by_memory == tuple(BY_MEMORY) and settings.recipe.training.activation_checkpointing is True
    decided = settings.deciding({"activation_checkpointing": False}, "why")
    assert decided.by_memory == () and decided.decided == dict.fromkeys(BY_MEMORY, "why")
    document = yaml.safe_load(yaml.safe_dump(decided.document()))["training"]
    assert document["activation_checkpointing"] is False and document["tiled_loss"] is True
    assert of(load, activation_checkpointing=False).by_memory == ("tiled_loss",)


def test_the_identity_is_what_was_decided(load):
    named = {again: of(load, activation_checkpointing=again) for again in (True, False)}
    for again, settings in named.items():
        open_ = of(load).deciding({"activation_checkpointing": again}, "")
        assert identity(open_.before_proofs, ["ddp"]) == identity(settings.before_proofs, ["ddp"])


@pytest.mark.parametrize("key", [*BY_MEMORY, *BY_PROOF])
def test_another_word_is_a_mistake_that_names_auto(load, key, mistake):
    assert "'auto'" in mistake(load, f"--{key}", "automatic")


def each_way(recipe, batch, device):
    """{(activation_checkpointing, tiled_loss, micro-batch): its estimate} of all that may be decided."""
    found = {}
    for again in (False, True):
        for tiles in (None, True):
            changed = {"activation_checkpointing": again, "tiled_loss": tiles}
            training = recipe.training.model_copy(update=changed)
            for tried in job_of_recipe.automatic(batch, SINGLE):
                if recipe.training.per_device_train_batch_size in ("auto", tried.micro):
                    job = job_of_run(
                        recipe.model_copy(update={"training": training}), SINGLE, tried, 1, 1, CONFIG, device.kind
                    )
                    found[again, tiles, tried.micro] = estimate(job, device)
    return found


@pytest.mark.parametrize("gib, again", [(79.1, False), (44.0, True), (30.0, True), (10.0, True)])
@pytest.mark.parametrize("micro", [1, 2, "auto"])
def test_the_fastest_is_taken_whose_upper_end_fits(load, gib, again, micro):
    settings, device = of(load, per_device_train_batch_size=micro), hardware.gpu("H100 80GB")
    device = replace(device, memory_gib=gib)
    batch = batch_arithmetic(settings.recipe.training, 1, "")
    values, why = job_of_recipe.fastest_fit(
        settings.recipe, settings.by_memory, SINGLE, batch, job_of_recipe.counting(SINGLE, 1, 1, CONFIG, device, "")
    )
    every = each_way(settings.recipe, batch, device)
    fitting = {way: result for way, result in every.items() if result.fits and result.spare_gib >= 0.05 * gib}
    if not fitting:
        assert values == BY_MEMORY and why.startswith("the least; the planner counts ") and gib == 10.0
        return
    soonest = min(result.time.total for result in fitting.values())
    mine = [result.time.total for way, result in fitting.items() if way[:2] == tuple(values.values())]
    assert min(mine) <= job_of_recipe.NEAR * soonest and why.startswith("the planner's: ")
    if micro != 2:
        assert values["activation_checkpointing"] is again


def test_a_recipe_is_planned_as_its_run_decides(load, monkeypatch):
    sees(monkeypatch, "NVIDIA H100 80GB HBM3", hardware.gpu("H100 80GB").memory_gib)
    settings = of(load)
    run = settled(settings, offers(WORLD))
    planned = job_of(replace(settings, recipe_path=REPOSITORY / "recipes/qwen3-8b/lora.yaml"))
    assert (planned.checkpointing != "none") == bool(run.recipe.training.activation_checkpointing)
    assert (planned.loss == "tiled") == bool(run.recipe.training.tiled_loss)


@pytest.mark.parametrize("device, training, why", [
    (("cpu", 0.0), {}, "there is no GPU"), (("NVIDIA H200", 139.8), {"bf16": False}, "computes in fp32"),
])  # fmt: skip
def test_what_the_planner_cannot_tell_takes_the_least_memory_and_says_so(load, monkeypatch, device, training, why):
    sees(monkeypatch, *device)
    for offered, words in ((offers(WORLD), why), (Offers(), "no planner is here")):
        run = settled(of(load, **training), offered)
        assert {key: getattr(run.recipe.training, key) for key in BY_MEMORY} == BY_MEMORY
        assert all(words in said for said in run.decided.values())


KEYS = tuple(BY_MEMORY)
FAST = {"activation_checkpointing": False, "tiled_loss": True}
PLAIN = {"activation_checkpointing": True, "tiled_loss": None}


@pytest.mark.parametrize("answers, values, why", [
    ([(FAST, "large"), (FAST, "large")], FAST, "large"),
    ([(FAST, "large"), (BY_MEMORY, "small")], BY_MEMORY, "small"),
    ([(FAST, "large"), ({}, "unknown")], BY_MEMORY, "unknown"),
    ([(FAST, "one"), (PLAIN, "other")], BY_MEMORY, "GPUs differ: one"),
])  # fmt: skip
def test_all_ranks_take_what_the_least_of_them_has_memory_for(answers, values, why):
    assert common(KEYS, answers) == (values, why)


def test_a_rank_that_does_not_see_the_directory_takes_what_the_first_one_began_with(load, monkeypatch):
    first = (FAST, FAST, "as this run began")
    monkeypatch.setattr(ranks, "gather", lambda mine: [first, mine] if isinstance(mine[0], dict) else [mine])
    run = settled(of(load), Offers())
    assert run.recipe.training.activation_checkpointing is False
    assert set(run.decided.values()) == {"as this run began"}


@pytest.mark.parametrize("written, begins", [(False, False), (True, True), ("auto", True)])
def test_a_run_that_is_there_keeps_its_decision(load, tmp_path, mistake, written, begins):
    """A version that decided nothing wrote `auto` for tiles, and always took them."""
    settings = replace(of(load), output_dir=tmp_path)
    document = settings.deciding({"activation_checkpointing": begins}, "").document()
    document["training"]["tiled_loss"] = "auto" if written == "auto" else None
    document["run"] = {"strategy": {"kind": "single"}, "identity": "0123"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    opened = open_directory(settings, SINGLE, WORLD)
    tiles = True if written == "auto" else None
    assert opened.began == {"activation_checkpointing": begins, "tiled_loss": tiles} and opened.identity == "0123"
    assert open_directory(replace(settings, fresh=True), SINGLE, WORLD).began == {}
    other = replace(of(load, activation_checkpointing=not begins), output_dir=tmp_path)
    assert "it holds another run: training.activation_checkpointing" in mistake(open_directory, other, SINGLE, WORLD)
