"""What belongs to a checkpoint, written down when it is whole, and what of it is missing or damaged."""

import json
from pathlib import Path
from typing import Any

from ..recipe.files import read_yaml
from ..run import directory as runs

RECORD = "brigade.json"  # the last file of a checkpoint: {"run": run.yaml, "base": digests, "files": {name: bytes}}
ONE = "one process or DDP"
# What a checkpoint of each engine holds; by the first it is known. For those that earlier versions wrote, without a record.
_PARTS = {
    "DeepSpeed": ("global_step*", "latest", "global_step*/*_model_states.pt", "global_step*/*_optim_states.pt"),
    "FSDP2": ("pytorch_model_fsdp*", "optimizer*"),
    ONE: ("*model*.safetensors", "optimizer.pt"),
}
_PARTS_OF_ALL = (runs.STATE, "scheduler.pt")


def record(folder: Path, run: runs.Run) -> None:
    """Write down what belongs to a checkpoint and whose it is. Call it when all ranks have written their parts."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(RECORD, None)
    document = {"run": read_yaml(run.directory / runs.RECORD), "base": run.base, "files": files}
    runs.write_whole(folder / RECORD, json.dumps(document, indent=1, default=str))


def reopen(folder: Path) -> None:
    """Before a checkpoint is written over one that a dead run left: what says that it is whole must go first."""
    for name in (RECORD, runs.STATE):
        (folder / name).unlink(missing_ok=True)


def flaw(folder: Path) -> str | None:
    """Why nothing can continue from a checkpoint, in words: what is missing, cut short or unreadable. Without checksums: a
    changed byte inside a file is not seen."""
    from safetensors import SafetensorError, safe_open

    if not finished(folder):
        return "it was not written to its end"
    try:
        read = recorded(folder)
        for name, size in read.get("files", {}).items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (there := (folder / name).stat().st_size) != size:
                return f"{name} has {there:,} bytes of {size:,}"
        parts = () if read else (*_PARTS_OF_ALL, *_PARTS[engine_of(folder)])
        if missing := next((pattern for pattern in parts if not any(folder.glob(pattern))), None):
            return f"{missing} is missing"
        json.loads((folder / runs.STATE).read_bytes())
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="numpy"):
                pass
    except (OSError, ValueError, SafetensorError) as error:
        return f"it cannot be read: {error}"
    return None


def finished(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RECORD, runs.STATE))


def engine_of(folder: Path) -> str:
    return next((name for name, (sign, *_) in _PARTS.items() if any(folder.glob(sign))), ONE)


def recorded(folder: Path) -> dict[str, Any]:
    path = folder / RECORD
    return json.loads(path.read_text()) if path.is_file() else {}
