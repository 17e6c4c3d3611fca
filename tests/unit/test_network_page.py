"""What docs/evidence/network.md computes from measured rows."""

import pytest

from benchmarks.network_tables import half_by_rule, half_measured, is_noise, shares, two, volume


def row(rate, share):
    return {"rate": rate, "communication_percent": share, "megabytes_sent": 10, "one_host_seconds": 0.5}


def test_the_rate_at_which_half_is_communication():
    assert half_by_rule(row("1gbit", 0)) == pytest.approx(160)
    assert half_measured([row("1gbit", 40), row("100mbit", 60)]) == "320"  # half-way on a logarithmic scale
    assert half_measured([row("1gbit", -3), row("100mbit", 10)]) == "< 100"
    assert half_measured([row("1gbit", 70), row("100mbit", 90)]) == "> 1000"


@pytest.mark.parametrize("kind, accumulation, shape, elements", [
    ("ddp", 8, (2, 1), 1), ("zero1", 8, (2, 1), 1.5), ("zero2", 8, (2, 1), 8.5), ("zero3", 8, (2, 1), 16),
    ("ddp", 1, (4, 1), 1.5), ("ddp", 1, (2, 2), 1.5),
    ("hsdp", 8, (2, 2), 1), ("hsdp", 8, (4, 1), 16.5),  # groups inside the hosts, and across them
])  # fmt: skip
def test_what_crosses_a_hosts_link(kind, accumulation, shape, elements):
    assert volume(kind, accumulation, *shape) == pytest.approx(elements)


def test_two_digits():
    assert [two(number) for number in (0.1234, 1.25, 27.6, 463.0)] == ["0.12", "1.2", "28", "460"]


def test_a_share_above_that_on_a_slower_link_is_noise():
    rows = [row("10gbit", 41), row("1gbit", 25), row("200mbit", 70)]
    assert [is_noise(rows, one) for one in rows] == [True, False, False]


def test_the_bars_reach_from_the_fastest_step_to_the_slowest():
    assert shares(row("1gbit", 0) | {"fastest_step": 0.4, "slowest_step": 1.0}) == (0, 50)
