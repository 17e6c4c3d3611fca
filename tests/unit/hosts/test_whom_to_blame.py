"""Which failure was the first, and in which words it is told."""

from pathlib import Path

from brigade.launch import first_failure
from brigade.launch.first_failure import Failure
from brigade.launch.status_and_logs import Output


def failure(at, kind, host="node1", rank=0, code=1, text=""):
    return Failure(at, kind, host, rank, code, text)


def test_the_earliest_failure_is_the_first():
    early, late = failure(1.0, "reported", "node2", 3), failure(1.5, "exit")
    assert first_failure.first([late, early]) is early


def test_a_lost_host_or_a_killed_rank_explains_closed_connections():
    told = failure(1.0, "reported")
    lost, killed = failure(2.0, "lost", "node2", None, None), failure(1.2, "signal", "node2", 1, -9)
    assert first_failure.first([told, killed]) is killed
    assert first_failure.first([told, killed, lost]) is lost
    much_later = failure(60.0, "lost", "node2", None, None)
    assert first_failure.first([told, much_later]) is told


def test_what_a_launcher_does_to_its_other_ranks_is_no_cause():
    raised = failure(1.0, "reported", "node2", 3)
    ended = [failure(1.3, "signal", "node2", 2, -15), failure(1.4, "signal", "node1", 0, -6)]
    assert first_failure.first([*ended, raised]) is raised


def test_a_rank_that_somebody_asked_to_end_before_it_trained_explains_that_the_others_miss_it():
    """A storm of SIGTERM to one host: what its peers said at the rendezvous was called a user's mistake."""
    missed = failure(1.0, "reported", code=2, text="error: rendezvous at 10.77.0.1:29500")
    asked, also = (failure(1.0 + rank / 10, "signal", "node2", rank, -15) for rank in (1, 2))
    found = first_failure.first([missed, asked, also])
    assert found is asked and found.exit_code == 1
    told = "\n".join(first_failure.report(found, [], Path("log")))
    assert "node2, rank 1 failed first: killed by signal 15 (SIGTERM)" in told
    assert "somebody asked it to end before it trained" in told


def test_a_rank_that_follows_is_the_cause_only_where_nothing_else_is():
    follows, exits = failure(1.0, "follows", "node2", 3), failure(4.0, "exit")
    assert first_failure.first([follows, exits]) is exits
    assert first_failure.first([follows]) is follows and "another rank failed first" in follows.in_words()


def test_exit_codes_and_words():
    assert failure(0, "reported", code=2).exit_code == 2
    for kind in ("exit", "launcher", "follows", "unfinished", "hang"):  # any library may end a process with 2
        assert failure(0, kind, code=2).exit_code == 1 and failure(0, kind, code=2).whose != "user"
    assert failure(0, "signal", code=-9).exit_code == 1
    said = failure(0, "signal", "node2", 1, -9)
    assert said.in_words() == "node2, rank 1 failed first: killed by signal 9 (SIGKILL)"
    assert "out-of-memory" in said.cure([]) and "node2" in said.cure([])
    assert failure(0, "signal", code=-35).in_words().endswith("killed by signal 35 (signal 35)")


def test_a_full_disk_is_named_wherever_it_fills(tmp_path, monkeypatch, capsys):
    raised = failure(0, "reported", "node2", 1)
    lines = first_failure.report(raised, ["OSError: [Errno 28] No space left on device: '/scratch/x'"], tmp_path)
    assert lines[-1].startswith("  cure: make room: a disk of node2 is full") and "df -h" in lines[-1]
    monkeypatch.setattr(Output, "path", lambda *_: Path("/dev/full"))
    with Output(["node1"], tmp_path) as output:
        output.keep("rank-0-node1", "words")
        output.say("and on")
    said = capsys.readouterr()
    assert "lost from here on: [Errno 28] No space left on device: '/dev/full'; the run goes on" in said.err
    assert said.out == "and on\n"
