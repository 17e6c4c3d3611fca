"""A disk that is full is told as such, whoever wrote: with the directory, the bytes that are free, and the cure."""

import errno
import pwd
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch.distributed.checkpoint.api import CheckpointException

from brigade.errors.disk import of_disk, writing
from brigade.train.host import cache

FULL = "/dev/full"
TENSORS = {"a": torch.zeros(2**20)}


def numpy_writes():
    with Path(FULL).open("wb") as file:
        np.zeros(2**20).tofile(file)


def safetensors_writes():
    save_file(TENSORS, "/dev/null/model.safetensors")  # it replaces whatever file it is given, /dev/full too


WRITERS = {
    "python": (lambda: Path(FULL).write_text("x"), "No space left"),
    "torch": (lambda: torch.save(TENSORS, FULL), ""),
    "numpy": (numpy_writes, ""),
    "tokenizers": (lambda: Tokenizer(models.BPE()).save(FULL), "No space left"),
    "safetensors": (safetensors_writes, "Not a directory"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_each_writer_says_of_a_disk_becomes_one_message(name, tmp_path):
    write, reason = WRITERS[name]
    with pytest.raises(Exception) as raised:  # each has a class of its own
        write()
    of_another_rank = CheckpointException("", {1: (raised.value, None)})
    for error in (raised.value, of_another_rank):
        told = of_disk(error, tmp_path)
        assert told and reason in told.problem
        assert told.place == str(tmp_path) or told.place == FULL
        assert "bytes are free there" in told.problem or reason == "Not a directory"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("I/O error"), OSError(errno.ENOENT, "gone")])
def test_other_errors_stay_what_they_are(error, tmp_path):
    assert of_disk(error, tmp_path) is None
    with pytest.raises(type(error)), writing(tmp_path):
        raise error


def test_a_cache_that_fills_is_named_and_swept(tmp_path, user_error):
    def build(aside):
        (aside / "part").write_text("x")
        numpy_writes()

    told = user_error(cache.once, tmp_path / "prepared" / "data", build)
    assert told.place == str(tmp_path / "prepared") and "BRIGADE_CACHE" in told.cure
    assert not [path for path in (tmp_path / "prepared").iterdir() if path.is_dir()]


def test_a_user_whom_the_system_does_not_know_is_asked_for_a_home(monkeypatch):
    """As in a container that runs under any number."""
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    for name in ("HOME", "BRIGADE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError) as raised:
        cache.cache_directory()
    told = of_disk(raised.value)
    assert told and "HOME" in told.place and "BRIGADE_CACHE" in told.cure
