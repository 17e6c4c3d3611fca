"""Each launcher's command as one types it on a cluster of two hosts: the ranks asked for, and one process's losses.

Node2's remote shell is bare: no environment's programs are on its PATH.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from testing import marks
from testing.clusters import SHORT, STEPS
from testing.launch_commands import COMMANDS
from testing.patience import PATIENCE
from testing.run_files import losses_of
from testing.shipped import shipped

# gloo takes the card of the host's own name, and each rank all cores, unless told otherwise: README, "On a cluster".
SETTINGS = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Launch:
    """line: as typed on the first host, or on each host with its number for {rank}; strategy: what rank 0 must say;
    ranks: how many; slots: what DeepSpeed's launcher must say; hosts: where they must be."""

    line: str
    strategy: str
    ranks: int = 2
    slots: dict[str, list[int]] | None = None
    hosts: tuple[str, ...] = ("node1", "node2")

    @property
    def on_each_host(self) -> bool:
        return "--machine_rank" in self.line or "--rdzv_endpoint" in self.line


EIGHT = list(range(8))
LAUNCHES = {
    "deepspeed": Launch(
        "deepspeed --hostfile hostfiles/2x8 train.py --ds_config ds_configs/zero3.json",
        "zero3", ranks=16, slots={"node1": EIGHT, "node2": EIGHT}),
    "deepspeed-include": Launch(
        "deepspeed --hostfile hostfiles/4x8 --include node1:0@node2:1 train.py --ds_config ds_configs/zero2.json",
        "zero2", slots={"node1": [0], "node2": [1]}),
    "deepspeed-exclude": Launch(
        "deepspeed --hostfile hostfiles/2x8 --exclude node1:0,1,2,3,4,5,7@node2:1,2,3,4,5,6,7 train.py"
        " --ds_config ds_configs/zero1.json", "zero1", slots={"node1": [6], "node2": [0]}),
    "deepspeed-numbers": Launch(
        "deepspeed --hostfile hostfiles/16x8 --num_nodes 2 --num_gpus 1 train.py --ds_config ds_configs/zero3.json",
        "zero3", slots={"node1": [0], "node2": [0]}),
    "deepspeed-one-host": Launch(
        "deepspeed --hostfile hostfiles/1x8 --no_ssh_check --master_addr localhost --num_gpus 2 train.py"
        " --ds_config ds_configs/zero3.json", "zero3", slots={"localhost": [0, 1]}, hosts=("node1",)),
    "accelerate-zero3": Launch(
        "accelerate launch --config_file accelerate_configs/zero3_2x8.yaml --num_processes 2 train.py", "zero3"),
    "accelerate-ddp": Launch(
        "accelerate launch --config_file accelerate_configs/ddp_2x8.yaml --machine_rank {rank} --num_processes 2"
        " train.py", "ddp"),
    "accelerate-fsdp2": Launch(
        "accelerate launch --config_file accelerate_configs/fsdp2_2x8.yaml --machine_rank {rank} --num_processes 2"
        " train.py", "fsdp2"),
    "accelerate-hsdp": Launch(
        "accelerate launch --config_file accelerate_configs/hsdp_2x8.yaml --machine_rank {rank} --num_processes 4"
        " --parallelism_config_dp_shard_size 2 train.py", "hsdp", ranks=4),
    "torchrun": Launch(
        "torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint node1:29500 --rdzv_id tiny train.py"
        " --ds_config ds_configs/zero3.json", "zero3"),
    # Tensor groups inside the hosts, and the pipeline across them.
    "deepspeed-3d": Launch(
        "deepspeed --hostfile hostfiles/2x8 --num_gpus 2 train.py --ds_config ds_configs/zero1_tp2_pp2.json",
        "zero1_tp2_pp2", ranks=4, slots={"node1": [0, 1], "node2": [0, 1]}),
    "accelerate-3d": Launch(
        "accelerate launch --config_file accelerate_configs/ddp_2x8.yaml --machine_rank {rank} --num_processes 4"
        " train.py --ds_config ds_configs/zero1_tp2_pp2.json", "zero1_tp2_pp2", ranks=4),
    "torchrun-3d": Launch(
        "torchrun --nnodes 2 --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint node1:29500 --rdzv_id tiny train.py"
        " --ds_config ds_configs/zero1_tp2_pp2.json", "zero1_tp2_pp2", ranks=4),
}  # fmt: skip


@pytest.fixture
def forwarded(cluster):
    """All that reaches the ranks that deepspeed starts on other hosts."""
    file = cluster.home / ".deepspeed_env"
    file.write_text("".join(f"{key}={value}\n" for key, value in SETTINGS.items()))
    yield
    file.unlink()


# In the matrix: other ways to name the same ranks, sixteen of them, and axes or engines that another launcher has here.
@pytest.mark.parametrize("name", marks.cases(
    *("deepspeed-include", "accelerate-zero3", "accelerate-ddp", "torchrun"),
    matrix=LAUNCHES,
))  # fmt: skip
def test_command_on_two_hosts(name, cluster, forwarded, single):
    launch, output = LAUNCHES[name], cluster.shared / f"command-{name}"  # test_launch.py has directories, too
    line = " ".join([launch.line, *SHORT, "--output_dir", str(output)])
    variables = SETTINGS
    if launch.on_each_host:  # by its path: node2 finds it no other way
        line = f"{Path(cluster.python).parent}/{line}"
    elif name.startswith("accelerate"):
        # It adds its whole environment to the file that this names, by default to .deepspeed_env in the directory.
        variables = SETTINGS | {"DS_ENV_FILE": str(cluster.shared / "accelerate_env")}
    hosts = list(cluster) if launch.on_each_host else [cluster["node1"]]
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(host.run, line.format(rank=host.number), timeout=PATIENCE, **variables) for host in hosts]
        said = "\n".join(run.result().stdout + run.result().stderr for run in runs)

    assert len(single) == STEPS and (output / "success.json").exists()
    assert losses_of(output) == pytest.approx(single, rel=1e-5)
    print("worst relative difference", max(abs(a - b) / b for a, b in zip(losses_of(output), single, strict=True)))
    table = f"world size {launch.ranks} on {len(launch.hosts)} host"
    assert table in said and re.search(rf"strategy +{launch.strategy} ", said), said[-3000:]
    record = yaml.safe_load((output / "run.yaml").read_text())["run"]
    assert (record["ranks"], record["hosts"]) == (launch.ranks, list(launch.hosts))
    if "DS_ENV_FILE" in variables:
        assert "OMP_NUM_THREADS=1\n" in Path(variables["DS_ENV_FILE"]).read_text()
    if launch.slots:
        assert f"WORLD INFO DICT: {launch.slots}" in said, said[:3000]


def test_every_configuration_and_hostfile_is_started_by_some_command():
    started = {word for launch in LAUNCHES.values() for word in launch.line.split()}
    started |= {word for words, *_ in COMMANDS.values() for word in words}
    files = {
        f"{folder}/{path.name}" for folder in ("accelerate_configs", "hostfiles") for path in shipped(f"{folder}/*")
    }
    assert not files - started, "add a command to LAUNCHES that uses them"
