"""The GPUs of this host, its driver and libraries, and the commit; and whether torch has read what a run sets for it."""

import json
from pathlib import Path

import torch

from brigade.train.distributed import read_once
from brigade.train.run.versions import git_commit, of_packages
from brigade.train.upstream import memory_snapshots
from testing import runs

from .subject import NO_EVALUATION, Subject, command, in_ranks, torchrun

ASK = "--ask"  # which this module's ranks are started with


def main() -> None:
    subject = Subject(__doc__)
    gpus = subject.gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
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
    if gpus and read_once.has_segments_that_grow():
        allocator(subject)


def allocator(subject: Subject) -> None:
    """Leave the row of torch's allocator in a run of several ranks. It reads its settings once, when CUDA starts."""
    folder = subject.work / "allocator"
    folder.mkdir()
    flags = [*subject.inputs(folder), "--output_dir", str(folder / "run"), *NO_EVALUATION, "--max_steps", "1"]
    flags += ["--per_device_train_batch_size", str(runs.GLOBAL_BATCH // subject.ranks)]
    words = torchrun(subject.ranks, "-m", "benchmarks.gpu_proof.machine", ASK, str(folder), *flags)
    shortfall, late = subject.run(words, "allocator")
    grows = [json.loads(file.read_text()) for file in sorted(folder.glob("*.grows"))]
    if not (shortfall or late) and not all(grows):
        shortfall = (
            f"memory is not taken in segments that grow: {read_once.ALLOCATOR[0]} was set after CUDA had started"
        )
    subject.row("allocator", {"segments_grow": grows}, shortfall, command(words), late)


def ask(folder: Path, flags: list[str]) -> None:
    """Train with these flags in a rank, and write what its allocator has read."""
    import train

    trainer = train.main(flags)
    (folder / f"{trainer.args.process_index}.grows").write_text(json.dumps(memory_snapshots.has_expandable_segments()))


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
    if not in_ranks(ASK, ask):
        main()
