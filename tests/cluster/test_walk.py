"""A newcomer's first run on several hosts: the commands of three guides, in order, as they stand there."""

import re
import shutil

import pytest

from testing.patience import PATIENCE
from testing.ranks import REPOSITORY

PAGES = [REPOSITORY / "docs" / name for name in ("launching.md", "slurm.md", "kubernetes.md")]
NOT_HERE = {
    "--launcher slurm": "test_slurm.py",  # wants an allocation
    "-m testbed": "test_testbed.py",  # builds hosts of its own
    "--restarts": "test_faults.py",  # something has to fail
}


def commands() -> list[str]:
    """The pages' command lines: indented, and beginning with a program."""
    text = "".join(page.read_text() for page in PAGES)
    lines = re.findall(r"^ {4}((?:printf|for|python) .*)$", text, re.M)
    return [line for line in lines if not any(part in line for part in NOT_HERE)]


@pytest.fixture
def clone(cluster):
    """A copy of the project in which files may be written; its environment is this one's."""
    copy = cluster.shared / "brigade"
    ignored = shutil.ignore_patterns(".venv", ".git", "outputs", ".*_cache", ".hypothesis")
    shutil.copytree(REPOSITORY, copy, ignore=ignored)
    return copy


def test_the_walk(cluster, clone):
    said = {}
    for command in commands():
        done = cluster["node1"].run(command, cwd=clone, timeout=PATIENCE, check=False, OMP_NUM_THREADS="1")
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said[command] = done.stdout + done.stderr
    check, lint, dry, launch = (
        next(words for command, words in said.items() if part in command)
        for part in ("check --hostfile", "lint", "--dry-run", "--max_steps 20")
    )
    assert "ok answers" in check and "node1, node2" in check
    assert "FAIL" not in check and "WARN" not in check
    assert "0 errors" in lint
    assert len([line for line in dry.splitlines() if re.match(r"node\d: ", line)]) == 2
    for line in (
        "world size 2 on 2 hosts, by deepspeed",
        "strategy       zero3 (from flag --ds_config)",
        "node1  running, 1 rank",
        "step 20/20",
        "succeeded: ",
    ):
        assert line in launch
    assert {path.name for path in clone.glob("my-*")} == {
        "my-hosts",
        "my-job.sbatch",
        "my-accelerate.yaml",
        "my-trainjob.yaml",
        "my-task.yaml",
    }
    again = cluster["node1"].run(
        next(command for command in said if "--max_steps 20" in command), cwd=clone, timeout=PATIENCE
    )
    assert "This run is finished" in again.stdout and "succeeded: " in again.stderr
