"""What a run takes from the rooms around the hall."""

import sys

from brigade.offers import offers
from brigade.train.distributed import ranks
from brigade.train.host.cluster import World
from brigade.train.run.offers import Offers

WORLD = World(0, 0, 1, 1, "here", "python")


def test_what_one_host_lacks_no_host_takes(monkeypatch, capsys):
    monkeypatch.setattr(ranks, "gather", lambda value: [value, ["prove_kernels"]])
    offered, nothing = offers(WORLD), Offers()
    assert offered.peak_tflops is nothing.peak_tflops and offered.prove_kernels is not nothing.prove_kernels
    lacking = "callbacks, fails_to_load, fastest_that_fits, peak_tflops, rows_that_fit, what_fits"
    assert f"without {lacking}: not every host" in capsys.readouterr().out


def test_a_planner_that_is_broken_ends_no_run(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "brigade.plan.runs.offered", None)
    monkeypatch.delattr("brigade.plan.runs.offered", raising=False)
    assert offers(WORLD).callbacks(None, None, None, 0) == []
    assert "here: this run goes on without the planner: " in capsys.readouterr().out
