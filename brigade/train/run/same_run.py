"""The run that the directory holds already: whether it is the one that these settings ask for, so that this one continues or
lengthens it, or moves it aside."""

import json
import shlex
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from ...errors import UserError
from ...errors.tables import Fields
from ..distributed import stop
from ..host import files
from ..recipe.files import another_output, read_yaml
from ..recipe.schema import BY_MEMORY, computed, difference, recorded
from ..recipe.settings import Settings
from ..recipe.training_section import TrainingSection
from ..strategy import Strategy
from ..strategy.axes import without
from . import owner


def check(old: Fields, settings: Settings, strategy: Strategy, record: Path, newest: Path | None) -> None:
    """Raise UserError where `record`, the directory's run.yaml with these contents, is of another run. newest: its checkpoint"""
    directory = record.parent
    other, version = another_run(old, settings, strategy)
    if not other:
        return
    again = shlex.join(["--recipe", str(record), "--output_dir", str(directory)])
    cure = f"for a new run name a directory of its own: {another_output(directory)}"
    if newest and another_run(old, settings, strategy, with_strategy=False)[0] is None:
        cure += f" (there --resume_from_checkpoint {newest} continues under this strategy)"
    cure += f"; continue the old one with {f'that version ({version})' if version else again}"
    cure += "; --fresh begins anew here and moves the old one aside"
    raise UserError(str(directory), f"it holds another run: {other}", cure)


def another_run(
    old: Fields, settings: Settings, strategy: Strategy, with_strategy: bool = True
) -> tuple[str | None, str | None]:
    """(the first thing in which the run of a run.yaml differs from this one, in words, None where it is the same run; the
    version that began it, where this one does not know all its keys). with_strategy=False: it may be sharded differently.

    By the values in run.yaml, not by its identity: the version that wrote it may have known fewer keys. A run of another
    length is the same run: step/lengthening.py says whether it can be lengthened.
    """
    try:
        recipe = recorded(old)
    except ValidationError as error:
        first, commit = error.errors()[0], (old.get("run") or {}).get("commit") or "run.yaml names it"
        key = ".".join(map(str, first["loc"]))
        value = f"{key} is {first['input']!r} there, which this one does not know"
        return f"another version of Brigade began it: {value}", commit
    there, here = (old.get("run") or {}).get("strategy", {}).get("kind"), strategy.kind
    if with_strategy and not (there == here or {there, here} == {"single", "ddp"}):
        return f"its strategy is {there} there and {here} here", None
    trees = []
    for of_run, cluster in ((recipe, old.get("cluster") or {}), (settings.before_proofs, strategy.as_cluster())):
        tree = computed(of_run)
        for key in ("max_steps", "num_train_epochs"):
            del tree["training"][key]
        fsdp = (cluster.get("accelerate_config") or {}).get("fsdp_config")  # the mesh may be another one
        if with_strategy:
            ds_config = without(cluster.get("ds_config"))
            tree["cluster"] = {"ds_config": ds_config, "accelerate_config": {"fsdp_config": fsdp}}
        trees.append(tree)
    other = difference(*trees)
    return other and "{} is {!r} there and {!r} here".format(*other), None


def began_with(key: str, old: Fields) -> object:
    """The value that a run.yaml has for a key of BY_MEMORY. A version that decided none wrote `auto` for what takes the least."""
    value = (old.get("training") or {}).get(key, TrainingSection.model_fields[key].default)
    return BY_MEMORY[key] if value == "auto" else value


def move_aside(here: Path, owned: owner.Owned) -> tuple[owner.Owned, Path]:
    """Move the run in a directory away, as --fresh asks. Return what makes the directory this process's own from here on, as
    `owned` did until now, and where the earlier run lies."""
    number = next(n for n in range(1, 10_000) if not here.with_name(f"{here.name}.old-{n}").exists())
    owned.released.set()  # its file moves away, and is nobody's
    aside = here.rename(here.with_name(f"{here.name}.old-{number}"))
    here.mkdir()
    with suppress(FileNotFoundError):  # it came since this run was started
        (aside / stop.FILE).rename(here / stop.FILE)
    new = owner.take(here)
    owned.release(aside)
    return new, aside


def kept(lengthened: str, resized: bool, record: Path, marker: Path) -> Fields:
    """What run.yaml keeps when a run continues: why its memory was used so, what was measured, until it has measured again, and
    how it was lengthened, each time with the success that it had been. lengthened, resized: as Run has them"""
    old = (read_yaml(record).get("run") or {}) if record.exists() else {}
    kept = {key: old[key] for key in ("prediction", "decided", "lengthened") if key in old}
    if lengthened and (resized or not record.exists()):
        before: Fields = {}
        with suppress(OSError, ValueError, TypeError):
            before |= json.loads(files.read(marker))
        kept["lengthened"] = [*kept.get("lengthened", []), {"how": lengthened, **before}]
    return kept


def check_data(record: Path, fingerprint: str, now: str | None) -> None:
    """Raise UserError when the directory's run was trained on other data than there is now. now: the repository's commit"""
    old = read_yaml(record).get("run") or {}
    if old.get("data") != fingerprint:
        began = old.get("commit")
        version_ = f", or Brigade's way to encode it: {began} became {now}" if began != now else ""
        problem = f"the data or the tokenizer changed since this run began{version_}"
        cure = (
            f"bring the old data back; or for a new run name a directory of its own: {another_output(record.parent)} "
        )
        cure += "(--fresh begins anew here and moves the old run aside)"
        raise UserError(str(record), problem, cure)
