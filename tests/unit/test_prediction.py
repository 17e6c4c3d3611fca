"""A run as a Job, what is predicted of it, and what is said where it comes out otherwise."""

import json
from dataclasses import replace

import pytest
import yaml
from transformers import AutoConfig

from brigade.offers import offers
from brigade.plan import hardware
from brigade.plan.choice import job_of_recipe, job_of_run
from brigade.plan.costs.conventions import ENGINES
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.job import EAGER, FUSED
from brigade.plan.runs import calibrate, prediction
from brigade.plan.shape.find import described
from brigade.plan.shape.from_code import MeasuredShape
from brigade.plan.shape.lora import lora_parameters
from brigade.train.distributed import ranks
from brigade.train.host import control_groups
from brigade.train.host.cluster import World
from brigade.train.model.config_json import read_config
from brigade.train.model.location import check_beside, load_config
from brigade.train.recipe.batch import Batch, batch_arithmetic
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run import directory as runs_on_disk
from brigade.train.step import micro_batch
from brigade.train.strategy import Strategy
from testing.gpus import sees
from testing.shipped import shipped

CONFIG = json.loads((REPOSITORY / "recipes/qwen3-8b/config.json").read_text())
BATCH = Batch(64, 2, 2, 16, 1e-5)
SINGLE = Strategy("single", "single", "the world size")
FSDP2 = Strategy("fsdp2", "fsdp2", "a test", shard=16)
HALF = {"bf16": True, "global_batch_size": 64}


def zero(stage, **more):
    return Strategy(f"zero{stage}", f"zero{stage}", "a test", {"zero_optimization": {"stage": stage, **more}})


@pytest.fixture
def job(load):
    """job(strategy, training={...}, ...): the Job of 16 ranks, eight on a host."""

    def make(strategy=SINGLE, training=None, model=None, ranks=16, **more):
        recipe = load(training=HALF | (training or {}), model=model or {}).recipe
        return job_of_run.job_of_run(recipe, strategy, BATCH, ranks, 8, CONFIG, "H100 80GB", **more)

    return make


@pytest.mark.parametrize("strategy, wanted", [
    (SINGLE, ("ddp", 0, 0, 0, "")),
    (Strategy("ddp", "ddp", "a test"), ("ddp", 0, 0, 0, "")),
    (zero(1), ("zero", 1, 0, 0, "")),
    (zero(2, offload_optimizer={"device": "cpu"}), ("zero", 2, 0, 0, "optimizer")),
    (zero(3, offload_optimizer={"device": "none"}), ("zero", 3, 0, 0, "")),
    (zero(3, zero_hpz_partition_size="auto"), ("zero", 3, 0, 8, "")),
    (zero(3, zero_hpz_partition_size=4), ("zero", 3, 0, 4, "")),
    (zero(3, zero_hpz_partition_size=1), ("zero", 3, 0, 0, "")),
    (zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}), ("zero", 3, 0, 0, "all")),
    (zero(3, offload_optimizer={"device": "nvme"}, offload_param={"device": "cpu"}), ("zero", 3, 0, 0, "nvme")),
    (FSDP2, ("fsdp2", 3, 0, 0, "")),
    (Strategy("hsdp", "hsdp", "a test", replicate=2, shard=8), ("fsdp2", 3, 8, 0, "")),
    (replace(FSDP2, fsdp={"cpu_offload": True}), ("fsdp2", 3, 0, 0, "all")),
])  # fmt: skip
def test_every_strategy_has_its_engine(job, strategy, wanted):
    made = job(strategy)
    assert (made.engine, made.stage, made.shard, made.hpz, made.offload) == wanted and made.engine in ENGINES


def test_the_shipped_ds_configs_are_known(job):
    offloads = dict.fromkeys(("zero2_offload", "zero3_offload"), "optimizer")
    offloads |= {"zero3_offload_param": "all", "zero3_nvme": "nvme"}
    for path in shipped("ds_configs/*.json"):
        config = json.loads(path.read_text())
        stage = config["zero_optimization"]["stage"]
        strategy = Strategy(f"zero{stage}", path.stem, "a test", config)
        made = job(strategy)
        assert made.offload == offloads.get(path.stem, "") and made.stage == stage, path.stem
        assert made.quantised == (path.stem == "zeropp")


def test_batch_ranks_and_rows_are_the_runs(job):
    made = job()
    assert (made.micro_batch, made.accumulation, made.data, made.node_size, made.nodes) == (2, 2, 16, 8, 2)
    assert made.sequence == 2048 and made.shape.parameters == 8_190_735_360 and made.gpu == "H100 80GB"


@pytest.mark.parametrize("training, kernels, loss", [
    ({}, EAGER, "released"), ({"torch_compile": True}, FUSED, "online"), ({"use_liger_kernel": True}, FUSED, "released"),
    ({"use_liger_kernel": True, "torch_compile": True}, FUSED, "online"),
    ({"use_liger_kernel": True, "tiled_loss": True}, FUSED, "tiled"),
])  # fmt: skip
def test_kernels_and_loss(job, training, kernels, loss):
    made = job(training=training)
    assert (made.kernels, made.loss, made.checkpointing) == (kernels, loss, "none")
    assert job(training=training | {"activation_checkpointing": True}).checkpointing == "full"


def test_adapters(job):
    made = job(model={"use_peft": True, "lora_r": 8})
    assert (made.method, made.trained) == ("lora", lora_parameters(made.shape, 8))
    made = job(model={"use_peft": True, "load_in_4bit": True, "lora_target_modules": ["q_proj"]}, trained=1000)
    assert (made.method, made.trained) == ("qlora", 1000)
    made = job(model={"use_peft": True, "lora_r": 8, "lora_target_modules": ["v_proj", "q_proj"]})
    assert (made.targets, made.trained) == ("qv", lora_parameters(made.shape, 8, "qv"))
    ends = job(model={"use_peft": True, "lora_r": 8, "lora_modules_to_save": ["embed_tokens", "lm_head"]})
    assert ends.trained == lora_parameters(ends.shape, 8) + 2 * ends.shape.vocab * ends.shape.hidden
    assert job().trained == 0


WORLD = World(0, 0, 1, 1, "here", "python")


@pytest.fixture
def begin(load, tmp_path, monkeypatch):
    """begin(name, gib, record="", **training): the batch of a run of one rank on that GPU, beside a run.yaml of that batch."""

    def make(name, gib=0.0, record="", integrated=False, **training):
        sees(monkeypatch, name, gib, integrated)
        settings = load(training=HALF | training)
        batch = batch_arithmetic(settings.recipe.training, 1, "")
        if record:
            (tmp_path / "run.yaml").write_text(yaml.safe_dump({"run": {"batch": record}}))
        config, kernels = AutoConfig.for_model(**CONFIG), runs_on_disk.Kernels()
        return micro_batch.settle_batch(batch, settings, SINGLE, WORLD, kernels, config, tmp_path, offers(WORLD))

    return make


H200, L4 = ("NVIDIA H200", 139.8), ("NVIDIA L4", 22.0)
SMALL = {"activation_checkpointing": True, "optim": "sgd"}


@pytest.mark.parametrize("device, training, micro, why", [
    (H200, SMALL, 8, "the planner's: "), (L4, {}, 1, "the least; the planner counts "),
    (("cpu",), {}, 1, "there is no GPU; set per_device"), (H200, {"bf16": False}, 1, "in fp32; set per_device"),
    (L4, {"per_device_train_batch_size": 4}, 4, ""),
])  # fmt: skip
def test_an_automatic_micro_batch_is_the_planners_where_it_can_tell_else_1(begin, device, training, micro, why):
    batch = begin(*device, **training)
    assert batch.micro == micro and why in batch.why and bool(why) == bool(batch.why) and batch.why in str(batch)
    assert batch.micro * batch.accumulation == 64


# Names as drivers give them, of which the catalogue knows two, and GiB as torch counts them.
ANY_GPUS = [
    ("NVIDIA GeForce RTX 3060", 7.7), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5), ("NVIDIA GeForce RTX 3060", 11.6),
    ("NVIDIA GeForce RTX 5080", 15.5), ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7), ("NVIDIA RTX A5000", 23.6),
    ("NVIDIA GeForce RTX 4090", 47.4), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.9),
    ("NVIDIA GB10", 119.6), ("NVIDIA H200 NVL", 139.8), ("NVIDIA GH200 144G HBM3e", 139.9), ("NVIDIA H200", 70.0),
]  # fmt: skip


def test_memory_is_the_devices_whatever_the_catalogue_knows_of_its_name(begin):
    """Cards of one name differ, and most names are in no catalogue: the micro-batch follows what the device reports."""
    filled = {device: begin(*device, **SMALL) for device in ANY_GPUS}
    micro = [filled[device].micro for device in sorted(ANY_GPUS, key=lambda device: device[1])]
    assert micro == sorted(micro) and micro[0] == 1 and micro[-1] == 8, micro
    assert all(f" of {gib:.0f} GiB" in batch.why for (_, gib), batch in filled.items())


def test_a_gpu_without_memory_of_its_own_has_what_its_host_has_left(begin, monkeypatch, tmp_path):
    (meminfo := tmp_path / "meminfo").write_text("MemTotal: 125000000 kB\nMemFree: 1 kB\nMemAvailable:   41943040 kB\n")
    monkeypatch.setattr(control_groups, "MEMINFO", meminfo)
    monkeypatch.setattr(control_groups, "read", lambda *_: iter(()))
    assert " of 40 GiB" in begin("NVIDIA GB10", 119.6, integrated=True, **SMALL).why
    limited = ("0", [str(31 * 2**30), str(2**30), "anon 1"])
    monkeypatch.setattr(control_groups, "read", lambda *_: iter([limited]))
    assert " of 30 GiB" in begin("NVIDIA GB10", 119.6, integrated=True, **SMALL).why


def test_ranks_meet_as_often_whatever_their_recipes_say(begin, monkeypatch):
    """Recipes are compared later: until then a host with another one must not leave the others waiting."""
    gather, met = ranks.gather, []
    monkeypatch.setattr(ranks, "gather", lambda value: met.append(value) or gather(value))
    begin("cpu", per_device_train_batch_size=4)
    fixed = len(met)
    begin("cpu")
    assert fixed == len(met) - fixed > 0


def test_it_fits_and_the_next_does_not(load):
    """8B with LoRA on one card of 80 GB: more than one sequence, fewer than eight."""
    recipe = load(training=HALF, model={"use_peft": True}, data={"max_length": 4096}).recipe
    batch, device = batch_arithmetic(recipe.training, 1, ""), hardware.gpu("H100 80GB")
    micro, why = job_of_recipe.largest_fit(
        recipe, SINGLE, batch, job_of_recipe.counting(SINGLE, 1, 1, CONFIG, device, "")
    )

    def fits(m):
        of_it = replace(batch, micro=m, accumulation=64 // m)
        return estimate(job_of_run.job_of_run(recipe, SINGLE, of_it, 1, 1, CONFIG, "H100 80GB")).fits

    assert 1 <= micro < 8 and fits(micro) and not fits(2 * micro) and "of 79 GiB" in why


@pytest.mark.parametrize("record, micro", [
    ("64 sequences = micro-batch 4 x accumulation 16 x 1 data-parallel rank", 4),
    ("64 sequences = micro-batch 2 (the planner's: 61 of 80 GiB) x accumulation 32 x 1 data-parallel rank", 2),
    ("64 sequences = micro-batch 48 x accumulation 1 x 1 data-parallel rank", 1), ("nonsense", 1),
])  # fmt: skip
def test_a_run_that_continues_keeps_the_micro_batch_that_it_began_with(begin, record, micro):
    batch = begin("cpu", record=record)
    assert batch.micro == micro and ("as this run began" in str(batch)) == (micro > 1)


@pytest.mark.parametrize("changes, reason", [
    ({"training": {"bf16": False}}, "fp32"),
    ({"model": {"use_peft": True, "lora_target_modules": ["up_proj"]}}, "attention's projections, the MLP or all"),
    ({"model": {"use_peft": True, "lora_modules_to_save": ["lm_head", "norm"]}}, "not norm"),
    ({"training": {"ddp_comm_hook": "power_sgd"}}, "power_sgd"),
    ({"strategy": zero(3, zero_quantized_weights=True)}, "neither alone"),
    ({"strategy": zero(3, zero_quantized_nontrainable_weights=True)}, "stored quantised"),
    ({"strategy": replace(FSDP2, fsdp={"cpu_offload": True}), "training": {"optim": "adamw_torch"}}, "offloads with"),
    ({"strategy": replace(FSDP2, fsdp={"reshard_after_forward": False})}, "gathered"),
])  # fmt: skip
def test_what_the_formulas_do_not_know_gets_no_prediction(job, changes, reason):
    with pytest.raises(job_of_run.NotCovered, match=reason):
        job(**changes)


def test_nor_does_an_unknown_architecture(load):
    with pytest.raises(job_of_run.NotCovered, match="mamba"):
        job_of_run.job_of_run(load(training=HALF).recipe, SINGLE, BATCH, 16, 8, {"model_type": "mamba"}, "H100 80GB")


@pytest.mark.parametrize("changes", [
    {},
    {"strategy": zero(3, zero_hpz_partition_size=8)},
    {"training": {"use_liger_kernel": True}, "model": {"use_peft": True}},
])  # fmt: skip
def test_a_job_survives_run_yaml(job, changes):
    made = prediction.as_seen(job(**changes), tokens=4000.0, attended=812.5, labelled=0.4)
    assert calibrate.job_of_record(yaml.safe_load(yaml.safe_dump(calibrate.record(made))), "here") == made


def test_a_job_of_a_model_that_was_counted_in_its_code_survives_run_yaml(job):
    counted = {"parameters": 50_000, "embedding": 6_400, "head": 6_400, "dense_layer": 18_000, "adapted": 500}
    made = replace(job(), shape=MeasuredShape("olmo", 2, 64, 128, 4, 4, 16, 100, **counted))
    again = calibrate.job_of_record(yaml.safe_load(yaml.safe_dump(calibrate.record(made))), "here")
    assert again == made and again.shape.parameters == 50_000


def test_a_record_of_another_version(mistake):
    place = "run.yaml: run.prediction.job"
    assert place in mistake(calibrate.job_of_record, {"shape": {"speed": 3}}, place)
    assert "no configuration" in mistake(calibrate.job_of_record, ["shape"], place)


# ---- what is told ------------------------------------------------------------------------------------------------
PREDICTED = prediction.Prediction(39.8, (36, 44), 2.2, (1.9, 2.6))
TIME = "2.31 s per step (estimated 2.20, 80 % interval 1.90 to 2.60)"


def told(memory=41.2, seconds=2.31, data=0.0, predicted=PREDICTED, reason=""):
    return prediction.report(predicted, prediction.Measured(10, 4, seconds, data, memory), reason)


def test_one_line_where_it_came_as_predicted():
    memory = "41.2 GiB allocated at most (estimated 39.8, 80 % interval 36.0 to 44.0)"
    assert told() == [f"after 10 steps: {memory}, {TIME}"]


@pytest.mark.parametrize("figures, words", [
    ({"memory": 50}, "more memory"), ({"memory": 20}, "less memory"), ({"seconds": 3}, "slower"), ({"seconds": 1}, "faster"),
    ({"seconds": 3, "data": 1.0}, "waits for data during 33%"), ({"memory": 50, "seconds": 3}, "too tight, and it is slower"),
])  # fmt: skip
def test_one_sentence_where_it_did_not(figures, words):
    line, sentence = told(**figures)
    assert line.startswith("after 10 steps: ") and words in sentence and sentence.count(". ") == 0
    assert sentence[-1] == "."


def test_without_a_gpu_nothing_is_said_of_memory_and_without_a_prediction_the_reason():
    assert told(memory=None) == [f"after 10 steps: {TIME}"]
    assert told(predicted=None, reason="fp32", seconds=0.0123) == [
        "after 10 steps: 41.2 GiB allocated at most, 0.0123 s per step; the planner estimates nothing: fp32"
    ]


def test_memory_is_that_of_the_largest_micro_batch(job):
    usual = prediction.as_seen(job(FSDP2), tokens=2048, attended=512, labelled=0.5)
    largest = prediction.as_seen(usual, tokens=4096, attended=512, labelled=0.5)
    device = hardware.gpu("H100 80GB")
    both, small = prediction.predict(usual, largest, device), prediction.predict(usual, usual, device)
    assert both.step_time == small.step_time and both.allocated_gib > small.allocated_gib
    assert both.allocated_between[0] < both.allocated_gib < both.allocated_between[1]
    entry = prediction.entry(both, prediction.Measured(10, 4, 2.0, 0.1, 50.0), device)
    assert entry["measured"]["allocated_gib"] == 50.0
    assert entry["predicted"]["step_time"] == pytest.approx(both.step_time, 1e-4)
    assert yaml.safe_load(yaml.safe_dump(entry)) == entry


def test_logits_without_a_label_cost_nothing(job):
    whole = prediction.as_seen(job(FSDP2), tokens=4096, attended=512, labelled=1.0)
    some = replace(whole, labelled=0.25)
    device = hardware.gpu("H100 80GB")
    assert prediction.predict(some, some, device).step_time < prediction.predict(whole, whole, device).step_time


# ---- the config.json beside a recipe -----------------------------------------------------------------------------
@pytest.fixture
def beside(load, tmp_path):
    """beside({"hidden_size": 64}, *flags): the tiny recipe's settings, with its config.json so changed beside it."""

    def make(changes, *argv):
        settings = load(*argv, data={"max_length": 256})
        config = json.loads((REPOSITORY / "recipes/tiny/config.json").read_text()) | changes
        settings.recipe_path.with_name("config.json").write_text(json.dumps(config))
        return settings

    return make


def test_the_models_own_config_beside_the_recipe(beside):
    settings = beside({"rope_theta": 5.0, "bos_token_id": 7})  # neither changes a shape
    check_beside(settings, load_config(settings))


@pytest.mark.parametrize("field, value", [
    ("hidden_size", 64), ("num_hidden_layers", 2), ("num_key_value_heads", 6), ("vocab_size", 4100),
    ("tie_word_embeddings", False), ("model_type", "qwen3"),
])  # fmt: skip
def test_another_models_config_is_refused(beside, mistake, field, value):
    settings = beside({field: value})
    config = load_config(settings)
    message = mistake(check_beside, settings, config)
    assert f"recipe/config.json: {field}" in message and repr(value) in message
    assert repr(getattr(config, field)) in message
    assert "recipe was copied" in message and "remove it" in message


def test_new_tokens_are_no_other_model(beside, mistake):
    """The model's vocabulary grows from 4,096 to 4,160; a file with another one is another model's all the same."""
    words = ["--add_tokens", "<call>"]
    settings = beside({}, *words)
    check_beside(settings, load_config(settings))
    for other in (4000, 4250):
        settings = beside({"vocab_size": other}, *words)
        assert "vocab_size" in mistake(check_beside, settings, load_config(settings))


def test_but_not_where_a_flag_names_the_model_or_a_run_repeats_itself(beside, tmp_path):
    settings = beside({"hidden_size": 64}, "--model_name_or_path", "recipes/tiny")
    check_beside(settings, load_config(settings))
    settings = beside({"hidden_size": 64})
    settings = replace(settings, recipe_path=settings.recipe_path.with_name("run.yaml"))
    check_beside(settings, load_config(settings))


IMAGES = ("qwen3-vl-8b", "smolvlm2-500m", "tiny-vision")  # whose kinds have no causal language model
DECODERS = [path for path in shipped("recipes/*/config.json") if path.parent.name not in IMAGES]


@pytest.mark.parametrize("path", DECODERS, ids=lambda path: path.parent.name)
def test_config_classes_keep_what_the_shipped_configs_say(load, path):
    from transformers import AutoConfig

    settings = replace(load(), recipe_path=path.with_name("full.yaml"))
    config = AutoConfig.from_pretrained(path.parent)
    check_beside(settings, config)
    assert described(config.to_dict(), "the run's", "it") == described(read_config(path), "the file's", "it")
