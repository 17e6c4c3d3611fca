"""Whose an error is, from where it is raised: what the rank that meets it tells `launch` of it."""

import errno
import json
import os
import pickle

import pytest

from brigade.errors import UserError, whose
from brigade.errors.disk import of_disk
from brigade.train.cluster import World
from brigade.train.distributed import supervised, tell
from brigade.train.recipe.files import find

ERRORS = {
    "a mistake": (UserError("flag --x", "no such flag", "leave it out"), ("user", ())),
    "a host's, which names others": (
        UserError("x", "none there", "mount it", "host", ("node2",)),
        ("host", ("node2",)),
    ),
    "a stale NFS handle": (OSError(errno.ESTALE, "Stale file handle"), ("host", ())),
    "a FUSE that died": (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), ("host", ())),
    "a port in use": (OSError(errno.EADDRINUSE, "Address already in use"), ("passing", ())),
    "a server that closes": (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), ("passing", ())),
    "a GPU that fails": (RuntimeError("CUDA error: uncorrectable ECC error encountered"), ("host", ())),
    "a program's error on a GPU": (RuntimeError("CUDA error: device-side assert triggered"), ("run", ())),
    "an exception": (ValueError("bad row 7"), ("run", ())),
}


@pytest.mark.parametrize("name", ERRORS)
def test_whose_an_error_is(name):
    error, expected = ERRORS[name]
    assert whose.of_error(error) == expected
    assert whose.of_error(pickle.loads(pickle.dumps(error))) == expected, "processes that read data hand theirs on"


@pytest.mark.parametrize(
    ("number", "expected"),
    [("EIO", "host"), ("EROFS", "host"), ("ENOSPC", "host"), ("EACCES", "user"), ("EDQUOT", "user"), ("EFBIG", "user")],
)
def test_whose_an_error_of_a_disk_is(number, expected):
    code = getattr(errno, number)
    assert of_disk(OSError(code, os.strerror(code), "/x")).whose == expected


def test_a_file_that_one_host_lacks_is_its_fault_and_one_that_all_lack_the_user_s():
    with pytest.raises(UserError) as lacks:
        find("/data/train.jsonl", "recipe.yaml: data.train_file", "file")
    here = whose.of_error(lacks.value)[0]
    assert whose.of_ranks([(None, "a"), (here, "b")]) == ("host", ("b",))
    assert whose.of_ranks([(here, "a"), (here, "b")]) == ("user", ())


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(None, "a"), ("host", "b"), ("host", "b")], ("host", ("b",))),
        ([("host", "a"), ("host", "b")], ("user", ())),  # no host is left without it
        ([("host", "a"), ("host", "a")], ("host", ("a",))),  # but a spare may be
        ([("host", "a"), ("host", "b"), (None, "c")], ("host", ("a", "b"))),
        ([("user", "a"), ("host", "b")], None),
        ([(None, "a"), ("run", "b")], None),
    ],
)
def test_what_all_hosts_meet_is_no_host_s(found, expected):
    assert whose.of_ranks(found) == expected


def test_a_rank_tells_launch_whose_its_error_is(monkeypatch, capfd):
    here, there = os.pipe()
    monkeypatch.setattr(supervised, "_notes", there)
    tell.tell(UserError("out", "none there", "mount it", "host", ("node2",)), World(1, 0, 2, 1, "node1", "torchrun"))
    told = json.loads(os.read(here, 4096))
    assert (told["code"], told["whose"], told["hosts"]) == (2, "host", ["node2"]) and "none there" in told["told"]
