"""What leaves a host's network card per step is what benchmarks/published/traffic.py says."""

import pytest

from benchmarks import axes_network, communication


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
