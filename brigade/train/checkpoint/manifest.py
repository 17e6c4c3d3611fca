"""The record of a whole checkpoint: which files belong to it, and which of them are missing or damaged.

Checksums find what disks and copies have done to a file. They are not a signature: whoever changes a file can change the record
too. upstream/unpickling.py finds what a stranger has put into a file.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors.tables import Document, Fields
from ..host import checksums
from ..host.files import LINE, odd, read_text
from ..host.files import read as read_file
from ..host.files import write as write_file
from ..run import on_disk, versions
from ..strategy.ds_keys import value_at
from ..upstream.unpickling import is_inside

RECORD = on_disk.MANIFEST  # write() says what is in it
FORMAT = 2  # 1: sizes without checksums, {"run": run.yaml, "base": digests, "files": {name: bytes}}
ONE = "one process or DDP"
# The files of each engine's checkpoint; the first pattern identifies it. For checkpoints of earlier versions, without a record.
_PARTS = {
    "DeepSpeed": ("global_step*", "latest", "global_step*/*_model_states.pt", "global_step*/*_optim_states.pt"),
    "FSDP2": ("pytorch_model_fsdp*", "optimizer*"),
    ONE: ("*model*.safetensors", "optimizer.pt"),
}
_DIRECTORIES = ("global_step*", "pytorch_model_fsdp*", "optimizer*")
_PARTS_OF_ALL = (on_disk.STATE, "scheduler.pt")
# Types that the readers of a record rely on, where the key is there.
_KINDS: dict[str, type] = {
    "base": dict,
    "files": dict,
    "folders": list,
    "tokens": int,
    "run": dict,
    "run.run": dict,
    "run.run.ranks": int,
    "run.run.strategy": dict,
    "run.run.versions": dict,
    "run.cluster": dict,
    "run.cluster.accelerate_config.parallelism_config": dict,
    "run.cluster.ds_config.zero_optimization": dict,
}


def write(folder: Path, document: Document, files: Mapping[str, Document], folders: Iterable[str] = ()) -> None:
    """Write the record of a checkpoint: its files, and the run it belongs to.

    document: `step`; `samples` and `tokens` seen; `position`: where the data goes on; `world`: ranks and hosts; `base`: digests
    of the weights that the run began with; `run`: its run.yaml, with strategy, versions and the data's fingerprint
    files: name -> {"bytes": ..., "checksum": hexadecimal digits}
    folders: those without a file, which ZeRO looks for and object storage does not have
    """
    document = {**document, "folders": sorted(folders)} if folders else document
    head = {"format": FORMAT, "checksum": checksums.ALGORITHM}
    write_file(folder / RECORD, checksums.sealed({**head, **document, "files": dict(sorted(files.items()))}))


def flaw(folder: Path) -> str | None:
    """Return in words why no run can continue from a checkpoint: what is missing, cut short or unreadable; None where a run can.
    It compares sizes; damage() finds a changed byte inside a file."""
    if not finished(folder):
        return "it was not written to its end"
    try:
        strange = odd_file(folder)
        if strange:
            return f"{strange.name} is a pipe, a socket or a device, and no file"
        record = _whole_record(folder)
        absent = missing(folder, sizes(record))
        if absent:
            return " ".join(absent)
        tag_of(folder)
        parts = () if record else (*_PARTS_OF_ALL, *_PARTS[engine_of(folder)])
        pattern = next((pattern for pattern in parts if not any(folder.glob(pattern))), None)
        if pattern:
            return f"{pattern} is missing"
        if record.get("format", 1) < 2:
            _open_what_has_no_checksum(folder)
    except (OSError, ValueError, RecursionError) as error:
        return f"it cannot be read: {error}"
    return None


def missing(folder: Path, files: Mapping[str, int]) -> tuple[str, str] | None:
    """(name, what is wrong) of the first file that is not there with its size; None: all are. files: name -> bytes"""
    for name, size in files.items():
        try:
            there = (folder / name).stat().st_size if is_inside(name) else None
        except FileNotFoundError:
            return name, "is missing"
        if there is None:
            return repr(name), "is no file's name within a checkpoint"
        if there != size:
            return name, f"has {there:,} bytes of {size:,}"
    return None


def damage(folder: Path, names: Iterable[str] | None = None) -> str | None:
    """Which of these files (default: all) is not what was written, in words, or None. Reads them whole. Checkpoints of earlier
    versions have no checksums, so nothing is found there."""
    try:
        files = _whole_record(folder).get("files", {})
        for name in files if names is None else names:
            written = files[name]
            if isinstance(written, dict) and checksums.of_file(folder / name) != written["checksum"]:
                return f"{name} is not what was written: its checksum is another"
    except (OSError, ValueError, RecursionError) as error:
        return f"it cannot be read: {error}"
    return None


def odd_file(folder: Path) -> Path | None:
    """The first thing in a checkpoint that is neither a file nor a directory (files.odd), or None."""
    return odd((*folder.iterdir(), *(path for part in _DIRECTORIES for path in folder.glob(f"{part}/*"))))


def tag_of(folder: Path) -> Path:
    """The directory of DeepSpeed's part of a checkpoint; the checkpoint itself where it has none. Raises ValueError where
    `latest` names a directory elsewhere."""
    latest = folder / "latest"
    tag = read_text(latest, LINE).strip() if latest.is_file() else "."
    if tag != "." and not (is_inside(tag) and (folder / tag).is_dir()):
        raise ValueError(f"latest names {tag!r}, and that is no directory in the checkpoint")
    return folder / tag


def shares(files: Mapping[str, int], ranks: int) -> list[list[str]]:
    """The files that each rank has to read, so that all read about as much. The same on all ranks. files: name -> bytes"""
    loads, names = [0] * ranks, [list[str]() for _ in range(ranks)]
    for name in sorted(files, key=lambda name: (-files[name], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]
        names[least].append(name)
    return names


def sizes(record: Document) -> dict[str, int]:
    """{name: bytes} of the files in a record of any format."""
    files = record.get("files", {})
    return {name: entry["bytes"] if isinstance(entry, dict) else entry for name, entry in files.items()}


def finished(folder: Path) -> bool:
    """Whether a checkpoint was written to its end, by the file that is written last."""
    return any((folder / name).is_file() for name in (RECORD, on_disk.STATE))


def oddity(folder: Path) -> str:
    """Return what a user has to know of a checkpoint that a run continues from, in words, or ""."""
    if not (folder / RECORD).is_file():
        return f"without its manifest, {RECORD}, so that its files could not be compared with what was written"
    step = on_disk.step_of(folder)
    return "" if step == on_disk.named_step(folder.name) else f"it holds step {step}, by its manifest"


def engine_of(folder: Path) -> str:
    """The engine that wrote a checkpoint, by its files: DeepSpeed, FSDP2 or ONE."""
    return next((name for name, (sign, *_) in _PARTS.items() if any(folder.glob(sign))), ONE)


def recorded(folder: Path) -> Fields:
    """The record of a checkpoint; {} where it has none."""
    path = folder / RECORD
    return json.loads(path.read_text()) if path.is_file() else {}


def other_versions(folder: Path) -> str:
    """The versions that have changed since a checkpoint was written: `torch 2.12.0, now 2.13.0`; "" where none has."""
    run = recorded(folder).get("run", {}).get("run", {})
    before = run.get("versions", {}) | ({"Brigade": run["commit"]} if run.get("commit") else {})
    now = versions.of_packages() | {"Brigade": versions.git_commit()}
    changed = {name: was for name, was in before.items() if now.get(name) and now[name] != was}
    return "; ".join(f"{name} {was}, now {now[name]}" for name, was in changed.items())


def _whole_record(folder: Path) -> Fields:
    """Return recorded(), with every byte as it was written. Raises ValueError where it is not, or a later version wrote it."""
    path = folder / RECORD
    if not path.is_file():
        return {}
    return parsed(read_file(path).decode())  # read_text would change line endings


def parsed(text: str) -> Fields:
    """The record in a text, with every byte as it was written. Raises ValueError where it is not, or where a later version
    wrote it."""
    record = json.loads(text)
    kinds = {key: value_at(record, key) for key in _KINDS}
    wrong = [key for key, value in kinds.items() if value is not None and not isinstance(value, _KINDS[key])]
    if not isinstance(record, dict) or wrong:
        raise ValueError(f"{RECORD} is not what was written: {', '.join(wrong) or 'it is no table'}")
    version = record.get("format", 1)
    if version not in range(1, FORMAT + 1):
        raise ValueError(f"{RECORD} has format {version}, and this version of Brigade knows {FORMAT}")
    files = record.get("files")
    plain = isinstance(files, dict) and all(isinstance(size, int) for size in files.values())
    if not all(map(_is_entry, (files or {}).values())):
        raise ValueError(f"{RECORD} is not what was written: files")
    if not plain and not checksums.is_itself(text, record.get("itself")):
        raise ValueError(f"{RECORD} is not what was written: its checksum is another")
    return record


def _is_entry(entry: object) -> bool:
    known = isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("checksum"), str)
    return known or isinstance(entry, int)


def _open_what_has_no_checksum(folder: Path) -> None:
    """Raise ValueError or OSError where a file is not even what its name says."""
    from safetensors import SafetensorError, safe_open

    json.loads((folder / on_disk.STATE).read_bytes())
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ValueError(str(error)) from None
