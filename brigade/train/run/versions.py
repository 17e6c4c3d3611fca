"""What a run was computed by, and when: versions of packages, and the repository's commit."""

import functools
import platform
import subprocess
import time

from ...errors.versions import installed
from ..recipe.files import REPOSITORY

_PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "peft", "datasets")


def now() -> str:
    """The time now with its offset from UTC, as run.yaml has it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


@functools.cache  # each parses the package's whole description, and every checkpoint asks
def of_packages() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a run computes."""
    return {"python": platform.python_version()} | {name: installed(name) or "missing" for name in _PACKAGES}


def git_commit() -> str | None:
    """The repository's commit, with a + when files differ from it; None outside of git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
