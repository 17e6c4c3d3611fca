"""Which rank is blamed for a start that hangs, and for a run that does."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from brigade.hosts import hearing
from brigade.launch import first_failure
from brigade.launch import judge as judging
from brigade.launch.judge import Judge
from brigade.launch.policy import fault_of, would_repeat

NOW = [1000.0]


def _nothing(*_, **__):
    pass


def two_hosts():
    always = {"slots": 1, "open": False, "stopped": False, "patience": 60.0, "tell": _nothing}
    return [SimpleNamespace(host=f"node{n}", ranks=range(n, n + 1), **always) for n in (0, 1)]


@pytest.fixture
def judge(monkeypatch):
    """A judge of two hosts with a rank each, on a clock that the test moves."""
    monkeypatch.setattr(judging.Clock, "now", lambda _: NOW[0])
    said = []
    return Judge(two_hosts(), "torchrun", 5.0, SimpleNamespace(set=_nothing, say=said.append, said=said))


def all_say(judge, **what):
    for rank, channel in enumerate(judge.channels):
        judge.on_rank(channel, rank, **what)


def after(seconds, judge):
    NOW[0] += seconds
    judge.check_start()


def test_late_is_who_is_later_than_the_first_rank(judge):
    judge.on_rank(judge.channels[0], 0, pid=1)
    judge.on_rank(judge.channels[1], 1, pid=2)
    after(60, judge)  # a busy machine: nobody is ready yet, and nobody is late
    assert not judge.failures
    judge.on_rank(judge.channels[0], 0, stage="waiting")
    after(6, judge)
    assert [(failure.kind, failure.rank) for failure in judge.failures] == [("hang", 1)]


def test_that_no_rank_starts_is_found_too(judge):
    after(judging.READY + 1, judge)
    assert judge.failures[0].kind == "hang"


def test_ranks_that_meet_and_do_not_reach_each_other_count_for_the_start_too(judge):
    """A firewall that opens the master port alone: issue 17 saw 552 s of silence, and a cure for another fault."""
    all_say(judge, pid=1, stage="waiting")
    judge.check_start()
    after(4, judge)
    assert not judge.failures
    after(2, judge)
    (failure,) = judge.failures
    assert failure.kind == "rendezvous"
    assert "2 ranks on node0, node1 met at the rendezvous" in failure.in_words()
    assert "all TCP ports" in failure.cure([])


def test_who_comes_late_to_the_rendezvous_gives_the_others_time_anew(judge):
    judge.on_rank(judge.channels[0], 0, pid=1, stage="waiting")
    NOW[0] += 4
    judge.on_rank(judge.channels[1], 1, pid=2, stage="waiting")
    judge.check_start()
    after(4, judge)
    all_say(judge, stage="joined")
    after(60, judge)
    assert not judge.failures


# ---- stopped from outside ----------------------------------------------------------------------------------------
def test_ranks_that_were_stopped_have_not_failed_in_whatever_order_it_is_heard(judge):
    first, second = judge.channels
    judge.on_rank(second, 1, exit=-15)  # its host's line is quicker
    judge.on_rank(first, 0, marker="stopped", step=7)
    judge.on_rank(first, 0, exit=-15)
    assert not judge.failures and not judge.decided(), "the hosts' launchers have not ended"
    for channel in judge.channels:
        judge.on_ended(channel, code=1)
    assert judge.decided() and not judge.failures and judge.stopped == "at step 7" and not judge.reached_end


def test_a_rank_that_somebody_ended_at_once_is_named_and_nobody_is_blamed(judge):
    first, second = judge.channels
    judge.on_rank(second, 1, ended="SIGTERM")
    judge.on_rank(second, 1, exit=-15)
    judge.on_rank(first, 0, follows=True, exit=1)
    assert judge.decided() and not judge.failures
    assert judge.stopped == "when rank 1 on node1 was ended by SIGTERM"


def test_what_a_launcher_ends_after_a_failure_is_no_stop(judge):
    judge.on_rank(judge.channels[1], 1, told="ValueError", code=1)
    judge.on_rank(judge.channels[0], 0, ended="SIGTERM")
    assert [failure.rank for failure in judge.failures] == [1] and not judge.stopped


def test_what_failed_stays_the_cause_where_the_other_ranks_save_a_checkpoint_before_they_end(judge):
    judge.on_ended(judge.channels[1], code=0)  # its launcher was killed, and nothing was said of its rank
    assert judge.failures
    judge.stopping = True  # launch stops the others
    judge.on_rank(judge.channels[0], 0, marker="stopped", step=13)
    assert [failure.kind for failure in judge.failures] == ["launcher"]


def test_a_lost_host_stays_the_cause_where_its_agent_stops_its_ranks_and_all_save_a_checkpoint(judge):
    """The soak found it: both ends gave the line up, the ranks stopped in good order, and launch waited for the lost host."""
    first, second = judge.channels
    judge.on_lost(second, "nothing heard of it")
    judge.on_rank(first, 0, marker="stopped", step=206)
    judge.on_rank(first, 0, exit=-15)
    judge.on_ended(first, code=1)
    NOW[0] += first_failure.RACE + 1
    assert judge.decided() and [failure.kind for failure in judge.failures] == ["lost"]


def test_a_checkpoint_is_asked_for_when_all_ranks_are_there(judge):
    judge.on_rank(judge.channels[0], 0, pid=1, stage="joined")
    assert not judge.trains()
    judge.on_rank(judge.channels[1], 1, pid=2, stage="joined", grace=400.5)
    assert judge.trains() and judge.grace == 400.5


SILENT = {"phase": "backward", "step": 41, "seconds": 200.0, "stopped": False}


def test_a_hang_is_judged_once_all_ranks_are_silent_and_have_said_where_they_wait(judge):
    judge.on_rank(judge.channels[0], 0, silent=SILENT)
    judge.on_rank(judge.channels[0], 0, waits={"collective": "gloo:all_reduce", "number": 7}, records="/out/heartbeats")
    judge.check_hang()
    assert not judge.failures, "rank 1 still moves: it computes, evaluates or writes for longer"
    judge.on_rank(judge.channels[1], 1, silent=SILENT | {"phase": "data"})
    judge.check_hang()
    assert not judge.failures
    judge.on_rank(judge.channels[1], 1, waits={"collective": ""})
    judge.check_hang()
    (failure,) = judge.failures
    assert (failure.kind, failure.host, failure.rank) == ("hang", "node1", 1)
    said = "rank 1 on node1 has waited in data loading since step 41; rank 0 waits for it in all-reduce"
    assert failure.in_words() == said == fault_of(failure).in_words, "the time line names the culprit"
    told = first_failure.report(failure, [], Path("log"))
    assert told == [f"error: {said}", "  stacks and collectives of all ranks: /out/heartbeats"]


def test_a_hang_in_which_all_wait_for_each_other_is_no_hosts_fault(judge):
    all_say(judge, silent=SILENT, waits={"collective": "nccl:all_reduce", "number": 7, "group": "0"})
    judge.check_hang()
    fault = fault_of(judge.failures[0])
    assert "ranks 0-1 have waited for each other in all-reduce" in fault.in_words
    assert fault.hosts == () and fault.whose == "passing" and would_repeat([fault]) is None


def test_a_rank_that_moves_again_takes_everything_back(judge):
    """As a launch reads it that was itself suspended: what came first, first."""
    all_say(judge, silent=SILENT)
    judge.on_rank(judge.channels[1], 1, silent=None)
    NOW[0] += 3600
    judge.check_hang()
    assert not judge.failures


def test_a_rank_that_says_nothing_has_been_stopped_or_is_stuck(judge):
    judge.on_rank(judge.channels[0], 0, silent=SILENT, waits={"collective": "gloo:all_reduce", "number": 7})
    judge.on_rank(judge.channels[1], 1, silent=SILENT)
    judge.check_hang()
    assert not judge.failures
    NOW[0] += judging.HEARD + 1
    judge.check_hang()
    assert judge.failures[0].text.startswith("rank 1 on node1 has not answered since step 41")


# ---- ranks that leave before the end, and after it -----------------------------------------------------------------
def test_a_rank_that_ends_with_0_in_mid_run_failed_first_whatever_the_others_report_of_it(judge):
    first, second = judge.channels
    judge.on_rank(first, 0, told="RuntimeError: Connection closed by peer", code=1)
    judge.on_rank(second, 1, exit=0, left=SILENT | {"step": 3})
    said = "node1, rank 1 failed first: exit code 0, at step 3, in the backward pass, where train.py had not reached its end"
    assert first_failure.first(judge.failures).in_words().startswith(said)


def test_ranks_that_end_with_0_when_their_work_is_done_are_no_failures(judge):
    all_say(judge, exit=0)
    assert not judge.failures


@pytest.mark.parametrize("hangs", ["rank 1 on node1", "torchrun on node1"])
def test_who_hangs_at_its_exit_does_not_hold_a_run_that_has_succeeded(judge, hangs):
    first, second = judge.channels
    judge.on_rank(first, 0, marker=True)
    judge.on_rank(first, 0, exit=0)
    judge.on_ended(first, code=0)
    if "torchrun" in hangs:
        judge.on_rank(second, 1, exit=0)
    NOW[0] += judge.leave_within - 1
    judge.check_end()
    assert not judge.decided()
    NOW[0] += 2
    judge.check_end()
    assert judge.decided() and not judge.failures
    assert judge.output.said == [f"the run has succeeded; {hangs} did not end within 120 s: ended now"]


def test_who_hangs_after_a_stop_does_not_hold_launch_and_is_asked_for_no_stacks(judge):
    """All ranks agreed to stop, and rank 1 hangs in its part of the checkpoint, or at its exit."""
    asked = []
    for rank, channel in enumerate(judge.channels):
        channel.tell = lambda do, **what: asked.append(do)
        judge.on_rank(channel, rank, marker="stopped", step=40, grace=300.0)
    judge.on_rank(judge.channels[0], 0, exit=0)
    judge.on_rank(judge.channels[1], 1, silent=SILENT, waits={"collective": ""})
    NOW[0] += 299
    for _ in range(2):
        judge.check_hang()
        judge.check_end()
    assert not judge.decided() and not asked
    NOW[0] += 2
    judge.check_end()
    assert judge.decided() and not judge.failures
    assert judge.output.said == ["the run was stopped at step 40; rank 1 on node1 did not end within 300 s: ended now"]


def test_a_storm_of_signals_to_a_launcher_is_no_users_mistake(judge):
    """Its store is gone with it: the ranks' checkpoint fails with exit code 2, and each takes the other for the first."""
    for rank, channel in enumerate(judge.channels):
        judge.on_rank(channel, rank, asked="SIGTERM")
        judge.on_rank(channel, rank, asked="SIGTERM (12 times)")
        judge.on_rank(channel, rank, follows=True)
        judge.on_rank(channel, rank, exit=2)
    assert first_failure.first(judge.failures).exit_code == 1
    judge.on_ended(judge.channels[0], code=-15)
    failure = first_failure.first(judge.failures)
    assert failure.in_words() == "node0 failed first: torchrun was ended by SIGTERM, and its ranks with it"
    assert failure.exit_code == 1 and would_repeat([fault_of(failure)]) is None
    assert judge.were_asked() == ["ranks 0-1 had been asked to stop: SIGTERM (12 times)"]


def test_that_launch_and_launchers_end_the_other_ranks_after_a_failure_is_no_wish_to_stop(judge):
    first, second = judge.channels
    judge.on_rank(second, 1, exit=-9)
    judge.on_rank(first, 0, asked="SIGTERM")  # by its launcher
    judge.stopping = True
    judge.on_rank(first, 0, asked="SIGTERM (4 times)")  # by its agent, until it has ended
    assert judge.were_asked() == []


ASLEEP = {  # seconds that launch stood still, by which clock; what it reads then; whose fault it is
    "suspended": (95, "monotonic", ("leaving", "its agent heard nothing from launch for 60 s"), "passing"),
    "a host that slept": (95, "boot", ("lost", "Connection reset by peer (ssh ended with 255)"), "passing"),
    "stopped for a moment": (8, "monotonic", ("lost", "Connection reset by peer (ssh ended with 255)"), "host"),
    "awake": (0, "monotonic", ("leaving", "its agent got SIGTERM"), "host"),
}


@pytest.mark.parametrize("name", ASLEEP)
def test_a_launch_that_stood_still_itself_blames_no_host(monkeypatch, name):
    """An agent that hears nothing for a minute ends its ranks: twice in succession, and the host would have been left out."""
    seconds, clock, (kind, why), whose = ASLEEP[name]
    clocks = {"monotonic": 1000.0, "boot": 1000.0}
    monkeypatch.setattr(hearing.time, "monotonic", lambda: clocks["monotonic"])
    monkeypatch.setattr(hearing.time, "clock_gettime", lambda _: clocks["boot"])
    hosts = two_hosts()
    judge = Judge(hosts, "torchrun", 5.0, SimpleNamespace(set=_nothing, say=_nothing))
    judge.on_rank(hosts[0], 0, pid=1)
    judge.on_rank(hosts[0], 0, stage="waiting")
    clocks["boot"] += seconds
    clocks["monotonic"] += seconds if clock == "monotonic" else 0
    judge.check_start()
    assert not judge.failures, "the other rank's word still waits to be read"
    judge.hear(hosts[1], kind, {"why": why})
    fault = fault_of(first_failure.first(judge.failures))
    assert (fault.whose, bool(fault.hosts), why in fault.text) == (whose, whose == "host", True)
    assert (f"launch itself stood still for {seconds} s" in fault.text) == (whose == "passing")
    told = "\n".join(first_failure.report(judge.failures[0], [], Path("log")))
    assert ("node1 failed first" in told) == (whose == "host") and ("--detach" in told) == (whose == "passing")


def test_the_last_whole_step_is_what_the_ranks_themselves_say_at_their_end(judge):
    assert judge.done is None
    judge.on_rank(judge.channels[0], 0, exit=-9, within=16)
    judge.on_rank(judge.channels[1], 1, exit=1, within=15)
    assert judge.done == 15
