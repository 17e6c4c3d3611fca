"""Each file in hostfiles/ is what its name says, read by DeepSpeed's own parser."""

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from testing.shipped import shipped

HOSTFILES = shipped("hostfiles/*")


def test_the_usual_sizes_are_there():
    assert {path.name for path in HOSTFILES} >= {"1x8", "2x8", "4x8", "16x8"}


@pytest.mark.parametrize("path", HOSTFILES, ids=lambda path: path.name)
def test_hostfile_is_as_named(path):
    hosts, slots = map(int, path.name.split("x"))
    names = [f"node{number}" for number in range(1, hosts + 1)] if hosts > 1 else ["localhost"]  # which needs no ssh
    assert fetch_hostfile(str(path)) == dict.fromkeys(names, slots)


@pytest.mark.parametrize("path", HOSTFILES, ids=lambda path: path.name)
def test_comments_stand_on_lines_of_their_own(path):
    # DeepSpeed's pattern has no end anchor: "node1 slots=8 # spare" and "node1 slots=8x" are taken as 8 slots without a word
    assert all(line.startswith("#") or "#" not in line for line in path.read_text().splitlines())
