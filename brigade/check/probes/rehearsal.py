"""What a rehearsal leaves on a host."""

import shutil
from pathlib import Path
from typing import Any


def remove(directory: str) -> dict[str, Any]:
    """Remove a rehearsal's directory, and nothing that is none."""
    path = Path(directory)
    if path.name.startswith("rehearsal-") and (path / "rehearsal.yaml").is_file():
        shutil.rmtree(path, ignore_errors=True)
    return {"left": path.is_dir()}
