"""What may stand in a ds_config, what Brigade fills in, and how a mistake in it is told."""

import copy
import json

import pytest
from deepspeed.utils.config import get_timers_config

from brigade.train.strategy import deepspeed_config
from brigade.train.strategy.ds_keys import key_table
from testing.strategies import DS_CONFIGS, ZERO3, changed


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
def test_each_ds_config_fits_any_recipe(pick, name, training, mistake):
    if "_pp" in name and "fp16" in training:  # the one pair that does not go together
        assert "fp16's loss scale" in mistake(pick, "--ds_config", f"ds_configs/{name}", size=4, training=training)
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
@pytest.mark.parametrize("path, value, is_read_as", [
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
])  # fmt: skip
def test_every_spelling_is_one_key_and_one_run(pick_config, path, value, is_read_as):
    by_user, by_us = (
        pick_config({"zero_optimization": {"stage": 3} | zero, "bf16": None}) for zero in ({path: value}, is_read_as)
    )
    assert by_user.ds_config["zero_optimization"] == {"stage": 3} | is_read_as
    assert json.dumps(by_user.identity()) == json.dumps(by_us.identity())


@pytest.mark.parametrize("zero", [
    {"max_live_parameters": 1, "stage3_max_live_parameters": 1},
    {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
])  # fmt: skip
def test_two_spellings_of_one_key_are_a_mistake(pick_config, mistake, zero):
    place, problem, cure = mistake(pick_config, {"zero_optimization": {"stage": 3} | zero}).splitlines()
    assert place.endswith(f"ds.json: zero_optimization.{[*zero][1]}") and "another name" in problem
    assert "keep one" in cure


@pytest.mark.parametrize("path, value, wanted", [
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
])  # fmt: skip
def test_a_value_that_deepspeed_would_not_take(pick_config, mistake, path, value, wanted):
    place, problem, cure = mistake(pick_config, changed(path, value)).splitlines()
    assert place.endswith(f"ds.json: {path}") and json.dumps(value) in problem and wanted in problem and "write" in cure


@pytest.mark.parametrize("config, at", [
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
     "zero_optimization.offload_optimizer.ratio"),
])  # fmt: skip
def test_values_that_deepspeed_refuses_together(pick_config, mistake, config, at):
    message = mistake(pick_config, ZERO3 | config, training={"bf16": True})
    assert f"ds.json: {at}" in message and "DeepSpeed refuses" in message


@pytest.mark.parametrize("path, value, word", [
    ("gradient_allreduce_op", "SUM", "mean"),
    ("zero_optimization.compute_grad_norm", False, "changes the weights"),
    ("bf16.check_grad_overflow", False, "changes the weights"),
    ("zero_optimization.zenflow", {}, "of its own"), ("zero_optimization.zenflow", {"topk_ratio": 0.2}, "of its own"),
])  # fmt: skip
def test_what_deepspeed_takes_and_a_run_cannot(pick_config, mistake, path, value, word):
    zero2 = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
    message = mistake(pick_config, changed(path, value, zero2))
    assert f"ds.json: {path}" in message and word in message and "remove the" in message


@pytest.mark.parametrize("path, value, cure", [
    ("prescale_gradients", True, "communication_data_type"),
    ("gradient_predivide_factor", 2.0, "communication_data_type"),
    ("activation_checkpointing.partition_activations", True, "the recipe's activation_checkpointing: true"),
    ("activation_checkpointing.number_checkpoints", 4, "the recipe's activation_checkpointing: true"),
    ("activation_checkpointing.cpu_checkpointing", True, "the recipe's activation_checkpointing: true"),
    ("compile.deepcompile", True, "the recipe's torch_compile: true"),
    ("data_efficiency", {"enabled": True, "data_sampling": {"enabled": True}}, "the recipe's data"),
    ("dataloader_drop_last", True, "once in an epoch"),
    ("disable_allgather", True, "remove the line"),
    ("managed_gradient_accumulation", False, "remove the line"),
    ("seq_parallel_communication_data_type", "bf16", "communication_data_type"),
    ("data_parallel_size", 2, "remove the line"),
    ("tensor_parallel", {"autotp_size": 2, "tp": {"tp_size": 2}}, "autotp_size"),
    ("expert_parallel", {"enabled": True, "autoep_size": 2, "top_k": 4}, "autoep_size"),
    ("pipeline", {"stages": 2, "partition": "uniform"}, "stages, schedule"),
    ("weight_quantization.quantized_initialization", {"num_bits": 8}, "load_in_4bit"),
    ("hybrid_engine.enabled", True, "remove it"),
    ("autotuning.enabled", True, "brigade plan"),
    ("inference", {"tensor_parallel": {"tp_size": 2}}, "tensor_parallel.autotp_size"),
    ("comms_logger.enabled", True, "verbose: true"),
    ("zero_optimization.save_muon_momentum_buffer_in_memory", True, "muon"),
])  # fmt: skip
def test_what_nothing_in_a_run_reads_is_refused(pick_config, mistake, path, value, cure):
    place, problem, said = mistake(pick_config, changed(path, value)).splitlines()
    block = path if path.partition(".")[0] in ("zero_optimization", "comms_logger") else path.partition(".")[0]
    assert place.endswith(f"ds.json: {block}") and "nothing in a run reads" in problem and cure in said


@pytest.mark.parametrize("path, value", [
    ("prescale_gradients", False),
    ("gradient_predivide_factor", 1),
    ("activation_checkpointing", {"partition_activations": False, "number_checkpoints": None, "profile": False}),
    ("data_efficiency", {"enabled": False, "data_sampling": {"anything": {"at": "all"}}}),
    ("autotuning", {"fast": False}),
    ("weight_quantization", {"enabled": False, "num_bits": 4}),
    ("expert_parallel", {"enabled": False, "top_k": 4}),
    ("comms_logger", {"enabled": True, "verbose": True}),
    ("comms_logger.prof_all", False),
    ("compile.deepcompile", False),
])  # fmt: skip
def test_defaults_that_are_written_out_and_blocks_that_are_off_are_none(pick_config, path, value):
    assert pick_config(changed(path, value)).kind == "zero3"


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
    assert "flag --bf16" in mistake(pick, "--ds_config", write_json(changed("bf16.enabled", False)), "--bf16")


@pytest.mark.parametrize("path, value, training", [
    ("bf16.enabled", True, {"bf16": True}), ("gradient_clipping", 1, {}), ("train_batch_size", 32, {}),
    ("train_micro_batch_size_per_gpu", 4, {"per_device_train_batch_size": 4}),
    ("gradient_clipping", 0, {"max_grad_norm": 0}),
])  # fmt: skip
def test_a_value_that_agrees_with_the_recipe_is_no_mistake(pick_config, path, value, training):
    assert pick_config(changed(path, value), training=training).kind == "zero3"


def test_accumulation_is_never_fixed(pick_config, mistake):
    message = mistake(pick_config, changed("gradient_accumulation_steps", 4))
    assert "gradient_accumulation_steps" in message and "4" in message and "global_batch_size" in message
    assert "auto" in message


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


@pytest.mark.parametrize("key", ["flops_profiler.output_file", "tensorboard.job_name", "csv_monitor.output_path"])
@pytest.mark.parametrize("value", ["/etc/cron.d/x", "../x", "a/../../x", "~/x"])
def test_what_deepspeed_writes_stays_in_the_output_directory(pick_config, mistake, key, value):
    message = mistake(pick_config, changed(key, value))
    assert f"ds.json: {key}" in message and value in message and "leads out of the output directory" in message


def test_writers_of_deepspeed_get_a_place_in_the_output_directory(tmp_path):
    writers = {"tensorboard": {"enabled": True}, "csv_monitor": {"enabled": True, "output_path": "csv"}}

    def fill(**blocks):
        return deepspeed_config.fill(
            {"zero_optimization": {"stage": 2}} | blocks, 2, tmp_path, "adamw_torch", output=tmp_path
        )

    filled = fill(flops_profiler={"enabled": True, "output_file": "flops.txt"}, **writers)
    places = [filled["flops_profiler"]["output_file"], *(filled[writer]["output_path"] for writer in writers)]
    assert places == [str(tmp_path / "flops.txt"), str(tmp_path), str(tmp_path / "csv")]
    for silent in ({"flops_profiler": {"enabled": True}}, {"tensorboard": {"enabled": False, "output_path": "x"}}):
        filled = fill(**silent)
        assert {name: filled[name] for name in silent} == silent


@pytest.mark.parametrize("bf16", [True, False])
def test_autocast_in_the_file_is_refused_for_it_hides_the_runs_precision(pick_config, mistake, bf16):
    block = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    said = mistake(pick_config, ZERO3 | block, training={"bf16": bf16})
    assert "ds.json: torch_autocast.enabled" in said and "whatever the recipe says" in said
    assert pick_config(ZERO3 | {"torch_autocast": {"enabled": False}})


def test_deepspeed_imports_no_module_of_a_strangers(pick_config, mistake):
    key = "torch_autocast.lower_precision_safe_modules"
    said = mistake(pick_config, changed(key, ["torch.nn.Linear", "os.path"]))
    assert "os.path" in said and f"ds.json: {key}" in said and "transformers" in said


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
    config["timers"] = {"throughput": {"enabled": True}}
    assert deepspeed_config.fill(config, 8, tmp_path, "adamw_torch") == config


def test_fill_turns_off_the_timer_that_waits_for_the_device(tmp_path):
    filled = deepspeed_config.fill({"zero_optimization": {"stage": 2}}, 2, tmp_path, "adamw_torch")
    assert get_timers_config(filled).enabled is False
