"""Where a strategy comes from, what it goes with, and that nothing of it gets lost on the way to run.yaml."""

import json
import re
from pathlib import Path

import pytest
import yaml

from brigade.train.recipe.schema import Recipe, identity
from brigade.train.step.environment import clear_accelerate_variables
from brigade.train.strategy import choose
from testing.strategies import ACCELERATE_CONFIGS, DS_CONFIGS, FSDP2, changed, hsdp, world

# ---- who wins ----------------------------------------------------------------------------------------------------
LAUNCHED_ZERO2 = {
    "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero2.json",
}  # fmt: skip


@pytest.mark.parametrize("size, kind", [(1, "single"), (2, "ddp")])
def test_without_a_word_it_is_the_world_size(pick, size, kind):
    chosen = pick(size=size)
    assert (chosen.kind, chosen.name, chosen.ds_config, chosen.fsdp) == (kind, kind, None, {})
    assert not chosen.is_deepspeed and not chosen.is_fsdp


def test_flag_over_environment_over_recipe(load):
    in_recipe = {"ds_config": "ds_configs/zero1.json"}

    def kind(*argv, env):
        settings = load(*argv, cluster=in_recipe)
        strategy = choose(settings, world(), env)
        return strategy.kind, [*settings.overridden, *strategy.overridden]

    assert kind(env={}) == ("zero1", [])
    said = "accelerate launch says zero2 (the recipe says ds_configs/zero1.json)"
    assert kind(env=LAUNCHED_ZERO2) == ("zero2", [said])
    overridden = ["--ds_config ds_configs/zero3.json (the recipe says ds_configs/zero1.json)"]
    assert kind("--ds_config", "ds_configs/zero3.json", env={}) == ("zero3", overridden)
    overridden.append("--ds_config ds_configs/zero3.json (accelerate launch says zero2)")
    assert kind("--ds_config", "ds_configs/zero3.json", env=LAUNCHED_ZERO2) == ("zero3", overridden)


LAUNCHED_FSDP = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


@pytest.mark.parametrize("flag, env, said", [
    ("--ds_config none", LAUNCHED_ZERO2, "zero2"), ("--ds_config none", LAUNCHED_FSDP | {"FSDP_VERSION": "2"}, "fsdp2"),
    ("--ds_config ds_configs/zero2.json", LAUNCHED_FSDP | {"FSDP_VERSION": "2"}, "fsdp2"),
    ("--ds_config ds_configs/zero2.json", LAUNCHED_FSDP | {"FSDP_VERSION": "1"}, "FSDP"),  # would be refused by itself
    ("--accelerate_config accelerate_configs/fsdp2_1x2.yaml", LAUNCHED_ZERO2, "zero2"),
    ("--ds_config ds_configs/zero2.json", LAUNCHED_ZERO2 | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "gone.json"}, "DEEPSPEED"),
    ("--ds_config ds_configs/zero2.json", LAUNCHED_ZERO2, ""),  # the same one
    ("--ds_config ds_configs/zero3.json", {"ACCELERATE_MIXED_PRECISION": "no"}, ""),  # it asks for none
    ("--ds_config ds_configs/zero3.json", {}, ""),
    ("--accelerate_config accelerate_configs/fsdp2_ep2_1x4.yaml", LAUNCHED_FSDP | {
        "FSDP_VERSION": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"}, ""),
])  # fmt: skip
def test_a_launchers_strategy_gives_way_to_a_flag_and_that_is_said(pick, flag, env, said):
    lines = (f"{flag} (accelerate launch says {said})",) if said else ()
    assert pick(*flag.split(), size=4 if "1x4" in flag else 2, env=env).overridden == lines


def test_plain_accelerate_launch_means_ddp_and_says_so(load):
    settings = load(cluster={"ds_config": "ds_configs/zero1.json"})
    strategy = choose(settings, world(), {"ACCELERATE_MIXED_PRECISION": "no"})
    assert strategy.kind == "ddp" and "zero1.json" in strategy.overridden[0]


@pytest.mark.parametrize("key", ["ds_config", "accelerate_config"])
def test_none_takes_a_strategy_away(pick, key):
    assert pick(f"--{key}", "none", cluster={"ds_config": "ds_configs/zero1.json"}).kind == "ddp"
    assert pick(f"--{key}", "none", cluster={"accelerate_config": "accelerate_configs/fsdp2_1x2.yaml"}).kind == "ddp"
    assert pick(f"--{key}", "none", env=LAUNCHED_ZERO2).kind == "ddp"


def test_a_recipe_that_names_two_strategies_is_a_mistake(pick, mistake):
    both = {"ds_config": "ds_configs/zero1.json", "accelerate_config": "accelerate_configs/fsdp2_1x2.yaml"}
    message = mistake(pick, cluster=both)
    assert "zero1.json" in message and "fsdp2_1x2.yaml" in message
    assert pick(cluster=both | {"accelerate_config": "none"}).kind == "zero1"
    assert pick("--ds_config", "ds_configs/zero3.json", cluster=both).kind == "zero3"


def test_the_source_says_who_said_so(pick, write_recipe):
    assert pick("--ds_config", "ds_configs/zero2.json").source == "flag --ds_config"
    assert pick(cluster={"ds_config": "ds_configs/zero2.json"}).source.endswith("full.yaml: cluster.ds_config")
    assert pick(env=LAUNCHED_ZERO2).source == "accelerate launch"


def test_accelerates_variables_are_taken_out(monkeypatch):
    for key in (*LAUNCHED_ZERO2, "FSDP_VERSION", "PARALLELISM_CONFIG_TP_SIZE"):
        monkeypatch.setenv(key, "x")
    monkeypatch.setenv("RANK", "0")
    clear_accelerate_variables()
    import os

    assert not [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))]
    assert os.environ["RANK"] == "0"


# ---- optimizers and precision ------------------------------------------------------------------------------------
@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_32bit", "lion_8bit"])
def test_8_bit_optimizers_are_refused_under_fsdp2(pick, mistake, optim):
    message = mistake(pick, "--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml", training={"optim": optim})
    assert "training.optim" in message and optim in message and "DTensors" in message and "zero2.json" in message
    assert pick("--ds_config", "ds_configs/zero2.json", training={"optim": optim}).kind == "zero2"


MUON, ADAFACTOR = ["--optim", "muon"], ["--optim", "adafactor"]
FREE = ["--optim", "schedule_free_adamw", "--lr_scheduler_type", "constant", "--warmup_steps", "0"]


@pytest.mark.parametrize("optimizer, flags, words", [
    (MUON, ["--use_peft"], "an adapter's weight is the product"),
    (MUON, ["--sync_every", "4"], "replicas that train independently"),
    (MUON, ["--ds_config", "ds_configs/zero3_nvme.json"], "from NVMe"),
    (MUON, ["--ds_config", "ds_configs/zero1_tp2.json"], "whole matrices"),
    (MUON, ["--ds_config", "ds_configs/zero1_pp2.json"], "in a pipeline"),
    (MUON, ["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml"], "where experts are divided"),
    (FREE, ["--sync_every", "4"], "replicas that train independently"),
    (FREE, ["--ds_config", "ds_configs/zero3_nvme.json"], "on NVMe"),
    (FREE, ["--ds_config", "ds_configs/zero1_tp2.json"], "where a tensor group divides"),
    (FREE, ["--ds_config", "ds_configs/zero1_pp2.json"], "in a pipeline"),
    (FREE, ["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml"], "where experts are divided"),
    (FREE, ["--accelerate_config", "accelerate_configs/fsdp2_offload_1x4.yaml"], "shards in host memory"),
    (ADAFACTOR, ["--ds_config", "ds_configs/zero1.json"], "rows and columns of whole matrices"),
    (ADAFACTOR, ["--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml"], "rows and columns of whole matrices"),
])  # fmt: skip
def test_an_optimizer_is_refused_where_no_rank_has_its_matrices_or_nobody_compared_it(
    optimizer, flags, words, pick, mistake
):
    message = mistake(pick, *optimizer, *flags, size=4)
    assert "flag --optim" in message and words in message


@pytest.mark.parametrize("flags, words", [
    (["--sync_every", "4"], "replicas that train independently"),
    (["--objective", "dpo"], "objective dpo does not read weights"),
    (["--images", "true"], "where rows have images"),
])  # fmt: skip
def test_weights_of_samples_are_refused_where_nobody_reads_them(flags, words, pick, mistake):
    assert words in mistake(pick, "--columns", "{weight: weight}", *flags, size=4)


@pytest.mark.parametrize("optim", ["lamb", "lars"])
@pytest.mark.parametrize("name", ["zero1.json", "zero3.json"])
def test_optimizers_that_need_whole_parameters_are_refused_under_zero(pick, mistake, optim, name):
    message = mistake(pick, "--ds_config", f"ds_configs/{name}", training={"optim": optim})
    assert "training.optim" in message and optim in message and "whole parameters" in message and "FSDP2" in message
    assert pick(training={"optim": optim}).kind == "ddp"
    assert pick("--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml", training={"optim": optim}).kind == "fsdp2"


def test_two_precisions_at_once(pick, mistake):
    message = mistake(pick, "--fp16", training={"bf16": True})
    assert "bf16" in message and "fp16" in message


# ---- to run.yaml and back ----------------------------------------------------------------------------------------
OF_FSDP = {
    "reshard_after_forward": False,
    "cpu_ram_efficient_loading": False,
    "auto_wrap_policy": "SIZE_BASED_WRAP",
    "min_num_params": 1000,
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
}
OFFLOADED = {"fsdp_version": 2, "fsdp_offload_params": True} | {f"fsdp_{key}": value for key, value in OF_FSDP.items()}
CPU_OFFLOAD = {"distributed_type": "FSDP", "fsdp_config": OFFLOADED}
SAID = [
    *({"ds_config": f"ds_configs/{name}"} for name in DS_CONFIGS), {},
    *({"accelerate_config": f"accelerate_configs/{name}"} for name in ACCELERATE_CONFIGS),
    {"accelerate_config": CPU_OFFLOAD},
    {"accelerate_config": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}},
]  # fmt: skip


@pytest.mark.parametrize("said", SAID, ids=lambda said: Path(str(next(iter(said.values()), "nothing"))).name[:30])
def test_a_runs_record_gives_the_same_strategy_and_identity(load, said):
    numbers = re.search(r"_(\d+)x(\d+)\.yaml", str(said))
    size = int(numbers[1]) * int(numbers[2]) if numbers else 4
    first = load(cluster=said)
    chosen = choose(first, world(size), {})
    record = first.recipe.model_dump(mode="json")
    record["cluster"] |= chosen.as_cluster()
    record = yaml.safe_load(yaml.safe_dump(record))
    again = load(cluster=record["cluster"])
    back = choose(again, world(size), {})
    assert back.identity() == chosen.identity() and (back.replicate, back.shard) == (chosen.replicate, chosen.shard)
    assert back.kind == chosen.kind and back.ds_config == chosen.ds_config and back.fsdp == chosen.fsdp
    recipes = (Recipe.model_validate(record), first.recipe)
    assert len({identity(recipe, s.identity()) for recipe, s in zip(recipes, (back, chosen), strict=True)}) == 1


def test_every_fsdp_option_of_a_file_arrives(pick):
    # In the names of TrainingArguments.fsdp_config; version and state_dict_type are set there for every run.
    assert pick(cluster={"accelerate_config": CPU_OFFLOAD}).fsdp == {"cpu_offload": True, **OF_FSDP}


def test_identity_tells_strategies_apart_but_not_world_sizes(pick):
    # With other axes it is the same run, divided otherwise.
    files = [pick("--rehearse", "--ds_config", f"ds_configs/{name}") for name in DS_CONFIGS]
    assert {json.dumps(file.identity()) for file in files if file.axes} < {
        json.dumps(f.identity()) for f in files if not f.axes
    }
    kinds = [file.identity() for file in files if not file.axes]
    kinds += [pick().identity(), pick(cluster={"accelerate_config": FSDP2}).identity()]
    kinds += [pick(cluster={"accelerate_config": CPU_OFFLOAD}).identity()]
    assert len({json.dumps(kind) for kind in kinds}) == len(kinds)
    assert pick("--ds_config", "ds_configs/zero1_pp2.json").identity() in kinds
    for said in ({}, {"ds_config": "ds_configs/zero3_hpz.json"}, {"accelerate_config": FSDP2}):
        assert pick(size=2, cluster=said).identity() == pick(size=16, cluster=said).identity()


def test_the_identity_of_a_ds_config_is_its_content(pick_config):
    bare = {"zero_optimization": {"stage": 2}}
    spelled = {**bare, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
    assert pick_config(bare).identity() == pick_config(spelled).identity()
    assert pick_config(bare).identity() != pick_config(changed("zero_optimization.overlap_comm", True, bare)).identity()


def test_ddp_between_tensor_groups_is_ddp(pick):
    """FSDP2 runs it, in shards of one rank (tests/unit/test_tensor.py); to a reader and to later runs it is DDP."""
    said = {"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_tp_size": 2}}
    chosen = pick(cluster={"accelerate_config": said}, size=8)
    assert (chosen.kind, chosen.name, chosen.writes_in_parts) == ("ddp", "ddp", "ddp")
    assert chosen.as_cluster()["accelerate_config"]["distributed_type"] == "MULTI_GPU"
    assert chosen.identity() == pick(size=8).identity()


def test_hsdp_that_shards_nothing_is_refused(pick, mistake):
    """Accelerate ends with a ValueError; between tensor groups it runs."""
    assert "MULTI_GPU" in mistake(pick, size=2, cluster={"accelerate_config": hsdp(2, 1)})
    assert "MULTI_GPU" in mistake(pick, "--rehearse", size=2, cluster={"accelerate_config": hsdp(2, 1)})
    divided = hsdp(2, 1)
    divided["parallelism_config"]["tp_size"] = 2
    chosen = pick(size=4, cluster={"accelerate_config": divided})
    document = chosen.as_cluster()["accelerate_config"]
    assert chosen.kind == "hsdp" and document["distributed_type"] == "FSDP"
    assert pick(size=4, cluster={"accelerate_config": document}).identity() == chosen.identity()
