"""`python -m brigade plan`: what its flags ask for, and what it says of those it does not know and of a recipe's data."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from brigade.plan.choice.goals import own_tokens
from brigade.plan.choice.job_of_recipe import load_plan
from brigade.plan.choice.workload import CHOICES, Cluster, named, runs
from brigade.plan.output.answer import speed_of
from brigade.plan.output.show_recipe import header
from brigade.train.recipe import flags
from brigade.train.recipe.files import REPOSITORY
from brigade.train.recipe.method import METHODS, method_of
from brigade.train.strategy.axis_keys import of_ds_config
from testing.shipped import shipped

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("in_the_repository")


@pytest.mark.parametrize("words, said", [
    (["qwen3-8b", "--metod", "lora"], "did you mean '--method'?"), (["qwen3-8b", "--metod=lora"], "did you mean '--method'?"),
    (["x" * 5000, "--gpu", "H100"], "File name too long"),
    (["a", "b", "c"], "'b c': there are more words"), (["qwen3-8b", "--gpu", "H100", "--network", "foo"], "states no rate"),
    (["qwen3-8b", "--gpu", "H100", "--network", "100 Gb/s"], "nothing goes between hosts where there is one"),
    (["qwen3-8b", "--gpu", "H100", "--lora_r", "8"], "full fine-tuning has no adapters"),
    (["qwen3-8b", "--gpu", "H100", "--network", "0 Gb/s"], "is no rate"),
    (["qwen3-8b", "--gpu", "H100", "--strategy", "zreo3"], "did you mean 'zero3'?"),
    (["qwen3-8b", "--gpu", "H100", "--strategy", "SP 2 x ZeRO-3"], "write sp_zero3: plan tries every size"),
    (["qwen3-8b", "--gpu", "H100", "--strategy", "hsdp"], "here: it shards over several GPUs, and there is one"),
    (["qwen3-30b-a3b", "--gpu", "H100", "--method", "qlora"], "57 GiB in 16 bits. Fits: DDP on 1 x 1 H100 80GB"),
    (["gemma-4-26b-a4b", "--gpu", "4090", "--method", "qlora"], "that does: H100 80GB instead of RTX 4090."),
    (["glm-4.5-air", "--gpu", "H100", "--hostfile", "hostfiles/1x8", "--method", "qlora"], "Fits: ZeRO-3 on 1 x 8 H100 80GB"),
    (["llama-3.1-8b", "--gpu", "4090", "--strategy", "fsdp2_offload"], "name ddp, zero2_offload or zero3_offload_param"),
    (["qwen3.5-9b", "--gpu", "H200", "--hostfile", "hostfiles/1x8", "--max_length", "131072", "--strategy", "sp_zero3"],
     "a mixer's state goes from token to token, and no rank has it from another one\n  cure: name zero3, or"),
    (["qwen3-8b", "--gpu", "H100,4090"], "every rank waits for the slowest: plan all hosts as --gpu 'RTX 4090', or each"),
    (["qwen3-8b", "--gpu", "A10 + 4090"], "--gpu 'A10', or" ),
    (["qwen3-8b", "--gpu", "B200 and A10x"], "GPU kind 'A10x'"),
    (["qwen3-8b", "--gpu", "H100", "--micro_batch", "0"], "'0' is not a whole number from 1"),
    (["qwen3-8b", "--gpu", "H100", "--micro_batch", "3", "--global_batch_size", "8"], "use --global_batch_size 9"),
    (["qwen3-8b", "--gpu", "H100", "--optim", "adamw_8bti"], "did you mean 'adamw_8bit'?"),
    (["qwen3-8b", "--gpu", "H100", "--optim", "lamb", "--strategy", "zero2"], "does not run lamb under ZeRO-2"),
    (["recipes/qwen3-8b/none.yaml"], "there is no recipe"), (["recipes/tiny/full.yaml"], "this run computes in fp32"),
    (["recipes/llama-3.1-8b/full.yaml", "--method", "lora"], "flag --method"),
    (["llama-3.1-8b", "--gpu", "H100", "--max_length", "262144"], "give at most 131072"),
    (["qwen3-8b", "--gpu", "NVIDIA GeForce RTX 4090 D v2"], "did you mean 'RTX 4090 D'?"),
    (["qwen3-8b", "--gpu", "NVIDIA H200 NVL"], "did you mean 'H200'?"),
    (["qwen3-8b", "--gpu", "8xH100"], "says how many"), (["recipes", "--gpu", "H100"], "the folder has no config.json"),
    (["qwen3-30b-a3b", "--method", "qlora", "--gpu", "H100 80GB"], "95% of the weights are experts"),
    (["lama-3.1-8b", "--gpu", "H100 80GB"], "did you mean 'llama-3.1-8b'?"),
    (["qwen3-8b", "--gpu", "H100", "--method", "lora", "--lora_r", "1000000"], "below 8193"),
    (["qwen3-8b", "--gpu", "H100", "--method", "lora", "--lora_r", "8000"], "no low rank"),
    (["qwen3-8b", "--gpu", "H100", "--max_length", "100000000000000"], "below 3e+07"),
    (["qwen3-8b", "--gpu", "H1000"], "did you mean 'H100 80GB'"),
    (["qwen3-8b", "--gpu", "H100", "--images-per-sample", "1"], "its config.json has no vision_config"),
    (["glm-4.5-air", "--gpu", "H100", "--image-size", "10x10"], "its config.json has no vision_config"),
    (["gemma-3-4b-it", "--gpu", "H100", "--image-size", "big"], "is no width and height"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "20"], "are more than a sequence of 4,096"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "1", "--write", "x"], "a recipe of images is not written"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "1", "--liger"], "nobody has compared"),
    (["gemma-3-4b-it", "--gpu", "H100", "--images-per-sample", "1", "--objective", "dpo"], "have texts only"),
    (["recipes/qwen3-8b/full.yaml", "--images-per-sample", "1"], "this recipe reads none"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_cure(plan, words, said):
    code, text = plan(*words)
    assert code == 2 and said in text and "cure:" in text


def test_every_refusal_has_its_row():
    asked = re.findall(r'_refuse\("(.*?)"', (ROOT / "brigade/plan/command.py").read_text())
    assert {*asked} == yaml.safe_load((ROOT / "brigade/plan/refused.yaml").read_text()).keys()


def test_a_host_of_more_gpus_than_any_has_is_a_mistake(plan, tmp_path):
    (tmp_path / "many").write_text("a slots=1000\n")
    code, text = plan("qwen3-8b", "--gpu", "H100", "--hostfile", tmp_path / "many")
    assert code == 2 and "1,000 GPUs in a host" in text and "cure:" in text


def test_a_rack_of_nvlink_is_one_of_gpus_that_have_it(plan, tmp_path):
    (tmp_path / "rack").write_text("a slots=4\nb slots=4\n")
    words = ["qwen3-8b", "--hostfile", tmp_path / "rack", "--network", "NVL72"]
    code, text = plan(*words, "--gpu", "RTX 4090")
    assert code == 2 and "RTX 4090 has no NVLink" in text
    code, text = plan(*words, "--gpu", "GB200")
    assert code == 0 and "NVLink joins all hosts (up to 72 GPUs)" in text and "one card of each host" not in text


@pytest.mark.parametrize("method, node_size, nodes, batch", [
    ("full", 1, 1, 128), ("lora", 1, 1, 16), ("qlora", 2, 1, 16), ("lora", 8, 1, 32), ("dora", 8, 2, 64),
    ("lora", 8, 3, 96), ("lora", 8, 32, 256),
])  # fmt: skip
def test_adapters_get_a_smaller_batch_than_all_weights(method, node_size, nodes, batch):
    """Adapters lose more by large batches; on one small card 128 sequences take minutes a step."""
    assert Cluster("RTX 4090", node_size, nodes).batch(1, method) == batch


def test_the_usual_batch_divides_over_any_cluster(plan, tmp_path):
    (tmp_path / "3x8").write_text("".join(f"{host} slots=8\n" for host in "abc"))
    words = ["qwen3-8b", "--gpu", "H100", "--hostfile", tmp_path / "3x8"]
    for more, batch in (([], 144), (["--micro_batch", 4], 192), (["--global_batch_size", 48], 48)):
        code, text = plan(*words, *more)
        assert code == 0 and f"{batch} x 4,096 tokens" in text
    code, text = plan(*words, "--global_batch_size", 127)
    assert code == 2 and "127 sequences do not divide over 24 GPUs" in text


def test_a_search_among_what_is_asked_for(plan, tmp_path):
    words = ["qwen3-8b", "--gpu", "H100", "--hostfile", "hostfiles/2x8", "--strategy", "zero3", "ZeRO-2"]
    code, text = plan(*words, "--micro_batch", 2, "--optim", "adamw_8bit", "--write", tmp_path)
    rows = [line.split("│")[1:3] for line in text.splitlines() if line.startswith("│")]
    assert code == 0
    assert sorted((name.strip(), size.strip()) for name, size in rows) == [("ZeRO-2", "2"), ("ZeRO-3", "2")]
    written = yaml.safe_load((tmp_path / "full.yaml").read_text())
    assert written["training"]["optim"] == "adamw_8bit" and written["training"]["per_device_train_batch_size"] == 2
    plain = [choice for choice in CHOICES if not choice.axes]
    assert [choice.name for choice in named([], "lamb") if not choice.axes] == ["DDP", "FSDP2", "HSDP"]
    runnable = [choice for choice in CHOICES if runs(choice, optim="sgd")]
    assert set(plain) <= set(runnable)
    assert all(named([name], "sgd") == (choice,) for choice in runnable for name in (choice.key, choice.name))
    files = {path.stem for path in shipped("ds_configs/*.json") if not of_ds_config(json.loads(path.read_text()))}
    assert {choice.key for choice in plain if choice.file.endswith("json")} == files


@pytest.mark.parametrize("method", METHODS)
def test_every_method_that_a_run_takes_is_planned_and_written(method, plan, tmp_path):
    """Plans a tiny model too, whose figures are small: none of them is shown as 0.00."""
    for model, more in (("recipes/tiny", []), ("qwen3-0.6b", ["--write", tmp_path])):
        code, text = plan(model, "--gpu", "H100", "--strategy", "ddp", "--method", method, *more)
        assert code == 0 and f"parameters, {method}, " in text
        assert not re.search(r"\b0(\.0+)? (B|GB|MB|days|s per|GPU-hours)|\b1 (hosts|nodes|steps|ranks)\b", text), text
    section = flags.load(["--recipe", str(tmp_path / f"{method}.yaml")]).recipe.model
    assert {key for key in ("use_peft", "use_rslora", "use_dora", "load_in_4bit") if getattr(section, key)} == set(
        METHODS[method].keys
    )
    assert method_of(section) == method.removeprefix("rs")
    assert load_plan(tmp_path / f"{method}.yaml").estimate.job.title == METHODS[method.removeprefix("rs")].title


def test_dora_costs_more_than_lora(plan):
    found = {}
    for method in ("lora", "dora"):
        text = plan("qwen3-0.6b", "--gpu", "H200", "--method", method, "--strategy", "ddp", "--micro_batch", 1)[1]
        found[method] = [
            float(re.search(rf"{name} +([\d.,]+) ", text)[1].replace(",", "")) for name in ("memory", "speed")
        ]
    assert found["dora"][0] > 1.1 * found["lora"][0] and found["dora"][1] < found["lora"][1]


def test_eight_bit_moments_take_less(plan):
    found = []
    for optim in ("adamw_torch", "adamw_8bit"):
        words = ["qwen3-0.6b", "--gpu", "H200", "--micro_batch", 1, "--strategy", "ddp", "--optim", optim]
        found.append(float(re.search(r"memory +([\d.]+) GiB", plan(*words)[1])[1]))
    assert found[0] - found[1] == pytest.approx(6 * 0.596e9 / 2**30 * 1.07, abs=0.11)


def test_a_recipe_is_planned_as_it_is(plan):
    path = "recipes/llama-3.1-8b/full.yaml"
    planned = load_plan(Path(path))
    code, text = plan(path)
    assert code == 0 and f"memory   {planned.estimate.device_gib:.1f} GiB" in text and text.startswith("Fits with ")
    assert f"{speed_of(planned.estimate)[0]} tokens/s on each GPU" in text
    assert text.count("\nspeed ") == 1
    code, text = plan(path, "--gpu", "L40S")
    assert code == 1 and "1 x 8 L40S" in text and text.startswith("Does not fit:")


OFFLOADED = {"ds_config": "ds_configs/zero3_offload_param.json", "accelerate_config": "none"}


@pytest.mark.parametrize("name, changes, words, code, said", [
    ("full", {"cluster": OFFLOADED}, ["--host_memory", 20], 1, "each host needs"),
    ("lora", {"data": {"max_length": 45056}}, [], 2, "45056 tokens, but the model has positions for 40960"),
])  # fmt: skip
def test_a_recipe_that_the_search_or_train_py_would_refuse_is_refused_too(
    plan, tmp_path, name, changes, words, code, said
):
    folder = tmp_path / "mine"
    shutil.copytree(ROOT / "recipes/qwen3-8b", folder)
    document = yaml.safe_load((folder / f"{name}.yaml").read_text())
    for section, values in changes.items():
        document[section] |= values
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(document))
    found, text = plan(folder / f"{name}.yaml", "--gpu", "H200", *words)
    assert found == code and said in text


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.key)
def test_a_strategy_is_taken_by_every_name_that_is_printed(choice):
    """The table's name and the one of its file, which are the same but for spaces and dashes."""
    words = {choice.name, choice.key, choice.name.lower()} | (
        {choice.file} if choice.file and not choice.axes else set()
    )
    assert {*named(words, "adamw_torch_fused")} == {choice}
    if choice.file.endswith(".json") and not choice.axes:
        assert Path(choice.file).stem == choice.key


def test_the_chosen_strategy_is_the_first_row(plan):
    code, text = plan("llama-3.2-3b", "--gpu", "4090", "--method", "lora", "--max_length", "2048")
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert code == 0 and "chosen" in rows[0] and any("not taken: its speed is a formula" in row for row in rows[1:])


def test_samples_are_packed_or_padded_as_the_recipe_says(plan, tmp_path):
    """The line names the key; an unpacked recipe is counted by its longest batch."""
    text = (REPOSITORY / "recipes" / "qwen3-8b" / "lora.yaml").read_text()
    assert "packing: true" in text
    path = tmp_path / "padded.yaml"
    path.write_text(text.replace("packing: true", "packing: false"))
    packed = "packed (data.packing: true), so that each sequence has 4,096 tokens"
    padded = "padded to the longest of their batch (data.packing: false): counted is a batch in which one has max_length, 4,096 "
    for recipe, said in ((REPOSITORY / "recipes" / "qwen3-8b" / "lora.yaml", packed), (path, padded)):
        assert f"samples  {said}" in plan(str(recipe))[1]
    assert f"samples  {packed}" in plan("qwen3-0.6b", "--gpu", "H200")[1]


# ---- its own data ----------------------------------------------------------------------------------------------------
def changed(recipe, section, **keys):
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=keys)})


def test_hours_are_those_of_the_epochs_of_the_recipes_own_data():
    plan = load_plan(Path("recipes/qwen3-8b/lora.yaml"))
    tokens = own_tokens(plan.settings.recipe)
    assert tokens == 18e6  # of 71.9 MB of English
    said = float(re.search(r"([\d.]+) hours for its 18 million tokens", header(plan))[1])
    assert said == pytest.approx(tokens / plan.estimate.tokens_per_second_per_gpu / 3600, abs=0.005)
    assert own_tokens(changed(plan.settings.recipe, "training", num_train_epochs=2.0)) == 2 * tokens


@pytest.mark.parametrize("section, keys", [
    ("data", {"dataset_name": "somebody/else"}),
    ("data", {"dataset_name": None, "train_file": "mine.jsonl"}),
    ("data", {"max_train_samples": 100}),
    ("data", {"dataset_train_split": "test"}),
    ("training", {"max_steps": 10}),
])  # fmt: skip
def test_data_that_nobody_has_counted_get_the_time_of_a_billion_tokens(section, keys):
    plan = load_plan(Path("recipes/qwen3-8b/lora.yaml"))
    recipe = changed(plan.settings.recipe, section, **keys)
    assert own_tokens(recipe) is None
    other = replace(plan.settings, recipe=recipe)
    assert "hours for a billion tokens" in header(replace(plan, settings=other))
