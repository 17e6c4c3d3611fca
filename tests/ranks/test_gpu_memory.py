"""What a recipe leaves to the memory of GPUs is decided once: on a small card, on a large one, and by a run that goes on."""

import json

import pytest
import yaml

from brigade.plan.choice.job_of_run import job_of_run
from brigade.plan.choice.workload import Workload
from brigade.plan.costs.estimate import estimate
from brigade.train.host.cluster import World
from brigade.train.recipe import flags
from brigade.train.recipe.batch import batch_arithmetic
from brigade.train.strategy import choose
from testing import runs
from testing.ranks import run_ranks

pytestmark = pytest.mark.slow
RANKS, KEYS = 2, ("activation_checkpointing", "tiled_loss")
LARGE = 80 * 2**30  # bytes


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(name, bytes, *flags): (run.yaml, output) of a run on two cards of so many bytes; start.small: such that there is room
    for activations only where they are computed again."""
    folder = tmp_path_factory.mktemp("memory")
    runs.write_inputs(folder)
    common = ["--recipe", str(folder / "full.yaml"), "--ds_config", "none", "--bf16"]
    common += ["--per_device_train_batch_size", "2", "--save_steps", "1"]
    common += [word for key in KEYS for word in (f"--{key}", "auto")]

    def make(name, memory, *more):
        words = [*common, "--output_dir", str(folder / name), *more]
        done = run_ranks("testing.gpu_memory", str(memory), json.dumps(words), ranks=RANKS, timeout=300, gpus=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return yaml.safe_load((folder / name / "run.yaml").read_text()), done.stdout

    settings = flags.load(common)
    strategy = choose(settings, World(0, 0, RANKS, RANKS, "here", "torchrun"), env={})
    batch = batch_arithmetic(settings.recipe.training, RANKS, "")
    config = json.loads((folder / "model/config.json").read_text())
    needs = []
    for again in (True, False):
        recipe = settings.with_training(activation_checkpointing=again, tiled_loss=None).recipe
        needs.append(estimate(job_of_run(recipe, strategy, batch, RANKS, RANKS, config, "H100 80GB")).device_gib)
    assert needs[0] < needs[1]
    make.small = int(sum(needs) / 2 / (1 - Workload.margin) * 2**30)
    return make


def decided(record):
    return [record["training"][key] for key in KEYS]


def test_the_memory_of_the_gpus_decides_and_a_run_keeps_what_it_began_with(start):
    large, said = start("large", LARGE, "--max_steps", "1")
    assert decided(large)[0] is False and "activation_checkpointing false (the planner's: 1 of 80 GiB, up to 1)" in (
        " ".join(said.split())
    )
    assert large["run"]["decided"]["activation_checkpointing"].startswith("the planner's: ")

    small, said = start("small", start.small, "--max_steps", "1")
    assert decided(small)[0] is True and "activation_checkpointing true (the planner's: " in " ".join(said.split())
    assert small["run"]["identity"] != large["run"]["identity"]

    # Lengthened on the large card, and with the value that was decided for a flag: the same run.
    later, said = start("small", LARGE, "--max_steps", "2")
    assert decided(later) == decided(small) and all(
        later["run"][key] == small["run"][key] for key in ("identity", "decided")
    )
    assert "activation_checkpointing true (as this run began)" in " ".join(said.split()) and "continues" in said
    later, said = start("small", LARGE, "--max_steps", "3", "--activation_checkpointing", "true")
    assert later["run"]["identity"] == small["run"]["identity"] and "continues" in said
