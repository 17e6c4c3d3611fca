"""What leaves a host's network card per step is what benchmarks/published/traffic.py says; and benchmarks/network.py runs."""

import pytest

from benchmarks import axes_network, communication, network, network_tables


@pytest.mark.matrix  # five minutes beside other clusters; test_traffic.py has the formulas
def test_hosts_send_what_the_formulas_say(cluster):
    rows = communication.measure(cluster, communication.QUICK, measured=3)
    assert {row["strategy"] for row in rows} == set(communication.QUICK)
    for row in rows:
        assert abs(row["difference_percent"]) < 5, row


@pytest.mark.matrix  # a minute and a half; test_traffic.py has the formulas
def test_hosts_of_stages_and_of_tensor_groups_send_what_the_formulas_say(cluster):
    rows = axes_network.measure(cluster, axes_network.QUICK, rates=(None,), measured=8)
    assert [row["strategy"] for row in rows] == [of.name for of in axes_network.QUICK]
    for row in rows:
        assert abs(row["difference_percent"]) < 5, row


# ---- the network -----------------------------------------------------------------------------------------------------
def test_a_slow_link_slows_the_step_and_carries_what_the_formula_says(cluster):
    rows = network.measure(cluster, network.QUICK)
    fast, slow = rows
    assert (fast["rate"], slow["rate"]) == ("1gbit", "50mbit")
    for row in rows:
        assert abs(row["megabytes_sent"] / row["megabytes_formula"] - 1) < 0.25
    # At 50 Mbit/s what a step sends takes a second and a half, whatever this machine is.
    assert slow["step_seconds"] > fast["step_seconds"] + 0.5 * network_tables.seconds_on_the_link(slow)
    assert slow["communication_percent"] > 50
