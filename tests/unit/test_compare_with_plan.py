"""When the callback measures and what of: with a clock, a GPU's counters and ranks that are made up."""

import math
from types import SimpleNamespace

import pytest
import torch

from brigade.plan import hardware
from brigade.plan.choice import job_of_run
from brigade.plan.costs.job import Job, Replicas
from brigade.plan.runs import prediction
from brigade.plan.shape.find import named_shape
from brigade.train.data.collate import About
from brigade.train.distributed import ranks
from brigade.train.host.cluster import World
from brigade.train.run.directory import Kernels
from brigade.train.watch import throughput as meters


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    return clock


@pytest.fixture
def card(monkeypatch):
    """A GPU whose allocator's peak since the last reset is card.peak, in GiB."""
    card = SimpleNamespace(peak=0.0, reserved=0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: card.peak * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: card.reserved * 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(card, "peak", 1.0))
    return card


def about(slots, supervised=10):
    shape = {"slots": slots, "length": slots // 2, "logits": supervised}
    return About(tokens=slots - 4, squared_lengths=slots * 50, supervised=supervised, step_supervised=None, **shape)


def test_memory_of_training_is_not_that_of_loading_and_evaluating(card):
    meter = meters.Meter(1000, 2, 8)
    card.peak, card.reserved = 70.0, 75.0  # while it was loaded
    with meter.pause():
        card.peak = 60.0  # evaluated before the first step
    meter.start()
    card.peak = 40.0
    with meter.pause():
        card.peak = 50.0
    assert meter.training_peak_gib() == 40.0
    card.peak, card.reserved = 42.0, 60.0
    figures = meter.report()
    assert (figures["peak_memory_gib"], figures["reserved_memory_gib"]) == (70.0, 75.0)  # since the start, as ever
    assert meter.training_peak_gib() == 42.0


def test_ten_steps_of_which_six_are_timed_pauses_left_out(card, clock, monkeypatch):
    meter, told = meters.Meter(1000, 2, 8), []
    run = SimpleNamespace(world=SimpleNamespace(is_main_rank=True))
    callback = prediction.CompareWithPlan(run, meter, None, 0)
    monkeypatch.setattr(prediction, "compare", lambda run, config, trained, seen: told.append(seen))
    own, other = [], {"seconds": 3.5, "allocated": 1.0, "largest": 400}
    both = lambda row: [own.append(row) or row, row | other]  # noqa: E731
    monkeypatch.setattr(ranks, "gather", lambda row: both(row) if isinstance(row, dict) else [row])
    for step in range(1, 14):
        meter.start()
        meter.count([about(100), about(300 if step == 2 else 120, supervised=30)], 0.25)
        card.peak = 30.0
        clock.now += 20.0 if step <= 4 else 2.0  # the first compile
        callback.on_step_end(None, None, None)
        with meter.pause():
            clock.now += 100.0 if step == 7 else 7.0
            card.peak = 90.0
        if step == 8:
            meter.report()  # logging changes nothing
    (seen,) = told
    assert [row["seconds"] for row in own if "seconds" in row] == [pytest.approx(2.0)], "without pauses"
    assert (seen["seconds"], seen["waited"], seen["allocated"]) == (3.5, 0.25, 30.0)  # the slowest and fullest rank's
    assert seen["tokens"] == 110 and seen["largest"] == 400 and seen["labelled"] == pytest.approx(40 / 220)
    assert seen["length"] == pytest.approx((100 * 50 + 120 * 60) / 220), "of a token"
    assert seen["attended"] == pytest.approx(220 * 50 / 212) and meter.first == []


@pytest.mark.parametrize("error, reason", [
    (job_of_run.NotCovered("they know no DoRA"), "they know no DoRA"),
    (ZeroDivisionError("by zero"), "formulas fail on it (ZeroDivisionError: by zero)"),
])  # fmt: skip
def test_whatever_the_formulas_say_the_run_goes_on(card, monkeypatch, capsys, error, reason):
    kept = {}

    def fail(run, config, trained, kind):
        assert kind == hardware.gpu("H200").kind
        raise error

    monkeypatch.setattr(prediction, "planned_job", fail)
    monkeypatch.setattr(prediction, "add_to_record", lambda run, key, value: kept.update({key: value}))
    prediction.compare(None, None, 0, {"seconds": 2.0, "waited": 0.1, "allocated": 30.0})
    said = capsys.readouterr().out
    assert "30.0 GiB allocated at most, 2.00 s per step; the planner estimates nothing: " in said and reason in said
    assert reason in kept["prediction"]["none"] and kept["prediction"]["measured"]["allocated_gib"] == 30.0


@pytest.mark.parametrize("implementation, row, attended", [
    ("varlen", 4000.0, 300.0), ("flash_attention_3", 1000.0, 300.0), ("sdpa", 4000.0, 2 * 4000), ("sdpa", 1000.0, 2 * 1000),
    ("eager", 1000.0, 1000),
])  # fmt: skip
def test_what_masks_hide_is_computed_all_the_same(implementation, row, attended):
    config = SimpleNamespace(_attn_implementation=implementation)
    job = Job(named_shape("qwen3-8b"), 2048, 4, attention=job_of_run.ATTENTION[implementation])
    seen = {"tokens": 4000.0, "attended": 300.0, "length": row, "labelled": 0.5}
    seen |= {"largest": 6000.0, "most_labelled": 1500.0}
    usual, largest = prediction._as_seen(job, config, seen)
    assert (usual.sequence, largest.sequence, usual.attended) == (1000, 1500, attended)
    assert (usual.labelled, largest.labelled) == (0.5, 0.25)


@pytest.mark.parametrize("every, counted", [(5, 5), (50, math.inf)])
def test_a_round_that_no_measured_step_ends_is_not_predicted(monkeypatch, every, counted):
    found = Job(named_shape("qwen3-0.6b"), 128, replicas=Replicas(2, every))
    recipe = SimpleNamespace(model=SimpleNamespace(use_peft=False))
    settings = SimpleNamespace(with_training=lambda **_: SimpleNamespace(recipe=recipe))
    asked = []
    monkeypatch.setattr(job_of_run, "job_of_run", lambda *given, **_: asked.append(given) or found)
    world = World(0, 0, 4, 4, "here", "torchrun")  # as before the ranks are divided into replicas
    run = SimpleNamespace(
        settings=settings, kernels=Kernels(), strategy=None, batch=None, world=world, replica=world.part(2)
    )
    config = SimpleNamespace(to_dict=dict, _attn_implementation="sdpa")
    assert prediction.planned_job(run, config, 0, "H200").replicas == Replicas(2, counted)
    assert asked[0][3:5] == (2, 4), "the ranks of a replica, and those of a host"
