"""Where a strategy comes from, what may stand in its file, and that nothing of it gets lost on the way to run.yaml."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml

from brigade.cluster import World
from brigade.errors import UserError
from brigade.recipe.identity import identity
from brigade.recipe.schema import Recipe
from brigade.strategy import Strategy, choose, deepspeed_config
from brigade.strategy.accelerate_config import KEYS
from brigade.strategy.ds_keys import key_table
from brigade.training.environment import clear_accelerate_variables

ROOT = Path(__file__).parents[2]
DS_CONFIGS = sorted(path.name for path in (ROOT / "ds_configs").glob("*.json"))
ACCELERATE_CONFIGS = sorted(path.name for path in (ROOT / "accelerate_configs").glob("*.yaml"))
AXES = {"tp": "tensor", "sp": "sequence", "pp": "stages", "ep": "experts"}
ZERO3 = json.loads((ROOT / "ds_configs/zero3.json").read_text())
FSDP2 = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}


def world(size=2):
    return World(0, 0, size, size, "host", "python" if size == 1 else "torchrun")


def hsdp(replicate, shard):
    return {**FSDP2, "parallelism_config": {"dp_replicate_size": replicate, "dp_shard_size": shard}}


@pytest.fixture
def pick(load):
    """pick("--ds_config", ...): the strategy of such a command on `size` ranks, started with environment `env`."""

    def call(*argv, size=2, env=None, **sections) -> Strategy:
        return choose(load(*argv, **sections), world(size), env or {})

    return call


@pytest.fixture
def pick_config(pick, write_json):
    """pick_config({...}): the strategy of a ds_config file with that content."""
    return lambda config, **sections: pick("--ds_config", write_json(config), **sections)


def changed(path, value, base=ZERO3):
    config = copy.deepcopy(base)
    *parents, key = path.split(".")
    block = config
    for name in parents:
        block = block.setdefault(name, {})
    block[key] = value
    return config


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
        return choose(settings, world(), env).kind, settings.overridden

    assert kind(env={}) == ("zero1", [])
    assert kind(env=LAUNCHED_ZERO2) == (
        "zero2",
        ["accelerate launch says zero2 (the recipe says ds_configs/zero1.json)"],
    )
    overridden = ["--ds_config ds_configs/zero3.json (the recipe says ds_configs/zero1.json)"]
    assert kind("--ds_config", "ds_configs/zero3.json", env={}) == ("zero3", overridden)
    assert kind("--ds_config", "ds_configs/zero3.json", env=LAUNCHED_ZERO2) == ("zero3", overridden)


def test_plain_accelerate_launch_means_ddp_and_says_so(load):
    settings = load(cluster={"ds_config": "ds_configs/zero1.json"})
    assert choose(settings, world(), {"ACCELERATE_MIXED_PRECISION": "no"}).kind == "ddp"
    assert "zero1.json" in settings.overridden[0]


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


# ---- ds_configs --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DS_CONFIGS)
def test_each_ds_config_is_what_its_name_says(pick, name):
    chosen = pick("--ds_config", f"ds_configs/{name}", size=4)
    stage = "3" if name.startswith("zeropp") else name[4]
    assert chosen.kind == f"zero{stage}" and chosen.name == name.removesuffix(".json") and chosen.is_deepspeed
    zero = chosen.ds_config["zero_optimization"]
    offloads = {block: zero[block]["device"] for block in ("offload_optimizer", "offload_param") if block in zero}
    expected = {
        "offload_param": {"offload_optimizer": "cpu", "offload_param": "cpu"},
        "offload": {"offload_optimizer": "cpu"},
        "nvme": {"offload_optimizer": "nvme", "offload_param": "nvme"},
    }
    assert offloads == expected.get(name.removesuffix(".json").partition("_")[2], {})
    assert deepspeed_config.swaps_to_nvme(chosen.ds_config) is ("nvme" in name)
    assert deepspeed_config.is_quantised(chosen.ds_config) is ("zeropp" in name)


@pytest.mark.parametrize(
    "training", [{"bf16": True}, {"fp16": True}, {"max_grad_norm": 0.5}, {"per_device_train_batch_size": 4}]
)
@pytest.mark.parametrize("name", DS_CONFIGS)
def test_each_ds_config_fits_any_recipe(pick, name, training):
    if "_pp" in name and "fp16" in training:  # the one pair that does not go together
        with pytest.raises(UserError, match="fp16's loss scale"):
            pick("--ds_config", f"ds_configs/{name}", size=4, training=training)
        return
    assert pick("--ds_config", f"ds_configs/{name}", size=4, training=training).is_deepspeed


REMOVED = {path: entry for path, entry in key_table()["removed"].items() if not path.startswith("optimizer.")}


@pytest.mark.parametrize("path", REMOVED)
def test_a_removed_key_is_told_what_to_use(pick_config, mistake, path):
    message = mistake(pick_config, changed(path, {"enabled": 7}))
    place, problem, cure = message.splitlines()
    assert place.endswith(f"ds.json: {path}") and "7" in problem and "0.19.8" in problem
    assert " ".join(REMOVED[path]["use"].split()) in cure and REMOVED[path]["issue"] in cure


@pytest.mark.parametrize("path, right", [
    ("zero_optimisation", "zero_optimization"), ("zero_optimization.stag", "stage"),
    ("zero_optimization.offload_optimizer.devise", "device"), ("gradient_cliping", "gradient_clipping"),
    ("bf16.enable", "enabled"), ("zero_optimization.prefetch_bucket_siz", "stage3_prefetch_bucket_size"),
    ("aio.block_sizes", "block_size"),
])  # fmt: skip
def test_an_unknown_key_suggests_the_nearest(pick_config, mistake, path, right):
    place, problem, cure = mistake(pick_config, changed(path, 12345)).splitlines()
    assert place.endswith(f"ds.json: {path}") and "12345" in problem and f"'{right}'" in cure


# What the files of axolotl, LLaVA and older guides say, and what DeepSpeed makes of it.
@pytest.mark.parametrize(
    "path, value, is_read_as",
    [
        ("max_live_parameters", 0, {"stage3_max_live_parameters": 0}),
        ("gather_16bit_weights_on_model_save", "true", {"stage3_gather_16bit_weights_on_model_save": True}),
        ("prefetch_bucket_size", "auto", {"stage3_prefetch_bucket_size": "auto"}),
        ("stage3_gather_fp16_weights_on_model_save", True, {"stage3_gather_16bit_weights_on_model_save": True}),
        ("cpu_offload", True, {"offload_optimizer": {"device": "cpu"}}),
        ("cpu_offload_param", False, {}),
        ("cpu_offload_use_pin_memory", True, {}),
        ("offload_param", None, {}),
        ("sub_group_size", 1e9, {"sub_group_size": 1e9}),
        ("reduce_bucket_size", "500", {"reduce_bucket_size": 500}),
        ("overlap_comm", 1, {"overlap_comm": True}),
    ],
)
def test_every_spelling_is_one_key_and_one_run(pick_config, path, value, is_read_as):
    by_user, by_us = (
        pick_config({"zero_optimization": {"stage": 3} | zero, "bf16": None}) for zero in ({path: value}, is_read_as)
    )
    assert by_user.ds_config["zero_optimization"] == {"stage": 3} | is_read_as
    assert json.dumps(by_user.identity()) == json.dumps(by_us.identity())


@pytest.mark.parametrize(
    "zero",
    [
        {"max_live_parameters": 1, "stage3_max_live_parameters": 1},
        {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
    ],
)
def test_two_spellings_of_one_key_are_a_mistake(pick_config, mistake, zero):
    place, problem, cure = mistake(pick_config, {"zero_optimization": {"stage": 3} | zero}).splitlines()
    assert (
        place.endswith(f"ds.json: zero_optimization.{[*zero][1]}") and "another name" in problem and "keep one" in cure
    )


@pytest.mark.parametrize(
    "path, value, wanted",
    [
        ("zero_optimization.overlap_comm", "yes please", "true or false"),
        ("zero_optimization.reduce_bucket_size", "5e8", "above 0"),
        ("zero_optimization.reduce_bucket_size", 0, "above 0"),
        ("zero_optimization.sub_group_size", 1.5, "a whole number"),
        ("zero_optimization.offload_optimizer.device", "gpu", "none, cpu, nvme"),
        ("communication_data_type", "fp61", "fp32, fp16, bf16"),
        ("wall_clock_breakdown", "false", "true or false"),
        ("steps_per_print", "10", "a number"),
        ("fp16.loss_scale", -1, "from 0"),
        ("zero_optimization.stage3_max_live_parameters", None, "a whole number"),
        ("data_types.grad_accum_dtype", "fp23", "bf16"),
        ("zero_optimization.cpu_offload", "maybe", "true or false"),
        ("zero_optimization.offload_optimizer.ratio", 1.5, "up to 1"),
    ],
)
def test_a_value_that_deepspeed_would_not_take(pick_config, mistake, path, value, wanted):
    place, problem, cure = mistake(pick_config, changed(path, value)).splitlines()
    assert place.endswith(f"ds.json: {path}") and json.dumps(value) in problem and wanted in problem and "write" in cure


@pytest.mark.parametrize(
    "config, at",
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "zero_optimization.offload_optimizer.ratio",
        ),
    ],
)
def test_values_that_deepspeed_refuses_together(pick_config, mistake, config, at):
    message = mistake(pick_config, ZERO3 | config, training={"bf16": True})
    assert f"ds.json: {at}" in message and "DeepSpeed refuses" in message


@pytest.mark.parametrize(
    "path, value, word",
    [
        ("gradient_allreduce_op", "SUM", "mean"),
        ("zero_optimization.compute_grad_norm", False, "changes the weights"),
        ("bf16.check_grad_overflow", False, "changes the weights"),
    ],
)
def test_what_deepspeed_takes_and_a_run_cannot(pick_config, mistake, path, value, word):
    zero2 = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
    message = mistake(pick_config, changed(path, value, zero2))
    assert f"ds.json: {path}" in message and word in message and "remove the line" in message


def test_keys_in_free_blocks_are_deepspeeds_business(pick_config):
    assert pick_config(changed("data_efficiency.data_sampling", {"anything": {"at": "all"}})).kind == "zero3"


@pytest.mark.parametrize("path, value, key, ours, training", [
    ("bf16.enabled", True, "bf16", "False", {}), ("bf16.enabled", False, "bf16", "True", {"bf16": True}),
    ("fp16.enabled", True, "fp16", "False", {}), ("gradient_clipping", 0.5, "max_grad_norm", "1.0", {}),
    ("train_batch_size", 64, "global_batch_size", "32", {}),
    ("train_micro_batch_size_per_gpu", 4, "per_device_train_batch_size", "2", {"per_device_train_batch_size": 2}),
    ("train_micro_batch_size_per_gpu", 4, "per_device_train_batch_size", "'auto'", {}),
])  # fmt: skip
def test_a_value_at_odds_with_the_recipe(pick_config, mistake, path, value, key, ours, training):
    message = mistake(pick_config, changed(path, value), training=training)
    place, problem, cure = message.splitlines()
    assert place.endswith(f"ds.json: {path}") and repr(value) in problem and key in problem and ours in problem
    assert "full.yaml" in problem and key in cure and "auto" in cure


def test_a_value_at_odds_with_a_flag_names_the_flag(pick, mistake, write_json):
    message = mistake(pick, "--ds_config", write_json(changed("bf16.enabled", False)), "--bf16")
    assert "flag --bf16" in message


@pytest.mark.parametrize("path, value, training", [
    ("bf16.enabled", True, {"bf16": True}), ("gradient_clipping", 1, {}), ("train_batch_size", 32, {}),
    ("train_micro_batch_size_per_gpu", 4, {"per_device_train_batch_size": 4}),
    ("gradient_clipping", 0, {"max_grad_norm": 0}),
])  # fmt: skip
def test_a_value_that_agrees_with_the_recipe_is_no_mistake(pick_config, path, value, training):
    assert pick_config(changed(path, value), training=training).kind == "zero3"


def test_accumulation_is_never_fixed(pick_config, mistake):
    message = mistake(pick_config, changed("gradient_accumulation_steps", 4))
    assert (
        "gradient_accumulation_steps" in message
        and "4" in message
        and "global_batch_size" in message
        and "auto" in message
    )


@pytest.mark.parametrize("block, content, named", [
    ("optimizer", {"type": "AdamW", "params": {"lr": "auto"}}, "learning_rate"),
    ("scheduler", {"type": "WarmupDecayLR", "params": {}}, "lr_scheduler_type"),
])  # fmt: skip
def test_optimizer_and_scheduler_are_the_recipes(pick_config, mistake, block, content, named):
    place, problem, cure = mistake(pick_config, changed(block, content)).splitlines()
    assert place.endswith(f"ds.json: {block}") and content["type"] in problem and named in cure


@pytest.mark.parametrize("block, content, stage", [
    ("offload_param", {"device": "cpu"}, 2), ("offload_param", {"device": "nvme", "nvme_path": "/x"}, 1),
    ("offload_optimizer", {"device": "nvme", "nvme_path": "/x"}, 2),
])  # fmt: skip
def test_offload_under_the_wrong_stage(pick_config, mistake, block, content, stage):
    place, problem, cure = mistake(pick_config, {"zero_optimization": {"stage": stage, block: content}}).splitlines()
    assert place.endswith(f"ds.json: zero_optimization.{block}.device") and "stage 3" in problem + cure


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 4}, {"stage": "3"}, {}, None])
def test_a_stage_that_is_none(pick_config, mistake, zero):
    message = mistake(pick_config, {} if zero is None else {"zero_optimization": zero})
    assert "zero_optimization.stage" in message and "is not 1, 2 or 3" in message


@pytest.mark.parametrize("path, value", [
    ("bf16", True), ("fp16", "auto"), ("fp16", None), ("zero_optimization", 3),
    ("zero_optimization.offload_optimizer", "cpu"), ("aio", []), ("activation_checkpointing", True),
])  # fmt: skip
def test_a_value_where_a_block_belongs(pick_config, mistake, path, value):
    message = mistake(pick_config, changed(path, value))
    assert f"ds.json: {path}" in message and ("null" if value is None else repr(value)) in message


@pytest.mark.parametrize("key", ["tensor_parallel.autotp_size", "sequence_parallel_size", "pipeline.stages"])
@pytest.mark.parametrize("value", [-1, "two", 1.5])
def test_an_axis_of_no_size_is_refused(pick_config, mistake, key, value):
    assert f"ds.json: {key}" in mistake(pick_config, changed(key, value))


@pytest.mark.parametrize("text, said", [
    ('{\n  "a": 1,\n}', "line 3"), ("", "line 1"), ("[1, 2]", "[1, 2] is not an object"),
    ('{"zero_optimization": {"stage": 3}', "line 1"), ("null", "null is not an object"),
])  # fmt: skip
def test_a_file_that_is_no_ds_config(pick_config, mistake, text, said):
    message = mistake(pick_config, text)
    assert "ds.json" in message and said in message


def test_a_ds_config_that_is_not_there(pick, mistake):
    message = mistake(pick, "--ds_config", "ds_configs/zero4.json")
    assert "flag --ds_config" in message and "'ds_configs/zero4.json'" in message
    assert "ds_configs" in mistake(pick, "--ds_config", "ds_configs")


def test_owned_keys_that_a_file_lacks_are_added(pick_config):
    # Absent, gradient_clipping would mean 1.0 to DeepSpeed, whatever max_grad_norm says.
    config = pick_config({"zero_optimization": {"stage": 2}}, training={"max_grad_norm": 0}).ds_config
    assert config["gradient_clipping"] == config["train_batch_size"] == config["gradient_accumulation_steps"] == "auto"
    assert config["bf16"] == config["fp16"] == {"enabled": "auto"}


# ---- Brigade's own autos -----------------------------------------------------------------------------------------
def autos(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key


@pytest.mark.parametrize("name", DS_CONFIGS)
def test_fill_leaves_only_the_autos_of_hugging_face(pick, name, tmp_path):
    config = pick("--ds_config", f"ds_configs/{name}", size=4).ds_config
    before = copy.deepcopy(config)
    filled = deepspeed_config.fill(config, 8, tmp_path, "adamw_torch", largest_shard=1000)
    assert config == before, "fill works on a copy: run.yaml keeps the autos"
    table = key_table()["allowed"]
    assert [path for path in autos(filled) if table[path].get("auto") != "huggingface"] == []
    zero = filled["zero_optimization"]
    if "zero_hpz_partition_size" in zero:
        assert zero["zero_hpz_partition_size"] == 8
    for block in ("offload_param", "offload_optimizer"):
        if "nvme" in name:
            assert zero[block]["nvme_path"] == str(tmp_path)
    if "nvme" in name:
        assert zero["offload_param"]["buffer_size"] == 1000


def test_fill_keeps_what_a_file_says(tmp_path):
    offload = {"device": "nvme", "nvme_path": "/mine"}
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4, "offload_param": offload}}
    assert deepspeed_config.fill(config, 8, tmp_path, "adamw_torch") == config


@pytest.mark.parametrize("optim, kept", [("adamw_torch", False), ("adamw_torch_fused", False), ("sgd", True)])
def test_offload_keeps_an_optimizer_that_is_no_adamw(optim, kept, tmp_path):
    filled = deepspeed_config.fill(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, 2, tmp_path, optim
    )
    assert ("zero_force_ds_cpu_optimizer" in filled) is kept and not filled.get("zero_force_ds_cpu_optimizer", False)


# ---- optimizers and precision ------------------------------------------------------------------------------------
@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit"])
def test_8_bit_optimizers_are_refused_under_fsdp2(pick, mistake, optim):
    message = mistake(pick, "--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml", training={"optim": optim})
    assert "training.optim" in message and optim in message and "DTensors" in message and "zero2.json" in message
    assert pick("--ds_config", "ds_configs/zero2.json", training={"optim": optim}).kind == "zero2"


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


# ---- accelerate configs ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ACCELERATE_CONFIGS)
def test_each_accelerate_config_is_what_its_name_says(pick, name):
    kind, axes, hosts, slots = re.fullmatch(r"([a-z0-9]+)((?:_[a-z]+\d)*)_(\d+)x(\d+)\.yaml", name).groups()
    size = int(hosts) * int(slots)
    document = yaml.safe_load((ROOT / "accelerate_configs" / name).read_text())
    assert document["num_processes"] == size and document["num_machines"] == int(hosts)
    chosen = pick("--accelerate_config", f"accelerate_configs/{name}", size=size)
    assert chosen.kind == kind
    assert chosen.axes.used == {AXES[short]: int(number) for short, number in re.findall(r"_([a-z]+)(\d)", axes)}
    if kind == "hsdp":
        assert chosen.replicate * chosen.shard == size and chosen.replicate > 1 and chosen.shard > 1
        assert hosts == "1" or chosen.shard == int(slots), "shards stay inside a host"
    if hosts != "1" and kind.startswith("zero"):
        from brigade.cluster import read_hostfile

        hostfile = read_hostfile(ROOT / document["deepspeed_config"]["deepspeed_hostfile"])
        assert list(hostfile.values()) == [int(slots)] * int(hosts)


@pytest.mark.parametrize("name", ACCELERATE_CONFIGS)
def test_accelerates_own_loader_takes_each(name):
    from accelerate.commands.config.config_args import ClusterConfig

    # It raises for a key that it does not know, at top level.
    config = ClusterConfig.from_yaml_file(str(ROOT / "accelerate_configs" / name))
    assert config.mixed_precision is None, "precision is the recipe's"


# Keys that accelerate refuses beside deepspeed_config_file ("the following ... will be ignored").
NOT_BESIDE_A_FILE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model", "mixed_precision",
}  # fmt: skip


@pytest.mark.parametrize("name", ACCELERATE_CONFIGS)
def test_what_accelerate_launch_hands_on_reads_like_the_file(pick, name, monkeypatch):
    """The variables that accelerate's own launcher makes of a file give the strategy that the file gives."""
    from accelerate.commands import launch
    from accelerate.utils import launch as environments

    path = ROOT / "accelerate_configs" / name
    parsed = launch.launch_command_parser().parse_args(["--config_file", str(path), str(ROOT / "train.py")])
    arguments, defaults, _ = launch._validate_launch_command(parsed)
    # Every nested key is an option of the launcher: it copies unknown ones without a word.
    options = set(vars(launch.launch_command_parser().parse_args(["x.py"])))
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        assert set(getattr(defaults, section) or {}) <= options | set(KEYS["own"]), section
    if arguments.use_deepspeed:
        assert not set(defaults.deepspeed_config) & NOT_BESIDE_A_FILE
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        env = environments.prepare_deepspeed_cmd_env(arguments)[1]
    else:
        env = environments.prepare_multi_gpu_env(arguments)
    size = arguments.num_processes
    if set(defaults.parallelism_config or {}) & set(KEYS["own"]):  # of these it hands nothing on, and a run says so
        with pytest.raises(UserError, match="hands no size of it on"):
            pick(size=size, env=env)
        return
    launched = pick(size=size, env=env)
    by_flag = pick("--accelerate_config", f"accelerate_configs/{name}", size=size)
    assert (launched.kind, launched.name) == (by_flag.kind, by_flag.name)
    assert (launched.replicate, launched.shard) == (by_flag.replicate, by_flag.shard)
    # One run, however it was started: its directory asks for the same identity.
    assert launched.identity() == by_flag.identity()


def test_our_list_of_what_accelerate_refuses_is_accelerates():
    import inspect

    from accelerate.utils import DeepSpeedPlugin

    source = inspect.getsource(DeepSpeedPlugin._deepspeed_config_checks)
    names = re.findall(r'"ACCELERATE_(\w+)",\n', source)
    assert {name.removeprefix("DEEPSPEED_").lower() for name in names} == NOT_BESIDE_A_FILE


def test_accelerates_own_zero_options(pick, write_json, tmp_path):
    options = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"}
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": options}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(document))
    chosen = pick("--accelerate_config", str(tmp_path / "a.yaml"))
    assert chosen.kind == "zero3"
    assert chosen.ds_config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in chosen.ds_config["zero_optimization"]
    assert chosen.ds_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True
    env = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "none",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    }
    assert pick(env=env).identity() == chosen.identity()


@pytest.mark.parametrize("key, value, named", [
    ("gradient_clipping", 0.5, "max_grad_norm"), ("gradient_accumulation_steps", 4, "global_batch_size"),
])  # fmt: skip
def test_accelerates_own_options_at_odds_with_the_recipe(pick, mistake, key, value, named):
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, key: value}}
    message = mistake(pick, cluster={"accelerate_config": document})
    assert key in message and repr(value) in message and named in message
    env = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        f"ACCELERATE_{key.upper()}": str(value),
    }
    assert named in mistake(pick, env=env)


@pytest.mark.parametrize("options", [
    {"gradient_clipping": 1.0, "gradient_accumulation_steps": 1}, {"gradient_clipping": "none"},
    {"gradient_accumulation_steps": "auto"},
])  # fmt: skip
def test_what_accelerates_questionnaire_writes_by_itself_is_no_contradiction(pick, options):
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, **options}}
    assert pick(cluster={"accelerate_config": document}).kind == "zero2"


@pytest.mark.parametrize("fsdp", [{}, {"fsdp_version": 1}, {"fsdp_sharding_strategy": "FULL_SHARD"}])
def test_fsdp1_is_refused(pick, mistake, fsdp):
    document = {"distributed_type": "FSDP", "fsdp_config": fsdp}
    message = mistake(pick, cluster={"accelerate_config": document})
    assert "fsdp_version" in message and "1" in message and "fsdp_version: 2" in message.splitlines()[-1]
    env = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
    assert "fsdp_version: 2" in mistake(pick, env=env)


@pytest.mark.parametrize("replicate, shard, size", [(2, 2, 8), (4, 4, 8), (2, 2, 1)])
def test_hsdp_sizes_must_make_up_the_world(pick, mistake, replicate, shard, size):
    message = mistake(pick, size=size, cluster={"accelerate_config": hsdp(replicate, shard)})
    for number in (replicate, shard, size):
        assert str(number) in message
    assert pick(size=replicate * shard, cluster={"accelerate_config": hsdp(replicate, shard)}).kind == "hsdp"
    assert pick("--rehearse", size=size, cluster={"accelerate_config": hsdp(replicate, shard)}).kind == "hsdp"


@pytest.mark.parametrize("key", ["cp_size"])
def test_other_meshes_are_refused(pick, mistake, key):
    mesh = {f"parallelism_config_{key}": 2}
    assert f"parallelism_config_{key}" in mistake(
        pick, cluster={"accelerate_config": {**FSDP2, "parallelism_config": mesh}}
    )


@pytest.mark.parametrize("kind", [{"ds_config": {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 4}},
                                  {"accelerate_config": {**FSDP2, "parallelism_config": {"sp_size": 4}}}])  # fmt: skip
def test_rows_go_over_a_divisor_of_the_ranks(pick, mistake, kind):
    assert pick(size=8, cluster=kind).axes.sequence == 4
    assert pick(size=8, cluster=kind).axes.data(8) == 2
    assert "sequence 4 needs a multiple of 4 ranks, and there are 6" in mistake(pick, size=6, cluster=kind)


@pytest.mark.parametrize("precision, training, fine", [
    ("bf16", {"bf16": True}, True), ("bf16", {}, False), ("fp16", {"bf16": True}, False), ("no", {"bf16": True}, True),
    ("fp8", {}, False),
    (False, {"bf16": True}, True),  # what YAML reads from `mixed_precision: no`
    (None, {}, True),
])  # fmt: skip
def test_precision_is_the_recipes(pick, mistake, precision, training, fine):
    document = {"distributed_type": "MULTI_GPU", "mixed_precision": precision}
    options = {"cluster": {"accelerate_config": document}, "training": training}
    if fine:
        assert pick(**options).kind == "ddp"
        return
    message = mistake(pick, **options)
    assert "mixed_precision" in message and repr(precision) in message
    message = mistake(pick, env={"ACCELERATE_MIXED_PRECISION": precision}, training=training)
    assert "accelerate launch" in message


@pytest.mark.parametrize("kind", ["FSDP2", "ZERO3", "MEGATRON_LM", "fsdp", "XLA"])
def test_an_unknown_distributed_type_is_not_ddp(pick, mistake, kind):
    message = mistake(pick, cluster={"accelerate_config": {"distributed_type": kind}})
    assert "distributed_type" in message and repr(kind) in message


@pytest.mark.parametrize("kind", ["NO", False, "MULTI_GPU", "MULTI_CPU"])
def test_distributed_types_that_mean_ddp(pick, kind):
    assert pick(cluster={"accelerate_config": {"distributed_type": kind}}).kind == "ddp"
    assert pick(size=1, cluster={"accelerate_config": {"distributed_type": kind}}).kind == "single"


@pytest.mark.parametrize("document", [
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": "two"}},
    {"distributed_type": "FSDP", "fsdp_config": [1]},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": "three"}},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": "zero3"},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}},
    {**FSDP2, "parallelism_config": {"dp_shard_size": "all"}}, {**FSDP2, "parallelism_config": 4},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "nowhere.json"}},
])  # fmt: skip
def test_broken_accelerate_configs(pick, mistake, document):
    mistake(pick, cluster={"accelerate_config": document})


# ---- to run.yaml and back ----------------------------------------------------------------------------------------
CPU_OFFLOAD = {"distributed_type": "FSDP", "fsdp_config": {
    "fsdp_version": 2, "fsdp_offload_params": True, "fsdp_reshard_after_forward": False,
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}  # fmt: skip
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
    assert pick(cluster={"accelerate_config": CPU_OFFLOAD}).fsdp == {
        "cpu_offload": True,
        "reshard_after_forward": False,
        "cpu_ram_efficient_loading": False,
        "auto_wrap_policy": "SIZE_BASED_WRAP",
        "min_num_params": 1000,
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    }


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
