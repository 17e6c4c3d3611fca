"""A run's directory: who it belongs to, what was resolved (run.yaml), where it stands, and whether it succeeded."""

import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from . import best, ranks
from .cluster import World, read_hostfile
from .errors import UserError
from .flags import Settings
from .hosts import rank
from .recipe import REPOSITORY, Batch, find, identity, read_yaml
from .schema import SECTIONS, marked_apart
from .strategy import Strategy

RECORD = "run.yaml"
SUCCESS = "success.json"
_PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets")


@dataclass
class Run:
    """One run and its directory.

    identity: hash of what it computes; a directory belongs to one identity
    made_for: the recipe's own cluster in words, or ""
    """

    settings: Settings
    strategy: Strategy
    world: World
    batch: Batch
    identity: str
    directory: Path
    made_for: str = ""

    @property
    def finished(self) -> bool:
        """True when train.py reached its end here; no launcher's exit code says that as surely."""
        return not self.settings.fresh and (self.directory / SUCCESS).exists()


def open_run(settings: Settings, strategy: Strategy, world: World, batch: Batch) -> Run:
    """The run that these settings ask for. Looks only, changes nothing.

    Raises UserError when its directory holds another run, or something that is no run.
    """
    best.check(settings)
    directory = settings.directory(strategy.name)
    name = identity(settings.recipe, strategy.identity())
    run = Run(settings, strategy, world, batch, name, directory, _made_for(settings))
    if directory.exists() and not directory.is_dir():
        raise UserError(str(directory), "the output directory is a file", "give another --output_dir")
    if settings.fresh or not directory.exists() or not any(directory.iterdir()):
        return run
    record = directory / RECORD
    if not record.exists():
        raise UserError(str(directory), "the output directory holds files, but no run.yaml: it is not a run's",
                        "give another --output_dir, or --fresh to move it aside")  # fmt: skip
    old = read_yaml(record)
    if (old.get("run") or {}).get("identity") != run.identity:
        raise UserError(
            str(directory),
            f"it holds another run: {_difference(old, run)}",
            "give another --output_dir, or --fresh to move that run aside",
        )
    return run


def _made_for(settings: Settings) -> str:
    cluster = settings.recipe.cluster
    words = []
    if cluster.hostfile:
        hosts = read_hostfile(find(cluster.hostfile, settings.place("hostfile"), "hostfile"))
        words.append(f"{sum(hosts.values())} ranks on {len(hosts)} hosts ({cluster.hostfile})")
    return ", ".join(words + ([cluster.gpu] if cluster.gpu else []))


def claim(run: Run, fingerprint: str, checkpoint: Path | None = None) -> None:
    """After all agreed, on one rank: move an old run aside if --fresh, and write run.yaml. The others wait.

    Ends all ranks with one message when hosts differ in the recipe, the data or the checkpoint that they found, and
    when the directory cannot be written.
    """
    seen = {"recipe or strategy": run.identity, "data": fingerprint, "checkpoint to continue from": str(checkpoint)}
    found = ranks.gather((run.world.host, seen))
    with ranks.agreed(run.world):
        host, first = found[0]
        for what, value in seen.items():
            if value != first[what]:
                raise UserError(
                    f"the {what}",
                    f"{value} here, but {first[what]} on {host}, rank 0",
                    "give all hosts the same files, or one file system for these and the output directory",
                )
        if run.world.speaks:
            _claim(run, fingerprint, list(dict.fromkeys(host for host, _ in found)))


def checkpoint_to_resume(run: Run) -> Path | None:
    """The checkpoint to continue from: the one asked for, else the newest whole one in the run's directory.

    Raises UserError for a named directory that is no checkpoint.
    """
    named = run.settings.resume_from_checkpoint
    if named:
        if not (Path(named) / "trainer_state.json").is_file():
            problem = f"{named!r} is not a checkpoint: no trainer_state.json in it"
            raise UserError("flag --resume_from_checkpoint", problem,
                            "name a checkpoint-N directory, or leave the flag out to take the newest")  # fmt: skip
        if run.settings.fresh and run.directory.resolve() in Path(named).resolve().parents:
            raise UserError("flags --fresh, --resume_from_checkpoint", f"--fresh would move {named!r} away first",
                            "drop one of the two, or give another --output_dir")  # fmt: skip
        return Path(named)
    if run.settings.fresh:
        return None
    steps = whole_checkpoints(run.directory)
    return steps[max(steps)] if steps else None


def whole_checkpoints(directory: Path) -> dict[int, Path]:
    """step -> checkpoint-N, of those that were written to their end: Trainer writes trainer_state.json last."""
    return {
        int(path.name.rpartition("-")[2]): path
        for path in directory.glob("checkpoint-*")
        if path.name.rpartition("-")[2].isdigit() and (path / "trainer_state.json").is_file()
    }


def _claim(run: Run, fingerprint: str, hosts: list[str]) -> None:
    directory = run.directory
    try:
        if run.settings.fresh and directory.exists():
            number = next(n for n in range(1, 10_000) if not directory.with_name(f"{directory.name}.old-{n}").exists())
            directory.rename(directory.with_name(f"{directory.name}.old-{number}"))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f".{RECORD}").touch()
        promise = _promise_before(directory)
    except OSError as error:
        raise UserError(str(directory), f"the output directory cannot be written: {error.strerror}",
                        "give another --output_dir") from None  # fmt: skip
    recipe = run.settings.recipe.model_dump(mode="json")
    recipe["cluster"] |= run.strategy.as_cluster()  # not a path: run.yaml repeats the run when the file has changed
    record = {
        "identity": run.identity,
        "data": fingerprint,
        "strategy": {"kind": run.strategy.kind, "name": run.strategy.name, "from": run.strategy.source},
        "batch": str(run.batch),
        "learning_rate": run.batch.learning_rate,
        "ranks": run.world.size,
        "hosts": hosts,
        "launcher": run.world.launcher,
        "overridden": run.settings.overridden,
        "command": " ".join(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
        "commit": git_commit(),
    }
    _write_record(directory, {**recipe, "run": record | promise})


def _promise_before(directory: Path) -> dict[str, Any]:
    """A run that continues keeps what was measured, until it has measured anew."""
    path = directory / RECORD
    old = (read_yaml(path).get("run") or {}) if path.exists() else {}
    return {"promise": old["promise"]} if "promise" in old else {}


def add_to_record(run: Run, key: str, value: Any) -> None:
    """Add to run.yaml's record what is known only while the run goes on: `ds_config`, what DeepSpeed's engine really runs with
    once every "auto" is filled; `promise`, predicted and measured figures."""
    if run.world.speaks:
        document = read_yaml(run.directory / RECORD)
        document["run"][key] = json.loads(json.dumps(value, default=str))
        _write_record(run.directory, document)


def _write_record(directory: Path, document: dict[str, Any]) -> None:
    text = "# This run, with every value filled in. `train.py --recipe THIS_FILE --output_dir OTHER` repeats it.\n"
    text += yaml.safe_dump(document, sort_keys=False, width=120)
    temporary = directory / f".{RECORD}"
    temporary.write_text(text)
    temporary.replace(directory / RECORD)


def check_data(run: Run, fingerprint: str) -> None:
    """Raises UserError when the directory's run was trained on other data than there is now."""
    record = run.directory / RECORD
    if run.settings.fresh or not record.exists():
        return
    old = (read_yaml(record).get("run") or {}).get("data")
    if old != fingerprint:
        problem = f"the data or the tokenizer changed since this run began ({old} became {fingerprint})"
        raise UserError(str(record), problem,
                        "bring the old data back, or begin anew with --fresh")  # fmt: skip


def succeed(run: Run, state: Any, held_out_loss: float) -> None:
    """On one rank, as the very last thing: write the marker that means success, and say where everything lies."""
    if not run.world.speaks:
        return
    before = next((entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry), None)
    figures = {
        "identity": run.identity,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "steps": state.global_step,
        "saved_step": best.saved_step(run.settings, state),
        "held_out_loss_before": before,
        "held_out_loss": held_out_loss,
    }
    temporary = run.directory / f".{SUCCESS}"
    temporary.write_text(json.dumps(figures, indent=2) + "\n")
    temporary.replace(run.directory / SUCCESS)
    rank.note(marker=str((run.directory / SUCCESS).resolve()))
    print(*best.story(run.settings, state, before, held_out_loss), sep="\n")
    print(f"The model lies in {run.directory}, its log in {run.directory / 'trainer_state.json'}, "
          f"the resolved run in {run.directory / RECORD}.", flush=True)  # fmt: skip


def say_finished(run: Run) -> None:
    """The run reached its end before; the same command asks for nothing more."""
    rank.note(marker=str((run.directory / SUCCESS).resolve()))
    print(f"This run is finished: {run.directory} (--fresh begins it anew).")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def git_commit() -> str | None:
    """The repository's commit, with a + when files differ from it; None outside of git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _difference(old: dict[str, Any], run: Run) -> str:
    """The first key in which a directory's run differs from this one."""
    new = run.settings.recipe.model_dump(mode="json")
    for section in ("model", "data", "training"):
        for key, info in SECTIONS[section].model_fields.items():
            before, now = (old.get(section) or {}).get(key), new[section][key]
            if before != now and not marked_apart(info):
                return f"{section}.{key} is {before!r} there and {now!r} here"
    there = (old.get("run") or {}).get("strategy", {}).get("name")
    if there != run.strategy.name:
        return f"its strategy is {there!r} there and {run.strategy.name!r} here"
    before, now = _flat(old.get("cluster")), _flat(run.strategy.as_cluster())
    for key in [*now, *before]:
        if before.get(key) != now.get(key) and key.startswith(("ds_config", "accelerate_config")):
            return f"{key} is {before.get(key)!r} there and {now.get(key)!r} here"
    return f"it has the identity {(old.get('run') or {}).get('identity')}, this one {run.identity}"


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    if not isinstance(tree, dict):
        return {prefix.rstrip("."): tree}
    return {key: value for name, below in tree.items() for key, value in _flat(below, f"{prefix}{name}.").items()}
