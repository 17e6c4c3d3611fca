"""`python -m brigade check`: what it says of recorded hosts, and its table."""

import asyncio
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from brigade.check.checks import (
    GROUPS,
    LEVELS,
    NO_ANSWER,
    SIZES,
    Check,
    Result,
    Threshold,
    Wanted,
    checks,
    exit_code,
    most_common,
    refusal,
    sound,
    thresholds,
    unknown,
)
from brigade.check.run import UNREACHED, judge
from brigade.check.table import columns, result_lines, result_table
from testing.outcomes import NODES, bad, outcome
from testing.recorded_hosts import Recorded


def drawn(found):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(result_table(found))
    for line in result_lines(found):
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
    free = [sound(host, f"{number} GiB", number) for number, host in enumerate(NODES)]
    rows = {"mtu": [sound(host, "9000") for host in NODES], "free": free}
    assert columns(outcome(rows)) == [list(NODES)]
    text = drawn(outcome(rows))
    assert "node1 ... node4 (4 hosts)" in text
    assert "0 GiB to 3 GiB" in text


def test_hosts_that_nobody_reaches_have_no_rows_of_question_marks():
    rows = {"login": [bad(host) for host in NODES], "packages": [unknown(host, UNREACHED) for host in NODES]}
    table, said, _ = drawn(outcome(rows)).partition("FAIL login, all hosts")
    assert said and "FAIL" in table and "packages" not in table and "?" not in table
    rows["packages"][0] = sound("node1", "as here")
    assert "packages" in drawn(outcome(rows))


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
            told = Result(name, level, value, None, "?")
            results[name] = bad(name, value, level) if level in ("yellow", "red") else told
    found = outcome({"one": list(results.values())}, dict.fromkeys(names, 8))
    groups = columns(found)
    assert sorted(host for group in groups for host in group) == sorted(names)
    assert len(result_table(found).columns) <= 9
    said = "\n".join(line.plain for line in result_lines(found))
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
