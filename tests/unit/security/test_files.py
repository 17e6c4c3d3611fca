"""Files are written and read as among other users: no link that others planted is followed, and nothing waits."""

import os
import stat
from pathlib import Path

import pytest

from brigade.train.host import files
from brigade.train.run import events


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "mine"
    path.write_text("mine\n")
    return path


@pytest.fixture
def planted(tmp_path, victim):
    """A name that others made a link to a file of this user."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "planted").symlink_to(victim)
    return folder / "planted"


def test_a_written_file_takes_a_links_place(planted, victim):
    files.write(planted, "new\n")
    assert (planted.read_text(), victim.read_text()) == ("new\n", "mine\n")
    assert not planted.is_symlink() and [path.name for path in planted.parent.iterdir()] == ["planted"]


def test_what_fails_leaves_the_file_that_was_there(tmp_path, victim):
    with pytest.raises(ZeroDivisionError), files.replacing(victim) as file:
        file.write(b"half")
        1 / 0  # noqa: B018
    assert victim.read_text() == "mine\n" and [*tmp_path.iterdir()] == [victim]


@pytest.mark.parametrize("open_", [files.append, files.create])
def test_no_link_is_opened(planted, victim, open_):
    with pytest.raises(OSError):
        open_(planted)
    assert victim.read_text() == "mine\n"


def test_lines_are_appended_to_regular_files_of_one_name(tmp_path, victim):
    for line in b"one\n", b"two\n":
        with files.append(tmp_path / "lines") as file:
            file.write(line)
    assert (tmp_path / "lines").read_text() == "one\ntwo\n"
    os.link(victim, tmp_path / "hard")
    os.mkfifo(tmp_path / "fifo")
    for name in "hard", "fifo":
        with pytest.raises(OSError):
            files.append(tmp_path / name)


def test_events_that_a_hard_link_refuses_are_told_of_once(tmp_path, victim, capsys):
    (tmp_path / "run.yaml").touch()
    os.link(victim, tmp_path / events.FILE)
    for step in 1, 2:
        events.add(tmp_path, "step", step=step)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith(f"warning: nothing is added to {tmp_path / events.FILE}: {events.FILE} is a link")
    assert victim.read_text() == "mine\n"


def test_only_regular_files_of_a_fair_size_are_read(tmp_path, victim):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="no regular file"):
        files.read(tmp_path / "fifo")
    with pytest.raises(OSError, match="no regular file"):
        files.read(Path("/dev/zero"))
    with pytest.raises(OSError, match="larger than 4 bytes"):
        files.read(victim, most=4)
    assert files.read_text(victim, most=5) == "mine\n"


def test_the_umask_decides_unless_it_is_a_secret(tmp_path):
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "plain", "")
        files.write(tmp_path / "secret", "", secret=True)
        files.append(tmp_path / "log", secret=True).close()
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("plain", "secret", "log")] == [0o640, 0o600, 0o600]


def test_a_folder_takes_a_links_place(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert not files.make_folder(tmp_path / "link").is_symlink()
    assert files.make_folder(tmp_path / "new").is_dir() and files.make_folder(tmp_path / "new").is_dir()
