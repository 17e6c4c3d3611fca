"""`check --fix` on real hosts: it prints what it would do, and with --yes brings the odd host to the others' commit."""

import subprocess

from testbed import check_same
from testbed.cluster import PROJECT
from testbed.preflight import check


def commit_of(host):
    return host.run(f"git -C {PROJECT} rev-parse HEAD").stdout.strip()


def test_another_commit_is_checked_out_after_a_yes_and_never_over_a_changed_file(cluster_of_three):
    cluster = cluster_of_three
    cluster.hostfile(1)
    clean = not subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=PROJECT).returncode
    check_same.other_commit(cluster)
    try:
        odd, wanted = cluster["node2"], commit_of(cluster["node1"])
        other = commit_of(odd)
        assert other != wanted
        asked = check(cluster, words="--only code --fix")
        assert commit_of(odd) == other  # nothing ran
        assert (f"checkout --quiet --detach {wanted}" in asked.said) == clean
        odd.run(f"echo '# mine' >> {PROJECT}/train.py")
        refused = check(cluster, words="--only code --fix --yes")
        assert commit_of(odd) == other
        assert refused.exit_code == 3
        odd.run(f"git -C {PROJECT} checkout --quiet train.py")
        done = check(cluster, words="--only code --fix --yes")
        if clean:  # else no checkout makes the hosts equal, and none is tried
            assert commit_of(odd) == wanted, done.said
            assert done.exit_code == 0, done.said
            assert done.levels("code") == {host.name: ["green"] for host in cluster}
    finally:
        check_same.same_commit(cluster)
