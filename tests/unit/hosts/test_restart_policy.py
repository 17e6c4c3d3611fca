"""What follows from a failure: which was the first, does it repeat, which hosts carry the next attempt, after what pause."""

from pathlib import Path

import pytest

from brigade.launch import first_failure
from brigade.launch.first_failure import Failure
from brigade.launch.policy import Fault, Policy, fault_of, next_hosts, pause, would_repeat
from brigade.launch.status_and_logs import Output

THREE = {"node1": 8, "node2": 8, "node3": 4}


def failed(kind, host="node2", text="", code=1, *more):
    return fault_of(Failure(0.0, kind, host, 1, code, text, *more))


# ---- whose fault -------------------------------------------------------------------------------------------------
HOSTS_AT_FAULT = {
    "a lost host": (("lost", "node2", "the host was lost: nothing heard of it"), ("node2",)),
    "a killed rank": (("signal", "node2", "", -9), ("node2",)),
    "a rank that hangs": (("hang", "node2", "rank 1 did not get to the rendezvous"), ("node2",)),
    "a launcher that ended": (("launcher", "node2", "torchrun ended with exit code 1"), ("node2",)),
    "what a rank says of its host": (("reported", "node2", "OSError: [Errno 5]", 1, "", "host"), ("node2",)),
    "what a rank says of others": (("reported", "node2", "none there", 2, "", "host", ("node1", "node3")), ("node1", "node3")),
    "an exception": (("reported", "node2", "ValueError: the third step fails on this rank"), ()),
    "a mistake": (("reported", "node2", "error on node2: data.dataset_name", 2), ()),
    "a run without its marker": (("unfinished", "node1", "no success.json", 0), ()),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTS_AT_FAULT)
def test_which_host_is_at_fault(name):
    failure, hosts = HOSTS_AT_FAULT[name]
    assert failed(*failure).hosts == hosts


# ---- does it repeat ----------------------------------------------------------------------------------------------
def exception(text="ValueError: bad row 7", step=40, checkpoint=30):
    return Fault("reported", f"Traceback ...\n{text}", (), 1, step, checkpoint)


def on(host, text="[Errno 5] Input/output error"):
    """A fault that a host reports of itself, and names."""
    return failed("reported", host, f"error on {host}\n  {host}: {text}", 2, "", "host")


@pytest.mark.parametrize("faults, repeats", [
    ([failed("reported", text="error on node1, rank 0: flag --max_steps", code=2)], True),
    ([failed("exit", code=2)], False),  # nobody has reported a mistake
    ([failed("launcher", code=2)] * 3, False),
    ([failed("reported", "node2", "error: rendezvous at node1:29500", 2, "", "passing")] * 3, False),
    ([on("node2")] * 2, False),
    ([on("node2")] * 3, True),
    ([on("node2"), on("node1")], True),  # on both hosts: it is neither's own
    ([on("node2"), on("node1", "[Errno 30] Read-only file system")], False),
    ([exception()], False),
    ([exception(), exception()], True),
    ([exception(), exception("ValueError: bad row 9")], True),  # the number may be a process or an address
    ([exception(), exception("KeyError: 'text'")], False),
    ([exception(), exception(step=50)], False),
    ([exception(), exception(checkpoint=40)], False),
    ([exception(), failed("lost"), exception()], False),  # not in succession: the other one may have had a part
    ([failed("signal", code=-9)] * 3, False),
    ([failed("unfinished", text="no success.json", code=0)] * 2, True),
])  # fmt: skip
def test_what_would_repeat_is_not_tried_again(faults, repeats):
    assert bool(would_repeat(faults)) == repeats


def test_a_host_that_cannot_take_part_ends_the_run_where_none_may_take_its_place():
    assert "node2 is at fault, and no other host may take its place" in would_repeat([on("node2")], replaceable=False)
    assert would_repeat([failed("lost")], replaceable=False) is None, "it may come back"


def test_a_long_exception_is_shortened_in_the_time_line():
    failure = Failure(0.0, "reported", "node2", 1, 1, f"Traceback\nValueError: {'x' * 5000}")
    said = fault_of(failure, "logs/rank-1-node2.log").in_words
    assert said.startswith("node2, rank 1 failed first: ValueError: xxx") and len(said) < 300
    assert said.endswith(" ... (the rest is in logs/rank-1-node2.log)")


# ---- where next --------------------------------------------------------------------------------------------------
def at_fault(*hosts):
    return [Fault("signal", "", (host,)) for host in hosts]


ALL = {*THREE, "spare1", "spare2"}


@pytest.mark.parametrize("faults, sound, least, spares, expected", [
    # An exception on healthy hosts: the same ones, spares or not.
    ([exception()], ALL, 3, ("spare1",), THREE),
    # A failed host is replaced by a spare, which takes its slots and comes last; the first one is another if need be.
    (at_fault("node3"), ALL, 3, ("spare1",), {"node1": 8, "node2": 8, "spare1": 4}),
    (at_fault("node1"), ALL - {"node1"}, 3, ("spare1",), {"node2": 8, "node3": 4, "spare1": 8}),
    # One that was at fault once goes before none at all, and stays out while others have never failed.
    (at_fault("node3", "node2"), ALL, 3, ("spare1",), {"node1": 8, "node2": 8, "spare1": 4}),
    (at_fault("node3", "node2"), ALL, 3, ("spare1", "spare2"), {"node1": 8, "spare1": 8, "spare2": 4}),
    # Without a spare a dead one is left out where that is allowed, and one that answers gets a second chance.
    (at_fault("node2"), {"node1", "node3"}, 2, (), {"node1": 8, "node3": 4}),
    (at_fault("node2"), {"node1", "node3"}, 3, (), {}),
    (at_fault("node2"), ALL, 2, (), THREE),
    (at_fault("node2", "node2"), ALL, 2, (), {"node1": 8, "node3": 4}),
    (at_fault("node2", "node2"), ALL, 3, (), THREE),
    # One that says that it cannot take part has no second chance, unless the run needs it.
    ([on("node2")], ALL, 2, (), {"node1": 8, "node3": 4}),
    ([on("node2")], ALL, 3, (), THREE),
    # It comes back once another one was at fault meanwhile.
    (at_fault("node2", "node2", "node3"), ALL, 2, (), THREE),
    ([Fault("start", "", ("node1", "node2"))], {"node3"}, 1, (), {"node3": 4}),
    ([Fault("start", "", ("node1",))], set(), 1, ("spare1",), {}),
])  # fmt: skip
def test_hosts_of_the_next_attempt(faults, sound, least, spares, expected):
    assert list(next_hosts(THREE, spares, least, faults, sound).items()) == list(expected.items())


@pytest.mark.parametrize(("unit", "least", "expected"), [(1, 1, 3), (8, 1, 2), (16, 1, 2), (16, 3, 0), (32, 1, 0)])
def test_hosts_of_the_next_attempt_are_so_many_that_the_axes_divide_their_ranks(unit, least, expected):
    four = dict.fromkeys(("node1", "node2", "node3", "node4"), 8) | {"node3": 4}
    found = next_hosts(four, (), least, [failed("lost", "node4")], {"node1", "node2", "node3"}, unit)
    assert len(found) == expected and sum(found.values()) % unit == 0


def test_pauses_grow_until_a_checkpoint_is_added():
    policy, stuck = Policy(9, pause=10.0), exception(checkpoint=30)
    assert [pause(policy, [stuck] * count) for count in range(1, 8)] == [10, 20, 40, 80, 160, 300, 300]
    assert pause(policy, [stuck, stuck, exception(checkpoint=60)]) == 10
    assert pause(policy, [stuck, exception(checkpoint=60), exception(checkpoint=60)]) == 20


# ---- whom to blame ---------------------------------------------------------------------------------------------------
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
