"""What leaves a host's network card per step is what benchmarks/published/traffic.py says."""

from benchmarks import communication


def test_hosts_send_what_the_formulas_say(cluster):
    rows = communication.measure(cluster, communication.QUICK, measured=3)
    assert {row["strategy"] for row in rows} == set(communication.QUICK)
    for row in rows:
        assert abs(row["difference_percent"]) < 5, row
