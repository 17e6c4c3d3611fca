"""What a fresh machine lacks is named with the command that installs it, and `python -m brigade --help` needs nothing."""

import os
import subprocess
import sys

import pytest

from brigade.check import build_tools
from testing.ranks import REPOSITORY


def run(*command, **environment):
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


def test_a_missing_compiler_is_named_with_its_cure(tmp_path):
    """By the commands of make, with nothing on PATH."""
    assert run(sys.executable, "brigade/check/build_tools.py", "setup", PATH=str(tmp_path)).returncode == 0
    done = run(sys.executable, "brigade/check/build_tools.py", "kernels", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "g++ is missing" in done.stderr and "cure: apt-get install g++" in done.stderr.replace("python3-dev ", "")


@pytest.mark.parametrize("target, tools", [("setup", False), ("test", True), ("lint", True)])
def test_a_host_that_trains_installs_no_tools_of_tests(target, tools):
    commands = run("make", "--dry-run", "--always-make", target, PATH=os.environ["PATH"]).stdout
    assert "-r requirements.txt" in commands and ("-r requirements-dev.txt" in commands) == tools


def test_nothing_is_said_where_all_is_there():
    assert build_tools.missing("kernels") == {}


def test_an_old_python_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9))
    assert build_tools.main() == 2
    assert "too old" in capsys.readouterr().err
