"""What would make a run fit, by the planner's count: the least changes of its command, with the memory that they take."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from transformers import AutoConfig

from brigade.plan import hardware
from brigade.plan.choice.job_of_run import NotCovered
from brigade.plan.runs import prediction, remedies
from brigade.train.checkpoint import manifest, resume
from brigade.train.engines import deepspeed_needs
from brigade.train.host.cluster import World
from brigade.train.model.config_json import read_config
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run.directory import Kernels, Run, open_directory
from brigade.train.step import preflight
from brigade.train.strategy import choose
from testing.remedies import NAMED, in_the_command

H100, GIB = "NVIDIA H100 80GB HBM3", 2**30
SMALL = {"per_device_train_batch_size": 1, "activation_checkpointing": True, "tiled_loss": True}
HALF = {"bf16": True, "global_batch_size": 64, "per_device_train_batch_size": 4}


@pytest.fixture
def run_of(load, tmp_path, monkeypatch):
    """run_of(ranks, argv, ...): a run on so many H100, eight on a host."""
    monkeypatch.setattr(remedies, "gpu_here", lambda: hardware.gpu_of_device(H100))

    def make(ranks, argv=(), training=None, **cluster):
        argv = ["--output_dir", str(tmp_path / "out"), *argv]
        settings = load(*argv, training=HALF | (training or {}), cluster=cluster)
        world = World(0, 0, ranks, min(8, ranks), "node1", "torchrun")
        strategy = choose(settings, world, env={})
        batch = batch_arithmetic(settings.recipe.training, strategy.axes.data(ranks), "a test")
        return Run(settings, strategy, world, batch, "a test", tmp_path / "out", Kernels(attention="varlen"))

    return make


@pytest.fixture
def ways(run_of, monkeypatch):
    """ways(ranks, training, needed, ...): what would make a run of Qwen3-8B fit; the model itself is not asked."""
    config = read_config(REPOSITORY / "recipes/qwen3-8b/config.json")
    monkeypatch.setattr(remedies.preflight, "check_strategy", lambda *_: None)
    monkeypatch.setattr(deepspeed_needs, "lacking", lambda *_: iter(()))
    monkeypatch.setattr(remedies.control_groups, "memory", lambda: 2000 * GIB)

    def ask(ranks, training=None, needed=0.0, argv=(), prepare=lambda run: None, **cluster):
        run = run_of(ranks, argv, training, **cluster)
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
            strategy = {"kind": run.strategy.kind, "name": run.strategy.name}
            document["run"] = {"strategy": strategy, "ranks": run.world.size}
            run.directory.mkdir(exist_ok=True)
            (run.directory / "run.yaml").write_text(yaml.safe_dump(document))
            if step:
                checkpoint = run.directory / f"checkpoint-{step}"
                checkpoint.mkdir(exist_ok=True)
                (checkpoint / "trainer_state.json").write_text("{}")
                manifest.write(checkpoint, {"step": step, "run": document}, {})
            at.run = run

        return prepare

    return at


def started_again(way, run):
    """Give the run's command the words of a way, as train.py reads them. Return the checkpoint that it continues from."""
    settings = flags.load(in_the_command(way, list(run.settings.argv)))
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
    assert any("--ds_config ds_configs/zero" in way for way in ways(8, SMALL, ds_config="none").ways)
    (way,) = changes(ways(1, SMALL))
    assert way.startswith("--ds_config ds_configs/zero") and "offload" in way
    assert ways(1, SMALL | {"optim": "lamb"}).ways == ()  # which no ZeRO takes


def test_nothing_is_offloaded_to_a_host_whose_memory_is_the_gpus(ways, monkeypatch):
    device = replace(hardware.gpu("H100 80GB"), memory_gib=100.0, integrated=True)
    monkeypatch.setattr(remedies, "gpu_here", lambda: device)
    found = ways(1, SMALL)
    assert found.ways == () and " of 100.0 GiB for this run" in found.counted


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

    assert ways(1, SMALL).ways
    monkeypatch.setattr(remedies.control_groups, "memory", lambda: 64 * GIB)
    assert ways(1, SMALL).ways == (), "the host's memory is too small to offload"
    monkeypatch.setattr(remedies.control_groups, "memory", lambda: 2000 * GIB)
    monkeypatch.setattr(deepspeed_needs, "lacking", everything)
    (fsdp2,) = ways(1, SMALL).ways
    assert "fsdp2_offload" in fsdp2, "its optimizer is torch's, which nobody has to compile"


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


@pytest.mark.parametrize("key, file, other", [
    ("accelerate_config", "accelerate_configs/ddp_1x2.yaml", "ds_config"),
    ("ds_config", "none", "accelerate_config"),
])  # fmt: skip
def test_a_strategy_of_the_other_kind_replaces_the_one_of_the_command(
    ways, claimed, key, file, other, in_the_repository
):
    small = SMALL | ({"optim": "lamb"} if key == "ds_config" else {})  # which no ZeRO takes
    found = ways(2, small, argv=[f"--{key}", file], prepare=claimed(0)).ways
    assert any(way.startswith(f"--{other} ") for way in found)
    for way in found:
        assert way.startswith(f"--{other} ") == (f" instead of --{key} (" in way)
        started_again(way, claimed.run)


RUNS = {  # which together are told of every file that any run is: ranks, model, training, flags
    "DDP": (4, "qwen3-8b", {}, ["--ds_config", "none"]),
    "two hosts": (16, "qwen3-8b", {}, []),
    "experts": (4, "qwen3-30b-a3b", {}, []),
    "packing under ZeRO-1": (4, "qwen3-8b", {}, ["--packing", "--ds_config", "ds_configs/zero1.json"]),
    "no ZeRO": (2, "qwen3-8b", {"optim": "lamb"}, ["--accelerate_config", "accelerate_configs/ddp_1x2.yaml"]),
}


@pytest.fixture
def told(run_of, claimed, monkeypatch, in_the_repository):
    """told(name of RUNS): the run, its model's config, and each single change that it may be told of, in words."""
    monkeypatch.setattr(remedies, "find_spec", lambda _: True)  # Liger's kernels, where nobody has them

    def ask(name):
        ranks, model, training, argv = RUNS[name]
        argv = [*argv, "--model_name_or_path", f"recipes/{model}", "--from_scratch"]
        run, config = run_of(ranks, argv, training), AutoConfig.from_pretrained(REPOSITORY / "recipes" / model)
        claimed(500)(run)
        own = remedies._estimated(run, config, hardware.gpu_of_device(H100))
        changes = [each for of_kind in remedies._changes(run, config, own).values() for each in of_kind]
        named = [each for each in changes if remedies._following(run, config, own, each)]
        tried = (remedies._way(run, config, own, (each,)) for each in named)
        return run, config, [remedies._in_words(run, way, 1.0) for way in tried if way]

    return ask


def test_each_file_and_flag_that_may_be_named_is_taken_by_the_command(told):
    """By all that train.py checks before it builds a model; the steps are tests/ranks/test_remedies_run.py's."""
    files = set[str]()
    for name in RUNS:
        run, config, every = told(name)
        assert len(every) >= 6
        for way in every:
            started_again(way, run)
            settings = flags.load(in_the_command(way, list(run.settings.argv)))
            strategy = choose(settings, run.world, env={})
            batch = batch_arithmetic(settings.recipe.training, strategy.axes.data(run.world.size), "a test")
            preflight.check_host(settings, strategy, run.world)
            preflight.check_run(replace(run, settings=settings, strategy=strategy, batch=batch), config)
            files |= {word for word in way.split() if "_configs/" in word}
    assert files == {*NAMED}, "each file is named for some run, or testing/remedies.py says why not"


def test_a_checkpoint_that_the_engine_would_not_read_is_not_promised(told):
    """From ZeRO-1 to tensor groups under ZeRO-1 it is the same run, and DeepSpeed takes states of the same division alone."""
    (way,) = (way for way in told("packing under ZeRO-1")[2] if "ds_configs/zero1_tp2.json" in way)
    assert "--output_dir" in way and "begins anew" in way


FSDP2 = {"accelerate_config": "accelerate_configs/fsdp2_2x8.yaml"}
ZERO3 = {"ds_config": "ds_configs/zero3.json"}


@pytest.mark.parametrize("gpu_gib, host_gib, ranks, cluster, words, refused, warned", [
    (24, 900, 16, FSDP2, ["--use_peft", "--load_in_4bit"],
     r"whole model in 4 bits before FSDP2 cuts its shards, 3\d\.\d GiB .* has 24\.0", None),
    (80, 900, 16, FSDP2, ["--use_peft", "--load_in_4bit"], None, None),
    (24, 900, 16, FSDP2, ["--use_peft"], None, None),
    (80, 900, 16, FSDP2, [], None, None),
    # An end of the model may be in fp32 in its files, and shards need not be copied by all ranks at once.
    (80, 2, 16, FSDP2, [], None, r"host node1: its processes may own .* up to 3\.9 GiB .* has 2\.0"),
    (80, 100, 8, ZERO3, [], None, r"up to 131\.4 GiB .* has 100\.0"),
    (80, 10, 8, ZERO3, [], r"own copies of weights while the model loads, 16\.4 GiB .* has 10\.0", None),
])  # fmt: skip
def test_what_cannot_be_loaded_is_refused_before_it_is_loaded(
    gpu_gib, host_gib, ranks, cluster, words, refused, warned, run_of, monkeypatch, capsys
):
    """70B; what is not sure to fail is said, and goes on."""
    config = read_config(REPOSITORY / "recipes/llama-3.1-70b/config.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, gpu_gib * GIB))
    monkeypatch.setattr(prediction.control_groups, "memory", lambda: host_gib * GIB)
    run = run_of(ranks, words, **cluster)
    fails = prediction.fails_to_load(run, SimpleNamespace(to_dict=lambda: config, _attn_implementation=None))
    assert bool(fails) == bool(refused) and re.search(refused or "", fails[0] if fails else "")
    said = capsys.readouterr().err
    assert bool(said) == bool(warned) and re.search(warned or "", said)


@pytest.mark.parametrize("error, says", [
    (NotCovered("of the reference the formulas know no sizes"), "of the reference the formulas know no sizes"),
    (ZeroDivisionError("division by zero"), "the formulas fail on it, ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_a_planner_that_cannot_count_what_loads_says_so(error, says, run_of, monkeypatch, capsys):
    def planned_job(*_):
        raise error

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(prediction, "planned_job", planned_job)
    assert prediction.fails_to_load(run_of(8), None) is None
    assert f"memory while the model loads was not checked: {says}\n" == capsys.readouterr().out
