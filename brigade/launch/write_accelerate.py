"""A job as the configuration of `accelerate launch`: where it runs and how it is sharded; the rest is the recipe's.

The files in accelerate_configs/ are what this writes (tests/unit/test_jobs_accelerate.py).
"""

import shlex
from typing import Any

from ..errors import UserError
from ..strategy import accelerate_config
from .job import Job
from .job_script import header, name, slots, to_yaml

SUFFIX = ".accelerate.yaml"
PORT = 29500

_COMMENTS = {
    "num_processes": "ranks on all hosts",
    "fsdp_version": "accelerate's own default is 1, which is deprecated",
    "parallelism_config_dp_replicate_size": "groups, each a whole copy",
    "parallelism_config_dp_shard_size": "GPUs that share one copy",
}


def document(job: Job, launched: bool = False) -> dict[str, Any]:
    """The configuration as accelerate's ClusterConfig takes it.

    launched: `launch` starts accelerate on every host; else, with DeepSpeed, one command on the first reaches the others
    Raises UserError for hosts of different sizes, and for a ds_config that is in no file.
    """
    several = len(job.hosts) > 1
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if job.world_size > 1 else "NO",
        "num_machines": len(job.hosts),
        "num_processes": len(job.hosts) * slots(job),
        "machine_rank": 0,
        "main_process_ip": next(iter(job.hosts)) if several else "127.0.0.1",
        "main_process_port": PORT,
    }
    strategy = job.strategy
    if strategy.is_deepspeed:
        content["distributed_type"] = "DEEPSPEED"
        # Nothing else may stand beside the file: accelerate refuses it (utils/dataclasses.py:1507).
        content["deepspeed_config"] = {"deepspeed_config_file": _ds_config_file(job)}
        if strategy.kind == "zero3":
            content["deepspeed_config"]["zero3_init_flag"] = True
        if several and launched:  # torch.distributed.run on each host, no hostfile
            content["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
        elif several:
            if job.hostfile is None:
                raise UserError(
                    "the hosts",
                    "DeepSpeed's launcher reads hosts from a file, and there is none",
                    "add --hostfile, or under Slurm: --write sbatch",
                )
            content["deepspeed_config"]["deepspeed_hostfile"] = job.hostfile
            content["deepspeed_config"]["deepspeed_multinode_launcher"] = "pdsh"
    if strategy.is_fsdp:
        content["distributed_type"] = "FSDP"
        options = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True} | strategy.fsdp
        content["fsdp_config"] = {
            "fsdp_version": 2,
            **{accelerate_config.FSDP_KEYS[key]: value for key, value in options.items()},
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if strategy.kind == "hsdp":
        content["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": strategy.replicate,
            "parallelism_config_dp_shard_size": strategy.shard,
        }
    return content


def _ds_config_file(job: Job) -> str:
    """The strategy's ds_config by its file's name. Raises UserError when it stands in the recipe or the flag itself."""
    settings = job.settings
    cluster, key = settings.recipe.cluster, "ds_config"
    said = cluster.ds_config
    if said in (None, "none") and cluster.accelerate_config is not None:
        key = "accelerate_config"
        said = accelerate_config.read(cluster.accelerate_config, settings.place(key)).ds_config
    if not isinstance(said, str):
        raise UserError(
            settings.place(key),
            "this ds_config is in no file, and accelerate's own ZeRO options hold few of its keys",
            "write it to a file, and name that: --ds_config my_zero3.json",
        )
    return said


def body(job: Job) -> str:
    """The configuration as text, without the header."""
    return to_yaml(document(job), _COMMENTS)


def text(job: Job) -> str:
    """The YAML file, header and all."""
    several = len(job.hosts) > 1
    start = ["accelerate", "launch", "--config_file", name(job) + SUFFIX]
    here = "Start"
    lines = [
        "What a run computes (precision, batch, clipping, ...) is the recipe's; this file says only where and how it "
        "is sharded."
    ]
    if several and job.strategy.is_deepspeed:
        here = "Start, on the first host (DeepSpeed's launcher reaches the others over ssh)"
        lines.append(
            "accelerate appends the whole environment, secrets too, to ./.deepspeed_env: remove that file then."
        )
    elif several:
        here = "Start, on each host with its own number"
        start += ["--machine_rank", "0"]
        lines.append("Change: main_process_ip, to a name of the first host that all of them reach.")
    command = shlex.join([*start, "train.py", *job.train_arguments])
    return header(job, "accelerate", f"{here}: {command}", *lines) + body(job)
