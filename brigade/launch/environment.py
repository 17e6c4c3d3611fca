"""Which variables of the launching shell the ranks of all hosts get.

`deepspeed` hands on NCCL_*, PYTHON*, MV2*, UCX* and MLFLOW* alone, so that HF_HOME or a proxy holds on the first host only
(ArcticTraining #316); handing on everything would take one host's own settings to all others (a Slurm job's, a session's).
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from ..errors import UserError

# pattern: why
FORWARDED = {
    "HF_*": "the Hub: token, cache, offline, mirror",
    "HUGGING_FACE_HUB_TOKEN": "an older name of HF_TOKEN",
    "TRANSFORMERS_*": "caches and verbosity of Transformers",
    "TOKENIZERS_PARALLELISM": "threads of the tokenizers",
    "WANDB_*": "Weights & Biases: key, project, mode",
    "MLFLOW_*": "MLflow",
    "NCCL_*": "the network of GPU collectives",
    "GLOO_*": "the network of CPU collectives",
    "UCX_*": "RDMA under NCCL's plug-ins",
    "FI_*": "libfabric, for EFA",
    "TORCH_*": "torch: flight recorder, logs, extension cache",
    "PYTORCH_*": "torch's allocators",
    "CUDA_*": "devices, toolkit",
    "OMP_*": "threads of a rank",
    "MKL_*": "threads of a rank",
    "DS_*": "DeepSpeed: accelerator, builds",
    "BRIGADE_*": "ours: cache",
    "PYTHON*": "Python: path, fault handler",
    "LD_LIBRARY_PATH": "libraries beside the system's",
    "PATH": "the environment's programs first, then the host's own, then the launching shell's",
    "XDG_CACHE_HOME": "where caches lie",
    "*_proxy": "the way out",
    "*_PROXY": "the way out",
    "TZ": "the clock in the log",
}
# What starts with one of these patterns, but belongs to one process or one host.
KEPT = ("BRIGADE_RUN", "BRIGADE_DOOR", "TORCHELASTIC_*", "PYTHONSTARTUP", "PYTHONHOME")


def forwarded(env: Mapping[str, str], extra: list[str]) -> dict[str, str]:
    """The variables of `env` that travel. extra: further names, as given with --env.

    Raises UserError for a name that env does not have, and for NAME=VALUE: every user of a host reads its command lines.
    """
    chosen = {
        name: value
        for name, value in env.items()
        if any(fnmatchcase(name, pattern) for pattern in FORWARDED)
        and not any(fnmatchcase(name, pattern) for pattern in KEPT)
    }
    for word in extra:
        name, equals, _ = word.partition("=")
        if equals:
            raise UserError(
                f"flag --env {name}=...",
                "a value on a command line can be read by every user of this host",
                f"export {name}, then give --env {name}",
            )
        if name not in env:
            raise UserError(f"flag --env {name}", f"{name} is not set here", f"export {name}")
        chosen[name] = env[name]
    return chosen
