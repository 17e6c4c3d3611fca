"""What lies in a cache is believed, so one that others can write is refused; and no script of a page comes from there."""

import grp
import os
import pwd
import stat
from types import SimpleNamespace

import pytest

from brigade.errors import UserError
from brigade.kernels import proofs
from brigade.launch import background
from brigade.report import library
from brigade.train.host import cache

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
