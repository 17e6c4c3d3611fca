"""The table of `python -m brigade top`: what it makes of what hosts and ranks say; and the command on a real terminal."""

import io
import json
import os
import pty
import select
import socket
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from brigade.hosts import launches, usage
from brigade.top import table
from brigade.top.watching import HostSeen, Watching
from brigade.train.recipe.files import REPOSITORY

HOST = socket.gethostname()
GIB = 2**30


def says(rank, host="node1", step=41, **more):
    beat = {"rank": rank, "host": host, "pid": 100 + rank, "step": step, "phase": "forward", "seconds": 0.0, "age": 1.0}
    return beat | {"waits": None, "state": "running"} | more


def facts(at, ranks=(), gpus=(), busy=0.0):
    host = {
        "cores": 4,
        "busy": busy,
        "total": 4 * at,
        "memory": 3 * GIB,
        "memory_total": 24 * GIB,
        "received": 2e6 * at,
        "sent": 0,
    }
    return {"at": at, "host": host, "gpus": list(gpus), "ranks": {str(one["rank"]): one for one in ranks}}


@pytest.fixture
def watching(tmp_path):
    """watching(node1=[facts, ...], node2="why it does not answer"): what was seen."""

    def make(told=(), read=(), **hosts):
        found = Watching(list(hosts), tmp_path, 1.0)
        found.told, found.read = list(told), {str(one["rank"]): one for one in read}
        for name, samples in hosts.items():
            host: HostSeen = found.hosts[name]
            if isinstance(samples, str):
                host.problem = samples
            else:
                for sample in samples:
                    host.add(sample)
        return found

    return make


def shown(watching, width=150):
    console = Console(file=io.StringIO(), width=width)
    console.print(table.render(watching))
    return console.file.getvalue()


def line(text, rank):
    return next(line for line in text.splitlines() if line.split()[:1] == [str(rank)])


def test_two_looks_make_rates(watching):
    def look(at):
        gpu = {
            "index": 0,
            "used": 97,
            "memory": 60 * GIB,
            "memory_total": 80 * GIB,
            "temperature": 61,
            "watts": 512.3,
            "pids": [100],
        }
        first = says(0, at=at, tokens=1500 * at, cpu=0.5 * at)
        ranks = [first, says(1, at=at, tokens=1400 * at, cpu=2 * at, memory=GIB)]
        return facts(at, ranks, [gpu], busy=3 * at)

    text = shown(watching(node1=[look(10.0), look(20.0)]))
    assert line(text, 0).split() == ["0", "41", "forward", "1,500", "50", "97", "60.0/80", "GiB", "61", "512"]
    assert line(text, 1).split() == ["1", "41", "forward", "1,400", "200", "1.0", "GiB"]
    assert "75" in text and "3.0/24 GiB" in text and "2.0 MB/s" in text and "All ranks move." in text


@pytest.mark.parametrize("last, mark, verdict", [
    ({"state": "stopped"}, "STOPPED", "rank 1 on node2 has been stopped (SIGSTOP, or a debugger) since step 41"),
    ({"state": "gone"}, "GONE", "rank 1 on node2 has not answered since step 41"),
    ({"seconds": 30.0, "phase": "data"}, "silent for 30 s", "rank 1 on node2 has waited in data loading since step 41"),
])  # fmt: skip
def test_who_stands_apart_is_marked_and_the_watchdog_says_why(watching, last, mark, verdict):
    quiet = {"seconds": 30.0} if last.get("seconds") else {}
    text = shown(watching(node1=[facts(1.0, [says(0, **quiet)])], node2=[facts(1.0, [says(1, "node2", **last)])]))
    assert mark in line(text, 1) and (quiet or mark not in line(text, 0))
    assert verdict in text


@pytest.mark.parametrize("state", ["gone", "old"])
@pytest.mark.parametrize("fault", [None, {"event": "fault", "what": "node2, rank 1 failed first: killed by signal 9"}])
def test_a_run_of_which_no_rank_is_left_is_not_spoken_of_as_if_it_ran(watching, state, fault):
    """All of them were killed, and it said that rank 0 had not answered since step 41, and for which ranks the others wait."""
    last = {"gone": {"state": "gone", "age": 95.0}, "old": {"state": None, "age": 95.0}}[state]
    step = {"event": "step", "step": 41, "tokens_per_second": 900.0}
    told = [{"event": "started"}, step, *([fault] if fault else [])]
    ranks = [says(0, **last), says(1, "node2", step=40, **last | {"age": 99.0})]
    text = shown(watching(told=told, read=ranks))
    assert "No rank runs: the last was heard of 95 s ago, at step 41; " in text and "900 tokens/s" not in text
    assert ("killed by signal 9" if fault else "nothing says what ended the run") in text and "wait" not in text


def test_who_is_behind_is_told_by_what_others_had_written_before(watching):
    """Files are written every few seconds, at other moments: ranks in step seemed 40 steps apart, each in its turn."""
    for last, mark in (
        (says(1, "node2", step=60, writings=8), ""),
        (says(1, "node2", step=40, writings=8), ""),
        (says(1, "node2", step=20, writings=7), ""),  # not written since
        (says(1, "node2", step=30, writings=8), "SLOWEST"),
    ):
        seen = watching(node1=[], node2=[])
        for node, rank in (
            ("node1", says(0, step=41, writings=5)),
            ("node2", says(1, "node2", step=20, writings=7)),
            ("node1", says(0, step=80, writings=6)),
            ("node2", last),
        ):
            seen.hosts[node].add(facts(1.0, [rank]))
        text = shown(seen)
        assert line(text, 1).split()[3:] == [mark] * bool(mark) and "SLOWEST" not in line(text, 0), text


def test_a_lost_host_is_named_and_its_ranks_with_it(watching):
    files = [says(0), says(1, "node2")]
    text = shown(watching(node1=[facts(1.0, [says(0)])], node2="No route to host", read=files))
    assert "LOST: No route to host" in text and "host lost" in line(text, 1)
    assert "rank 1 on node2 has not answered" in text


def test_a_slow_rank_is_marked_until_the_run_finds_none(watching):
    slow = {"event": "slow", "rank": 1, "host": "node2", "score": 0.61, "why": "the others wait for its forward pass"}
    seen = {"node1": [facts(1.0, [says(0), says(1)])]}
    text = shown(watching(told=[slow, {"event": "step", "slowest_rank_score": 0.61}], **seen))
    assert "SLOWEST" in line(text, 1)
    assert "rank 1 on node1 is slow, score 0.61: the others wait for its forward pass" in text
    text = shown(watching(told=[slow, {"event": "step", "slowest_rank_score": 0.95}], **seen))
    assert "SLOWEST" not in text and "All ranks move." in text


def test_who_was_looked_at_earlier_is_not_the_slowest_where_the_run_has_measured_it(watching):
    """On a busy machine the slow rank's partner was seen seven steps behind it, and both were marked."""
    slow = {"event": "slow", "rank": 1, "host": "node2", "score": 0.5, "why": "the others wait for its forward pass"}
    seen = {"node1": [facts(1.0, [says(0, step=34)])], "node2": [facts(1.0, [says(1, "node2")])]}
    text = shown(watching(told=[slow], **seen))
    assert "SLOWEST" in line(text, 1) and "SLOWEST" not in line(text, 0)


def test_ranks_of_a_run_at_its_end_have_ended_and_are_no_fault(watching):
    last = [facts(1.0, [says(0, state="gone")])]
    text = shown(watching(told=[{"event": "end"}], node1=last))
    assert line(text, 0).split()[-1] == "ended"
    assert "GONE" not in text and "The run has reached its end." in text
    assert "GONE" in shown(watching(told=[{"event": "failed", "text": "out of memory"}], node1=last))


def test_a_narrow_terminal_shows_why_a_host_is_lost_and_drops_empty_columns(watching):
    why = "ssh: Could not resolve hostname node2: Name or service not known"
    seen = watching(node1=[facts(1.0, [says(0)])], node2=why)
    text = shown(seen, 60)
    assert "forward" in text and "GPU" not in text and "q leaves" not in text
    assert "".join(why.split()) in "".join(part for row in text.splitlines() for part in row.split() if part != "node2")
    seen.directory = None
    assert "No answer from node2." in shown(seen) and "heartbeat" not in shown(seen)


def test_a_run_that_somebody_else_launched_is_seen_by_its_files(watching):
    text = shown(watching(node1="Permission denied (publickey)", read=[says(0, age=2.0), says(1, age=60.0)]))
    assert "Permission denied" in text and line(text, 0).split()[:3] == ["0", "41", "forward"]


def test_nothing_of_a_host_reaches_the_terminal_as_an_order(watching):
    text = shown(watching(node1=[facts(1.0, [says(0, phase="\x1b[2Jforward")])]))
    assert "\x1b[2J" not in text


def test_a_terminal_that_is_too_small_says_so(watching):
    seen = watching(node1=[facts(1.0, [says(rank) for rank in range(50)])])
    console = Console(file=io.StringIO(), width=150)
    console.print(table.render(seen, height=20))
    assert "37 more lines" in console.file.getvalue()


# ---- this host ---------------------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path):
    """A run of which this process is rank 0."""
    (tmp_path / "heartbeats").mkdir()
    beat = {"rank": 0, "host": HOST, "pid": os.getpid(), "step": 7, "phase": "backward", "seconds": 0.0, "waits": None}
    (tmp_path / "heartbeats/rank-0.json").write_text(json.dumps(beat))
    (tmp_path / "heartbeats/rank-1.json").write_text('{"rank": 1, "ho')
    (tmp_path / "heartbeats/rank-2.json").write_text("[]")
    (tmp_path / "events.jsonl").write_text(
        '{"event": "step", "step": 7, "steps": 9, "loss": 2.5, "tokens_per_second": 1e4}\n'
    )
    return tmp_path


def test_a_host_says_what_it_and_its_ranks_use(run):
    seen = usage.sample(str(run))
    (rank,) = seen["ranks"].values()
    assert rank["state"] == "running" and rank["cpu"] > 0 and rank["memory"] > 2**20 and 0 <= rank["age"] < 60
    assert 0 < seen["host"]["busy"] < seen["host"]["total"] and seen["host"]["memory"] < seen["host"]["memory_total"]
    json.dumps(seen)
    with subprocess.Popen(["sleep", "60"]) as other:
        other.kill()
    assert usage._process(other.pid)["state"] == "gone"


def test_without_a_terminal_one_table_is_printed(run, prints):
    text = prints(0, "top", str(run), "--every", "0.2")
    assert "step 7/9, loss 2.5000, 10,000 tokens/s" in text and line(text, 0).split()[1:3] == ["7", "backward"]
    assert HOST in text and "GiB" in text


def test_on_a_terminal_it_goes_on_until_q_and_leaves_the_terminal_as_it_was(run):
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-m", "brigade", "top", str(run), "--every", "0.2"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "140", "LINES": "30"}
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as top:
        said = _read_until(ours, "backward", top)
        assert "\x1b[?1049h" in said, "it has a screen of its own"
        beat = json.loads((run / "heartbeats/rank-0.json").read_text())
        (run / "heartbeats/rank-0.json").write_text(json.dumps(beat | {"step": 1234}))
        _read_until(ours, "1,234", top)
        os.write(ours, b"q")
        said = _read_until(ours, "\x1b[?1049l", top)
        assert top.wait(30) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(theirs)
    os.close(ours)


def _read_until(terminal, words, process, patience=60):
    said, deadline = "", time.monotonic() + patience
    while words not in said:
        assert time.monotonic() < deadline and (process.poll() is None or words in said), said
        if select.select([terminal], [], [], 0.5)[0]:
            said += os.read(terminal, 65536).decode(errors="replace")
    return said


@pytest.mark.parametrize("words, said", [
    ([], "there is no run in outputs/"),
    (["."], "names a host"),
    (["no"], "there is no such directory"),
    (["--hostfile", "no"], "no"),
])  # fmt: skip
def test_mistakes_are_told_at_once(tmp_path, monkeypatch, prints, words, said):
    monkeypatch.chdir(tmp_path)
    assert said in prints(2, "top", *words)


def test_hosts_that_only_a_strangers_files_name_are_not_asked(tmp_path, capsys, monkeypatch):
    from brigade.top import command as top

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(launches, "hosts", lambda: {"mine"})
    named = [HOST, "mine", "evil.example.org", "user@evil"]
    assert top._trusted(named, False) == [HOST, "mine"]
    said = capsys.readouterr().err
    assert "evil.example.org, user@evil" in said and "--ask_all" in said
    assert top._trusted(named, True) == named and capsys.readouterr().err == ""


def test_hosts_of_ones_own_launches_are_known(tmp_path, own_cache):
    from brigade.launch import background

    (tmp_path / "logs").mkdir()
    job = SimpleNamespace(output_dir=tmp_path / "run", hosts={"node1": 8, "node2": 8}, texts=dict)
    assert background.run(lambda: 0, tmp_path / "logs", job, False) == 0
    assert launches.hosts() == {"node1", "node2"}
