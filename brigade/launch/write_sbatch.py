"""A job as a script for Slurm's sbatch: sbatch.sh, filled in."""

import re
import shlex
from pathlib import Path

from .job import Job
from .job_script import NOTICE, TORCHRUN_OPTIONS, header, name, slots, train_words

SUFFIX = ".sbatch"
_TEMPLATE = Path(__file__).with_name("sbatch.sh")


def text(job: Job) -> str:
    """The script. Raises UserError for hosts of different sizes, and for flags that cannot be said twice."""
    output = str(job.output_dir)
    values = {
        "HEADER": header(
            job,
            "sbatch",
            f"Start, in the project's directory on a file system that all hosts share: sbatch {name(job)}{SUFFIX}",
            "Change: partition, account and time, here or on sbatch's command line, whose options win.",
            "Whole hosts are asked for; to share them, replace --exclusive and --mem by --cpus-per-task and --mem.",
        ).rstrip("\n"),
        "NAME": name(job),
        "NODES": str(len(job.hosts)),
        "SLOTS": str(slots(job)),
        "NOTICE": str(NOTICE),
        "OUTPUT": shlex.quote(output),
        "COMMAND": shlex.join(train_words(job, output)[:-2]),
        "TORCHRUN_OPTIONS": shlex.join(TORCHRUN_OPTIONS),
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    if job.settings.recipe.cluster.gpu is None:
        template = re.sub(r"#SBATCH --gpus-per-node=.*\n", "", template)
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template)
