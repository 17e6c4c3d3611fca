"""What may stand in an accelerate config, and that `accelerate launch` and the file itself say the same."""

import re

import pytest
import yaml
from transformers import LlamaConfig

from brigade.train.distributed.ranks import free_port
from brigade.train.step import preflight
from brigade.train.strategy.accelerate_config import KEYS
from testing.ranks import REPOSITORY as ROOT
from testing.strategies import ACCELERATE_CONFIGS, FSDP2, hsdp

AXES = {"tp": "tensor", "sp": "sequence", "pp": "stages", "ep": "experts"}

TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
NOT_BY_CLASS = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}


def handed_on(stage, **options):
    """The variables that `accelerate launch` makes of its own options of ZeRO."""
    own = {f"ACCELERATE_DEEPSPEED_{name.upper()}": value for name, value in options.items()}
    always = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_DEEPSPEED": "true"}
    return always | {"ACCELERATE_DEEPSPEED_ZERO_STAGE": stage} | own


@pytest.mark.parametrize("name", ACCELERATE_CONFIGS)
def test_each_accelerate_config_is_what_its_name_says(pick, name):
    kind, axes, hosts, slots = re.fullmatch(
        r"([a-z0-9]+)(?:_offload)?((?:_[a-z]+\d)*)_(\d+)x(\d+)\.yaml", name
    ).groups()
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
        from brigade.train.recipe.hostfile import read_hostfile

        hostfile = read_hostfile(ROOT / document["deepspeed_config"]["deepspeed_hostfile"])
        assert list(hostfile.values()) == [int(slots)] * int(hosts)


# Keys that accelerate refuses beside deepspeed_config_file ("the following ... will be ignored").
NOT_BESIDE_A_FILE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model", "mixed_precision",
}  # fmt: skip


@pytest.mark.parametrize("name", ACCELERATE_CONFIGS)
def test_what_accelerate_launch_hands_on_reads_like_the_file(pick, name, monkeypatch, mistake):
    """The variables that accelerate's own launcher makes of a file, whose keys at top level it has to know, give the strategy
    that the file gives."""
    from accelerate.commands import launch
    from accelerate.utils import launch as environments

    path = ROOT / "accelerate_configs" / name
    # It looks whether its default port is in use, by another run perhaps.
    port = ["--main_process_port", str(free_port())]
    parsed = launch.launch_command_parser().parse_args(["--config_file", str(path), *port, str(ROOT / "train.py")])
    arguments, defaults, _ = launch._validate_launch_command(parsed)
    assert defaults.mixed_precision is None, "precision is the recipe's"
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
        assert "hands no size of it on" in mistake(pick, size=size, env=env)
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
    env = handed_on("3", config_file="none", offload_optimizer_device="cpu", offload_param_device="none")
    assert pick(env=env).identity() == chosen.identity()


def test_a_mesh_that_shards_nothing_is_refused(pick, mistake):
    """TRL's examples give it beside DeepSpeed and sequence groups, as accelerate's product of sizes wants it."""
    mesh = {"parallelism_config": {"parallelism_config_dp_shard_size": 2}}
    message = mistake(pick, cluster={"accelerate_config": {"distributed_type": "MULTI_GPU"} | mesh})
    assert "parallelism_config_dp_shard_size" in message and "MULTI_GPU shards nothing by it" in message
    zero3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    assert pick(cluster={"accelerate_config": zero3 | mesh}).kind == "zero3"


@pytest.mark.parametrize("key, value, named", [
    ("gradient_clipping", 0.5, "max_grad_norm"), ("gradient_accumulation_steps", 4, "global_batch_size"),
])  # fmt: skip
def test_accelerates_own_options_at_odds_with_the_recipe(pick, mistake, key, value, named):
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, key: value}}
    message = mistake(pick, cluster={"accelerate_config": document})
    assert key in message and repr(value) in message and named in message
    assert named in mistake(pick, env=handed_on("2") | {f"ACCELERATE_{key.upper()}": str(value)})


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


@pytest.mark.parametrize("more, at, cure", [
    ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_config.dynamo_backend", "torch_compile: true"),
    ({"dynamo_backend": "INDUCTOR"}, "dynamo_backend", "torch_compile: true"),
    ({"fp8_config": {"backend": "TE"}}, "fp8_config", "bf16: true"),
    ({"megatron_lm_config": {"megatron_lm_tp_degree": 2}}, "megatron_lm_config", "docs/parallelism.md"),
    ({"parallelism_config": {"parallelism_config_sp_attn_implementation": "flash_attention_2"}}, "sp_attn_implementation",
     "attn_implementation"),
    ({"parallelism_config": {"parallelism_config_cp_size": 2}}, "parallelism_config_cp_size", ""),  # another mesh
    ({"fsdp_activation_checkpointing_offload": True}, "fsdp_activation_checkpointing_offload", "the recipe"),
    ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "fsdp_sharding_strategy", "fsdp_reshard_after_forward: false"),
    ({"fsdp_ofload_params": True}, "fsdp_config.fsdp_ofload_params", "'fsdp_offload_params'"),
    ({"fsdp_ignored_modules": "head"}, "fsdp_config.fsdp_ignored_modules", "remove it"),
    ({"parallelism_config": {"parallelism_config_tpsize": 2}}, "parallelism_config_tpsize", "parallelism_config_tp_size"),
    ({"parallelism_config": {"sp_attn_implementation": "flash_attention_2"}}, "sp_attn_implementation", "attn_implementation"),
    ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "fsdp_sharding_strategy", "dp_replicate_size"),
    ({"fsdp_sharding_strategy": 4, "parallelism_config": {"parallelism_config_dp_shard_size": 1}}, "fsdp_sharding_strategy",
     "dp_replicate_size"),
    ({"fsdp_sharding_strategy": "NO_SHARD"}, "fsdp_sharding_strategy", "MULTI_GPU"),
    ({"fp16": True}, "mixed_precision", "fp16"),
    ({"dynamo_config": {}, "fp8_config": {}, "megatron_lm_config": {}}, "", ""),
    ({"dynamo_config": {"dynamo_backend": "NO"}, "fp16": False}, "", ""),
    ({"dynamo_config": {"dynamo_backend": False, "dynamo_mode": "default"}}, "", ""),  # `no`, as YAML reads it
    ({"fsdp_sharding_strategy": "FULL_SHARD"}, "", ""),
    ({"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_reshard_after_forward": False}, "", ""),
])  # fmt: skip
def test_what_nothing_in_a_run_reads_is_refused(pick, mistake, more, at, cure):
    fsdp = {key: value for key, value in more.items() if key.startswith("fsdp_")}
    document = {**FSDP2, **more, "fsdp_config": {**FSDP2["fsdp_config"], **fsdp}}
    document = {key: value for key, value in document.items() if key not in fsdp}
    if not at:
        assert pick(cluster={"accelerate_config": document}).kind == "fsdp2"
        return
    message = mistake(pick, cluster={"accelerate_config": document})
    assert at in message.splitlines()[0] and cure in message.splitlines()[-1]


def test_compiling_that_only_the_launcher_knows_of_is_refused(pick, mistake):
    """Whatever file is named besides: accelerate would compile what it wraps."""
    env = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    assert "torch_compile: true" in mistake(pick, env=env)
    assert "torch_compile: true" in mistake(pick, "--ds_config", "ds_configs/zero3.json", env=env)
    assert pick(env=env | {"ACCELERATE_DYNAMO_BACKEND": "no"}).kind == "ddp"


@pytest.mark.parametrize("variables, at", [
    ({"ACCELERATE_USE_MEGATRON_LM": "true", "MEGATRON_LM_TP_DEGREE": "2"}, "distributed_type"),
    (handed_on("2", moe_layer_cls_names="Block"), "deepspeed_moe_layer_cls_names"),
    (handed_on("2", config_file="ds_configs/zero2.json", moe_layer_cls_names="Block"), "deepspeed_moe_layer_cls_names"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_IGNORED_MODULES": "head"}, "fsdp_ignored_modules"),
    ({"PARALLELISM_CONFIG_SP_SIZE": "2", "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": "flash_attention_2"},
     "sp_attn_implementation"),
    ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OF_ANOTHER_PROGRAM": "1"}, ""),
])  # fmt: skip
def test_what_the_launcher_hands_on_and_no_run_reads_is_refused(pick, mistake, variables, at):
    env = {"ACCELERATE_MIXED_PRECISION": "no"} | variables
    if at:
        assert at in mistake(pick, env=env).splitlines()[0]
    else:
        assert pick(env=env).kind == "fsdp2"


def test_a_misspelt_option_of_zero_is_refused(pick, mistake):
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_optimizer": "cpu"}}
    message = mistake(pick, cluster={"accelerate_config": document})
    assert "deepspeed_config.offload_optimizer" in message and "offload_optimizer_device" in message


@pytest.mark.parametrize("replicate, shard, size", [(2, 2, 8), (4, 4, 8), (2, 2, 1)])
def test_hsdp_sizes_must_make_up_the_world(pick, mistake, replicate, shard, size):
    message = mistake(pick, size=size, cluster={"accelerate_config": hsdp(replicate, shard)})
    for number in (replicate, shard, size):
        assert str(number) in message
    assert pick(size=replicate * shard, cluster={"accelerate_config": hsdp(replicate, shard)}).kind == "hsdp"
    assert pick("--rehearse", size=size, cluster={"accelerate_config": hsdp(replicate, shard)}).kind == "hsdp"


@pytest.mark.parametrize("kind", [
    {"ds_config": {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 4}},
    {"accelerate_config": {**FSDP2, "parallelism_config": {"sp_size": 4}}},
])  # fmt: skip
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
    for flags in (
        [],
        ["--ds_config", "ds_configs/zero2.json"],
        ["--ds_config", "none"],
    ):  # whatever the flag's file says
        message = mistake(pick, *flags, env={"ACCELERATE_MIXED_PRECISION": precision}, training=training)
        assert "accelerate launch" in message and repr(precision) in message


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
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "BY_LAYER"}},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": "three"}},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": "zero3"},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 0}},
    *({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage}} for stage in (True, 2.9, -1)),
    *({**FSDP2, "parallelism_config": {"parallelism_config_tp_size": size}} for size in (-2, 2.7, "-2", True)),
    {**FSDP2, "parallelism_config": {"dp_shard_size": "all"}}, {**FSDP2, "parallelism_config": 4},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "nowhere.json"}},
])  # fmt: skip
def test_broken_accelerate_configs(pick, mistake, document):
    mistake(pick, cluster={"accelerate_config": document})


@pytest.mark.parametrize("kind, section, reader", [
    ("MULTI_GPU", "fsdp_config", "FSDP"), (False, "deepspeed_config", "DEEPSPEED"), ("FSDP", "deepspeed_config", "DEEPSPEED"),
    ("DEEPSPEED", "fsdp_config", "FSDP"),
])  # fmt: skip
def test_the_section_of_another_type_is_refused_unless_it_is_empty(pick, mistake, kind, section, reader):
    document = {"distributed_type": kind, "fsdp_config": {"fsdp_version": 2} if kind == "FSDP" else {}}
    pick(cluster={"accelerate_config": document | {"deepspeed_config": {}}})
    options = {"zero_stage": 3} if section == "deepspeed_config" else {"fsdp_version": 2}
    message = mistake(pick, cluster={"accelerate_config": document | {section: options}})
    assert section in message and f"set distributed_type {reader}" in message and "read" in message


def test_a_variable_is_refused_where_nobody_replaces_it(pick, mistake):
    document = {"distributed_type": "MULTI_GPU", "num_machines": 1, "num_processes": "$WORLD_SIZE"}
    message = mistake(pick, cluster={"accelerate_config": document})
    assert "num_processes" in message and "'$WORLD_SIZE' is a variable" in message and "--num_processes" in message


@pytest.mark.parametrize("named, wrong", [
    ("LlamaDecoderLayer", ""), (["LlamaDecoderLayer", "LlamaMLP"], ""), ("LlamaDecoderLayer,Embedding", ""),
    ("ZImageTransformerBlock", "ZImageTransformerBlock"), ("LlamaDecoderLayer, Embedding", " Embedding"),
])  # fmt: skip
def test_a_class_of_layers_that_the_model_does_not_have_is_refused_before_it_is_built(
    pick, load, mistake, named, wrong
):
    options = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": named}
    cluster = {"accelerate_config": {"distributed_type": "FSDP", "fsdp_config": options}}
    settings, strategy = load(cluster=cluster), pick(cluster=cluster)
    config = LlamaConfig(**TINY)
    if wrong:
        message = mistake(preflight.check_layer_classes, settings, config, strategy)
        assert f"no layer of class {wrong!r}" in message and "are then taken: LlamaDecoderLayer" in message
        assert "fsdp_transformer_layer_cls_to_wrap" in message
        options |= NOT_BY_CLASS
        strategy = pick(cluster=cluster)
    preflight.check_layer_classes(settings, config, strategy)
