"""The coordinator of an elastic run: who belongs together, and who hears what, whoever dies and when."""

import json

import pytest

from brigade.train.local import coordinator as module
from brigade.train.local.coordinator import BACK, Coordinator


class Replica:
    """A replica as the coordinator sees it, on a line that keeps what it is sent."""

    def __init__(self, number):
        self.number, self.got, self.members, self.last, self.open = number, [], [], None, True
        self.runs = {}

    def write(self, line):
        what = json.loads(line)
        if "result" in what:
            self.last, self.members = what["result"], what["result"]["members"]
        self.got.append(what)

    def close(self):
        self.open = False

    def results(self):
        return [what["result"] for what in self.got if "result" in what]

    def hello(self, to):
        to._greet(self.number, {"runs": self.runs, "members": self.members, "last": self.last}, self)
        to.heard[self.number] = module.time.monotonic()
        to.settle()

    def says(self, to, **what):
        to.heard[self.number] = module.time.monotonic()
        to._take(self.number, what)
        to.settle()

    def comes(self, to):
        self.hello(to)
        self.says(to, join={"step": 0})


def all_say(to, replicas, seq, **what):
    for each in replicas:
        each.says(to, seq=seq, payload="", **what)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture
def meeting(clock):
    return Coordinator(3, "token", 60, 300)


@pytest.fixture
def replicas(meeting):
    """Three that have begun together."""
    found = [Replica(number) for number in range(3)]
    for each in found:
        each.comes(meeting)
    return found


def is_silent(one, replicas, meeting, clock):
    for _ in range(2):
        clock.now += 31
        for each in replicas:
            if each is not one:
                each.says(meeting, beat=1)


def breaks(meeting, replica):
    meeting._lose_line(replica.number, BACK)
    meeting.settle()


def is_killed(meeting, replica, clock):
    breaks(meeting, replica)
    clock.now += BACK
    meeting.settle()


def test_the_run_begins_when_all_are_there(replicas):
    assert [each.members for each in replicas] == [[0, 1, 2]] * 3


def test_it_begins_without_one_that_does_not_come(clock):
    meeting, first = Coordinator(2, "token", 60, 300), Replica(1)
    first.comes(meeting)
    for _ in range(9):  # it is alive
        clock.now += 35
        first.says(meeting, beat=1)
    assert first.members == [1]


def test_all_hear_the_same_when_the_last_has_spoken(meeting, replicas):
    for each in replicas[:2]:
        each.says(meeting, seq=1, payload=f"of {each.number}")
    assert not any(len(each.results()) > 1 for each in replicas)
    replicas[2].says(meeting, seq=1, payload="of 2")
    said = {"0": "of 0", "1": "of 1", "2": "of 2"}
    assert all(each.results()[-1]["said"] == said for each in replicas)


def test_who_is_killed_is_left_out_and_the_others_are_told(meeting, replicas, clock):
    breaks(meeting, replicas[1])
    all_say(meeting, (replicas[0], replicas[2]), 1)
    assert replicas[0].members == [0, 1, 2], "a line may break for a moment"
    clock.now += BACK
    meeting.settle()
    assert replicas[0].members == replicas[2].members == [0, 2]
    assert {"lost": [1]} in replicas[0].got


def test_a_line_that_breaks_for_a_moment_costs_nothing(meeting, replicas, clock):
    replicas[1].says(meeting, seq=1, payload="")
    breaks(meeting, replicas[1])
    clock.now += BACK / 2
    replicas[1].hello(meeting)
    all_say(meeting, replicas, 1)
    assert all(each.members == [0, 1, 2] for each in replicas)


def test_silence_is_an_end_too_and_who_comes_back_from_it_has_to_begin_anew(meeting, replicas, clock):
    is_silent(replicas[2], replicas, meeting, clock)
    all_say(meeting, replicas[:2], 1)
    assert replicas[0].members == [0, 1] and not replicas[2].open
    replicas[2].hello(meeting)
    assert "refused" in replicas[2].got[-1]


def test_a_process_that_was_given_up_does_not_take_its_successors_place(meeting, replicas, clock):
    """Its host was cut off, and a new one was started meanwhile."""
    first, old, third = replicas
    is_silent(old, [first, old, third], meeting, clock)
    again = Replica(1)
    again.comes(meeting)
    all_say(meeting, (first, third), 1)
    all_say(meeting, (first, third), 2, admits=True)
    old.hello(meeting)
    assert "refused" in old.got[-1] and meeting.lines[1] is again
    all_say(meeting, (first, third, again), 3)
    assert again.last["seq"] == 3 and again.members == [0, 1, 2]


def test_a_newcomer_joins_where_the_others_admit_it(meeting, replicas):
    again = Replica(1)
    again.comes(meeting)  # at once: before anybody noticed that it died
    all_say(meeting, (replicas[0], replicas[2]), 1)
    assert replicas[0].members == [0, 2] and not again.members
    all_say(meeting, (replicas[0], replicas[2]), 2, admits=True)
    assert again.members == replicas[0].members == [0, 1, 2]
    assert again.last["joined"] == {"1": {"step": 0}} and again.last["seq"] == 2


def test_a_coordinator_that_is_started_again_learns_from_the_replicas(replicas):
    after = Coordinator(3, "token", 60, 300)
    for each in replicas:
        each.hello(after)
    for each in replicas:
        each.says(after, seq=1, payload=each.number)
    assert all(each.results()[-1]["said"] == {"0": 0, "1": 1, "2": 2} for each in replicas)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_result_that_some_have_got_is_the_others_too(meeting, replicas, order):
    """The coordinator died between telling one and telling the others."""
    for each in replicas:
        each.says(meeting, seq=1, payload=each.number)
    for each in replicas[1:]:  # they did not get it
        each.last = each.results()[0]
    after = Coordinator(3, "token", 60, 300)
    for number in order:
        replicas[number].hello(after)
    for each in replicas[1:]:
        each.says(after, seq=1, payload="said again")
    assert all(each.results()[-1]["said"] == {"0": 0, "1": 1, "2": 2} for each in replicas)
    for each in replicas:
        each.says(after, seq=2, payload=10)
    assert all(each.results()[-1]["seq"] == 2 for each in replicas)


def test_a_newcomer_that_was_admitted_by_a_coordinator_that_died_then_is_admitted_again(meeting, replicas, clock):
    is_killed(meeting, replicas[1], clock)
    all_say(meeting, (replicas[0], replicas[2]), 1)
    again = Replica(1)
    again.comes(meeting)
    all_say(meeting, (replicas[0], replicas[2]), 2, admits=True)
    again.members, again.last = [], None  # it did not hear so
    after = Coordinator(3, "token", 60, 300)
    again.comes(after)
    for each in (replicas[0], replicas[2]):
        each.hello(after)
        each.says(after, seq=3, payload="")
    assert replicas[0].members == replicas[2].members == [0, 2]
    all_say(after, (replicas[0], replicas[2]), 4, admits=True)
    assert again.members == replicas[0].members == [0, 1, 2]


def test_who_comes_after_the_end_is_told_so(meeting, replicas, clock):
    waiting = Replica(1)
    is_killed(meeting, replicas[1], clock)
    waiting.comes(meeting)
    for each in (replicas[0], replicas[2]):
        each.says(meeting, leave=True)
    assert "refused" in waiting.got[-1]
    late = Replica(2)
    late.comes(meeting)
    assert "refused" in late.got[-1]


def other_code(number, file="1b", commit="abc"):
    replica = Replica(number)
    replica.runs = {"commit": commit, "versions.torch": "2.13.0", "code.brigade/train/local/outer.py": file}
    return replica


def test_who_runs_other_code_is_refused_and_the_difference_named(clock):
    meeting, first, second = Coordinator(2, "token", 60, 300), other_code(0), other_code(1, commit="abc+")
    for each in (first, second):
        each.comes(meeting)
    assert first.members == second.members == [0, 1], "its commit may be another where no file is"
    again = other_code(1, file="2c", commit="def")
    again.comes(meeting)
    refused = again.got[-1]
    differs = "code.brigade/train/local/outer.py is '2c' here and '1b' there"
    assert f"does not run what replica 0 runs: {differs}" in refused["refused"]
    assert "its clone is at def, the other's at abc" in refused["refused"] and "same commit" in refused["cure"]
    first.says(meeting, seq=1, payload="", admits=True)
    assert first.members == [0]
    mended = other_code(1)
    mended.comes(meeting)
    first.says(meeting, seq=2, payload="", admits=True)
    assert first.members == mended.members == [0, 1]


def test_who_runs_other_code_is_refused_at_the_start_too_and_by_a_younger_coordinator(clock):
    meeting = Coordinator(3, "token", 60, 300)
    first, second, third = other_code(0), other_code(1), other_code(2, file="2c")
    for each in (third, second, first):
        each.comes(meeting)
    assert first.members == second.members == [0, 1] and "refused" in third.got[-1]
    all_say(meeting, (first, second), 1, admits=True)
    younger, third = Coordinator(3, "token", 60, 300), other_code(2, file="2c")
    third.comes(younger)
    for each in (first, second):
        each.hello(younger)
        each.says(younger, seq=2, payload="", admits=True)
    assert first.members == second.members == [0, 1] and "refused" in third.got[-1]
