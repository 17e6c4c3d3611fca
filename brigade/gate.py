"""Imported before anything else by train.py and the verbs: refuses a Python that cannot read the rest, then packages that no run
is supported with, by their metadata and in milliseconds; importing torch takes seconds.

Python 3.6 has to read this file, to say that it is too old: no newer syntax here, and no import before its version is known.
"""

import os
import re
import sys
from pathlib import Path


def _refuse(text: str) -> None:
    """Leave with a message. Of a host's ranks the first one gives it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr)
    raise SystemExit(2)


def _refuse_old_python() -> None:
    table = (Path(__file__).parent / "errors" / "versions.yaml").read_text(encoding="utf-8")
    least = re.findall(r'^python: .*"from": "([\d.]+)"', table, re.MULTILINE)[0]
    if sys.version_info < tuple(map(int, least.split("."))):
        _refuse(
            f"error: {sys.executable}\n"
            f"  it is Python {sys.version.split()[0]}; Brigade needs {least} or newer\n"
            f"  cure: `make setup PYTHON=python{least}` makes an environment; then .venv/bin/python in place of this one"
        )


_refuse_old_python()

from .errors import versions  # noqa: E402  (no Python below 3.11 can)


def enter(command: str, *needed: str, judged: bool = True) -> None:
    """Leave with code 2 where packages are missing, or are not supported.

    command: what was called; needed: the kinds of versions.yaml without which it cannot start; judged: whether the versions
    of those that are there count
    """
    refusal = versions.refusal(command, versions.of_this_process(), needed, judged)
    if refusal:
        _refuse(refusal)
