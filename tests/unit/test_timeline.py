"""What a run took down of the time until its first step had ended."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from brigade.train.distributed import timeline
from brigade.train.distributed.timeline import Phase, Timeline
from brigade.train.recipe.files import REPOSITORY


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    now = SimpleNamespace(at=100.0)
    monkeypatch.setattr(timeline, "monotonic", lambda: now.at)
    return now


def test_phases_follow_each_other_without_a_gap(clock):
    run = Timeline()
    run.enter("nobody has begun")
    run.begin("settings")
    clock.at += 1.0
    with run.within("rendezvous"):
        clock.at += 2.0
    clock.at += 0.5
    run.enter("first step")
    run.enter("first step")
    clock.at += 4.0
    assert run.end() and not run.end(), "only the first time"
    clock.at += 60.0
    with run.within("evaluation"):
        run.enter("a later step")
    told = [("settings", 0.0, 1.0), ("rendezvous", 1.0, 2.0), ("settings", 3.0, 0.5), ("first step", 3.5, 4.0)]
    assert run.phases == [Phase(*each) for each in told]
    assert timeline.in_words(run.phases) == [
        "first step after 7.5 s", "settings 1.5 s", "rendezvous 2.0 s", "first step 4.0 s",
    ]  # fmt: skip


def test_the_next_run_of_a_process_begins_anew(clock):
    run = Timeline()
    run.begin("settings")
    clock.at += 9.0  # and it fails
    run.begin("settings")
    clock.at += 1.0
    run.end()
    assert run.phases == [Phase("settings", 0.0, 1.0)]


def test_the_first_run_of_its_own_process_counts_from_that_process_s_start():
    code = """
import time
began = time.time()
time.sleep(0.3)
from brigade.train.distributed.process import this_process
this_process.timeline.include_start()
for _ in range(2):
    this_process.timeline.begin("settings")
    this_process.timeline.end()
    print(this_process.timeline.phases[0].name, this_process.timeline.phases[0].seconds)
"""
    before = time.monotonic()
    told = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    first, second = told.stdout.splitlines()
    name, _, seconds = first.rpartition(" ")
    assert name == "starting Python" and 0.3 <= float(seconds) <= time.monotonic() - before + 0.02
    assert second.startswith("settings ")
