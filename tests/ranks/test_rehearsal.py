"""Every recipe and every strategy trains, saves, resumes with the same losses, and really shards its states."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import CONFIG_MAPPING

from brigade.__main__ import main
from brigade.train.strategy.axes import NAMES
from testing import marks, parity, runs
from testing.ranks import REPOSITORY
from testing.rehearsals import RECIPES, rehearsed

BY_RUN = {rehearsed(path): f"recipe-{path.parent.name}-{path.stem}" for path in reversed(RECIPES)}
REHEARSED = {path: BY_RUN[rehearsed(path)] for path in RECIPES}
REHEARSED_IN_CI = (
    "gemma-3-1b-it/lora", "gemma-4-26b-a4b/lora", "gemma-4-e4b/lora", "gpt-oss-120b/full-ep-2x8", "llama-3.1-405b/full-3d-16x8",
    "llama-3.1-8b/full-128k", "ministral-3-8b/full", "qwen3-14b/qlora", "qwen3.5-9b/full", "smollm2-81m/distill",
)  # fmt: skip
# Tensor groups in a pipeline's stages need four ranks.
RANKS = {
    REHEARSED[path]: 2 ** max(1, sum(isinstance(one, str) and one in NAMES for one in rehearsed(path)))
    for path in RECIPES
}
RECIPE_CASES = {name: ["--recipe", str(path)] for path, name in reversed(REHEARSED.items())}
CASES = {name: words for name, words in parity.STRATEGIES.items() if name != "hsdp"}
CASES |= {f"fsdp2-{optim}": [*parity.STRATEGIES["fsdp2"], "--optim", optim] for optim in ("lamb", "lars")}
CASES |= {
    f"{name}-bf16-checkpointing": [*parity.STRATEGIES[name], "--bf16", "--activation_checkpointing"]
    for name in ("ddp", "zero2", "zero3", "fsdp2")
}
CASES |= {f"ddp-{hook}": ["--ddp_comm_hook", hook] for hook in ("fp16", "bf16", "power_sgd")}
EXPERTS = ["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml"]
CASES |= {
    f"experts-{model}-{method}": ["--recipe", f"recipes/{model}/{method}.yaml", *EXPERTS]
    for model, method in (("qwen3-30b-a3b", "full"), ("qwen3-30b-a3b", "lora"), ("gpt-oss-20b", "full"))
}


def run(cases, folder, ranks=2):
    """What each rehearsal printed, all in one process group of `ranks`, and where they lie: in outputs/ of this folder."""
    cases = [{"name": name, "flags": [*flags, "--rehearse"]} for name, flags in cases.items()]
    found, done = runs.run_all(ranks, cases, folder, timeout=900)
    return {name: result["said"] for name, result in found.items()}, done, folder


@pytest.fixture(scope="module")
def said(tmp_path_factory, asked_for):
    return run(
        {name: CASES[name] for name in CASES if name in asked_for("name")}, tmp_path_factory.mktemp("strategies")
    )


@pytest.fixture(scope="module")
def said_of_recipes(tmp_path_factory, asked_for):
    """What rehearsals print, of every recipe of the repository and of one that `plan` writes now."""
    folder = tmp_path_factory.mktemp("recipes")
    wanted = ["qwen3-4b", "--method", "lora", "--gpu", "A100 80GB", "--hostfile", str(REPOSITORY / "hostfiles/1x8")]
    assert main(["plan", *wanted, "--write", str(folder / "mine")]) == 0
    names = {REHEARSED[path] for path in asked_for("path") if path in REHEARSED}
    cases = {name: flags for name, flags in RECIPE_CASES.items() if name in names}
    cases["written"] = ["--recipe", str(folder / "mine" / "lora.yaml")]
    for model in asked_for("model"):
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(CONFIG_MAPPING[model]().to_dict()))
        recipe = yaml.safe_load((REPOSITORY / "recipes/tiny/full.yaml").read_text())
        recipe["model"] = {"model_name_or_path": str(folder / model)}
        (folder / model / "full.yaml").write_text(yaml.safe_dump(recipe))
        bf16 = ["--recipe", str(folder / model / "full.yaml"), "--bf16", "--activation_checkpointing"]
        cases[model] = [*bf16, *parity.STRATEGIES["fsdp2"]]
    larger = {name: cases.pop(name) for name in list(cases) if RANKS.get(name, 2) > 2}
    texts, done, _ = run(cases, folder)
    if larger:
        more, of_four, _ = run(larger, folder, 4)
        texts, done = texts | more, done if done.returncode else of_four
    return texts, done, folder


@pytest.mark.parametrize("path", marks.cases(
    Path("recipes/tiny/full.yaml"),
    # Each axis, a mixture of experts, 4-bit weights, adapters on tied ends.
    slow=[Path(f"recipes/{name}.yaml") for name in REHEARSED_IN_CI],
    matrix=RECIPES,
))  # fmt: skip
def test_rehearsal_of_a_recipe_goes_well(path, said_of_recipes):
    went_well(REHEARSED[path], *said_of_recipes)


def test_rehearsal_of_a_recipe_that_plan_has_written(said_of_recipes):
    went_well("written", *said_of_recipes)


@pytest.mark.slow
@pytest.mark.parametrize("model", parity.MODELS)
def test_fsdp2_resumes_what_is_more_than_trained_parameters(model, said_of_recipes):
    """Buffers of the state dict, and a vision tower that texts do not reach."""
    went_well(model, *said_of_recipes)
    assert ("frozen         model.vision_tower" in said_of_recipes[0][model]) == (model == "gemma3")


# test_resume.py has that each strategy goes on; here one of each kind also shows that its states are sharded.
@pytest.mark.parametrize("name", marks.cases(slow=["zero3-bf16-checkpointing"], matrix=CASES))
def test_rehearsal_goes_well(name, said):
    went_well(name, *said)


def went_well(name, texts, done, _):
    assert name in texts, done.stderr[-3000:]
    text = texts[name]
    assert "continues" in text and "checkpoint-3" in text
    assert "The rehearsal went well" in text
    assert f"world size {RANKS.get(name, 2)}" in text


@pytest.mark.slow
@pytest.mark.cases(name="zero3_hpz")
def test_run_yaml_holds_the_ds_config_with_every_auto_filled(said):
    *_, folder = said
    record = yaml.safe_load((folder / "outputs/rehearsal-tiny-full-zero3_hpz/run/run.yaml").read_text())
    ds_config = record["run"]["ds_config"]
    assert "auto" not in str(ds_config) and ds_config["zero_optimization"]["zero_hpz_partition_size"] == 2
    assert ds_config["train_batch_size"] == 8 and ds_config["zero_optimization"]["reduce_bucket_size"] == 64 * 64


@pytest.mark.matrix
def test_a_rehearsal_needs_no_launcher_and_hsdp_gets_four_ranks(tmp_path):
    """The user's own command line, verbatim, from another directory."""
    words = "--recipe recipes/qwen3-8b/full.yaml --rehearse --accelerate_config accelerate_configs/hsdp_2x8.yaml"
    command = [sys.executable, str(REPOSITORY / "train.py"), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "world size 4" in done.stdout and "The rehearsal went well" in done.stdout
    assert "Serve it" not in done.stdout  # a random model
    assert "gemm_4bit" not in done.stderr, "bitsandbytes warns on a CPU with AVX512-BF16"
