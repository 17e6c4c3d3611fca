"""Running a cure on a host. `check --fix --yes` alone asks for it."""

import os
import signal
import subprocess
from contextlib import suppress
from typing import Any

LAST = 15  # lines of what it prints


def run(line: str, limit: float) -> dict[str, Any]:
    """Run a shell line. code: its exit code, None where it was ended after `limit` seconds; said: its last lines"""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(["bash", "-c", line], text=True, errors="replace", start_new_session=True, **streams)
    try:
        said, _ = process.communicate(timeout=limit)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        code = None
    return {"code": code, "said": said.strip().splitlines()[-LAST:]}
