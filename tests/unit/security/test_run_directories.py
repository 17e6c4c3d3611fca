"""A run's directory in which others can write: their links are not followed, their FIFOs and locks hold nobody."""

import fcntl
import json
import os
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from brigade.__main__ import main
from brigade.hosts import host_facts, usage
from brigade.report import command, page, records
from brigade.top import watching
from brigade.train.checkpoint import memory_stage
from brigade.train.host import files
from brigade.train.host.cluster import World
from brigade.train.run import directory as runs
from brigade.train.run import events, mark, on_disk, other_owner, owner, same_run, starts, status
from brigade.train.run import page as run_page
from brigade.train.run.success import SUCCESS
from brigade.train.step import sample_answers
from brigade.train.strategy import Strategy
from brigade.train.watch import watch_thread
from testing.patience import in_time
from testing.recorded import write_run

STRANGER = 65534
ANSWER = {"step": 4, "source": "a", "question": "q", "reference": "r", "answer": "a"}


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=4)


def watch(directory):
    world, strategy = World(0, 0, 1, 1, "node1", "torchrun"), Strategy("single", "single", "flag")
    found = watch_thread.Watch(SimpleNamespace(world=world, strategy=strategy, directory=directory))
    found.write()
    found.record({})


def kept(directory):
    own = SimpleNamespace(directory=directory, world=SimpleNamespace(is_main_rank=True))
    runs.add_to_record(own, "prediction", 1)


WRITERS = {
    "run.yaml": kept,
    ".run.yaml": kept,
    "events.jsonl": lambda directory: events.add(directory, "step", step=1),
    "answers.jsonl": lambda directory: sample_answers.store([ANSWER], directory),
    ".answers.jsonl": lambda directory: sample_answers.store([ANSWER], directory),
    ".starts": lambda directory: starts.count(directory / starts.FILE, "job", 0),
    "heartbeats/rank-0.json": watch,
    "heartbeats/.rank-0": watch,
    "heartbeats/rank-0.stacks": watch,
    "heartbeats/rank-0.collectives": watch,
    ".report.html": lambda directory: page.write(records.read_records([directory]), directory / "report.html"),
}


@pytest.fixture
def blank(monkeypatch):
    monkeypatch.setattr(page, "html", lambda records: page.MARK)


@pytest.mark.parametrize("name", WRITERS)
def test_a_planted_link_is_not_followed(run, victim, name, blank):
    planted = run / name
    planted.parent.mkdir(exist_ok=True)
    victim.write_text(before := planted.read_text() if planted.exists() else "")
    planted.unlink(missing_ok=True)
    planted.symlink_to(victim)
    WRITERS[name](run)
    assert victim.read_text() == before


def test_figures_go_into_no_planted_link(run, victim, tmp_path, monkeypatch):
    monkeypatch.setattr(page.library, "picture", lambda spec, title: b"png")
    (tmp_path / "elsewhere").mkdir()
    (run / "report_files").symlink_to(tmp_path / "elsewhere")
    page.write_files(records.read_records([run]), run / "report_files")
    assert [*(tmp_path / "elsewhere").iterdir()] == []
    (table, *_) = (run / "report_files").glob("*.csv")
    table.unlink()
    table.symlink_to(victim)
    page.write_files(records.read_records([run]), run / "report_files")
    assert victim.read_text() == "mine\n" and not table.is_symlink()


def test_the_owner_s_file_is_no_link(run, victim):
    (run / owner.FILE).symlink_to(victim)
    with pytest.raises(OSError, match=r"\.owner is a link, and others may have made it"):
        owner.take(run)
    assert victim.read_text() == "mine\n"


def test_a_start_removes_folders_that_are_links(run, tmp_path):
    other = tmp_path / "another-run"
    other.mkdir()
    (other / "rank-0.json").write_text("{}")
    for name in (".saving", "heartbeats"):
        (run / name).symlink_to(other)
    on_disk.remove_leftovers(run)
    assert not (run / ".saving").exists() and not (run / "heartbeats").exists() and (other / "rank-0.json").exists()


def test_what_transformers_writes_follows_no_link(run, victim):
    (run / "training_args.bin").symlink_to(victim)
    (run / "config.json").symlink_to(run / "nowhere")
    (run / "checkpoint-4").mkdir()
    (run / "folder").symlink_to(run / "checkpoint-4")
    files.remove_links(run)
    left = {path.name for path in run.iterdir()}
    assert "folder" in left and not left & {"training_args.bin", "config.json"} and victim.exists()


READERS = {
    "run.yaml": [
        status.of,
        lambda run: records.read_records([run]),
        lambda run: same_run.check_data(run / "run.yaml", "", ""),
    ],
    "events.jsonl": [
        events.read,
        lambda run: records.read_records([run]),
        lambda run: events.add(run, "step", step=1),
        lambda run: host_facts.progress(run),
        lambda run: watching._newest(run / events.FILE),
        lambda run: main(["report", str(run), "--page_only", "--html", str(run / "page.html")]),
    ],
    "success.json": [status.of],
    "stopped.json": [host_facts.progress],
    "answers.jsonl": [lambda run: records.read_records([run])],
    "trainer_state.json": [lambda run: records.read_records([run])],
    "heartbeats/rank-0.json": [
        usage.heartbeats,
        lambda run: watch_thread.Peer("a", 1).read(run / "heartbeats/rank-0.json"),
    ],
    ".owner": [lambda run: other_owner.holder(run / owner.FILE), owner.take],
    ".mark": [lambda run: mark._problem(run, "token")],
    ".starts": [lambda run: starts.count(run / starts.FILE, "job", 0)],
    "report.html": [lambda run: page.write(records.read_records([run]), run / "report.html")],
}


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_holds_nobody(run, name, blank):
    """Whoever opens one without care waits for ever."""
    fifo = run / name
    fifo.parent.mkdir(exist_ok=True)
    fifo.unlink(missing_ok=True)
    os.mkfifo(fifo)
    for read in READERS[name]:
        try:
            with in_time(5):
                read(run)
        except Exception as error:  # its words are tested elsewhere
            assert "regular file" in str(error)


def test_whoever_locks_the_events_delays_the_page_for_a_moment(run, monkeypatch, blank):
    monkeypatch.setattr(command, "TURN", 0.2)
    with (run / events.FILE).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        assert main(["report", str(run), "--page_only"]) == 0
    assert 0.2 <= time.monotonic() - began < 3 and (run / "report.html").exists()


def test_the_page_of_another_user_s_run_is_written_where_it_is_asked_for(run, monkeypatch, prints, tmp_path, blank):
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    said = prints(2, "report", str(run), "--page_only")
    assert f"cure: name the page: --html {run.name}.html" in said and not (run / "report.html").exists()
    assert main(["report", str(run), "--page_only", "--html", str(tmp_path / "page.html")]) == 0


def test_a_run_asks_for_its_own_page(run, monkeypatch):
    """Also where another user began it."""
    started = []
    monkeypatch.setattr(run_page.subprocess, "Popen", lambda command, **_: started.append(command))
    run_page._start(run)
    assert started[0][-2:] == ["--html", str(run / "report.html")]


def test_answers_are_for_their_owner_and_the_rest_is_by_the_umask(run, blank):
    before = os.umask(0o022)
    try:
        (run / "answers.jsonl").unlink()
        page.write(records.read_records([run]), run / "report.html")
        open_page = mode(run / "report.html")
        sample_answers.store([ANSWER], run)
        page.write(records.read_records([run]), run / "report.html")
        kept(run)
    finally:
        os.umask(before)
    assert [mode(run / name) for name in ("answers.jsonl", "report.html", "run.yaml")] == [0o600, 0o600, 0o644]
    assert open_page == 0o644 and json.loads((run / "answers.jsonl").read_text()) == ANSWER


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


AS_A_STRANGER = """
import os, sys
from pathlib import Path
run = Path(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in ("success.json", ".success.json", "events.jsonl", "report.html"):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_a_second_user_gains_no_write_by_links(run, victim, blank):
    """All may write to the directory, on a host without fs.protected_symlinks."""
    for folder in (run.parent, run):
        folder.chmod(0o777)
    for above in run.parent.parents:  # pytest's own, one more under xdist
        if not above.stat().st_mode & 0o001:
            above.chmod(above.stat().st_mode | 0o011)
    victim.chmod(0o600)
    subprocess.run([sys.executable, "-c", AS_A_STRANGER, str(run), str(victim)], check=True)
    files.write(run / SUCCESS, "{}")
    events.add(run, "end", step=4)
    with pytest.raises(Exception, match="is no page of a run"):
        page.write(records.read_records([run]), run / "report.html")
    assert victim.read_text() == "mine\n"


def test_who_continues_another_user_s_run_leaves_his_answers_and_replaces_his_page(run, monkeypatch, capsys):
    """Both are for their owner's eyes alone."""

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    sample_answers.store([ANSWER], run)
    before = (run / "answers.jsonl").read_text()
    (run / run_page.FILE).write_text(page.MARK)
    with monkeypatch.context() as of_another:
        of_another.setattr(files, "opened", refuse)
        sample_answers.store([ANSWER | {"step": 8}], run)
        of_another.setattr(page, "html", lambda records: "new")
        page.write([], run / run_page.FILE)
    assert (run / "answers.1.jsonl").read_text() == before and "stay in answers.1.jsonl" in capsys.readouterr().err
    assert [json.loads(line)["step"] for line in (run / "answers.jsonl").read_text().splitlines()] == [8]
    assert (run / run_page.FILE).read_text() == "new"


def test_a_link_in_shared_memory_lets_go_of_no_lock(tmp_path, monkeypatch):
    """To close a file gives up all locks that its process has on it, the lock on its own run among them."""
    held = owner.take(tmp_path)
    (tmp_path / "shm/brigade.a").mkdir(parents=True)
    (tmp_path / "shm/brigade.a/.lock").symlink_to(tmp_path / owner.FILE)
    monkeypatch.setattr(memory_stage, "MEMORY", tmp_path / "shm")
    memory_stage._remove_those_of_the_dead()
    ask = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    asked = subprocess.run([sys.executable, "-c", ask, str(tmp_path / owner.FILE)], capture_output=True, text=True)
    assert "BlockingIOError" in asked.stderr and held
