"""`python -m brigade check`: what it says of recorded hosts, its table, its JSON, its exit codes, what it leaves behind."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from brigade.check import result_file
from brigade.check.bandwidth import Sweep
from brigade.check.hosts import Recorded, Wanted
from brigade.check.registry import GROUPS, SIZES, Check, checks
from brigade.check.results import (
    LEVELS,
    NO_ANSWER,
    Result,
    Threshold,
    exit_code,
    most_common,
    refusal,
    sound,
    thresholds,
    unknown,
)
from brigade.check.run import Outcome, Row, judge
from brigade.check.table import columns, lines, table
from brigade.errors import UserError
from brigade.recipe.files import REPOSITORY

NODES = {f"node{number}": 8 for number in range(1, 5)}


def outcome(rows, hosts=NODES):
    """rows: name -> results"""
    return Outcome(dict(hosts), "quick", [Row(name, "reach", results, 0.1) for name, results in rows.items()], 1.0)


def bad(host, value="1500", level="red", **more):
    return Result(host, level, value, None, f"{host} has {value}", "it matters", f"ssh {host} repair", **more)


def drawn(found):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table(found))
    for line in lines(found):
        console.print(line, soft_wrap=True)
    return console.export_text()


# ---- levels ------------------------------------------------------------------------------------------------------
def test_the_exit_code_is_that_of_the_gravest():
    hosts = [sound("a", "x"), unknown("b", "no GPU")]
    assert exit_code(hosts) == 0
    assert exit_code([*hosts, bad("c", level="yellow")]) == 1
    assert exit_code([*hosts, bad("c", level="yellow"), bad("d")]) == 3


def test_thresholds_may_lie_above_or_below():
    high, low = Threshold(1, 10, "s", "?"), Threshold(0.8, 0.5, "of the median", "?", below=True)
    assert [high.level(x) for x in (0.5, 1, 2, 11)] == ["green", "green", "yellow", "red"]
    assert [low.level(x) for x in (0.9, 0.8, 0.7, 0.4)] == ["green", "green", "yellow", "red"]
    assert Threshold(None, 10, "s", "?").level(9) == "green"


def test_every_threshold_names_its_source():
    for name, threshold in thresholds().items():
        assert len(threshold.source) > 10, name
        if None not in (threshold.yellow, threshold.red):
            assert (threshold.yellow > threshold.red) == threshold.below, name


def test_the_majority_is_the_reference_and_of_equals_the_first_host():
    assert most_common({"a": 1, "b": 2, "c": 2}) == 2
    assert most_common({"a": 1, "b": 2}) == 1
    with pytest.raises(ValueError, match="no host answered"):
        most_common({})


# ---- checks ------------------------------------------------------------------------------------------------------
def test_every_check_says_what_it_reads_and_where_its_threshold_comes_from():
    every = checks()
    assert len({check.name for check in every}) == len(every)
    assert {check.group for check in every} <= set(GROUPS)
    for check in every:
        assert "hreshold" in check.about, check.name
        assert len(check.about) > 60, check.name


def test_a_smaller_size_has_fewer_checks():
    names = [{check.name for check in checks(size)} for size in SIZES]
    assert names[0] < names[1] <= names[2]
    assert sum(check.seconds for check in checks("quick") if check.alone) == 0  # they would wait for one another


def of(function, seconds=5):
    return Check("it", "reach", function, "quick", seconds, False, "")


def judged(function, answers=None, seconds=5):
    hosts = Recorded(Wanted(dict(NODES)), {"x.y": answers or {}})
    return {result.host: result for result in asyncio.run(judge(of(function, seconds), hosts))}


async def asks(hosts):
    for host, facts in (await hosts.ask("x.y", 2)).items():
        yield sound(host, facts["value"])


def test_a_host_that_does_not_answer_is_not_sound_and_the_others_are_judged():
    found = judged(asks, {host: {"value": "1"} for host in list(NODES)[:3]})
    assert [found[host].level for host in NODES] == ["green"] * 3 + ["red"]
    assert "no answer within 2 s" in found["node4"].problem


def test_a_check_that_fails_itself_is_grey():
    found = judged(asks, {host: {} for host in NODES})  # KeyError
    assert {result.level for result in found.values()} == {"grey"}
    assert "KeyError: 'value'" in found["node1"].problem


def test_a_check_that_does_not_end_is_given_up():
    async def hangs(hosts):
        yield sound("node1", "1")
        await asyncio.sleep(60)

    found = judged(hangs, seconds=0.05)
    assert found["node1"].level == "green"
    assert "had not ended after 0.05 s" in found["node2"].problem


# ---- the table ---------------------------------------------------------------------------------------------------
def test_hosts_that_agree_are_one_column():
    rows = {
        "mtu": [sound(host, "9000") for host in NODES],
        "free": [sound(h, f"{n} GiB", n) for n, h in enumerate(NODES)],
    }
    assert columns(outcome(rows)) == [list(NODES)]
    text = drawn(outcome(rows))
    assert "node1 ... node4 (4 hosts)" in text
    assert "0 GiB to 3 GiB" in text


def test_the_odd_host_has_a_column_and_a_line_with_its_cure():
    rows = {"mtu": [sound("node1", "9000"), sound("node2", "9000"), bad("node3"), sound("node4", "9000")]}
    assert columns(outcome(rows)) == [["node1", "node2", "node4"], ["node3"]]
    text = drawn(outcome(rows))
    assert "FAIL 1500" in text
    assert "FAIL mtu, node3: node3 has 1500" in text
    assert "cure: ssh node3 repair" in text


def test_hosts_with_the_same_fault_share_its_line():
    text = drawn(outcome({"mtu": [bad("node1"), bad("node2"), sound("node3", "9000"), sound("node4", "9000")]}))
    assert text.count("why: it matters") == 1
    assert "cure: ssh HOST repair" in text


def test_a_name_inside_another_is_left_alone():
    """node1 is no part of node10."""
    hosts = {"node1": 1, "node10": 1}
    one = Result("node1", "red", "x", None, "node1 cannot reach node10", "why", "cure")
    text = drawn(outcome({"ports": [one, sound("node10", "y")]}, hosts))
    assert "node1 cannot reach node10" in text


@given(
    st.integers(1, 1200),
    st.lists(st.tuples(st.integers(0, 1199), st.sampled_from(LEVELS), st.text(max_size=8)), max_size=40),
)
def test_any_cluster_gives_a_table_that_can_be_read(count, odd):
    """However many hosts differ, the table stays a few columns wide, and each warning and fault has a line."""
    names = [f"host{number}" for number in range(count)]
    results = {name: sound(name, "ok") for name in names}
    for number, level, value in odd:
        if number < count:
            name = names[number]
            results[name] = (
                bad(name, value, level) if level in ("yellow", "red") else Result(name, level, value, None, "?")
            )
    found = outcome({"one": list(results.values())}, dict.fromkeys(names, 8))
    groups = columns(found)
    assert sorted(host for group in groups for host in group) == sorted(names)
    assert len(table(found).columns) <= 9
    said = "\n".join(line.plain for line in lines(found))
    assert said.count("FAIL") >= bool([r for r in results.values() if r.level == "red"])


def test_a_launch_is_refused_in_the_words_of_what_is_not_sound():
    assert refusal([sound("node1", "x"), bad("node2", level="yellow")]) is None
    one = refusal([bad("node1"), sound("node2", "x")])
    assert (one.place, one.problem, one.cure) == ("node1", "node1 has 1500: it matters", "ssh node1 repair")
    assert refusal([bad("node1", NO_ANSWER)]) is None  # it may have been busy: the launch will see
    many = refusal([bad("node1"), bad("node2")])
    assert many.place == "2 hosts are not sound"
    assert "node2: node2 has 1500" in many.problem


def test_a_launch_goes_on_where_a_fault_may_pass():
    """A GPU that somebody uses, say: the run may begin all the same."""
    found = outcome({"gpus": [bad("node1")], "clock": [bad("node2")], "ports": [sound(host, "open") for host in NODES]})
    assert refusal(found.stopping) is None
    assert refusal(outcome({"ports": [bad("node3")], "gpus": [bad("node1")]}).stopping).place == "node3"


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
    was, now = (
        saved(
            {"variables": [sound("node1", "1 alike", detail=(f"NCCL_ALGO={value}",))]}, tmp_path / value, {"node1": 1}
        )
        for value in ("Ring", "Tree")
    )
    found = result_file.changes(result_file.read(tmp_path / "Ring"), now)
    assert found == ["node1: variables: no longer NCCL_ALGO=Ring", "node1: variables: now NCCL_ALGO=Tree"]
    assert result_file.compared(was, now) == "1 row compared"


def test_a_baseline_says_what_it_does_not_compare(tmp_path):
    was = saved({"mtu": [sound("node1", "1500")], "clock": [sound("node1", "fine")]}, tmp_path / "a", {"node1": 1})
    now = saved({"mtu": [sound("node1", "1500")], "ports": [sound("node1", "open")]}, tmp_path / "b", {"node1": 1})
    assert result_file.compared(was, now) == "1 row compared; 1 were not checked now (clock); 1 are new (ports)"


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("{", "Invalid JSON"), ('{"format": 1}', "Field required"), (b"\xff\xfe", "not text")],
)
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
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
    ],
)
def test_bad_input_is_named(words, says):
    done = brigade(*words)
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
    (tmp_path / "ssh").write_text("#!/bin/sh\necho begun >&2\nexec sleep 300\n")
    (tmp_path / "ssh").chmod(0o755)
    command = [sys.executable, "-m", "brigade", "check", "--hostfile", str(tmp_path / "hosts"), "--quick"]
    mark = {"CHECK_UNDER_TEST": str(tmp_path)}
    environment = os.environ | mark | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True)
    while not _marked(mark, "sleep"):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert "stopped by SIGINT" in process.stderr.read()
    deadline = time.monotonic() + 10
    while _marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _marked(mark)


def _marked(mark, name=""):
    """Processes with this variable in their environment."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if mark.items() <= process.environ().items() and name in process.name():
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
    return found
