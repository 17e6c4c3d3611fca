"""benchmarks/network.py cannot rot: two hosts, one strategy, two rates."""

from benchmarks import network, network_tables


def test_a_slow_link_slows_the_step_and_carries_what_the_formula_says(cluster):
    rows = network.measure(cluster, network.QUICK)
    fast, slow = rows
    assert (fast["rate"], slow["rate"]) == ("1gbit", "50mbit")
    for row in rows:
        assert abs(row["megabytes_sent"] / row["megabytes_formula"] - 1) < 0.25
    # At 50 Mbit/s what a step sends takes a second and a half, whatever this machine is.
    assert slow["step_seconds"] > fast["step_seconds"] + 0.5 * network_tables.seconds_on_the_link(slow)
    assert slow["communication_percent"] > 50
