"""One file to send: the report and what every part and run has written, without models and checkpoints. Standard library only."""

import re
import tarfile
import time
from pathlib import Path
from typing import Any

KEPT = (".json", ".jsonl", ".log", ".md", ".yaml", ".txt")
LARGEST = 5_000_000  # bytes of a file that is kept; a log beyond it is kept by its end
LEFT_OUT = ("models", "venv", "model")


def write(output: Path, report: dict[str, Any]) -> Path:
    """Pack what is in `output` into a file beside it, named after the GPU and the time. Returns its path."""
    device = next(iter(report["machine"].get("devices") or ["no GPU"]))
    name = f"test-gpu-{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{time.strftime('%Y%m%d-%H%M')}"
    path, unfinished = output / f"{name}.tar.gz", output / ".unfinished"
    with tarfile.open(unfinished, "w:gz") as archive:
        for file in files(output):
            add(archive, file, f"{name}/{file.relative_to(output)}")
    unfinished.replace(path)
    return path


def files(output: Path) -> list[Path]:
    """Return the logs, rows, settings and reports below a folder."""
    found = (path for path in sorted(output.rglob("*")) if path.suffix in KEPT and path.is_file())
    return [path for path in found if not {*LEFT_OUT} & {*path.relative_to(output).parts[:-1]}]


def add(archive: tarfile.TarFile, file: Path, name: str) -> None:
    """Add a file, or the end of one that is too long."""
    size = file.stat().st_size
    with file.open("rb") as content:
        content.seek(max(0, size - LARGEST))
        about = tarfile.TarInfo(name)
        about.size, about.mtime = min(size, LARGEST), int(file.stat().st_mtime)
        archive.addfile(about, content)
