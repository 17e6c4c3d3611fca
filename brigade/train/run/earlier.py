"""The run that the directory holds already, which this one continues, lengthens or moves aside."""

import json
from pathlib import Path
from typing import Any

from ...errors import UserError
from .. import files
from ..recipe.files import another_output, read_yaml
from . import owner


def move_aside(here: Path, owned: owner.Owned) -> tuple[owner.Owned, Path]:
    """Move the run in a directory away, as --fresh asks. Return what makes the directory this process's own from here on, as
    `owned` did until now, and where the earlier run lies."""
    number = next(n for n in range(1, 10_000) if not here.with_name(f"{here.name}.old-{n}").exists())
    owned.released.set()  # its file moves away, and is nobody's
    aside = here.rename(here.with_name(f"{here.name}.old-{number}"))
    here.mkdir()
    new = owner.take(here)
    owned.release(aside)
    return new, aside


def kept(run: Any, record: Path, marker: Path) -> dict[str, Any]:
    """What run.yaml keeps when a run continues: what was measured, until it has measured anew, and how it was lengthened,
    each time with the success that it had been."""
    old = (read_yaml(record).get("run") or {}) if record.exists() else {}
    kept = {key: old[key] for key in ("prediction", "promise", "lengthened") if key in old}
    if run.lengthened and (run.resized or not record.exists()):
        before = json.loads(files.read(marker)) if marker.exists() else {}
        kept["lengthened"] = [*kept.get("lengthened", []), {"how": run.lengthened, **before}]
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
