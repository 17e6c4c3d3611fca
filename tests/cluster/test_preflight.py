"""`python -m brigade check` on real hosts: each injected fault is found, on the right host, and a sound cluster is sound."""

import pytest

from testbed.preflight import INJECTED, check, misses, provoke


@pytest.mark.parametrize("fault", INJECTED, ids=lambda fault: fault.name)
def test_an_injected_fault_is_found_where_it_is(cluster_of_three, fault):
    cluster_of_three.hostfile(1)
    attempt = provoke(cluster_of_three, fault)
    assert not (missed := misses(fault, attempt)), f"check does not say {missed}\n{attempt.said[-3000:]}"
    assert attempt.exit_code == (3 if fault.level == "red" else 1)


def test_a_sound_cluster_is_sound_and_rehearses(cluster_of_three):
    """The usual size: rates, network and dress rehearsal too. Nothing of it is left behind."""
    cluster_of_three.hostfile(1)
    before = sorted(path.name for path in cluster_of_three.shared.iterdir())
    attempt = check(cluster_of_three, "usual")
    levels = {level for levels in attempt.levels().values() for level in levels}
    assert levels <= {"green", "grey"}, attempt.said
    assert attempt.exit_code == 0
    assert attempt.levels("dress rehearsal") == {host.name: ["green"] for host in cluster_of_three}
    assert sorted(path.name for path in cluster_of_three.shared.iterdir()) == before
