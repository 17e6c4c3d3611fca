"""What would make a run fit, by the planner's count: the least changes of its command, with the memory that they take."""

import re
from types import SimpleNamespace

import pytest

from brigade.plan.choice.job_of_run import NotCovered
from brigade.plan.runs import remedies
from brigade.train.cluster import World
from brigade.train.loop import deepspeed_needs
from brigade.train.model.config_json import read_config
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run.directory import Kernels, Run
from brigade.train.strategy import choose

H100, GIB = "NVIDIA H100 80GB HBM3", 2**30
HALF = {"bf16": True, "global_batch_size": 64, "per_device_train_batch_size": 4}


@pytest.fixture
def ways(load, tmp_path, monkeypatch):
    """ways(ranks, training, needed, ...): what would make a run of Qwen3-8B fit; the model itself is not asked."""
    config = read_config(REPOSITORY / "recipes/qwen3-8b/config.json")
    monkeypatch.setattr(remedies, "device_name", lambda: H100)
    monkeypatch.setattr(remedies.tiled, "check", lambda *_: None)
    monkeypatch.setattr(remedies.checks, "check", lambda *_: None)
    monkeypatch.setattr(deepspeed_needs, "lacking", lambda *_: iter(()))
    monkeypatch.setattr(remedies.os, "sysconf", lambda name: {"SC_PAGE_SIZE": GIB, "SC_PHYS_PAGES": 2000}[name])

    def ask(ranks, training=None, needed=0.0, **cluster):
        settings = load(training=HALF | (training or {}), cluster=cluster)
        world = World(0, 0, ranks, min(8, ranks), "node1", "torchrun")
        strategy = choose(settings, world, env={})
        batch = batch_arithmetic(settings.recipe.training, strategy.axes.data(ranks), "a test")
        run = Run(settings, strategy, world, batch, "a test", tmp_path, Kernels(attention="varlen"))
        return remedies.what_fits(run, SimpleNamespace(to_dict=lambda: config, _attn_implementation=None), needed)

    return ask


def flags(found):
    return [re.sub(r" \([\d.]+ GiB\)$", "", way) for way in found.ways]


def gib(found):
    return [float(re.search(r"\(([\d.]+) GiB\)$", way)[1]) for way in found.ways]


def test_activations_that_do_not_fit_get_smaller_or_are_computed_again(ways):
    found = ways(8, ds_config="ds_configs/zero3.json")
    assert not found.fits and re.search(r"the planner counts 1\d\d\.\d of 79\.\d GiB for this run$", found.counted)
    assert len(found.ways) == 3 and all(needs < 79 for needs in gib(found)), found
    assert {"--per_device_train_batch_size 2", "--activation_checkpointing"} & {*flags(found)}, found


def test_states_that_do_not_fit_are_sharded_and_offloaded(ways):
    small = {"per_device_train_batch_size": 1, "activation_checkpointing": True, "tiled_loss": "auto"}
    assert any("--ds_config ds_configs/zero" in way for way in ways(8, small, ds_config="none").ways)
    (way,) = flags(ways(1, small))
    assert way.startswith("--ds_config ds_configs/zero") and "offload" in way
    assert ways(1, small | {"optim": "lamb"}).ways == ()  # which no ZeRO takes


def test_a_way_is_no_larger_than_it_has_to_be(ways):
    """Where the micro-batch is enough, it is not named once more together with something else."""
    found = ways(8, ds_config="ds_configs/zero3.json")
    alone = {way for way in flags(found) if way.count("--") == 1}
    assert not any(way != one and one in way for way in flags(found) for one in alone)
    sizes = re.findall(r"batch_size (\d+)", " ".join(found.ways))
    assert "2" in sizes or "1" in sizes


def test_a_run_that_fits_by_its_count_and_did_not_raises_the_other_counts(ways):
    run = {"per_device_train_batch_size": 2, "activation_checkpointing": True}
    fits = ways(8, run, ds_config="ds_configs/zero3.json")
    assert fits.fits and fits.counted.endswith("GiB for this run, which fits")
    counted = float(re.search(r"counts ([\d.]+)", fits.counted)[1])
    assert all(needs < counted for needs in gib(fits))
    raised = ways(8, run, needed=84 * GIB, ds_config="ds_configs/zero3.json")
    both = dict(zip(flags(fits), gib(fits), strict=True)), dict(zip(flags(raised), gib(raised), strict=True))
    for flag in both[0].keys() & both[1].keys():
        assert both[1][flag] == pytest.approx(both[0][flag] * 84 / counted, rel=0.02)
    assert all(needs < 79.2 for needs in gib(raised)) and raised.ways


def test_what_train_would_refuse_is_not_named(ways, monkeypatch):
    def everything(*_):
        yield "there is no g++", "apt-get install g++"

    small = {"per_device_train_batch_size": 1, "activation_checkpointing": True, "tiled_loss": "auto"}
    assert ways(1, small).ways
    monkeypatch.setattr(remedies.os, "sysconf", lambda name: {"SC_PAGE_SIZE": GIB, "SC_PHYS_PAGES": 64}[name])
    assert ways(1, small).ways == (), "the host's memory is too small to offload"
    monkeypatch.setattr(remedies.os, "sysconf", lambda name: {"SC_PAGE_SIZE": GIB, "SC_PHYS_PAGES": 2000}[name])
    monkeypatch.setattr(remedies.deepspeed_needs, "lacking", everything)
    assert ways(1, small).ways == ()


@pytest.mark.parametrize("training, name, why", [
    ({"bf16": False}, H100, "this run computes in fp32"),
    ({}, "NVIDIA Nothing", "no figures of NVIDIA Nothing"),
])  # fmt: skip
def test_what_it_cannot_tell_it_says(ways, monkeypatch, training, name, why):
    monkeypatch.setattr(remedies, "device_name", lambda: name)
    with pytest.raises(NotCovered, match=why):
        ways(1, training)
