"""The testbed itself: hosts are hosts, what happens to them happens, and nothing of them stays behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from testbed.cluster import Cluster
from testbed.host import namespace
from testbed.needs import SLURM, missing
from testing.command_line import run_here
from testing.patience import wait_until
from testing.ranks import REPOSITORY

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=1"


def reached(cluster: Cluster, source: str, target: str) -> bool:
    return cluster[source].run(f"{SSH} {target} true", check=False).returncode == 0


@pytest.fixture
def place(monkeypatch):
    """Where clusters of one test lie, apart from everybody else's; not in /tmp, which hosts have to themselves."""
    with tempfile.TemporaryDirectory(prefix="testbed-", dir="/var/tmp") as directory:
        monkeypatch.setenv("BRIGADE_TESTBED", directory)
        monkeypatch.setattr("testbed.cluster.PARENT", Path(directory))
        yield Path(directory)


# ---- what a host is ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source, target", [("node1", "node2"), ("node2", "node1"), ("node1", "node1")])
def test_hosts_have_names_and_reach_each_other(cluster, source, target):
    said = cluster[source].run(f"hostname; {SSH} {target} 'hostname; cat /etc/hostname'").stdout.split()
    assert said == [source, target, target]


def test_remote_shell_finds_the_environment_only_where_it_is_not_bare(cluster):
    found = {
        host.name: cluster["node1"].run(f"{SSH} {host.name} command -v deepspeed", check=False).stdout.strip()
        for host in cluster
    }
    assert found == {"node1": str(Path(sys.executable).parent / "deepspeed"), "node2": ""}


def test_home_and_project_are_shared_and_the_rest_is_not(cluster):
    cluster["node1"].run("for place in ~ /tmp /run /dev/shm; do echo here > $place/mark; done")
    seen = cluster["node2"].run("ls ~/mark /tmp/mark /run/mark /dev/shm/mark 2>/dev/null; ls train.py", check=False)
    assert seen.stdout.split() == [f"{Path.home()}/mark", "train.py"]
    assert not (Path.home() / "mark").exists()
    program = "import sys, yaml; print(sys.prefix)"  # a package of the environment
    assert cluster["node2"].run([cluster.python, "-c", program]).stdout.strip() == sys.prefix


def test_a_host_does_not_see_the_machines_network(cluster):
    cards = cluster["node1"].run("ip -o link | cut -d: -f2").stdout.split()
    assert [card.partition("@")[0] for card in cards] == ["lo", "eth0"]


# ---- what happens to hosts -----------------------------------------------------------------------------------------
def test_cut_and_restore(cluster):
    cluster["node2"].cut()
    assert not reached(cluster, "node1", "node2")
    cluster["node2"].restore()
    assert reached(cluster, "node1", "node2")


def test_block_a_port(cluster):
    cluster["node2"].block(22)
    assert (reached(cluster, "node1", "node2"), reached(cluster, "node2", "node1")) == (False, True)
    cluster["node2"].unblock()
    cluster["node2"].block(22, "out")
    assert (reached(cluster, "node1", "node2"), reached(cluster, "node2", "node1")) == (True, False)


def test_power_off_and_boot(cluster):
    cluster["node2"].run("touch /tmp/mark; sleep 1000 >/dev/null 2>&1 &")
    cluster["node2"].power_off()
    assert not cluster["node2"].processes() and not reached(cluster, "node1", "node2")
    cluster["node2"].boot()
    assert reached(cluster, "node1", "node2")
    assert "mark" not in cluster["node2"].run("ls /tmp").stdout.split()  # where a clone may lie


def test_signals_reach_what_was_started(cluster):
    process = cluster["node1"].popen(
        "trap 'echo stopped; exit 3' TERM; sleep 1000 & echo ready; wait", stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    cluster["node1"].send(process, signal.SIGTERM)
    assert process.stdout.readline() == "stopped\n"
    assert process.wait(timeout=60) == 3
    assert cluster["node1"].kill("sleep 1000") == 1


def test_an_environment_that_is_a_link_into_what_hosts_have_to_themselves(place, tmp_path):
    """.venv links into /tmp, and the clone lies there too."""
    clone, elsewhere = tmp_path / "clone", tmp_path / "elsewhere"
    shutil.copytree(REPOSITORY / "testbed", clone / "testbed")
    elsewhere.mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (elsewhere / part).symlink_to(Path(sys.prefix) / part)
    (clone / ".venv").symlink_to(elsewhere)
    program = (
        "import sys\nfrom testbed import Cluster\nwith Cluster(1) as c:\n"
        "    print(c['node1'].run([c.python, '-c', 'import sys; print(sys.prefix)']).stdout)"
    )
    done = subprocess.run([clone / ".venv/bin/python", "-c", program], cwd=clone, capture_output=True, text=True)
    assert done.stdout.strip() == str(clone / ".venv"), done.stderr


# ---- what stays behind ---------------------------------------------------------------------------------------------
def links_here():
    return run_here(["ip", "-o", "link"], 60).stdout


def test_nothing_stays_behind(place):
    links = links_here()
    with Cluster(2) as cluster:
        inside = {namespace(host.pid, "net") for host in cluster}
        assert links_here() == links
    assert links_here() == links
    assert not list(place.iterdir()) and not _in_namespaces(inside)


def test_a_builder_that_is_killed_takes_its_hosts_along(place):
    program = (
        "import time\nfrom testbed import Cluster\nfrom testbed.host import namespace\n"
        "with Cluster(2) as c:\n    c['node1'].popen('sleep 1000')\n"
        "    print(*(namespace(h.pid, 'net') for h in c), flush=True)\n    time.sleep(100)"
    )
    builder = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    inside = {int(word) for word in builder.stdout.readline().split()}
    assert len(_in_namespaces(inside)) >= 5  # two first processes, two sshds, a sleep
    builder.kill()
    builder.wait()
    wait_until(lambda: not _in_namespaces(inside), seconds=10)
    (orphan,) = place.iterdir()
    with Cluster(1) as cluster:  # the next one clears up
        assert list(place.iterdir()) == [cluster.directory]
        assert not orphan.exists()


def _in_namespaces(networks: set[int]) -> list[str]:
    """Processes of this machine in one of these networks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if namespace(process.name, "net") in networks:
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


# ---- where none can be built ---------------------------------------------------------------------------------------
def test_without_root_it_says_so():
    program = "import os\nfrom testbed import Cluster\nos.setgroups([])\nos.setresuid(*[65534] * 3)\nCluster(1)"
    done = run_here([sys.executable, "-c", program], 60)
    assert "no cluster can be built here" in done.stderr and "root: " in done.stderr and "sudo" in done.stderr


def test_missing_programs_are_named_with_their_packages(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (line,) = missing()
    assert line.startswith("ip, tc, ") and "sshd" in line
    assert line.endswith(" iproute2 mount nftables openssh-client openssh-server util-linux")
    assert missing(SLURM) == [
        "slurmctld, slurmd, sbatch, munged: apt-get install --no-install-recommends munge slurm-wlm"
    ]


# ---- by hand -------------------------------------------------------------------------------------------------------
def test_by_hand(place):
    def testbed(*words):
        return run_here([sys.executable, "-m", "testbed", *words], 300)

    somebodys = place / "brigade-testbed-mine"  # a directory of another user, made in expectation
    somebodys.mkdir()
    with socket.socket(socket.AF_UNIX) as trap:
        trap.bind(str(somebodys / "door"))
        trap.listen()
        os.chown(somebodys, 65534, 65534)
        assert "no cluster is up" in testbed("down").stderr
    up = testbed("up", "2")
    assert up.returncode == 0 and up.stdout.startswith("up: node1 node2"), up.stderr
    try:
        assert "is up already" in testbed("up").stderr
        ssh = [*up.stdout.splitlines()[1].split(), "ssh -o ConnectTimeout=1 node2 hostname"]
        assert subprocess.run(ssh, capture_output=True, text=True).stdout == "node2\n"
        assert testbed("do", "node2", "cut").stdout == "cut node2: done\n"
        assert subprocess.run(ssh, capture_output=True, text=True).returncode == 255
        assert subprocess.run([*ssh[:-2], "node2", "hostname"], capture_output=True, text=True).stdout == "node2\n"
        assert testbed("do", "node3", "cut").returncode == 1
    finally:
        down = testbed("down")
    assert (down.returncode, down.stdout) == (0, "down\n")
    assert not list(place.iterdir())
