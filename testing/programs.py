"""Programs that tests start, which not every host has."""

import os
import shutil
import sys
from pathlib import Path

import pytest


def shellcheck() -> str:
    """Return shellcheck, of requirements-dev.txt or the system's (there is no wheel for aarch64). Skips where neither is."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("shellcheck", path=path) or pytest.skip("no shellcheck: apt-get install shellcheck")
