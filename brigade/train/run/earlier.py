"""The run that the directory holds already, which this one continues, lengthens or moves aside."""

import json
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from ...errors.tables import Fields
from ..distributed import stop
from ..host import files
from ..recipe.files import another_output, read_yaml
from . import owner


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
    """What run.yaml keeps when a run continues: what was measured, until it has measured anew, and how it was lengthened,
    each time with the success that it had been. lengthened, resized: as Run has them"""
    old = (read_yaml(record).get("run") or {}) if record.exists() else {}
    kept = {key: old[key] for key in ("prediction", "promise", "lengthened") if key in old}
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
