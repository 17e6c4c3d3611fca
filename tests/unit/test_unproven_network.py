"""Networks that are only named: intervals hold the case of one working card, and advice for more hosts says to measure."""

from dataclasses import replace

import pytest

from brigade.plan import hardware
from brigade.plan.choice import goals
from brigade.plan.choice.workload import Cluster, Workload
from brigade.plan.costs.estimate import estimate, factors, time_group
from brigade.plan.costs.job import Job
from brigade.plan.hardware.network import unproven_cards
from brigade.plan.shape.find import named_shape
from testing.ranks import REPOSITORY

ENGINES = [("ddp", 0), ("fsdp2", 3), ("zero", 2), ("zero", 3)]


@pytest.fixture(scope="module")
def shape():
    return named_shape("llama-3.1-8b")


@pytest.mark.parametrize("named, cards", [
    ("4x100 Gb/s Omni-Path", 4), ("100 Gb/s", 1), ("3200 Gb/s", 8), ("8x200 Gb/s InfiniBand", 8), ("400 Gb/s per GPU", 8),
    ("10 GbE", 1), ("25 Gb/s", 1), ("EFA 3200 Gb/s", 1), ("EFA", 1), ("", 4), ("Omni-Path", 4),
])  # fmt: skip
def test_as_many_cards_as_a_name_states(named, cards):
    device = hardware.gpu("A100 80GB")  # usually with 1600 Gbit/s
    assert unproven_cards(device, named, 8) == cards
    assert unproven_cards(replace(device, network_measured=True), named, 8) == 1


@pytest.mark.parametrize("nodes", [2, 8, 64])
@pytest.mark.parametrize("rate", [10, 25, 100, 200])
@pytest.mark.parametrize("engine, stage", ENGINES)
def test_the_interval_holds_one_card_of_four(shape, engine, stage, rate, nodes):
    job = Job(shape, 4096, engine=engine, stage=stage, data=8 * nodes, gpu="A100 80GB", link=f"4x{rate} Gb/s")
    one = estimate(replace(job, link=f"{rate} Gb/s"))
    found, high = estimate(job), factors("time", time_group(job, hardware.gpu(job.gpu)))[1]
    assert found.time.total <= one.time.total == pytest.approx(found.one_card_seconds)
    assert found.time_interval()[1] == pytest.approx(one.time.total * high)
    assert one.time_interval()[1] == pytest.approx(one.time.total * high)  # one card is all that there is


def test_what_was_measured_is_not_widened(shape, tmp_path, monkeypatch):
    job = Job(shape, 4096, engine="zero", stage=3, data=16, gpu="A100 80GB", link="4x100 Gb/s")
    wide = estimate(job)
    assert wide.one_card_seconds > 1.5 * wide.time.total
    (tmp_path / "measured.yaml").write_text("factors:\n  A100 80GB:\n    network: {factor: 0.5, runs: {check: 0.5}}\n")
    monkeypatch.setenv("BRIGADE_CALIBRATION", str(tmp_path / "measured.yaml"))
    found = estimate(job)
    assert found.time.total > wide.time.total and found.one_card_seconds == found.time.total
    inside = estimate(replace(job, link="", data=8))
    assert inside.one_card_seconds == inside.time.total


def test_advice_for_more_hosts_says_to_measure_first(shape, tmp_path, monkeypatch):
    workload, cluster = Workload(shape), Cluster("A100 80GB", 8, 2, link="4x20 Gb/s")
    whole = goals.answer(workload, cluster)
    _, sentences = goals.pick(whole, "")
    said = next(one for one in sentences if one.startswith("Measure the network first"))
    assert "brigade check --hostfile FILE --calibrate" in said and "1 host with 8 GPUs trains sooner" in said
    _, (first, *others) = goals.pick(whole, "fastest")
    assert "2 hosts" in first and others == [said]
    (tmp_path / "measured.yaml").write_text("factors:\n  A100 80GB:\n    network: {factor: 1.0, runs: {check: 1.0}}\n")
    monkeypatch.setenv("BRIGADE_CALIBRATION", str(tmp_path / "measured.yaml"))
    assert not any("Measure" in one for one in goals.pick(goals.answer(workload, cluster), "")[1])
    (tmp_path / "slow.yaml").write_text("factors:\n  A100 80GB:\n    network: {factor: 0.02, runs: {check: 0.02}}\n")
    monkeypatch.setenv("BRIGADE_CALIBRATION", str(tmp_path / "slow.yaml"))
    assert goals.pick(goals.answer(workload, cluster), "")[1][0].startswith("More is not faster")


def test_more_hosts_for_what_does_not_fit_are_measured_first(prints):
    hosts = ["--hostfile", str(REPOSITORY / "hostfiles/1x8"), "--nvme", "1000"]
    said = prints(1, "plan", "gpt-oss-120b", "--gpu", "H100 80GB", *hosts)
    assert "2 nodes instead of 1" in said and "Measure the network first (`python -m brigade check" in said
