"""What lies in a cache is believed, so one that others can write is refused; and no script of a page comes from there. Files
are written and read as among other users: no link that others planted is followed, and nothing waits."""

import grp
import os
import pwd
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from brigade.check.probes import storage
from brigade.errors import UserError
from brigade.kernels import proofs
from brigade.launch import background
from brigade.report import library
from brigade.train.host import cache, files
from brigade.train.run import events

STRANGER = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def home(tmp_path, monkeypatch):
    home = tmp_path / "made/cache"
    monkeypatch.setenv("BRIGADE_CACHE", str(home))
    return home


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_cache_is_made_for_its_owner_alone(home):
    before = os.umask(0o002)  # of hosts where each user has a group
    try:
        cache.remembered("key", lambda: "text")
        cache.once(home / "prepared/data", lambda aside: (aside / "tokens").write_text("one"))
    finally:
        os.umask(before)
    made = home.parent, home, home / "digests", home / "prepared", home / "prepared/data"
    assert [mode(path) for path in made] == [0o700] * 5
    assert {mode(path) for path in (home / "digests").iterdir()} == {0o600}


def test_an_empty_variable_is_none(home, monkeypatch):
    """The cache would lie in the working directory."""
    monkeypatch.setenv("BRIGADE_CACHE", "")
    usual = Path("~/.cache/brigade").expanduser()
    assert cache.cache_directory() == usual
    assert storage.rooms([], "/")["cache"]["path"] == str(usual), "as check sees it on each host"


@pytest.mark.parametrize("others", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("inside", ["", "launches"])
def test_a_cache_that_others_can_write_is_refused(home, inside, others, monkeypatch):
    monkeypatch.setattr(cache, "_is_own_group", lambda group: False)
    (home / inside).mkdir(parents=True)
    (home / inside).chmod(others)
    with pytest.raises(UserError, match="others may write to it") as error:
        background.find(home)
    folder = home / inside
    assert error.value.cure.startswith(f"look through it, then `chmod -R go-w {folder}`; or export BRIGADE_CACHE")


@pytest.mark.parametrize("group, members, mine", [
    ("me", [], True), ("me", ["me"], True), ("me", ["me", "you"], False), ("us", [], False),
])  # fmt: skip
def test_a_group_of_this_user_alone_may_write(home, group, members, mine, monkeypatch, mistake):
    """As it may in a cache that an earlier version made where the umask is 002."""
    home.mkdir(parents=True)
    home.chmod(0o775)
    number = home.stat().st_gid
    monkeypatch.setattr(cache, "ROOT", -1)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_name="me", pw_gid=number))
    monkeypatch.setattr(grp, "getgrgid", lambda number: SimpleNamespace(gr_name=group, gr_mem=members))
    if mine:
        monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid)
        assert cache.cache_directory() == home
    else:
        assert "its group or others may write to it" in mistake(cache.cache_directory)


def test_a_link_to_a_disk_that_was_emptied_is_followed(home, tmp_path):
    home.parent.mkdir()
    home.symlink_to(tmp_path / "scratch/cache")
    cache.remembered("key", lambda: "text")
    assert len([*(tmp_path / "scratch/cache/digests").iterdir()]) == 1 and mode(tmp_path / "scratch") == 0o700


def test_a_cache_that_root_made_is_told(home, monkeypatch, mistake):
    """In a container, with this user's directory as root's home."""
    home.mkdir(0o700, parents=True)
    monkeypatch.setattr(os, "access", lambda path, how: False)
    assert "this user may not read it" in mistake(cache.cache_directory)


def test_each_use_of_the_cache_looks(home, mistake):
    home.mkdir(parents=True)
    home.chmod(0o777)
    uses = (
        lambda: cache.remembered("key", lambda: "text"),
        lambda: cache.once(home / "data", lambda folder: True, lambda aside: None),
        lambda: cache.private_folder(home),
        proofs.folder,
        library.javascript,
    )
    for use in uses:
        assert "others may write to it" in mistake(use)


@only_root
def test_another_user_s_cache_is_refused(home):
    """Also by root, who could read it."""
    home.mkdir(0o755, parents=True)
    os.chown(home, STRANGER, STRANGER)
    with pytest.raises(UserError, match=f"it belongs to user {STRANGER}") as error:
        cache.cache_directory()
    assert error.value.cure == cache.CURE and [*home.iterdir()] == []


def test_where_root_is_nobody_its_own_cache_serves(home, monkeypatch):
    """As on network file systems."""
    home.mkdir(0o700, parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(cache, "ROOT", -1)
    assert cache.cache_directory() == home


def test_a_forged_chart_library_is_no_script_of_a_page(home, monkeypatch):
    forged = home / "charts" / library.vl_convert().__version__ / "vega.js"
    forged.parent.mkdir(parents=True)
    forged.write_text("window.forged = 1")
    monkeypatch.setattr(library, "bundled", lambda package: "from the package")
    assert library.javascript() == "from the package"


@pytest.mark.slow
def test_the_digest_is_that_of_the_package_in_use(home):
    """Else each page takes two seconds longer."""
    package = library.vl_convert()
    assert package.__version__ in library.DIGESTS
    text = library.javascript()
    assert text == library.bundled(package)
    kept = home / "charts" / package.__version__ / "vega.js"
    assert kept.read_text() == text


# ---- files -----------------------------------------------------------------------------------------------------------
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
