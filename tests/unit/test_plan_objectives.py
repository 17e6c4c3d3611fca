"""What the planner says of preferences: pairs, references in each step, before it and in memory, and reward models."""

import json
import re
from dataclasses import replace

import pytest
import yaml

from brigade.plan.choice.job_of_run import job_of_run
from brigade.plan.choice.workload import usual_comparison
from brigade.plan.costs.activations import logit_bytes
from brigade.plan.costs.comparing import looks_before_training, looks_of_a_step, reference_job, reference_weights
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.host_memory import host
from brigade.plan.costs.job import Comparison, Job
from brigade.plan.costs.memory import moments
from brigade.plan.costs.step_time import forward_seconds, head_seconds, step_time
from brigade.plan.hardware import gpu
from brigade.plan.runs.calibrate import job_of_record, record
from brigade.plan.shape.find import named_shape
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.recipe.objectives import DISTILL, OBJECTIVES
from brigade.train.strategy import Strategy
from testing.ranks import REPOSITORY as ROOT

pytestmark = pytest.mark.usefixtures("in_the_repository")
SHAPE, SMALL = (named_shape(str(ROOT / "recipes" / name)) for name in ("qwen3-8b", "qwen3-0.6b"))
CONFIG = json.loads((ROOT / "recipes" / "qwen3-4b" / "config.json").read_text())
H100 = gpu("H100 80GB")
SECOND = Comparison("dpo", "pairs", "model")
DDP = Strategy("ddp", "ddp", "")
LORA = ["--use_peft", "true", "--lora_target_modules", "all-linear"]


def job(**options) -> Job:
    return Job(SHAPE, **({"sequence": 4096, "data": 8, "checkpointing": "full", "loss": "released"} | options))


def of_recipe(*words, strategy=DDP, ranks=8, config=CONFIG):
    always = ["--bf16=true", "--global_batch_size=16", "--per_device_train_batch_size=1", "--max_length=1024"]
    recipe = flags.load([*always, "--packing=false", *words]).recipe
    batch = batch_arithmetic(recipe.training, strategy.axes.data(ranks), "")
    return job_of_run(recipe, strategy, batch, ranks, 8, config, "H100 80GB")


# ---- a run's job -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != DISTILL])
def test_pairs_are_two_samples_of_a_sequence(objective):
    found, plain = of_recipe("--objective", objective), of_recipe()
    two = OBJECTIVES[objective].rows == "pairs"
    assert found.sequence == (2048 if two else 1024)
    assert found.tokens_per_step == (2 if two else 1) * plain.tokens_per_step
    assert found.length == 1024  # what a token sees at most
    assert found.comparison == usual_comparison(objective, adapters=False)


def test_a_teacher_is_a_second_model_with_its_own_size():
    teacher = ["--objective", "distill", "--teacher", str(ROOT / "recipes/qwen3-8b")]
    whole, few = (of_recipe(*teacher, "--teacher_load_in_4bit", bits) for bits in ("false", "true"))
    assert whole.comparison.shape.parameters == SHAPE.parameters and whole.comparison.stays and whole.loss == "tiled"
    (held,), (held_in_4bit,) = ({each.reference for each in moments(of)} for of in (whole, few))
    assert held == 2 * SHAPE.parameters
    assert 0.25 * held < held_in_4bit < 0.4 * held  # embedding and head stay in 16 bits
    sharded = reference_weights(replace(whole, engine="fsdp2", stage=3, data=8, shard=8))
    assert sharded == pytest.approx(held / 8 + 7 / 8 * 2 * SHAPE.vocab * SHAPE.hidden)


def test_a_teacher_stands_with_the_last_stage_of_a_pipeline():
    distilled = of_recipe("--objective", "distill", "--teacher", str(ROOT / "recipes/qwen3-8b"))
    stages = replace(distilled, pipeline=2, data=1)
    assert {each.reference for each in moments(stages)} == {0.0, 2 * SHAPE.parameters}


def test_the_words_that_a_teacher_leaves_are_counted_on_the_disk(plan, tmp_path):
    recipe, few = ROOT / "recipes/qwen3-0.6b/distill.yaml", tmp_path / "few.yaml"
    few.write_text(recipe.read_text().replace("  teacher:", "  teacher_top_k: 64\n  teacher:"))
    _, live = plan(recipe)
    code, kept = plan(few)
    assert code == 0 and "with the teacher, once before training: " in kept and "of disk" not in live
    assert "64 words of each token: 492 GiB of disk on each host for a billion supervised tokens" in kept


def test_plan_asks_for_the_recipe_where_a_teacher_is_not_named(plan):
    code, out = plan("qwen3-4b", "--gpu", "H100", "--objective", "distill")
    assert code == 2 and "name a recipe with its teacher" in out


@pytest.mark.parametrize("words, reference, precomputed", [
    ([], "model", True),
    (LORA, "adapters_off", False),
    ([*LORA, "--precompute_ref_log_probs", "true"], "adapters_off", True),
    ([*LORA, "--reference", "model"], "model", True),
    (["--precompute_ref_log_probs", "false"], "model", False),
])  # fmt: skip
def test_the_reference_is_the_recipe_s(words, reference, precomputed):
    found = of_recipe("--objective", "dpo", *words).comparison
    assert (found.reference, found.precomputed, found.shape) == (reference, precomputed, None)
    assert found.stays == (reference == "model" and not precomputed) == found.second


def test_another_reference_has_its_own_size_and_none_is_an_error():
    found = of_recipe("--objective", "dpo", "--reference", "recipes/qwen3-0.6b")
    assert found.comparison.shape == replace(SMALL, name=found.comparison.shape.name)
    assert found.comparison.second and not found.comparison.stays
    assert job_of_record(yaml.safe_load(yaml.safe_dump(record(found))), "run.yaml") == found
    with pytest.raises(Exception, match="of the reference the formulas know no sizes"):
        of_recipe("--objective", "dpo", "--reference", "nowhere")


def test_a_plain_run_is_recorded_as_ever():
    assert "comparison" not in record(of_recipe()) and "scores" not in record(of_recipe())["shape"]
    compared = of_recipe("--objective", "kto", *LORA)
    assert job_of_record(yaml.safe_load(yaml.safe_dump(record(compared))), "run.yaml") == compared


def test_eager_attention_is_given_padded_pairs_unless_they_are_packed():
    eager = ["--objective", "dpo", "--attn_implementation", "eager"]
    assert of_recipe(*eager).scored == 1024 and of_recipe(*eager, "--packing", "true").scored == 2048
    assert of_recipe("--attn_implementation", "eager").scored == 1024


def test_the_loss_is_not_ligers():
    assert of_recipe("--use_liger_kernel", "true").loss == "released"
    assert of_recipe("--objective", "dpo", "--use_liger_kernel", "true", "--tiled_loss", "true").loss == "tiled"


# ---- time ------------------------------------------------------------------------------------------------------------
def looks(objective, adapters, **changes):
    method = {"method": "lora", "trained": 10**7} if adapters else {}
    found = job(comparison=replace(usual_comparison(objective, adapters), **changes), **method)
    return sum(times for _, times in looks_of_a_step(found)), sum(times for _, times in looks_before_training(found))


@pytest.mark.parametrize("objective, adapters, changes, in_step, before", [
    ("sft", False, {}, 0, 0),
    ("orpo", False, {}, 0, 0),
    ("reward", True, {}, 0, 0),
    ("dpo", True, {}, 1, 0),
    ("dpo", False, {}, 0, 1),
    ("dpo", False, {"precomputed": False}, 1, 0),
    ("kto", True, {}, 3, 0),  # the reference at both kinds of answers, and the model at the mismatched ones
    ("kto", False, {}, 1, 2),
])  # fmt: skip
def test_who_looks_how_often(objective, adapters, changes, in_step, before):
    assert looks(objective, adapters, **changes) == (in_step, before)


def test_a_pass_without_gradients_takes_a_third_of_a_step_s_products():
    """A forward pass has 2 N of the 6 N FLOPs per token, and the step of one GPU has little else."""
    plain = job(data=1, checkpointing="none", micro_batch=4, labelled=0.5)
    assert forward_seconds(plain, H100) == pytest.approx(step_time(plain).compute / 3, rel=0.1)
    dpo = replace(plain, comparison=replace(SECOND, precomputed=False))
    assert step_time(dpo).comparing == pytest.approx(step_time(dpo).compute / 3, rel=0.1)
    assert replace(step_time(dpo), comparing=0.0) == step_time(plain)


def test_adapters_that_are_off_compute_nothing():
    on = job(data=1, method="lora", trained=10**7, micro_batch=2)
    off = replace(on, comparison=usual_comparison("dpo", True))
    assert 0.7 * forward_seconds(on, H100) < step_time(off).comparing < forward_seconds(on, H100)


def test_the_hours_before_training_are_those_of_the_data():
    found = estimate(job(data=1, checkpointing="none", comparison=usual_comparison("dpo", False)))
    assert found.time.comparing == 0 and not estimate(job(data=1)).hours_before(1e9)
    steps = 1e9 / found.job.tokens_per_step
    trains = found.time.compute * steps / 3600
    assert found.hours_before(1e9) == pytest.approx(trains / 3, rel=0.1)
    assert found.hours_before(2e9) == pytest.approx(2 * found.hours_before(1e9))


def test_sharded_weights_are_gathered_for_a_pass():
    slow = {"stage": 3, "data": 16, "link": "10 Gb/s", "comparison": SECOND}
    assert step_time(job(**slow)).comparing > 3 * step_time(job(**slow | {"link": ""})).comparing


# ---- memory ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spread, ranks", [
    ({"engine": "ddp"}, 1),
    ({"engine": "zero", "stage": 1}, 1),
    ({"engine": "zero", "stage": 2}, 1),
    ({"engine": "zero", "stage": 3}, 8),
    ({"engine": "fsdp2", "stage": 3}, 8),
    ({"engine": "fsdp2", "stage": 3, "data": 16, "shard": 8}, 16),  # HSDP: over all ranks
    ({"engine": "zero", "stage": 3, "offload": "all"}, 8),  # which is not the reference's
])  # fmt: skip
def test_a_second_model_is_sharded_where_weights_are(spread, ranks):
    plain, second = job(**spread), job(**spread, comparison=SECOND)
    weights = 2 * SHAPE.parameters / ranks
    assert reference_weights(second) == pytest.approx(weights)
    with_it, without = estimate(second).memory, estimate(plain).memory
    assert with_it.reference == pytest.approx(weights) and without.reference == 0
    assert with_it.allocated >= without.allocated + 0.999 * weights
    assert host(second) == host(plain)


def test_quantised_weights_do_not_quantise_a_second_model():
    qlora = job(method="qlora", trained=10**7, engine="ddp", data=1, comparison=SECOND)
    assert reference_weights(qlora) == 2 * SHAPE.parameters
    assert reference_job(qlora).loss == "released" and not reference_job(qlora).autocast


@pytest.mark.parametrize("objective, adapters", [("dpo", False), ("dpo", True), ("kto", True), ("simpo", False)])
def test_without_a_second_model_nothing_stays(objective, adapters):
    method = {"method": "lora", "trained": 10**7} if adapters else {}
    compared = job(**method, comparison=usual_comparison(objective, adapters))
    assert estimate(compared).memory == estimate(job(**method)).memory


def test_another_model_before_training_needs_a_moment_of_its_own():
    small = job(stage=0, engine="ddp", comparison=replace(SECOND, precomputed=True, shape=SMALL))
    assert estimate(small).memory == estimate(job(stage=0, engine="ddp")).memory
    large = Job(SMALL, 2048, engine="ddp", comparison=replace(SECOND, precomputed=True, shape=SHAPE))
    memory = estimate(large).memory
    assert memory.reference == 2 * SHAPE.parameters and memory.logits < logit_bytes(reference_job(large)) + 1


# ---- reward models ---------------------------------------------------------------------------------------------------
def test_a_reward_model_has_a_head_of_one_column_and_no_logits():
    scoring = SHAPE.scoring
    assert scoring.parameters == SHAPE.parameters - SHAPE.vocab * SHAPE.hidden + SHAPE.hidden
    assert SMALL.scoring.parameters == SMALL.parameters + SMALL.hidden  # the embedding is no head
    reward = replace(job(), shape=scoring, comparison=usual_comparison("reward", False))
    assert logit_bytes(reward) < 0.02 * logit_bytes(job()) and head_seconds(reward, H100) == (0, 0)
    assert step_time(reward).compute < step_time(job()).compute


def test_a_reward_model_s_head_is_trained_beside_adapters():
    plain, reward = of_recipe(*LORA), of_recipe("--objective", "reward", *LORA)
    assert reward.trained == plain.trained + reward.shape.hidden


# ---- what it prints --------------------------------------------------------------------------------------------------
def test_the_page_says_what_the_command_prints(plan):
    page = (ROOT / "docs/preferences.md").read_text()
    commands = re.findall(r"    \$ python -m brigade plan (\S+)\n((?:    .+\n)+)", page)
    assert len(commands) == 2
    for recipe, lines in commands:
        code, out = plan(recipe)
        assert code == 0 and re.sub("^    ", "", lines, flags=re.M) in out


def test_a_second_model_is_told_with_its_memory_and_time(plan, tmp_path):
    recipe = yaml.safe_load((ROOT / "recipes/qwen3-8b/dpo.yaml").read_text())
    recipe["training"]["precompute_ref_log_probs"] = False
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump(recipe))
    _, out = plan(tmp_path / "dpo.yaml")
    assert "compares with a second model: a forward pass without gradients in each step" in out
    assert "1.0 GiB on each GPU hold its weights in half precision, all the time" in out
    assert re.search(r"memory .* reference 0.95,", out) and re.search(r"time .* comparing \d", out)


@pytest.mark.parametrize("strategy, said", [("zero3", True), ("zero2", False), ("fsdp2", False)])
def test_what_zero_3_forgets_is_told(plan, strategy, said):
    words = ["--objective", "dpo", "--method", "lora", "--strategy", strategy, "--max_length", 1024]
    _, out = plan("qwen3-8b", "--gpu", "H100", "--hostfile", "hostfiles/1x8", *words)
    assert ("records anew in which order it gathers weights" in out) == said


def test_json_says_what_is_learned(plan):
    _, out = plan("recipes/smollm3-3b/kto-lora.yaml", "--json")
    (found,) = json.loads(out)["plans"]
    assert (found["objective"], found["reference"], found["reference_precomputed"]) == ("kto", "adapters_off", False)
    assert found["reference_hours_per_billion_tokens"] == 0 and found["seconds"]["comparing"] > 0
    _, out = plan("recipes/qwen3-8b/full.yaml", "--json")
    (found,) = json.loads(out)["plans"]
    assert (found["objective"], found["reference"], found["seconds"]["comparing"]) == ("sft", None, 0)


@pytest.mark.parametrize("objective", [name for name, each in OBJECTIVES.items() if each.compares])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_recipe_is_written_for_each_objective(plan, tmp_path, objective, method):
    words = ["qwen3-4b", "--gpu", "H100", "--hostfile", "hostfiles/1x8", "--max_length", 1024, "--write", tmp_path]
    words += ["--objective", objective, "--method", method, "--strategy", "fsdp2", "tp_fsdp2", "--micro_batch", 1]
    code, out = plan(*words)
    assert code == 0 and f"learns   {OBJECTIVES[objective].title}, from" in out
    assert ("TP 2" in out) == (objective != "reward")
    recipe = flags.load(["--recipe", str(tmp_path / f"{method}.yaml")]).recipe
    assert recipe.training.objective == objective and not recipe.data.packing
    name = "kto-mix-14k" if objective == "kto" else "ultrafeedback_binarized"
    assert recipe.data.dataset_name == f"trl-lib/{name}" and recipe.training.learning_rate <= 1e-4
