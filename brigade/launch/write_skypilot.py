"""A job as a task of SkyPilot: hosts rented from a cloud, spot instances that come and go included.

Parsed by SkyPilot itself in the tests; not yet run on a cloud.
"""

import shlex
from typing import Any

from ..errors import UserError
from .job import Job
from .job_script import TORCHRUN_OPTIONS, dns_name, header, name, remote_output, secrets, slots, to_yaml, train_words

SUFFIX = ".sky.yaml"

# A recipe's cluster.gpu -> SkyPilot's name of it (sky show-gpus).
ACCELERATORS = {
    "A10G": "A10G",
    "A100 40GB": "A100",
    "A100 80GB": "A100-80GB",
    "B200": "B200",
    "H100": "H100",
    "H100 80GB": "H100",
    "H200": "H200",
    "L4": "L4",
    "L40S": "L40S",
    "RTX 3090": "RTX3090",
    "RTX 4090": "RTX4090",
}

_COMMENTS = {
    "workdir": "the project; what .gitignore names stays here",
    "use_spot": "false: on-demand, dearer, and nobody takes it away",
    "job_recovery": "a taken host is replaced, the same command goes on from the newest checkpoint; an error ends the job",
    "secrets": "values come from your environment: --secret NAME",
    "file_mounts": "checkpoints must outlive the hosts; change the bucket's name",
}

_SETUP = """\
sudo apt-get update -qq
sudo apt-get install -y -qq g++ make python3-dev python3-venv
make setup
"""

# SKYPILOT_NODE_IPS has one address a line, the head's first.
_RUN = """\
set -euo pipefail
.venv/bin/python -m torch.distributed.run --nnodes "$SKYPILOT_NUM_NODES" --nproc_per_node {ranks} \\
  --node_rank "$SKYPILOT_NODE_RANK" --master_addr "${{SKYPILOT_NODE_IPS%%$'\\n'*}}" --master_port 29500 {options} \\
  {train} --output_dir "$OUTPUT"
if [ "$SKYPILOT_NODE_RANK" = 0 ]; then test -e "$OUTPUT/success.json"; fi
"""


def document(job: Job) -> dict[str, Any]:
    """The task. Raises UserError for a GPU that SkyPilot has no name for, as far as we know."""
    ranks, output = slots(job), remote_output(job)
    gpu = _accelerator(job)
    return {
        "name": dns_name(job),
        "num_nodes": len(job.hosts),
        "workdir": ".",
        "resources": {
            **({"accelerators": f"{gpu}:{ranks}"} if gpu else {"cpus": f"{ranks}+"}),
            "use_spot": True,
            "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 0},
        },
        "envs": {"OUTPUT": output},
        **({"secrets": dict.fromkeys(secrets(job))} if secrets(job) else {}),
        "file_mounts": {"/outputs": {"name": "change-me-outputs", "mode": "MOUNT_CACHED"}},
        "setup": _SETUP,
        "run": _RUN.format(
            ranks='"$SKYPILOT_NUM_GPUS_PER_NODE"' if gpu else ranks,
            options=shlex.join(TORCHRUN_OPTIONS),
            train=shlex.join(train_words(job, output)[:-2]),
        ),
    }


def _accelerator(job: Job) -> str | None:
    gpu = job.settings.recipe.cluster.gpu
    if gpu is None:
        return None
    names = {key.casefold(): value for key, value in ACCELERATORS.items()}
    found = names.get(gpu.casefold().removeprefix("nvidia ").removeprefix("geforce "))
    if found is None:
        raise UserError(
            job.settings.place("gpu"),
            f"no name of SkyPilot's is known for {gpu!r}",
            f"use one of: {', '.join(ACCELERATORS)}",
        )
    return found


def text(job: Job) -> str:
    """The task file. Raises UserError for hosts of different sizes, and for flags that cannot be said twice."""
    file = name(job) + SUFFIX
    given = "".join(f" --secret {each}" for each in secrets(job))
    lines = [
        f"Start, in the project's directory: sky jobs launch{given} {file}",
        f"Once, without recovery: sky launch{given} {file}",
        "Change: the bucket in file_mounts; resources (infra: aws, a region, disk_size, network_tier: best) as you like.",
    ]
    return header(job, "skypilot", *lines) + to_yaml(document(job), _COMMENTS)
