"""Job files: one recipe on one cluster, for others to start."""

from collections.abc import Callable
from pathlib import Path

from ..errors import UserError
from . import write_accelerate, write_kubernetes, write_sbatch, write_skypilot
from .job import Job
from .job_script import name

# What --write takes: how the file's name ends, and what makes its text.
WRITERS: dict[str, tuple[str, Callable[[Job], str]]] = {
    "sbatch": (write_sbatch.SUFFIX, write_sbatch.text),
    "accelerate": (write_accelerate.SUFFIX, write_accelerate.text),
    "kubernetes": (write_kubernetes.SUFFIX, write_kubernetes.text),
    "skypilot": (write_skypilot.SUFFIX, write_skypilot.text),
}


def write(job: Job, kind: str, to: str | Path | None = None) -> Path:
    """Write the job file of that kind, and say so; to: default is RECIPE-TOPOLOGY here, "-" prints it instead.

    Raises UserError when a file with other content is there: it may be a user's, edited since.
    """
    suffix, make_text = WRITERS[kind]
    text = make_text(job)
    path = Path(name(job) + suffix if to is None else to)
    if str(path) == "-":
        print(text, end="")
        return path
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if not path.is_file() or path.read_bytes() != text.encode():
            stem = path.name.removesuffix(suffix)
            free = next(f for n in range(2, 10_000) if not (f := path.with_name(f"{stem}-{n}{suffix}")).exists())
            problem = "it is there already with other content, and is not overwritten"
            raise UserError(str(path), problem, f"remove it, or write another one: --to {free}") from None
        print(f"{path} is there already, unchanged.")
    except OSError as error:
        raise UserError(str(path), f"it cannot be written: {error.strerror}", "name another file with --to") from None
    else:
        print(f"Wrote {path}: its first lines say how to start it, and what to change before.")
    return path
