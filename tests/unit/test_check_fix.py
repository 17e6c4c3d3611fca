"""What --fix makes of what check found."""

import asyncio
import time
from pathlib import Path

from brigade.check import fix
from brigade.check.checks import Result, Wanted, sound
from brigade.check.probes import actions as fix_probe
from brigade.check.run import Outcome, Row
from testing.command_line import brigade


def outcome(*results, hosts=("localhost",)):
    rows = [Row(name, "sameness", [result], 0.1) for name, result in results]
    return Outcome(dict.fromkeys(hosts, 1), "quick", rows, 0.1)


def bad(line, level="red", host="localhost"):
    return Result(host, level, "x", None, "it is wrong", "why", "cure", line)


def test_each_line_is_printed_once_and_rows_without_one_are_counted():
    found = outcome(
        ("a", bad("echo 'one'")), ("b", bad("echo 'one'", "yellow")), ("c", bad("")), ("d", sound("localhost", "y"))
    )
    assert fix.lines(found.results) == {"localhost": ["echo 'one'"]}
    line, rest = fix.printed(found)
    assert line == "ssh localhost 'echo '\"'\"'one'\"'\"''"
    assert rest == "# 1 more of the above need a person: see their cures"
    assert fix.printed(outcome(("d", sound("localhost", "y")))) == ["# nothing to fix"]


def test_lines_run_on_their_hosts_and_their_rows_are_checked_again(tmp_path):
    there = tmp_path / "there"
    before = outcome(
        ("clock", bad(f"echo mended > {there}; echo done so")),
        ("python", bad("echo first; exit 3")),
        ("cores", sound("localhost", "left alone")),
    )
    told = []
    after = asyncio.run(fix.apply(Wanted({"localhost": 1}), before, told.append, lambda _: None))
    assert there.read_text() == "mended\n"
    assert [(done.problem, done.said) for done in told] == [("", ("done so",)), ("it ended with 3", ("first",))]
    levels = [(row.name, row.results[0].level) for row in after.rows]
    assert levels == [("clock", "green"), ("python", "green"), ("cores", "green")]
    assert after.rows[2].results[0].value == "left alone"
    assert after.rows[0].results[0].value != "x"


def test_hosts_are_cured_one_after_another_and_one_that_is_sound_by_then_is_left_alone(monkeypatch):
    """Two hosts with one environment: what the first line installs is there on the second."""
    found = [bad("install", host="a"), bad("install", host="b"), bad("other", host="c")]
    rows = [Row("python", "sameness", found, 0.1)]
    ran, told, again = [], [], iter([[bad("other", host="c")], [bad("other", host="c")], [sound("c", "mended")]])

    async def on(wanted, host, own, told):
        ran.append((host, own))

    async def checked(wanted, size, name, told, skip):
        return Outcome(wanted.slots, size, [Row("python", "sameness", next(again), 0.1)], 0.1)

    monkeypatch.setattr(fix, "_on", on)
    monkeypatch.setattr(fix, "run", checked)
    before = Outcome({"a": 1, "b": 1, "c": 1}, "quick", rows, 0.1)
    after = asyncio.run(fix.apply(Wanted(before.hosts), before, told.append, lambda _: None))
    assert ran == [("a", ["install"]), ("c", ["other"])]
    assert [(done.host, done.problem) for done in told] == [("b", "")]
    assert after.results[0].value == "mended"


def test_a_line_that_does_not_end_is_ended_with_what_it_started(tmp_path):
    pid = tmp_path / "pid"
    found = fix_probe.run(f"echo begun; sleep 300 & echo $! > {pid}; wait", 1)
    assert found == {"code": None, "said": ["begun"]}
    status, deadline = Path(f"/proc/{pid.read_text().strip()}/status"), time.monotonic() + 10
    while alive := status.exists() and "State:\tZ" not in status.read_text():  # ended, but for whoever adopted it
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert not alive


def test_only_the_end_of_what_a_line_prints_is_kept():
    assert fix_probe.run("seq 100", 10)["said"] == [str(number) for number in range(86, 101)]


def test_a_yes_without_a_fix_and_an_unknown_check_are_refused(tmp_path):
    (tmp_path / "hosts").write_text("localhost slots=1\n")
    refused = brigade("check", "--hostfile", tmp_path / "hosts", "--yes")
    assert refused.returncode == 2
    assert "add --fix" in refused.stderr
    unknown = brigade("check", "--hostfile", tmp_path / "hosts", "--only", "clocks")
    assert unknown.returncode == 2
    assert "flag --only clocks" in unknown.stderr
    one = brigade("check", "--hostfile", tmp_path / "hosts", "--only", "python", "--fix")
    assert one.returncode == 0
    assert "nothing to fix" in one.stderr
    assert "packages" not in one.stdout
