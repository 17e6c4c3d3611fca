"""What the writers of job files share: names, train.py's command line, the header, YAML with comments."""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..data.sources import BUILT_IN
from ..errors import UserError
from ..errors.console import counted
from ..recipe.files import REPOSITORY
from .job import Job

# Seconds between the notice of an end (time limit, pre-emption) and the end, and how long torchrun lets its ranks save
# before it kills them. Its own 30 s are short for a large model (pytorch#119856).
NOTICE, SHUTDOWN = 120, 90
TORCHRUN_OPTIONS = ["--shutdown_timeout", str(SHUTDOWN)]

# A job that its scheduler starts again runs the same command again, and that must go on from the newest checkpoint.
_NOT_TWICE = {
    "fresh": "each start of the job would begin anew",
    "resume_from_checkpoint": "each start of the job would go back to that checkpoint",
    "rehearse": "a rehearsal leaves no run that could be continued or judged",
}


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


def train_words(job: Job, output: str) -> list[str]:
    """train.py and its words, with the output directory said outright: that is where the success marker is looked for.

    Raises UserError for flags that must not be said again when the job starts a second time.
    """
    for flag, why in _NOT_TWICE.items():
        if getattr(job.settings, flag):
            raise UserError(f"flag --{flag}", why, "leave it out, or start the run without a job file")
    words, kept = iter(job.flags), []
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag.replace("-", "_") != "__output_dir":
            kept.append(word)
        elif not equals:
            next(words, None)
    return ["train.py", "--recipe", job.recipe, *kept, "--output_dir", output]


def remote_output(job: Job) -> str:
    """The output directory where hosts come and go: on storage that outlives them, mounted at /outputs."""
    return f"/outputs/{job.output_dir.name}"


def secrets(job: Job) -> list[str]:
    """Names of the variables with secrets that this run may need; their values never stand in a file."""
    recipe = job.settings.recipe
    sources = (recipe.model.model_name_or_path, recipe.model.tokenizer_name_or_path, recipe.data.dataset_name)
    from_hub = any(source not in (None, BUILT_IN) and not _is_here(source) for source in sources)
    return ["HF_TOKEN"] * from_hub + ["WANDB_API_KEY"] * ("wandb" in recipe.training.report_to)


def _is_here(source: str | None) -> bool:
    with suppress(OSError, ValueError):  # a name that no file can have
        return source is not None and any((base / source).exists() for base in (Path(), REPOSITORY))
    return False


def header(job: Job, kind: str, *lines: str) -> str:
    """The comment that a file begins with: what it is, the command that wrote it, and `lines`."""
    hosts = f"{counted(len(job.hosts), 'host')} of {slots(job)}"
    command = ["python", "-m", "brigade", "launch", job.recipe]
    command += ["--hostfile", job.hostfile] if job.hostfile else []
    written = shlex.join([*command, "--write", kind, *job.flags])
    text = [
        f"{job.settings.name}, {job.strategy.name}, {hosts}: {counted(job.world_size, 'rank')}.",
        f"Written by: {written}",
        *lines,
    ]
    # A flag may hold anything, but every line must stay a comment, and YAML takes no control characters in it.
    shown = ("".join(c if c.isprintable() else " " for c in line) for part in text for line in part.splitlines())
    return "".join(f"# {line}".rstrip() + "\n" for line in shown)


class _Dumper(yaml.SafeDumper):
    """YAML with scripts as blocks, and lists set in from their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Kubernetes reads YAML 1.2, where 1e-5 is a number; to PyYAML's 1.1 it is a string that needs no quotes."""
    style = "|" if "\n" in text else None
    for number in (float, partial(int, base=0)):
        with suppress(ValueError):
            number(text)
            style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _string)


def to_yaml(document: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """`document` as YAML; comments: key -> what to say beside it."""
    # In ASCII: some of Unicode's line breaks are YAML's too.
    plain = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1_000_000)
    lines = []
    for line in plain.splitlines(keepends=True):
        match = re.match(r"\s*(?:- )?(\w+):", line)
        comment = comments.get(match[1]) if match else None
        lines.append(f"{line.rstrip()}  # {comment}\n" if comment else line)
    text = "".join(lines)
    # A script or a flag may hold a line that looks like one of these keys; then there are no comments.
    return text if yaml.safe_load(text) == document else plain
