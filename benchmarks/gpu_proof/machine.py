"""The GPUs of this host, its driver and libraries, and the commit."""

import torch

from brigade.train.run.versions import git_commit, of_packages

from .subject import Subject


def main() -> None:
    subject = Subject(__doc__)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    figures = {
        "gpus": gpus,
        "devices": [torch.cuda.get_device_name(number) for number in range(gpus)],
        "memory_gib": [round(torch.cuda.get_device_properties(n).total_memory / 2**30, 1) for n in range(gpus)],
        "driver": driver(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "versions": of_packages(),
        "commit": git_commit(),
    }
    shortfall = "" if gpus else f"torch sees no GPU (torch {torch.__version__}, driver {driver() or 'unknown'})"
    subject.row("machine", figures, shortfall, "python -m brigade check recipes/tiny/full.yaml")


def driver() -> str | None:
    """Return the driver's version by NVML, which also sees GPUs that torch cannot use; None without it."""
    import pynvml

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None
    return version if isinstance(version, str) else version.decode()


if __name__ == "__main__":
    main()
