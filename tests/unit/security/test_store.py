"""Ranks of one host meet where no other user of it can join them, and no other user takes a rank's place."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from brigade.check import reach
from brigade.check.checks import NotHere
from brigade.check.probes import reach as probe
from brigade.errors import UserError
from brigade.train.distributed import one_host, process_group, ranks
from brigade.train.distributed.process import this_process
from testing.reaching import NODES, judged

STRANGER = 65534
SOON = timedelta(seconds=20)
REPOSITORY = Path(__file__).resolve().parents[3]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def stranger(script: str, **how) -> subprocess.Popen:
    """Another user's shell."""
    return subprocess.Popen(["bash", "-c", script], user=STRANGER, group=STRANGER, extra_groups=[], **how)


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not met anybody."""
    monkeypatch.setattr(this_process, "turn", lambda name: 0)  # two ranks are threads of one process
    monkeypatch.setattr(this_process, "rank_0", None)
    monkeypatch.setattr(one_host.gloo, "around_each_group", lambda guard: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def own_file(name: str = one_host.NAME) -> int:
    return os.memfd_create(name)


# ---- the store ---------------------------------------------------------------------------------------------------
def test_ranks_of_one_host_meet_in_a_file_that_nobody_else_opens(fresh):
    launchers, found = HashStore(), {}

    def join(rank: int) -> None:
        found[rank] = one_host.meet(launchers, rank, 2, SOON)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    found[0].set("said", "by rank 0")
    assert found[1].get("said") == b"by rank 0" and found[1].add("brigade/here", 0) == 2
    process, file = map(int, launchers.get("brigade/place-0-0").split())
    place = Path(f"/proc/{process}/fd/{file}")
    assert str(place.readlink()).endswith(" (deleted)")  # no name, so nothing is left behind, and no later run finds it
    assert place.stat().st_mode & 0o777 == 0o600 and not one_host.rank_0_is_gone()
    if os.geteuid() == 0:
        seen = stranger(f"cat {place}", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = seen.communicate(timeout=20)
        assert not out and "denied" in err


def test_a_place_that_others_name_is_not_believed(tmp_path):
    mine = own_file()
    process, file = one_host._open(f"{os.getpid()} {mine}")
    assert process == os.getpid() and os.fstat(file).st_ino == os.fstat(mine).st_ino
    notes = (tmp_path / "notes").open("w+")
    foreign = own_file()
    if os.geteuid() == 0:
        os.fchown(foreign, STRANGER, STRANGER)
    forged = [f"{os.getpid()} {number}" for number in (notes.fileno(), own_file("other"), 10**6)]
    forged += [f"{os.getpid()} {foreign}"] * (os.geteuid() == 0)
    for place in (*forged, "", "x y", "../../tmp 1", f"{os.getpid()} {mine} 1", "1 0"):
        with pytest.raises(RuntimeError, match="no rank 0 of this user on this host"):
            one_host._open(place)
    assert notes.read() == ""


def test_a_rank_that_never_comes_is_told(fresh):
    with pytest.raises(RuntimeError, match=r"1 of 2 ranks came within 0:00:00\.1"):
        one_host.meet(HashStore(), 0, 2, timedelta(seconds=0.1))


def test_the_end_of_rank_0_is_noticed(monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        monkeypatch.setattr(this_process, "rank_0", (process.pid, one_host._began(process.pid)))
        assert not one_host.rank_0_is_gone()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its parent has not asked yet
        assert one_host.rank_0_is_gone()


@pytest.mark.parametrize("one, said", [
    (True, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}),
    (True, {"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}),  # deepspeed
    (True, {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}),
    (True, {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}),
    (False, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}),
    (False, {"WORLD_SIZE": "2", "MASTER_ADDR": "run-master-0"}),  # Kubernetes says nothing of hosts
])  # fmt: skip
def test_which_runs_have_one_host(one, said):
    assert one_host.has_all_ranks(said) is one


def test_the_store_of_the_first_meeting_listens_on_the_loopback_alone():
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks.free_port())}
    port = f":{int(env['MASTER_PORT']):04X}"

    def listens() -> list[str]:
        return [each.local for each in one_host._table() if each.state == "0A" and each.local.endswith(port)]

    store = one_host.first_meeting(env, SOON)
    store.set("there", "yes")
    assert listens() == [f"0100007F{port}"]
    del store
    until = time.monotonic() + 5
    while listens() and time.monotonic() < until:
        time.sleep(0.01)
    assert not listens()  # nobody can ask it once the ranks have met
    assert one_host.first_meeting(env | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, SOON) is None
    assert one_host.first_meeting(env | {"RANK": "1"}, SOON) is one_host.first_meeting(env | {"MASTER_ADDR": "a"}, SOON)


def test_one_process_opens_no_port(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert isinstance(process_group._met()["store"], HashStore)


# ---- what check says of several hosts ------------------------------------------------------------------------------
def test_check_names_other_users_of_hosts_where_anybody_can_join_the_ranks():
    seen = {host: {"others": [], "hidden": False} for host in NODES}
    seen |= {"node2": {"others": ["alice", "bob"], "hidden": False}, "node3": {"others": [], "hidden": True}}
    found = judged(reach.other_users, {"reach.users": seen})
    assert [found[host][0] for host in NODES] == ["green", "yellow", "grey", "green"]
    assert found["node2"][1] == "alice, bob have processes here"
    with pytest.raises(NotHere):
        judged(reach.other_users, {}, hosts=NODES[:1])


@as_root
def test_a_host_knows_who_else_works_on_it():
    with subprocess.Popen(["sleep", "60"], user=54321, group=54321, extra_groups=[]) as process:
        assert "54321" in probe.users()["others"]
        process.kill()
    assert "root" not in probe.users()["others"] and "nobody" not in probe.users()["others"]


# ---- connections between ranks -----------------------------------------------------------------------------------
@as_root
def test_another_users_connection_is_named(monkeypatch):
    monkeypatch.setattr(this_process, "rank_0", (os.getpid(), one_host._began(os.getpid())))
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        before = one_host._own_sockets()
        with socket.create_connection(("127.0.0.1", port)), door.accept()[0]:
            assert one_host.strangers(before) == []
        with pytest.raises(UserError, match="connected to this run's ranks") as told, one_host.nobody_else():
            visitor = stranger(f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo; exec sleep 20", stdout=subprocess.PIPE)
            visitor.stdout.read(1)
            line, _ = door.accept()
        assert "user nobody" in told.value.problem or f"user {STRANGER}" in told.value.problem
        later = one_host._own_sockets()  # what was there before a group is not its business
        assert one_host.strangers(later) == []
        visitor.kill()
        line.close()


RANK = """
import time
import torch.distributed as dist
from brigade.train.host.cluster import world_from_environment
from brigade.train.distributed import ranks
world, make = world_from_environment(), dist.init_process_group
def slowly(*arguments, **named):
    time.sleep(3)
    make(*arguments, **named)
if world.rank == 1:  # so that there is time enough to step in
    dist.init_process_group = slowly
with ranks.agreed(world):
    pass
print("together", ranks.gather(world.rank), flush=True)
"""


def listening(pid: int) -> set[int]:
    """Ports on which a process waits for connections."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(entry.readlink()))
    rows = [row for row in one_host._table() if row.state == "0A" and f"socket:[{row.inode}]" in inodes]
    return {int(row.local.rpartition(":")[2], 16) for row in rows}


@as_root
@pytest.mark.slow
def test_who_takes_a_rank_s_place_in_gloo_ends_the_run(tmp_path):
    """Gloo numbers its connections 0, 1, 2, ... and takes whoever says such a number first."""
    port = ranks.free_port()
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": REPOSITORY}

    def rank(number: int) -> subprocess.Popen:
        own = {"RANK": str(number), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-c", RANK], env=os.environ | common | own, **pipes)

    both, visitors = [rank(0), rank(1)], []
    try:
        seen, until = {port}, time.monotonic() + 60
        while all(each.poll() is None for each in both) and time.monotonic() < until:
            time.sleep(0.01)
            for each in both:
                with suppress(OSError):
                    for door in listening(each.pid) - seen:
                        seen.add(door)
                        script = "".join(
                            f"exec {9 - n}<>/dev/tcp/127.0.0.1/{door}; printf '\\{n}\\0\\0\\0\\0\\0\\0\\0' >&{9 - n};"
                            for n in range(3)
                        )
                        visitors.append(stranger(script + "sleep 30", stderr=subprocess.DEVNULL))
        for each in both:  # as a launcher does when one has ended
            with suppress(subprocess.TimeoutExpired):
                each.wait(3)
            each.kill()
        said = "".join(each.communicate(timeout=30)[0] for each in both)
    finally:
        for each in (*both, *visitors):
            each.kill()
            each.wait()
    assert len(seen) > 1, "no port of gloo was seen"
    assert "connected to this run's ranks while they found each other" in said, said
    assert "together" not in said and "Traceback" not in said, said
