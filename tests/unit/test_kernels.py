"""The cache of compiled kernels: its own for each virtual environment, and never locked by a process that is gone."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from brigade import kernels


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[list[Path]]:
    """One lock that this process holds, as torch's FileBaton holds one, and one that nobody does."""
    found = [tmp_path / "py311_cpu" / name / "lock" for name in ("cpu_adam", "async_io")]
    for lock in found:
        lock.parent.mkdir(parents=True)
    held = os.open(found[0], os.O_CREAT | os.O_EXCL)
    found[1].touch()
    yield found
    os.close(held)


def test_a_lock_of_nobody_is_swept_and_a_held_one_stays(locks, tmp_path):
    assert kernels.sweep_locks(tmp_path) == [locks[1]]
    assert locks[0].exists() and not locks[1].exists()


def test_a_process_that_ends_while_it_is_looked_at_does_not_disturb_it(locks, tmp_path, monkeypatch):
    ending = f"/proc/{os.getppid()}/fd"

    def ends(read):
        def instead(path="."):
            if str(path) == ending:
                raise FileNotFoundError(2, "No such file or directory", ending)
            return read(path)

        return instead

    monkeypatch.setattr(os, "listdir", ends(os.listdir))
    monkeypatch.setattr(os, "scandir", ends(os.scandir))
    assert kernels.sweep_locks(tmp_path) == [locks[1]]


def test_where_another_host_may_hold_a_lock_only_an_old_one_goes(locks, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "LOCAL", set())
    assert kernels.sweep_locks(tmp_path) == []
    long_ago = time.time() - 2 * 3600 * kernels.HOURS
    os.utime(locks[1], (long_ago, long_ago))
    assert kernels.sweep_locks(tmp_path) == [locks[1]]


def test_each_virtual_environment_has_its_own_cache(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    assert kernels.cache() == Path("/somewhere")  # the user's word
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert kernels.cache() == Path(sys.prefix) / "torch_extensions"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(kernels.cache())  # for torch, and for the ranks
