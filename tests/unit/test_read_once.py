"""Variables that are read once are set before anything has read them."""

import os
import subprocess
import sys

import pytest

from brigade.train.distributed import read_once
from brigade.train.distributed.torch_build import Build
from brigade.train.host.cluster import World
from testing.ranks import REPOSITORY

GROW = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
HF = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


@pytest.fixture
def prepared(monkeypatch, tmp_path):
    """prepared(rank, kernel, hip, cuda_has_started, **environment): the variables of a rank after that."""

    def make(rank=0, kernel="6.8.0-generic", hip=None, started=False, **environment):
        (tmp_path / "osrelease").write_text(f"{kernel}\n")
        monkeypatch.setattr(read_once, "KERNEL", tmp_path / "osrelease")
        monkeypatch.setattr(read_once.torch_build, "read", lambda: Build(None if hip else "13.0", hip))
        monkeypatch.setattr(sys.modules["torch"].cuda, "is_initialized", lambda: started)
        monkeypatch.setattr(os, "environ", dict(environment))
        read_once.set_variables(World(rank, rank, 2, 2, "host", "torchrun"))
        return dict(os.environ)

    return make


@pytest.mark.parametrize("given, set_then", [
    ({}, GROW),
    ({"rank": 1}, GROW | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}),
    *(({name: own}, {name: own}) for name in read_once.ALLOCATOR for own in ("max_split_size_mb:128", "")),
    ({"kernel": "5.15.167.4-microsoft-standard-WSL2"}, {}),  # the first allocation would fail
    ({"hip": "7.2.0"}, {}),
    ({"started": True}, {}),  # too late: the table of the run would be wrong
])  # fmt: skip
def test_memory_is_taken_in_segments_that_grow_unless_they_cannot_or_the_user_says_otherwise(prepared, given, set_then):
    assert prepared(**given) == HF | set_then


def test_nothing_has_read_them_by_then():
    """Rank 1 showed a bar of each download: Transformers, and with it the Hub's library, had been imported before."""
    read_by = ["torch", "transformers", "huggingface_hub", "datasets", "deepspeed", "accelerate", "numpy"]
    code = f"import train, sys; print([name for name in {read_by} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    story = (REPOSITORY / "train.py").read_text().partition("def main(")[2]
    assert 0 < story.index("read_once.set_variables(world)") < story.index("ranks.agreed(world)")
