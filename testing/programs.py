"""Programs that tests start, which not every host has."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def shellcheck(*words: str | Path) -> None:
    """Assert that shellcheck finds nothing. words: its options, and files

    It is that of requirements-dev.txt or the system's (there is no wheel for aarch64). Skips where neither is.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which("shellcheck", path=path) or pytest.skip("no shellcheck: apt-get install shellcheck")
    done = subprocess.run([program, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
