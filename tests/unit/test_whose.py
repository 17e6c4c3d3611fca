"""Whose an error is, from where it is raised: what the rank that meets it tells `launch` of it."""

import errno
import json
import os
import pickle
import re
import traceback

import pytest

from brigade.errors import UserError, whose
from brigade.errors.disk import of_disk
from brigade.train.distributed import tell
from brigade.train.distributed.process import this_process
from brigade.train.host.cluster import World
from brigade.train.recipe.files import find

ERRORS = {
    "a mistake": (UserError("flag --x", "no such flag", "leave it out"), ("user", ())),
    "a host's, which names others": (UserError("x", "gone", "mount it", "host", ("node2",)), ("host", ("node2",))),
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


@pytest.mark.parametrize("number, expected", [
    ("EIO", "host"), ("EROFS", "host"), ("ENOSPC", "host"), ("EACCES", "user"), ("EDQUOT", "user"), ("EFBIG", "user"),
])  # fmt: skip
def test_whose_an_error_of_a_disk_is(number, expected):
    code = getattr(errno, number)
    assert of_disk(OSError(code, os.strerror(code), "/x")).whose == expected


def test_a_file_that_one_host_lacks_is_its_fault_and_one_that_all_lack_the_user_s(user_error):
    lacks = user_error(find, "/data/train.jsonl", "recipe.yaml: data.train_file", "file")
    here = whose.of_error(lacks)[0]
    assert whose.of_ranks([(None, "a"), (here, "b")]) == ("host", ("b",))
    assert whose.of_ranks([(here, "a"), (here, "b")]) == ("user", ())


@pytest.mark.parametrize("found, expected", [
    ([(None, "a"), ("host", "b"), ("host", "b")], ("host", ("b",))),
    ([("host", "a"), ("host", "b")], ("user", ())),  # no host is left without it
    ([("host", "a"), ("host", "a")], ("host", ("a",))),  # but a spare may be
    ([("host", "a"), ("host", "b"), (None, "c")], ("host", ("a", "b"))),
    ([("user", "a"), ("host", "b")], None),
    ([(None, "a"), ("run", "b")], None),
])  # fmt: skip
def test_what_all_hosts_meet_is_no_host_s(found, expected):
    assert whose.of_ranks(found) == expected


def test_a_rank_tells_launch_whose_its_error_is(monkeypatch, capfd):
    here, there = os.pipe()
    monkeypatch.setattr(this_process.agent, "_notes", there)
    tell.tell(UserError("out", "none there", "mount it", "host", ("node2",)), World(1, 0, 2, 1, "node1", "torchrun"))
    told = json.loads(os.read(here, 4096))
    assert (told["code"], told["whose"], told["hosts"]) == (2, "host", ["node2"]) and "none there" in told["told"]


def chained(how, frames):
    """The traceback of an exception of so many frames, raised from another or while that is handled, which has as many."""
    lines = [
        "def first0(): raise OSError('no space left\\non the disk')",
        "def last0(): raise RuntimeError('could not save')",
    ]
    lines += [f"def {name}{n}(): return {name}{n - 1}()" for n in range(1, frames) for name in ("first", "last")]
    wraps = "raise RuntimeError('could not save') from error" if how == "from" else f"last{frames - 1}()"
    lines += ["try:", f"    first{frames - 1}()", "except OSError as error:", f"    {wraps}"]
    try:
        exec("\n".join(lines), {})
    except RuntimeError as error:
        return "".join(traceback.format_exception(error)).rstrip()


@pytest.mark.parametrize("how, sentence", [("from", "the direct cause of"), ("while", "During handling of")])
@pytest.mark.parametrize("frames", [2, 60])
def test_a_long_traceback_keeps_the_last_lines_of_each_exception_in_its_chain(how, sentence, frames):
    said = tell.in_short(text := chained(how, frames))
    assert "OSError: no space left\non the disk\n" in said and sentence in said
    assert said.endswith("RuntimeError: could not save") and said.count("Traceback (most recent call last)") == 2
    assert said == text if frames == 2 else " lines ...\n" in said and said.count("\n") < 60 < text.count("\n")


def test_of_a_very_long_chain_the_first_and_the_last_exceptions_are_told():
    sentence = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    links = [f"Traceback (most recent call last):\n  a\n  b\nValueError: {number}" for number in range(40)]
    said = tell.in_short(sentence.join(links))
    assert re.findall(r"ValueError: (\d+)", said) == ["0", "36", "37", "38", "39"]
    assert said.count(sentence) == 4 and "  ... 35 exceptions ...\n" in said
