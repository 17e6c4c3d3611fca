"""Job files: one recipe on one cluster, for others to start. templates/ has one for each kind.

Tests check the manifests against kubeflow-trainer-api's models and let SkyPilot parse its tasks; neither was run on a cloud yet.
"""

import functools
import math
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..errors import UserError
from ..errors.console import counted, one_line
from ..errors.tables import Fields, table
from ..hosts.job import Job
from ..train.data.sources import BUILT_IN, each
from ..train.host import files
from ..train.host.hub import is_path
from ..train.model import packaged
from ..train.recipe.files import REPOSITORY
from ..train.recipe.objectives import named_models
from ..train.run import events
from ..train.strategy import accelerate_config
from ..train.strategy.axis_keys import as_mesh
from .policy import NOT_TWICE

if TYPE_CHECKING:
    from jinja2 import Environment

# What --write takes, and how the file's name ends.
SUFFIXES = {
    "sbatch": ".sbatch",
    "accelerate": ".accelerate.yaml",
    "kubernetes": ".trainjob.yaml",
    "skypilot": ".sky.yaml",
}
TEMPLATES = Path(__file__).with_name("templates")

# Seconds between the notice of an end (time limit, pre-emption) and the end, where the run has not measured what saving takes;
# and how many of them are left when torchrun kills ranks that still save. Its own 30 s are short (pytorch#119856).
NOTICE, LEFT = 120, 30

ACCELERATORS: dict[str, str] = table(TEMPLATES / "skypilot_gpus.yaml")


def write(job: Job, kind: str, to: str | Path | None = None, restarts: tuple[str, ...] = ()) -> Path:
    """Write the job file of that kind, and say so.

    to: default is RECIPE-TOPOLOGY here, "-" prints it instead; restarts: see text()

    Raises UserError when a file with other content is there: it may be a user's, edited since.
    """
    suffix = SUFFIXES[kind]
    path = Path(name(job) + suffix if to is None else to)
    if str(path) == "-":
        print(text(kind, job, restarts=restarts), end="")
        return path
    content = text(kind, job, restarts=restarts, file=str(path))
    try:
        with files.create(path) as file:
            file.write(content)
    except FileExistsError:
        if not path.is_file() or path.read_bytes() != os.fsencode(content):
            stem = path.name.removesuffix(suffix)
            others = (path.with_name(f"{stem}-{number}{suffix}") for number in range(2, 10_000))
            free = next(other for other in others if not other.exists())
            problem = "it is there already with other content, and is not overwritten"
            raise UserError(str(path), problem, f"remove it, or write another one: --to {free}") from None
        print(f"{path} is there already, unchanged.")
    except OSError as error:
        raise UserError(str(path), f"it cannot be written: {error.strerror}", "name another file with --to") from None
    else:
        print(f"Wrote {path}: its first lines say how to start it, and what to change before.")
    return path


@functools.cache
def _engine() -> "Environment":
    """Return what renders job files. It keeps the templates that it has compiled."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    engine = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    engine.filters |= {"yaml": _yaml, "script": _script, "quote": shlex.quote, "comment": one_line}
    return engine


def text(kind: str, job: Job, launched: bool = False, restarts: tuple[str, ...] = (), file: str | None = None) -> str:
    """Return the text of the job file.

    file: its path, which its first lines name (default: RECIPE-TOPOLOGY)
    launched: accelerate's configuration as `launch` hands it to accelerate on every host
    restarts: flags of `launch` (--restarts 3 --min_hosts 2), which then runs inside Slurm's allocation

    Raises UserError for hosts of different sizes, flags that must not be said twice, and what the kind cannot express.
    """
    file = file or name(job) + SUFFIXES[kind]
    suffix = "sh" if kind == "sbatch" else "yaml"
    written = ["python", "-m", "brigade", "launch", job.recipe]
    written += [*(["--hostfile", job.hostfile] if job.hostfile else []), "--write", kind, *restarts, *job.flags]
    hosts = f"{counted(len(job.hosts), 'host')} of {slots(job)}: {counted(job.world_size, 'rank')}"
    values = {
        "title": f"{job.settings.name}, {job.strategy.name}, {hosts}.",
        "written": f"Written by: {shlex.join(written)}",
        "file": shlex.quote(file),
        "name": name(job),
        "label": dns_name(job),
        "job": job,
        "strategy": job.strategy,
        "mesh": as_mesh(job.strategy.axes),
        "hosts": len(job.hosts),
        "slots": slots(job),
        "gpu": job.settings.recipe.cluster.gpu,
        "notice": notice(job)[0],
        "notice_says": notice(job)[1],
        "torchrun_options": shlex.join(torchrun_options(job)),
        "secrets": secrets(job),
        "restarts": shlex.join([*restarts, job.recipe, *train_words(job)[3:]]) if restarts else "",
    }
    values |= _of_accelerate(job, launched, file) if kind == "accelerate" else _of_scheduler(job, kind)
    return _engine().get_template(f"{kind}.{suffix}.jinja").render(values)


def _of_scheduler(job: Job, kind: str) -> Fields:
    """Values that the templates of Slurm, Kubernetes and SkyPilot need besides."""
    if job.settings.remote:
        problem = f"{job.settings.remote} is in object storage, and a job file looks for the run's end in a directory"
        cure = "name a directory on a disk that all hosts share"
        raise UserError("flag --output_dir", problem, cure)
    # Where hosts come and go, runs lie on storage that outlives them, mounted at /outputs.
    output = str(job.output_dir) if kind == "sbatch" else f"/outputs/{job.output_dir.name}"
    words = train_words(job)
    command = ["torchrun", *torchrun_options(job), *words, "--output_dir", output]
    return {
        "output": output,
        "train": shlex.join(words),
        "command": [word.replace("$", "$$") for word in command],  # Kubernetes would expand $(NAME)
        "accelerator": _accelerator(job) if kind == "skypilot" else None,
    }


def _of_accelerate(job: Job, launched: bool, file: str) -> Fields:
    """Values that the template of accelerate's configuration needs besides."""
    strategy, several = job.strategy, len(job.hosts) > 1
    if strategy.is_deepspeed and several and not launched and job.hostfile is None:
        problem = "DeepSpeed's launcher reads hosts from a file, and there is none"
        raise UserError("the hosts", problem, "add --hostfile, or under Slurm: --write sbatch")
    kind = "DEEPSPEED" if strategy.is_deepspeed else "FSDP" if strategy.is_fsdp else "MULTI_GPU"
    start = ["accelerate", "launch", "--config_file", file]
    start += ["--machine_rank", "0"] if several and not strategy.is_deepspeed else []
    options = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True} | (strategy.fsdp or {})
    return {
        "launched": launched,
        "start": shlex.join([*start, "train.py", *job.named_again(start[3]), *job.train_arguments]),
        "distributed_type": kind if job.world_size > 1 or kind != "MULTI_GPU" else "NO",
        "ds_config": _ds_config_file(job) if strategy.is_deepspeed else None,
        "fsdp": {accelerate_config.FSDP_KEYS[key]: value for key, value in options.items()},
    }


def _ds_config_file(job: Job) -> str:
    """The strategy's ds_config by its file's name. Raises UserError when it stands in the recipe or the flag itself."""
    settings = job.settings
    cluster, key = settings.recipe.cluster, "ds_config"
    named = cluster.ds_config
    if named is None and cluster.accelerate_config is not None:
        key = "accelerate_config"
        named = accelerate_config.read(cluster.accelerate_config, settings.place(key)).ds_config
    if not isinstance(named, str):
        problem = "this ds_config is in no file, and accelerate's own ZeRO options hold few of its keys"
        raise UserError(settings.place(key), problem, "write it to a file, and name that: --ds_config my_zero3.json")
    return named


def _accelerator(job: Job) -> str | None:
    """The GPU as SkyPilot calls it. Raises UserError for one of which no name is known."""
    gpu = job.settings.recipe.cluster.gpu
    if gpu is None:
        return None
    names = {key.casefold(): value for key, value in ACCELERATORS.items()}
    found = names.get(gpu.casefold().removeprefix("nvidia ").removeprefix("geforce "))
    if found is None:
        problem = f"SkyPilot's name of {gpu!r} is not known"
        raise UserError(job.settings.place("gpu"), problem, f"use one of: {', '.join(ACCELERATORS)}")
    return found


def notice(job: Job) -> tuple[int, str]:
    """(seconds between the notice of an end and the end, why so many): what this run has measured, if it ran here before."""
    measured = events.slowest(job.output_dir, "grace")
    if measured:
        why = f"{job.output_dir} measured that a step and a checkpoint take up to {measured:.0f} s"
        return max(NOTICE, math.ceil(measured)), why
    why = "nothing is measured yet: write this file again after the first checkpoints, and it has what they take"
    return NOTICE, why


def torchrun_options(job: Job) -> list[str]:
    """Options of torchrun that give its workers time to save when the job is told to end."""
    return ["--shutdown_timeout", str(notice(job)[0] - LEFT)]


def slots(job: Job) -> int:
    """Ranks on each host. Raises UserError when hosts differ: such a file gives all of them the same number."""
    found = sorted(set(job.hosts.values()))
    if len(found) > 1:
        problem = f"its hosts have {' and '.join(map(str, found))} slots, but a job file gives each the same number"
        raise UserError(job.hostfile or "the hosts", problem, "give all hosts the same slots, or leave --write out")
    return found[0]


def name(job: Job) -> str:
    """`qwen3-8b-full-2x8`: recipe and topology, in letters that file names and Slurm take."""
    return re.sub(r"[^\w.-]+", "-", f"{job.settings.name}-{len(job.hosts)}x{slots(job)}", flags=re.ASCII)


def dns_name(job: Job) -> str:
    """The same as a DNS label (RFC 1035), short enough for what Kubernetes appends to it."""
    label = re.sub(r"[^a-z0-9]+", "-", name(job).lower()).strip("-")
    return (label if label[:1].isalpha() else f"job-{label}")[:45].strip("-")


def train_words(job: Job) -> list[str]:
    """train.py and its words except --output_dir: a job file names the directory where it looks for the success marker.

    Raises UserError for flags that must not be said again when the job starts a second time.
    """
    for flag, why in NOT_TWICE.items():
        if getattr(job.settings, flag):
            raise UserError(f"flag --{flag}", why, "leave it out, or start the run without a job file")
    words, kept = iter(job.flags), []
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag.replace("-", "_") != "__output_dir":
            kept.append(word)
        elif not equals:
            next(words, None)
    return ["train.py", "--recipe", job.recipe, *kept]


def secrets(job: Job) -> list[str]:
    """Names of the variables with secrets that this run may need; their values never stand in a file."""
    recipe = job.settings.recipe
    sources = (*named_models(recipe).values(), *(source.dataset_name for source, _ in each(job.settings)))
    from_hub = any(source not in (None, BUILT_IN, *packaged.MODELS) and not _is_here(source) for source in sources)
    keys = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY"}
    return ["HF_TOKEN"] * from_hub + [key for name, key in keys.items() if name in recipe.training.report_to]


def _is_here(source: str | None) -> bool:
    """Whether it is not a name on the Hub: a path that exists, or written as one (outputs/model, which a job may make first)."""
    if source and is_path(source):
        return True
    with suppress(OSError, ValueError):  # a name that no file can have
        return source is not None and any((base / source).exists() for base in (Path(), REPOSITORY))
    return False


def _yaml(value: object) -> str:
    """A value in YAML, on one line. The words of a list are quoted: Kubernetes reads YAML 1.2, in which 1e-5 is a number,
    and in ASCII: some of Unicode's line breaks are YAML's too."""
    style = '"' if isinstance(value, list) else None
    line = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=1_000_000)
    return line.removesuffix("...\n").strip()


def _script(lines: str) -> str:
    """A script as a block of YAML, or as one quoted string where a flag holds what no block can."""
    return yaml.safe_dump(lines, default_style="|", width=1_000_000).strip("\n")
