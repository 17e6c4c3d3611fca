"""Modes of the files that safetensors writes: 0600 since 0.8.0, whatever the umask (it writes a temporary file and renames it).
Whoever serves a model is often another account."""

import re
from pathlib import Path


def by_umask(*paths: Path) -> None:
    """Give these files the mode that a file newly made by this process has."""
    # os.umask() would have to set one to tell it, for all threads.
    umask = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if umask:
        for path in paths:
            path.chmod(0o666 & ~int(umask[1], 8))
