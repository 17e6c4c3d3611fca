"""Which rank is blamed for a start that hangs."""

from types import SimpleNamespace

import pytest

from brigade.launch import first_failure
from brigade.launch.first_failure import Judge

NOW = [1000.0]


def _nothing(*_, **__):
    pass


@pytest.fixture
def judge(monkeypatch):
    """Of two hosts with a rank each, on a clock that the test moves."""
    monkeypatch.setattr(first_failure.time, "monotonic", lambda: NOW[0])
    hosts = [SimpleNamespace(host=f"node{n}", ranks=range(n, n + 1), slots=1, tell=_nothing) for n in (0, 1)]
    return Judge(hosts, "torchrun", 5.0, SimpleNamespace(set=_nothing))


def test_late_is_who_is_later_than_the_first_rank(judge):
    judge.on_rank(judge.channels[0], 0, pid=1)
    judge.on_rank(judge.channels[1], 1, pid=2)
    NOW[0] += 60  # a busy machine: nobody is ready yet, and nobody is late
    judge.check_start()
    assert not judge.failures
    judge.on_rank(judge.channels[0], 0, stage="waiting")
    NOW[0] += 6
    judge.check_start()
    assert [(failure.kind, failure.rank) for failure in judge.failures] == [("hang", 1)]


def test_that_no_rank_starts_is_found_too(judge):
    NOW[0] += first_failure.READY + 1
    judge.check_start()
    assert judge.failures[0].kind == "hang"
