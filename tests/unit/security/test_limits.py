"""Limits of time and memory: a message, and no traceback."""

import asyncio
import resource
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from brigade import __main__ as verbs
from brigade.report import library
from brigade.train.data.data_files import paths_of
from brigade.train.host import files
from brigade.train.local import coordinator
from brigade.train.step.checkpoints import Checkpoints


def test_a_connection_that_cannot_be_accepted_is_a_line(capfd):
    async def refuse():
        asyncio.get_running_loop().set_exception_handler(coordinator._say)
        message = "socket.accept() out of system resource"
        asyncio.get_running_loop().call_exception_handler(
            {"message": message, "exception": OSError(24, "Too many open files")}
        )

    asyncio.run(refuse())
    said = capfd.readouterr().err
    assert said == "coordinator: socket.accept() out of system resource: [Errno 24] Too many open files\n"


def test_a_small_file_is_read_with_little_memory(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    tracemalloc.start()
    assert files.read(tmp_path / "file") == b"x" * 100_000
    assert tracemalloc.get_traced_memory()[1] < 2**20  # of 256 MiB that it may have
    tracemalloc.stop()
    with pytest.raises(OSError, match="larger than 99,999 bytes"):
        files.read(tmp_path / "file", 99_999)
    assert files.read(tmp_path / "file", 100_000) == b"x" * 100_000


def test_report_says_that_its_pictures_need_addresses(monkeypatch, mistake):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2_000_000 << 10, -1))
    said = mistake(library.picture, {"config": {}}, "")
    assert "ulimit -v 2000000" in said and "--page_only" in said


def test_a_verb_without_memory_ends_with_a_message(monkeypatch, capsys):
    def none(_):
        raise MemoryError

    monkeypatch.setattr("brigade.report.command.run", none)
    assert verbs.main(["report", "somewhere"]) == 1
    assert "no more memory" in capsys.readouterr().err


@pytest.mark.parametrize("named, kept", [
    ("/home/stranger/model/checkpoint-4", False), ("../../secret", False), ("checkpoint-4/..", False),
    ("/elsewhere/moved/checkpoint-8", True), ("outputs/before/checkpoint-8", True),
])  # fmt: skip
def test_the_best_checkpoint_is_one_of_the_run_that_continues(named, kept, tmp_path, capsys):
    """A state's path is where the run lay when it was written, or what somebody wrote into it."""
    (tmp_path / "checkpoint-8").mkdir()
    state = SimpleNamespace(best_metric=1.0, best_model_checkpoint=named, best_global_step=8)
    run = SimpleNamespace(
        settings=SimpleNamespace(remote="", resume_from_checkpoint=None), world=SimpleNamespace(is_main_rank=True)
    )
    trainer = SimpleNamespace(run=run, state=state, args=SimpleNamespace(output_dir=str(tmp_path)))
    Checkpoints(trainer, 0).begin(tmp_path / "checkpoint-12")
    if kept:
        assert (state.best_model_checkpoint, state.best_global_step) == (str(tmp_path / "checkpoint-8"), 8)
    else:
        assert state.best_metric is state.best_model_checkpoint is state.best_global_step is None
        said = capsys.readouterr().out
        assert "is not beside it" in said and Path(named).name in said


def test_what_a_recipe_has_fetched_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text("{}")
    for said in (f"fetching 'file://{tmp_path}/rows.jsonl' (theirs.yaml: data.train_file)", ""):
        (copy,) = paths_of(f"file://{tmp_path}/rows.jsonl", "theirs.yaml: data.train_file")
        assert copy.read_text() == "{}" and capsys.readouterr().out.strip() == said
