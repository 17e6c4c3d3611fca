"""Write what lies beside the recipe that `plan --write` writes: the file of a strategy with axes, and a smaller hostfile."""

import json
from pathlib import Path
from typing import NamedTuple

import yaml

from ...errors.tables import Fields
from ...train.recipe.files import REPOSITORY, find
from ...train.recipe.hostfile import read_hostfile
from ...train.strategy.axis_keys import as_mesh, with_axes
from ..choice.job_of_recipe import here
from ..choice.workload import SHORT, Candidate

# What accelerate's launcher reads, as the files in accelerate_configs/ have it; its end is FSDP's alone.
ACCELERATE = Path(__file__).with_name("accelerate_template.txt")


class StrategyFile(NamedTuple):
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
        path = _place("ds_configs", f"{Path(file).stem}_{sizes}.json", folder)
        config = with_axes(json.loads((REPOSITORY / file).read_text()), axes)
        return StrategyFile("ds_config", path, json.dumps(config, indent=2) + "\n")
    path = _place("accelerate_configs", f"{file or 'ddp'}_{sizes}_{job.nodes}x{job.node_size}.yaml", folder)
    mesh = {f"parallelism_config_{key}": size for key, size in _mesh(candidate).items()}
    hosts = read_hostfile(find(hostfile, "flag --hostfile", "hostfile")) if hostfile else ["node1"]
    for_all, key, of_fsdp = ACCELERATE.read_text(encoding="utf-8").partition("fsdp_config:")
    text = for_all.format(
        name=candidate.name,
        path=here(path),
        recipe=recipe,
        kind="FSDP" if file else "MULTI_GPU",
        nodes=job.nodes,
        ranks=job.gpus,
        host=next(iter(hosts)) if job.nodes > 1 else "127.0.0.1",
    )
    text += f"{key}{of_fsdp}" * bool(file) + yaml.safe_dump({"parallelism_config": mesh}, sort_keys=False)
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


def _place(kind: str, name: str, folder: Path) -> Path:
    shipped = REPOSITORY / kind / name
    return shipped if ours(folder) or shipped.is_file() else folder.resolve() / name
