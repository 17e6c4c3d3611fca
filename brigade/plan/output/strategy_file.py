"""Write what lies beside the recipe that `plan --write` writes: the file of a strategy with axes, and a smaller hostfile."""

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from ...errors.tables import Fields
from ...train.recipe.files import REPOSITORY, find
from ...train.recipe.hostfile import read_hostfile
from ...train.strategy.axis_keys import as_mesh, with_axes
from ..choice.job_of_recipe import here
from ..choice.strategies import SHORT
from ..choice.workload import Candidate

# What accelerate's launcher reads, as the files in accelerate_configs/ have it.
ACCELERATE = """\
# {name}
# accelerate launch --config_file {path} train.py --accelerate_config {path} --recipe {recipe}
# Named twice: accelerate's launcher reads of it what starts the ranks, and does not know all of the axes.
# On each host: --machine_rank 0, 1, ... and one main_process_ip that all of them reach.
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
num_machines: {nodes}
num_processes: {ranks}  # ranks on all hosts
machine_rank: 0
main_process_ip: {host}
main_process_port: 29500
"""
FSDP = """\
fsdp_config:
  fsdp_version: 2  # accelerate's own default is 1, which is deprecated
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


@dataclass(frozen=True)
class StrategyFile:
    """key: of a recipe's `cluster:`, which names it; path: where it goes; text: what it says"""

    key: str
    path: Path
    text: str


def strategy_file(candidate: Candidate, recipe: str, folder: Path, hostfile: str | None) -> StrategyFile | None:
    """Return the file of a candidate with axes; None for one without.

    It goes beside the `recipe` in `folder`, or for a recipe of ours to where files of its kind are. A file that is there, under
    its name, is taken as it is.
    """
    job, file = candidate.estimate.job, candidate.choice.file
    axes = job.axes
    if not axes:
        return None
    sizes = "_".join(f"{SHORT[axis].lower()}{size}" for axis, size in axes.used.items())
    sizes += f"x{axes.virtual}" if axes.virtual > 1 else ""
    if file.endswith(".json"):
        path = _place("ds_configs", f"{Path(file).stem}_{sizes}.json", folder, ours(folder))
        config = with_axes(json.loads((REPOSITORY / file).read_text()), axes)
        return StrategyFile("ds_config", path, json.dumps(config, indent=2) + "\n")
    path = _place(
        "accelerate_configs", f"{file or 'ddp'}_{sizes}_{job.nodes}x{job.node_size}.yaml", folder, ours(folder)
    )
    mesh = {f"parallelism_config_{key}": size for key, size in _mesh(candidate).items()}
    text = ACCELERATE.format(
        name=candidate.name,
        path=here(path),
        recipe=recipe,
        kind="FSDP" if file else "MULTI_GPU",
        nodes=job.nodes,
        ranks=job.gpus,
        host=_first_host(hostfile) if job.nodes > 1 else "127.0.0.1",
    )
    text += FSDP * bool(file) + yaml.safe_dump({"parallelism_config": mesh}, sort_keys=False)
    return StrategyFile("accelerate_config", path, text)


def hosts_file(candidate: Candidate, folder: Path, hostfile: str | None) -> StrategyFile | None:
    """Return a hostfile in `folder` of the first hosts and slots, where a candidate takes fewer than `hostfile` has (--goal)."""
    if not hostfile:
        return None
    hosts, job = read_hostfile(find(hostfile, "flag --hostfile", "hostfile")), candidate.estimate.job
    if sum(hosts.values()) == job.gpus:
        return None
    taken = [name for name, slots in hosts.items() if slots >= job.node_size][: job.nodes]
    text = "".join(f"{name} slots={job.node_size}\n" for name in taken)
    return StrategyFile("hostfile", folder / f"hosts_{job.nodes}x{job.node_size}", text)


def ours(folder: Path) -> bool:
    """Return whether recipes in this folder are the project's."""
    return folder.resolve().is_relative_to(REPOSITORY / "recipes")


def as_document(candidate: Candidate) -> Fields:
    """Return a candidate's strategy as an accelerate config inside a recipe; under DeepSpeed it names a ds_config of ours."""
    file = candidate.choice.file
    document: Fields = {"distributed_type": "MULTI_GPU"}
    if file.endswith(".json"):
        document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": file}}
    elif file:
        offload = {"fsdp_offload_params": True} if candidate.choice.offload else {}
        document = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2} | offload}
    mesh = _mesh(candidate)
    return document | ({"parallelism_config": mesh} if mesh else {})


def _mesh(candidate: Candidate) -> Fields:
    """Return the sizes of a parallelism_config, by short names."""
    job = candidate.estimate.job
    hsdp = candidate.choice.file == "hsdp"
    groups = {"dp_replicate_size": job.nodes, "dp_shard_size": job.data // job.nodes} if hsdp else {}
    return groups | as_mesh(job.axes)


def _place(kind: str, name: str, folder: Path, belongs: bool) -> Path:
    shipped = REPOSITORY / kind / name
    return shipped if belongs or shipped.is_file() else folder.resolve() / name


def _first_host(hostfile: str | None) -> str:
    return next(iter(read_hostfile(find(hostfile, "flag --hostfile", "hostfile")))) if hostfile else "node1"
