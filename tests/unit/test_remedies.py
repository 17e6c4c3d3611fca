"""What would make a run fit, by the planner's count: the least changes of its command, with the memory that they take."""

import re
import shlex
from types import SimpleNamespace

import pytest
import yaml

from brigade.plan.choice.job_of_run import NotCovered
from brigade.plan.runs import remedies
from brigade.train.checkpoint import manifest, resume
from brigade.train.cluster import World
from brigade.train.loop import deepspeed_needs
from brigade.train.model.config_json import read_config
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run.directory import Kernels, Run, open_directory
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
    monkeypatch.setattr(remedies.control_groups, "memory", lambda: 2000 * GIB)

    def ask(ranks, training=None, needed=0.0, argv=(), prepare=lambda run: None, **cluster):
        argv = ["--output_dir", str(tmp_path / "out"), *argv]
        settings = load(*argv, training=HALF | (training or {}), cluster=cluster)
        world = World(0, 0, ranks, min(8, ranks), "node1", "torchrun")
        strategy = choose(settings, world, env={})
        batch = batch_arithmetic(settings.recipe.training, strategy.axes.data(ranks), "a test")
        run = Run(settings, strategy, world, batch, "a test", tmp_path / "out", Kernels(attention="varlen"))
        prepare(run)
        return remedies.what_fits(run, SimpleNamespace(to_dict=lambda: config, _attn_implementation=None), needed)

    return ask


@pytest.fixture
def claimed():
    """claimed(step): what a run has in its directory when it lacks memory: its run.yaml, and a checkpoint of that step if it is
    not 0. Its `run` is the last one's."""

    def at(step):
        def prepare(run):
            document = run.settings.document()
            document["cluster"] |= run.strategy.as_cluster()
            document["run"] = {
                "strategy": {"kind": run.strategy.kind, "name": run.strategy.name},
                "ranks": run.world.size,
            }
            run.directory.mkdir(exist_ok=True)
            (run.directory / "run.yaml").write_text(yaml.safe_dump(document))
            if step:
                checkpoint = run.directory / f"checkpoint-{step}"
                checkpoint.mkdir()
                (checkpoint / "trainer_state.json").write_text("{}")
                manifest.write(checkpoint, {"step": step, "run": document}, {})
            at.run = run

        return prepare

    return at


def started_again(way, run):
    """Give the run's command the words of a way, as train.py reads them. Return the checkpoint that it continues from."""
    words = shlex.split(re.sub(r" \([^()]*\)$", "", way))
    settings = flags.load([*run.settings.argv, *words])
    strategy = choose(settings, run.world, env={})
    opened = open_directory(settings, strategy, run.world)
    again = opened.run(settings, strategy, run.world, run.batch, run.kernels, run.offers)
    return resume.choose(again, "", {})[0]


def changes(found):
    return [re.sub(r" \([\d.]+ GiB\)$", "", way) for way in found.ways]


def gib(found):
    return [float(re.search(r"\(([\d.]+) GiB\)$", way)[1]) for way in found.ways]


def test_activations_that_do_not_fit_get_smaller_or_are_computed_again(ways):
    found = ways(8, ds_config="ds_configs/zero3.json")
    assert not found.fits and re.search(r"the planner counts 1\d\d\.\d of 79\.\d GiB for this run$", found.counted)
    assert len(found.ways) == 3 and all(needs < 79 for needs in gib(found)), found
    assert {"--per_device_train_batch_size 2", "--activation_checkpointing"} & {*changes(found)}, found


def test_states_that_do_not_fit_are_sharded_and_offloaded(ways):
    small = {"per_device_train_batch_size": 1, "activation_checkpointing": True, "tiled_loss": "auto"}
    assert any("--ds_config ds_configs/zero" in way for way in ways(8, small, ds_config="none").ways)
    (way,) = changes(ways(1, small))
    assert way.startswith("--ds_config ds_configs/zero") and "offload" in way
    assert ways(1, small | {"optim": "lamb"}).ways == ()  # which no ZeRO takes


def test_a_way_is_no_larger_than_it_has_to_be(ways):
    """Where the micro-batch is enough, it is not named once more together with something else."""
    found = ways(8, ds_config="ds_configs/zero3.json")
    alone = {way for way in changes(found) if way.count("--") == 1}
    assert not any(way != one and one in way for way in changes(found) for one in alone)
    sizes = re.findall(r"batch_size (\d+)", " ".join(found.ways))
    assert "2" in sizes or "1" in sizes


def test_a_run_that_fits_by_its_count_and_did_not_raises_the_other_counts(ways):
    run = {"per_device_train_batch_size": 2, "activation_checkpointing": True}
    fits = ways(8, run, ds_config="ds_configs/zero3.json")
    assert fits.fits and fits.counted.endswith("GiB for this run, which fits")
    counted = float(re.search(r"counts ([\d.]+)", fits.counted)[1])
    assert all(needs < counted for needs in gib(fits))
    raised = ways(8, run, needed=84 * GIB, ds_config="ds_configs/zero3.json")
    both = dict(zip(changes(fits), gib(fits), strict=True)), dict(zip(changes(raised), gib(raised), strict=True))
    for flag in both[0].keys() & both[1].keys():
        assert both[1][flag] == pytest.approx(both[0][flag] * 84 / counted, rel=0.02)
    assert all(needs < 79.2 for needs in gib(raised)) and raised.ways


def test_what_train_would_refuse_is_not_named(ways, monkeypatch):
    def everything(*_):
        yield "there is no g++", "apt-get install g++"

    small = {"per_device_train_batch_size": 1, "activation_checkpointing": True, "tiled_loss": "auto"}
    assert ways(1, small).ways
    monkeypatch.setattr(remedies.control_groups, "memory", lambda: 64 * GIB)
    assert ways(1, small).ways == (), "the host's memory is too small to offload"
    monkeypatch.setattr(remedies.control_groups, "memory", lambda: 2000 * GIB)
    monkeypatch.setattr(remedies.deepspeed_needs, "lacking", everything)
    assert ways(1, small).ways == ()


@pytest.mark.parametrize("step", [0, 500])
@pytest.mark.parametrize("training, cluster", [
    ({}, {"ds_config": "ds_configs/zero3.json"}), ({}, {"ds_config": "ds_configs/zero1.json"}),
    ({"use_liger_kernel": "auto"}, {"ds_config": "ds_configs/zero3.json"}),
    ({"per_device_train_batch_size": 1, "activation_checkpointing": True}, {"ds_config": "none"}),
])  # fmt: skip
def test_each_way_is_one_that_the_same_command_takes(ways, claimed, training, cluster, step, in_the_repository):
    """The run's directory holds the run as it was: a flag that makes another run of it needs a directory of its own."""
    found = ways(8, training, prepare=claimed(step), **cluster)
    assert found.ways
    for way in found.ways:
        checkpoint = started_again(way, claimed.run)
        anew = not step or "begins anew" in way
        assert anew == (checkpoint is None), (way, checkpoint)
    kept = ["begins anew" not in way for way in found.ways]
    assert kept == sorted(kept, reverse=True), "what keeps what was trained comes first"


def test_the_example_of_the_page_is_what_the_planner_says(ways, claimed, monkeypatch, in_the_repository):
    monkeypatch.setattr(remedies, "find_spec", lambda _: None)  # Liger's kernels, where somebody has them
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    found = ways(8, prepare=claimed(0), ds_config="ds_configs/zero3.json")
    told = ", or with ".join(found.ways).replace(str(claimed.run.directory), "outputs/qwen3-8b")
    assert f"; {found.counted}\n      cure: by its count the same command fits with {told}\n" in page


def test_of_a_named_checkpoint_only_ways_that_continue_from_it_are_named(ways, claimed, in_the_repository):
    argv, step = ["--resume_from_checkpoint", "elsewhere/checkpoint-7"], 500
    found = ways(8, argv=argv, prepare=claimed(step), ds_config="ds_configs/zero3.json")
    assert found.ways and not any("--activation_checkpointing" in way or "liger" in way for way in found.ways)


def test_a_ds_config_replaces_an_accelerate_config_of_the_command(ways, claimed, in_the_repository):
    argv = ["--accelerate_config", "accelerate_configs/ddp_1x2.yaml"]
    small = {"per_device_train_batch_size": 1, "activation_checkpointing": True, "tiled_loss": "auto"}
    for way in ways(2, small, argv=argv, prepare=claimed(0)).ways:
        assert " instead of --accelerate_config (" in way


@pytest.mark.parametrize("training, name, why", [
    ({"bf16": False}, H100, "this run computes in fp32"),
    ({}, "NVIDIA Nothing", "no figures of NVIDIA Nothing"),
])  # fmt: skip
def test_what_it_cannot_tell_it_says(ways, monkeypatch, training, name, why):
    monkeypatch.setattr(remedies, "device_name", lambda: name)
    with pytest.raises(NotCovered, match=why):
        ways(1, training)
