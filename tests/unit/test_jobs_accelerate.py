"""What `launch --write accelerate` writes is what lies in accelerate_configs/, and accelerate takes it."""

import re

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

from brigade.hosts import job as jobs
from brigade.launch.write import text as job_file
from brigade.train.host.cluster import World
from brigade.train.strategy import choose
from brigade.train.strategy.axis_keys import as_mesh
from testing.shipped import shipped

pytestmark = pytest.mark.usefixtures("in_the_repository")
FILES = shipped("accelerate_configs/*.yaml")
DDP = "{distributed_type: MULTI_GPU, parallelism_config: {%s_size: 2}}"
FSDP2 = "{distributed_type: FSDP, fsdp_config: {fsdp_version: 2%s}%s}"


def asked(kind, hosts, slots):
    """The flags that ask for a strategy, without any file of accelerate_configs/."""
    mesh = f", parallelism_config: {{dp_replicate_size: 2, dp_shard_size: {hosts * slots // 2}}}"
    flags = {
        "ddp": ["--ds_config", "none"],
        "fsdp2": ["--accelerate_config", FSDP2 % ("", "")],
        "fsdp2_offload": ["--accelerate_config", FSDP2 % (", fsdp_offload_params: true", "")],
        "hsdp": ["--accelerate_config", FSDP2 % ("", mesh)],
        **{f"ddp_{axis}2": ["--accelerate_config", DDP % axis] for axis in ("tp", "sp", "pp")},
        **{
            f"fsdp2_{axis}2": ["--accelerate_config", FSDP2 % ("", f", parallelism_config: {{{axis}_size: 2}}")]
            for axis in ("tp", "sp", "ep")
        },
    }
    return flags.get(kind) or ["--ds_config", f"ds_configs/{kind}.json"]


def job(flags, hosts=2, slots=8, hostfile="hostfiles/2x8"):
    return jobs.make("recipes/qwen3-8b/full.yaml", flags, hostfile, {f"node{n + 1}": slots for n in range(hosts)})


def text(made, launched=False):
    return job_file("accelerate", made, launched)


def document(made, launched=False):
    return yaml.safe_load(text(made, launched))


def body(file_text):
    """Without the comments that it begins with."""
    return re.sub(r"\A(#.*\n)+", "", file_text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_what_launch_writes(path):
    match = re.fullmatch(r"(\w+)_(\d+)x(\d+)\.yaml", path.name)
    assert match, "name it STRATEGY_HOSTSxSLOTS.yaml"
    hosts, slots = int(match[2]), int(match[3])
    made = job(asked(match[1], hosts, slots), hosts, slots, f"hostfiles/{hosts}x{slots}")
    file = path.read_text()
    assert body(file) == body(text(made))
    assert f"accelerate launch --config_file accelerate_configs/{path.name} train.py" in file


@pytest.mark.parametrize("hosts, slots", [(1, 2), (1, 8), (2, 8), (4, 2)])
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(
    "kind", ["ddp", "ddp_tp2", "ddp_pp2", "fsdp2", "fsdp2_ep2", "hsdp", "zero1", "zero2", "zero3", "zero3_offload"]
)
def test_accelerate_takes_it_and_train_py_reads_the_same_strategy(kind, launched, hosts, slots, tmp_path):
    slots = max(slots, 4) if kind == "hsdp" else slots  # two groups of two
    made = job(asked(kind, hosts, slots), hosts, slots)
    path = tmp_path / "config.yaml"
    path.write_text(text(made, launched))
    config = load_config_from_file(str(path))  # raises for unknown keys at top level
    assert isinstance(config, ClusterConfig) and config.mixed_precision is None
    assert (config.num_machines, config.num_processes) == (hosts, hosts * slots)
    assert config.fsdp_config.get("fsdp_version", 2) == 2
    several = kind.startswith("zero") and hosts > 1
    assert config.deepspeed_config.get("deepspeed_multinode_launcher") == (
        None if not several else "standard" if launched else "pdsh"
    )
    assert config.deepspeed_config.get("deepspeed_hostfile") == ("hostfiles/2x8" if several and not launched else None)
    assert kind != "zero3" or DEEPSPEED_MULTINODE_LAUNCHERS[0] == "pdsh"
    assert ("deepspeed_config_file" in config.deepspeed_config) is kind.startswith("zero")
    # train.py, told to read that file, does what the job was asked to do.
    again = jobs.flags.load(["--recipe", "recipes/qwen3-8b/full.yaml", "--accelerate_config", str(path)])
    read = choose(again, World(0, 0, made.world_size, slots, "node1", "torchrun"), {})
    assert read.identity() == made.strategy.identity() and read.name == made.strategy.name
    assert (read.replicate, read.shard, read.axes) == (made.strategy.replicate, made.strategy.shard, made.strategy.axes)


def test_one_rank_alone():
    made = job(["--ds_config", "none"], 1, 1)
    assert document(made)["distributed_type"] == "NO" and "distributed_type: 'NO'" in text(made)  # a bare NO is false


def test_a_written_file_written_again_is_the_same(tmp_path):
    for kind in ("fsdp2", "hsdp", "zero3"):
        path = tmp_path / f"{kind}.yaml"
        path.write_text(text(job(asked(kind, 2, 8))))
        assert body(text(job(["--accelerate_config", str(path)]))) == body(text(job(asked(kind, 2, 8))))


def test_options_that_are_no_defaults_arrive():
    made = job(["--accelerate_config", FSDP2 % (", fsdp_offload_params: true, fsdp_reshard_after_forward: false", "")])
    options = document(made)["fsdp_config"]
    assert options["fsdp_offload_params"] is True and options["fsdp_reshard_after_forward"] is False


def test_a_ds_config_without_a_file_is_refused(mistake):
    inline = "{zero_optimization: {stage: 2}}"
    plain = "{distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}}"
    for flag, value in (("--ds_config", inline), ("--accelerate_config", plain)):
        message = mistake(document, job([flag, value]))
        assert f"flag {flag}" in message and "--ds_config" in message.splitlines()[-1]


def test_several_hosts_without_a_hostfile(mistake):
    zero3 = job(asked("zero3", 2, 8), hostfile=None)
    assert "--hostfile" in mistake(document, zero3)
    assert document(zero3, launched=True)["num_machines"] == 2
    assert document(job(asked("fsdp2", 2, 8), hostfile=None))["main_process_ip"] == "node1"


AXES = [path for path in shipped("recipes/*/*.yaml") if "parallelism_config" in path.read_text()]


@pytest.mark.parametrize("path", AXES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_s_axes_reach_train_py_whatever_accelerate_hands_on(path):
    """A strategy that the recipe names is handed on as a flag, which wins over what the launcher says."""
    hosts, slots = (int(number) for number in re.search(r"hostfiles/(\d+)x(\d+)", path.read_text()).groups())
    made = jobs.make(str(path), [], f"hostfiles/{hosts}x{slots}", {f"node{n + 1}": slots for n in range(hosts)})
    words = made.named_again("accelerate.yaml")
    if words[0] == "--ds_config":
        again = jobs.flags.load(["--recipe", str(path), *words])
        read = choose(again, World(0, 0, made.world_size, slots, "node1", "torchrun"), {})
        assert (read.axes, read.identity()) == (made.strategy.axes, made.strategy.identity())
    else:
        mesh = {f"parallelism_config_{key}": size for key, size in as_mesh(made.strategy.axes).items()}
        assert document(made)["parallelism_config"].items() >= mesh.items()
