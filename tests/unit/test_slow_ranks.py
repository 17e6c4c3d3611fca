"""Which rank keeps the others waiting."""

from types import SimpleNamespace

import pytest
import torch

from brigade.train.distributed import heartbeat
from brigade.train.distributed.process import this_process
from brigade.train.run import events
from brigade.train.strategy import Strategy
from brigade.train.watch import slow_ranks
from brigade.train.watch.slow_ranks import SlowRanks, scores, seconds_of_a_product

EVEN = [1.0] * 4


def test_a_score_is_the_share_of_a_step_that_is_not_waiting_for_the_rank():
    found = scores({"data loading": (0.1, 0.1, 5.1, 0.1), "forward pass": (3.0, 3.1, 2.9, 3.0)}, 10.0, EVEN)
    assert [round(score, 2) for score, _ in found] == [1.0, 0.99, 0.5, 1.0]
    assert found[2][1] == "the others wait for its data loading 50 % of the time"


def test_who_waits_for_a_late_rank_in_its_forward_pass_is_not_slow():
    """DDP sends buffers at the beginning of the forward pass: two of three ranks wait there."""
    found = scores({"data loading": (0.0, 5.0, 0.0), "forward pass": (8.0, 3.0, 8.0)}, 10.0, EVEN[:3])
    assert [round(score, 1) for score, _ in found] == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("devices, speeds", [
    ([0.002, 0.002, 0.005, 0.0], [1.0, 1.0, 0.4, 1.0]),
    ([0.0, 0.0, 0.002, 0.002, 0.004], [1.0, 1.0, 1.0, 1.0, 0.5]),  # those without memory for a product say nothing of the usual
    ([0.0, 0.001, 0.002, 0.002], [1.0] * 4),
    ([0.0] * 4, [1.0] * 4),
])  # fmt: skip
def test_a_slow_device_shows_where_all_ranks_wait_in_each_layer(devices, speeds):
    found = scores({"data loading": [1.0] * len(devices)}, 10.0, devices)
    assert [score for score, _ in found] == speeds
    for speed, (_, why) in zip(speeds, found, strict=True):
        assert why == f"its device needs {1 / speed:.1f} times as long as others for the same product"


def test_a_device_is_measured():
    assert 0 < seconds_of_a_product() < 1


@pytest.mark.parametrize("rate, memory, sizes", [
    (700e12, 8192, [128, 256, 512, 1024, 2048, 4096, 8192]),  # an H100: 2,048 would last 25 us
    (350e12, 8192, [128, 256, 512, 1024, 2048, 4096, 8192]),  # one at half its clock
    (20e12, 8192, [128, 256, 512, 1024, 2048, 4096]),  # a small one is not kept busy for long
    (700e12, 4096, [128, 256, 512, 1024, 2048, 4096, 8192]),  # the last does not fit any more
    (1e9, 8192, [128]),  # bf16 on a processor that has no instructions for it: 1,024 would last 2 s
])  # fmt: skip
def test_a_gpu_is_measured_by_a_product_that_takes_it_a_while(rate, memory, sizes, monkeypatch):
    """A start of a kernel takes 10 us, whatever the clock."""
    asked = []

    def measured(device, size, dtype):
        asked.append(size)
        if size > memory:
            raise torch.OutOfMemoryError
        return 2 * size**3 / rate + 10e-6

    monkeypatch.setattr(slow_ranks, "measured", measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert seconds_of_a_product() == pytest.approx(2 * 8192**3 / rate, rel=0.06)
    assert asked == sizes


@pytest.mark.parametrize("product, most", [(1e-5, 6), (0.2, 3), (40.0, 2)])
def test_a_device_that_is_slow_in_it_is_not_measured_for_long(product, most, monkeypatch):
    """product: seconds; most: how many of them"""
    clock, products = SimpleNamespace(now=1000.0), []

    def multiply(*_, **__):
        products.append(1)
        clock.now += product

    watch = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now)
    monkeypatch.setattr(slow_ranks, "time", watch)
    monkeypatch.setattr(torch, "mm", multiply)
    assert slow_ranks.measured("cpu", 128, torch.float32) == pytest.approx(product)
    assert len(products) == most


def test_a_measurement_has_a_phase_of_its_own_and_a_twentieth_of_the_time(monkeypatch):
    clock, phases = [1000.0], []

    def measure():
        phases.append(this_process.heartbeat.page[heartbeat.PHASE])
        clock[0] += 10
        return 10.0

    monkeypatch.setattr(slow_ranks, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(slow_ranks, "seconds_of_a_product", measure)
    run = SimpleNamespace(world=SimpleNamespace(host="node1", size=2), strategy=Strategy("ddp", "ddp", "a test"))
    ranks, before = SlowRanks(run), this_process.heartbeat.page[heartbeat.PHASE]
    for passed, device in ((0, 10.0), (60, None), (100, None), (31, 10.0)):
        clock[0] += passed
        assert ranks.sample()["device"] == device
    assert phases == [heartbeat.MEASURING] * 2 and this_process.heartbeat.page[heartbeat.PHASE] == before


def test_a_rank_is_reported_once_when_it_becomes_slow_and_once_when_it_is_no_more(tmp_path, capsys):
    world = SimpleNamespace(host="node1", size=2, is_main_rank=True)
    run = SimpleNamespace(world=world, strategy=SimpleNamespace(kind="zero3"), directory=tmp_path)
    (tmp_path / "run.yaml").touch()
    ranks, logged = SlowRanks(run), []
    for late in (9.0, 9.0, 9.0, 0.0):  # seconds of 20 steps in 10 seconds; the first are not judged
        rows = [{"own": [wait], "device": None, "host": host} for host, wait in (("node1", 0.0), ("node2", late))]
        logged.append(dict(ranks.take(rows, 10.0, 20)))
    assert [round(one.get("slowest_rank_score", -1), 1) for one in logged] == [-1, 0.1, 0.1, 1.0]
    assert capsys.readouterr().out.splitlines() == [
        "rank 1 on node2 is slow, score 0.10: the others wait for its data loading 90 % of the time",
        "no rank is slow any more",
    ]
    (event,) = events.read(tmp_path)
    assert (event["event"], event["rank"], event["host"], event["score"]) == ("slow", 1, "node2", 0.1)


def test_what_a_rank_says_is_what_passed_since_the_last_time():
    run = SimpleNamespace(world=SimpleNamespace(host="node1", size=2), strategy=Strategy("ddp", "ddp", "a test"))
    ranks = SlowRanks(run)
    this_process.heartbeat.enter(heartbeat.EVALUATION)  # from here on no time passes that a rank spends alone
    this_process.heartbeat.seconds[heartbeat.DATA] += 2.0
    first, second = ranks.sample(), ranks.sample()
    assert first["own"][0] >= 2.0 and second["own"] == [0.0, 0.0]
    assert first["device"] and second["device"] is None, "once a minute"
