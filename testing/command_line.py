"""Flags of train.py from keys and values, and commands of brigade within this process."""

import contextlib
import io
import json
import os
import subprocess
from typing import Any
from unittest.mock import patch

from .ranks import REPOSITORY


def brigade(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m brigade WORDS` within this process, which has imported it: for what ends before it starts anything.

    variables: the whole environment, where any are given
    """
    from brigade.__main__ import main

    given, out, err = [str(word) for word in words], io.StringIO(), io.StringIO()
    there = patch.dict(os.environ, variables, clear=bool(variables))
    with there, contextlib.chdir(REPOSITORY), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(given)
        except SystemExit as left:  # argparse
            code = left.code if isinstance(left.code, int) else 1
    return subprocess.CompletedProcess(given, code, out.getvalue(), err.getvalue())


def run_here(command: list[Any], timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, with these variables added to the environment, and return how it ended."""
    words = [str(word) for word in command]
    environment = os.environ | variables
    return subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout)


def as_flags(**values: Any) -> list[str]:
    """`--key value` of each, as YAML reads it: None is null, True is true."""
    return [
        word
        for key, value in values.items()
        for word in (f"--{key}", value if isinstance(value, str) else json.dumps(value))
    ]
