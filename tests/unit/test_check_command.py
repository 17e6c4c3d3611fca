"""`python -m brigade check`: its JSON, its baseline, its command line, what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from brigade.check import result_file
from brigade.check.checks import checks, exit_code, sound
from brigade.check.collectives import Sweep
from brigade.errors import UserError
from brigade.train.recipe.files import REPOSITORY
from testing import command_line
from testing.outcomes import NODES, bad, outcome
from testing.train_command import surviving


# ---- JSON and baseline -------------------------------------------------------------------------------------------
def saved(rows, path, hosts=NODES):
    found = outcome(rows, hosts)
    document = result_file.document(found, None, exit_code(found.results))
    result_file.write(document, path)
    return document


def test_what_is_written_is_what_is_read(tmp_path):
    document = saved(
        {"mtu": [bad("node1", fix="ip link set eth0 mtu 9000"), sound("node2", "9000", 9000)]}, tmp_path / "a.json"
    )
    assert result_file.read(tmp_path / "a.json") == document
    assert json.loads((tmp_path / "a.json").read_text())["exit_code"] == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


def test_the_whole_sweep_is_written_down(tmp_path):
    """2 bytes for each of the payload, over 2 ranks half of them: 64 MiB in 10 ms are 6.7 GB/s on the bus."""
    rows = [("all_reduce", 2**26, 0.01), ("all_to_all", 2**20, 0.002)]
    found = outcome({"collectives": [sound(host, "6.71 GB/s", 6.71) for host in NODES]})
    document = result_file.document(found, None, 0, Sweep("gloo", 2, 2, "CPU", rows))
    result_file.write(document, tmp_path / "a.json")
    sweep = json.loads((tmp_path / "a.json").read_text())["sweep"]
    assert (sweep["backend"], sweep["device"], sweep["hosts"], sweep["ranks"]) == ("gloo", "CPU", 2, 2)
    assert [(one["collective"], one["payload"], one["seconds"]) for one in sweep["timed"]] == rows
    assert sweep["timed"][0]["bus"] == pytest.approx(6.71, rel=1e-3)
    assert result_file.read(tmp_path / "a.json") == document


def test_a_baseline_says_what_changed_since_it_last_worked(tmp_path):
    two = {"node1": 1, "node2": 1}
    was = {"mtu": [sound(host, "9000") for host in two], "rate": [sound(host, "10 GB/s", 10) for host in two]}
    earlier = saved(was, tmp_path / "a", two)
    rates = [sound("node1", "9 GB/s", 9), sound("node2", "5 GB/s", 5)]
    now = saved({"mtu": [sound("node1", "9000"), bad("node2")], "rate": rates}, tmp_path / "b", two | {"node3": 1})
    assert result_file.changes(earlier, now) == [
        "node3: not among the hosts then",
        "node2: mtu was ok 9000; it is FAIL 1500",
        "node2: rate was ok 10 GB/s; it is ok 5 GB/s",
    ]
    assert result_file.changes(now, now) == []


def test_a_baseline_knows_what_a_cell_leaves_out(tmp_path):
    """All hosts have NCCL_ALGO=Tree now: they agree with each other, and not with what worked."""
    rows = {value: [sound("node1", "1 alike", detail=(f"NCCL_ALGO={value}",))] for value in ("Ring", "Tree")}
    was, now = (saved({"variables": row}, tmp_path / value, {"node1": 1}) for value, row in rows.items())
    found = result_file.changes(result_file.read(tmp_path / "Ring"), now)
    assert found == ["node1: variables: no longer NCCL_ALGO=Ring", "node1: variables: now NCCL_ALGO=Tree"]
    assert result_file.compared(was, now) == "1 row compared"


def test_a_baseline_says_what_it_does_not_compare(tmp_path):
    was = saved({"mtu": [sound("node1", "1500")], "clock": [sound("node1", "fine")]}, tmp_path / "a", {"node1": 1})
    now = saved({"mtu": [sound("node1", "1500")], "ports": [sound("node1", "open")]}, tmp_path / "b", {"node1": 1})
    assert result_file.compared(was, now) == "1 row compared; 1 were not checked now (clock); 1 are new (ports)"


@pytest.mark.parametrize("text, says", [
    (None, "cannot be read"), ("{", "Invalid JSON"), ('{"format": 1}', "Field required"), (b"\xff\xfe", "not text"),
])  # fmt: skip
def test_a_baseline_that_is_none_is_named(tmp_path, text, says):
    path = tmp_path / "old.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=says) as error:
        result_file.read(path)
    assert str(path) in error.value.place


# ---- the command -------------------------------------------------------------------------------------------------
def brigade(*words, **options):
    command = [sys.executable, "-m", "brigade", "check", *map(str, words)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def one_host(tmp_path_factory):
    """A quick check of this machine, with its JSON."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "hosts").write_text("localhost slots=1\n")
    done = brigade("--hostfile", folder / "hosts", "--quick", "--json", folder / "found.json")
    return folder, done


def test_this_machine_alone_is_sound(one_host):
    folder, done = one_host
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    document = result_file.read(folder / "found.json")
    assert document.hosts == {"localhost": 1}
    found = {check.name for check in document.checks}
    assert found <= {"login", *(check.name for check in checks("quick"))}  # without GPUs no row of them but one
    assert {"login", "gpus", "packages", "clock"} <= found


def test_a_baseline_of_the_command_line(one_host):
    folder, _ = one_host
    done = brigade("--hostfile", folder / "hosts", "--quick", "--baseline", folder / "found.json", "--json", "-")
    assert result_file.Document.model_validate_json(done.stdout).hosts == {"localhost": 1}
    assert "changed since" in done.stderr


def test_a_file_of_the_user_is_not_overwritten(one_host, tmp_path):
    folder, _ = one_host
    (tmp_path / "notes.txt").write_text("mine")
    done = brigade("--hostfile", folder / "hosts", "--quick", "--json", tmp_path / "notes.txt")
    assert done.returncode == 2
    assert "is no result of check" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("words, says", [
    ([], "add --hostfile"),
    (["--hostfile", "hostfiles/none"], "there is no hostfile 'hostfiles/none'"),
    (["recipes/none.yaml", "--hostfile", "hostfiles/1x8"], "recipes/none.yaml"),
    (["--hostfile", "hostfiles/1x8", "--quick", "--full"], "not allowed with"),
    (["--hostfile", "hostfiles/1x8", "--bf16=true"], "name a recipe"),
    (["--recipe", "recipes/tiny/full.yaml"], "check takes the recipe as its first word"),
    (["--hostfile", "hostfiles/1x8", "--only", "Ports,packets"], "there is no such check"),
    (["--hostfile", "hostfiles/1x8", "--quick", "--only", "kernels"], "leave out --quick"),
    (["--hostfile", "hostfiles/1x8", "--only", "all kernels"], "add --full"),
    (["--hostfile", "hostfiles/1x8", "--calibrate"], "one host has no network"),
    (["--hostfile", "hostfiles/1x8", "--calibrate", "--only", "memory"], "leaves out the row `collectives`"),
    (["--hostfile", "hostfiles/1x8", "--json", "/proc/nowhere/x.json"], "is no directory"),
    (["--hostfile", "hostfiles/1x8", "--json", "/proc/x.json", "--quick"], "--json /proc/x.json"),
    (["--hostfile", "hostfiles/1x8", "--quik"], "did you mean 'quick'"),
])  # fmt: skip
def test_bad_input_is_named(words, says):
    done = command_line.brigade("check", *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_without_ssh_it_says_so(tmp_path):
    (tmp_path / "hosts").write_text("elsewhere slots=1\n")
    done = brigade("--hostfile", tmp_path / "hosts", "--quick", env=os.environ | {"PATH": str(tmp_path)})
    assert done.returncode == 3
    assert "ssh cannot be started here" in done.stdout
    assert "cure: install it" in done.stdout


def test_the_schema_and_the_list_are_printed():
    assert json.loads(brigade("--schema").stdout)["title"] == "Document"
    listed = brigade("--list", "--quick").stdout
    assert all(check.name in listed for check in checks("quick"))


def test_an_interrupted_check_ends_at_once_and_leaves_no_process(tmp_path):
    """A host that hangs at login, and Ctrl-C."""
    (tmp_path / "hosts").write_text("elsewhere slots=1\n")
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho begun >&2\ntouch {tmp_path}/begun\nexec sleep 300\n")
    (tmp_path / "ssh").chmod(0o755)
    command = [sys.executable, "-m", "brigade", "check", "--hostfile", str(tmp_path / "hosts"), "--quick"]
    mark = str(tmp_path)
    environment = os.environ | {"BRIGADE_TEST_MARK": mark, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert "stopped by SIGINT" in process.stderr.read()
    assert not surviving(mark, 10)
