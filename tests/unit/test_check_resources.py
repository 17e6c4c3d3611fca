"""What check says of a host's cores, memory and limits, of one core's speed, and of kernels."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from brigade.check import rehearsal, resources
from brigade.check.checks import Wanted
from brigade.check.probes import resources as probe
from brigade.hosts.job import make
from brigade.train.host import control_groups as groups
from testing.recorded_hosts import Recorded, by_host, results_of

HOST = {
    "cores": 32.0,
    "memory": {"total": 256 * 2**30, "available": 240 * 2**30},
    "shm": {"total": 128 * 2**30, "free": 128 * 2**30},
    "open_files": [1024, 524288],
    "locked_memory": None,
    "infiniband": ["mlx5_0"],
    "verbs": True,
    "ib_off": False,
    "shm_fails": "",
    "limits": {},
}
HOST_ROWS = ("cores", "memory", "/dev/shm", "open files", "limits", "locked memory")


def of_host(name, own, slots=8, gpus=8, environment=None):
    wanted = Wanted({"node1": slots, "node2": slots}, environment=environment or {})
    answers = {"resources.host": {"node1": HOST, "node2": HOST | own}}
    return by_host(name, Recorded(wanted, answers, {host: {"gpus": gpus} for host in wanted.slots}))


def memory(total, available, **more):
    return {"memory": {"total": total, "available": available} | more}


@pytest.mark.parametrize("name", HOST_ROWS)
def test_a_usual_host_is_sound(name):
    assert {result.level for result in of_host(name, {}).values()} == {"green"}


@pytest.mark.parametrize("name, own, level, says", [
    ("cores", {"cores": 4.0}, "yellow", "8 ranks on 4 cores; they need 8 at least"),
    ("cores", {"cores": 16.0}, "yellow", "16 cores, the median host has 32"),
    ("memory", memory(2**33, 2**32), "red", "4.0 of 8.0 GiB are free for 8 ranks, which need 8.0 GiB"),
    ("memory", memory(2**37, 2**37), "yellow", "128 GiB of memory, the median host has 256"),
    ("memory", memory(2**38, 2**30), "red", "for 8 ranks, which need 8.0 GiB at least"),
    ("memory", memory(2**35, 2**34, limit="/sys/fs/cgroup/job_7/memory.max"), "yellow",
     "26.4 GiB at least; /sys/fs/cgroup/job_7/memory.max allows no more"),
    ("/dev/shm", {"shm": {"total": 2**26, "free": 2**26}}, "red", "0.06 of 0.06 GiB are free in /dev/shm"),
    ("/dev/shm", {"shm": {"total": 2**29, "free": 2**29}}, "yellow", "0.50 of 0.50 GiB"),
    ("/dev/shm", {"shm": None}, "grey", "no file system of its own"),
    ("/dev/shm", {"shm": None, "shm_fails": "no such file or directory"}, "red", "made in /dev/shm: no such file"),
    ("/dev/shm", {"shm_fails": "permission denied"}, "red", "no file can be made in /dev/shm: permission denied"),
    ("limits", {"limits": {"f": 2**20}}, "red", "a file may have 0.00098 GiB there (ulimit -f)"),
    ("limits", {"limits": {"f": 2**33}}, "yellow", "a file may have 8.0 GiB there (ulimit -f)"),
    ("limits", {"limits": {"f": 2**40, "v": 2**40, "u": 63_000}}, "green", ""),
    ("limits", {"limits": {"v": 2**29}}, "red", "a process may map 0.5 GiB there (ulimit -v)"),
    ("limits", {"limits": {"v": 2**35, "f": 2**36}}, "yellow", "a process may map 32.0 GiB there (ulimit -v)"),
    ("limits", {"limits": {"d": 2**29, "f": 2**33}}, "red", "a process may allocate 0.5 GiB there (ulimit -d)"),
    ("limits", {"limits": {"u": 100}}, "red", "a user may have 100 processes there (ulimit -u)"),
    ("limits", {"limits": {"t": 1800}}, "red", "a process may compute for 1,800 s there (ulimit -t)"),
    ("open files", {"open_files": [256, 256]}, "yellow", "with a socket for each of 16 ranks it needs 528"),
    ("open files", {"open_files": [100, 100]}, "red", "a process may open 100 files there"),
    ("open files", {"open_files": [180, 524288]}, "green", ""),
    ("locked memory", {"locked_memory": 8 * 2**20}, "red", "a process may lock 8 MiB, and mlx5_0 need more"),
    ("locked memory", {"locked_memory": 8 * 2**20, "infiniband": []}, "green", ""),
    ("locked memory", {"locked_memory": 8 * 2**20, "verbs": False}, "green", ""),
    ("locked memory", {"locked_memory": 8 * 2**20, "ib_off": True}, "green", ""),
])  # fmt: skip
def test_a_host_that_lacks_something_is_named(name, own, level, says):
    found = of_host(name, own)
    assert found["node1"].level == "green"
    assert found["node2"].level == level
    assert says in found["node2"].problem
    assert level in ("green", "grey") or (found["node2"].why and found["node2"].cure)


@pytest.mark.parametrize("free, level, says", [
    (250, "green", ""), (150, "yellow", "need 100.0 GiB at least, and 200 at most"), (90, "red", "90.0 of 256.0 GiB"),
])  # fmt: skip
def test_ranks_on_gpus_need_what_the_planner_says(monkeypatch, free, level, says):
    """What is offloaded, or converted while it is loaded, for instance."""
    monkeypatch.setattr(resources, "host_memory", lambda job: (100.0, 200.0))
    found = of_host("memory", memory(2**38, free * 2**30))["node2"]
    assert found.level == level and says in found.problem
    assert of_host("memory", memory(2**38, 90 * 2**30), gpus=0)["node2"].level == "green"


def test_a_file_may_be_as_large_as_the_recipes_checkpoint(monkeypatch, in_the_repository):
    job = make("recipes/tiny/full.yaml", [], "hostfiles/1x8", None)
    monkeypatch.setattr(resources, "checkpoint_bytes", lambda job: 2.0**38)
    answers = {"resources.host": {"node1": HOST | {"limits": {"f": 2**37}}}}
    (found,) = results_of("limits", Recorded(Wanted({"node1": 8}, job), answers))
    assert found.level == "red" and found.why.endswith("one of this recipe takes 256 GiB")


def test_the_planner_knows_what_a_recipes_host_holds(in_the_repository):
    job = make("recipes/qwen3-8b/full.yaml", ["--ds_config", "ds_configs/zero3_offload.json"], "hostfiles/1x8", None)
    low, high = resources.host_memory(job)
    assert 60 < low < high < 400 and resources.host_memory(None) is None


def test_hosts_may_be_of_several_sizes():
    """Half the GPUs with half the memory, or with all of it."""
    whole, half = {"memory": HOST["memory"]}, memory(2**37, 2**37)
    for own, slots in ((half, 4), (whole, 4), (whole, 8)):
        answers = {"resources.host": {"node1": HOST, "node2": HOST | own}}
        found = results_of("memory", Recorded(Wanted({"node1": 8, "node2": slots}), answers))
        assert {result.level for result in found} == {"green"}


def test_what_docker_gives_is_enough_for_ranks_on_cpus_and_for_one_gpu():
    docker = {"shm": {"total": 2**26, "free": 2**26}}
    assert of_host("/dev/shm", docker, gpus=0)["node2"].level == "green"
    assert of_host("/dev/shm", docker, slots=1)["node2"].level == "green"
    assert of_host("/dev/shm", {"shm": {"total": 2**23, "free": 2**23}}, gpus=0)["node2"].level == "red"


def test_locked_memory_counts_where_nccl_would_use_infiniband():
    little = {"locked_memory": 8 * 2**20}
    assert of_host("locked memory", little, gpus=0)["node2"].level == "green"
    for off in ({"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}):
        assert of_host("locked memory", little, environment=off)["node2"].level == "green"
    assert of_host("locked memory", little, environment={"NCCL_IB_DISABLE": "0"})["node2"].level == "red"


def test_many_ranks_need_a_hard_limit_alone():
    """28 hosts of 8 ranks with the limits of a usual login."""
    assert of_host("open files", {"open_files": [1024, 2**20]}, slots=14 * 8)["node2"].level == "green"


def test_ranks_inherit_the_hard_limit():
    code = """if True:
        import resource, sys
        from brigade.hosts.agent import allow_open_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
        allow_open_files()
        print(resource.getrlimit(resource.RLIMIT_NOFILE))"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "(200, 200)"


def test_this_host_answers():
    found = probe.host()
    assert 1 <= found["cores"] <= os.cpu_count()
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]
    assert not found["shm_fails"]


def test_limits_are_read_as_ulimit_sets_them_and_a_folder_by_trying_it(monkeypatch):
    code = "from brigade.check.probes import resources as r; print(r.host()['limits'])"
    line = ["bash", "-c", 'ulimit -f 2048 -v 2000000 -t 900; exec "$0" -c "$1"', sys.executable, code]
    assert subprocess.check_output(line, text=True).startswith("{'f': 2097152, 'v': 2048000000,")
    monkeypatch.setattr(probe, "SHM", "/nowhere")
    found = probe.host()
    assert found["shm"] is None and found["shm_fails"] == "no such file or directory"
    assert probe._fails("/proc") != ""


def control_groups(monkeypatch, files):
    """files: name -> what it says in each group, from the inside"""

    def read(controller, *names):
        return enumerate(zip(*(files.get(name, []) for name in names), strict=False))

    monkeypatch.setattr(groups, "read", read)


@pytest.mark.parametrize("most, now, stat", [
    ("max", "current", "anon 100\nactive_file 600\ninactive_file 250\nslab_reclaimable 40"),
    ("limit_in_bytes", "usage_in_bytes", "active_file 1\ninactive_file 2\ntotal_active_file 640\ntotal_inactive_file 250"),
])  # fmt: skip
def test_what_a_container_has_read_from_files_is_free(monkeypatch, most, now, stat):
    """It looks full: the kernel keeps what was read until somebody wants the memory."""
    files = {f"memory.{most}": [str(2**20)], f"memory.{now}": [str(2**20 - 10)], "memory.stat": [stat]}
    control_groups(monkeypatch, files)
    found = groups.memory_left()
    assert (found["total"], found["available"]) == (2**20, 10 + 890) and found["limit"].startswith("0/memory.")


def test_files_of_control_groups_are_read_together():
    for _, (most, now) in groups.read("memory", "memory.max", "memory.current"):
        assert most == "max" or most.isdigit()
        assert now.isdigit()


def test_control_groups_limit_cores_and_memory(monkeypatch):
    files = {"memory.max": ["max", str(2**20)], "memory.current": ["0", "1000"]}
    files |= {"memory.stat": ["", "anon 900\nactive_file 0"], "cpu.max": ["max 100000", "150000 100000"]}
    control_groups(monkeypatch, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    assert groups.cores() == 1.5 and groups.memory() == 2**20
    assert groups.memory_left() == {"total": 2**20, "available": 2**20 - 1000, "limit": "1/memory.max"}


@pytest.mark.parametrize("files, available, limit", [
    ({"memory.max": ["1000", "4000"], "memory.current": ["100", "3900"]}, 100, "1/memory.max"),
    ({"memory.max": ["4000", "1000"], "memory.current": ["100", "100"]}, 900, "1/memory.max"),
    ({"memory.max": ["max"], "memory.high": ["500"], "memory.current": ["100"]}, 400, "0/memory.high"),
    ({"memory.limit_in_bytes": ["1000", "1500"], "memory.usage_in_bytes": ["0", "1400"]}, 100, "1/memory.limit_in_bytes"),
    ({"memory.limit_in_bytes": [str(2**63 - 4096)], "memory.usage_in_bytes": ["0"]}, None, ""),
    ({"memory.max": ["1000"], "memory.current": ["1100"]}, 0, "0/memory.max"),
])  # fmt: skip
def test_every_control_group_above_counts(monkeypatch, files, available, limit):
    """A large one may be full because of others, and memory.high makes processes wait."""
    control_groups(monkeypatch, files | {"memory.stat": ["", ""]})
    found = groups.memory_left()
    sizes = [size for file in ("memory.max", "memory.limit_in_bytes") for size in files.get(file, [])]
    own = [int(size) for size in sizes if size != "max"]
    assert groups.memory() == min([*own, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")])
    assert found["limit"] == limit and (available is None or found["available"] == available)


# ---- one core's speed --------------------------------------------------------------------------------------------
class Timed(Recorded):
    """Hosts that answer the next of their times; `asked` has the hosts of per_host question."""

    def __init__(self, seconds, machines=None):
        hello = {host: {"machine": f"{(machines or {}).get(host, host)} net"} for host in seconds}
        super().__init__(Wanted(dict.fromkeys(seconds, 1)), {}, hello)
        self.seconds, self.asked = {host: list(times) for host, times in seconds.items()}, []

    async def ask(self, probe, seconds=10, per_host=None, **arguments):
        hosts = sorted(per_host or self.hello)
        self.asked.append(hosts)
        times = {host: self.seconds[host].pop(0) for host in hosts}
        return {host: {"seconds": took, "computing": min(took, 0.2)} for host, took in times.items()}


def speeds(seconds, machines=None):
    hosts = Timed(seconds, machines)
    return hosts, by_host("core speed", hosts)


def test_a_host_half_as_fast_is_found_also_among_two():
    for count in (2, 3, 4):
        _, found = speeds({f"node{n}": [0.2, 0.2] for n in range(1, count)} | {"slow": [0.4, 0.41]})
        assert {host: result.level for host, result in found.items() if result.level != "green"} == {"slow": "red"}
    assert found["slow"].amount == 0.5
    assert "it waits" in found["slow"].cure


def test_a_host_that_was_disturbed_once_is_sound():
    hosts, found = speeds({"node1": [0.2], "node2": [0.2], "node3": [0.5, 0.2]})
    assert {result.level for result in found.values()} == {"green"}
    assert hosts.asked == [["node1", "node2", "node3"], ["node3"]]


def test_containers_of_one_machine_may_wait_for_one_another():
    """Here each computes for 0.2 s at most, however long it waits."""
    times = {"a": [0.2, 0.2], "b": [0.9, 0.9], "c": [0.2, 0.2]}
    assert {result.level for result in speeds(times, dict.fromkeys(times, "one"))[1].values()} == {"green"}
    assert speeds(times)[1]["b"].level == "red"


def test_arithmetic_takes_time():
    began = time.monotonic()
    found = probe.core_speed(1)
    assert 0 < found["computing"] <= found["seconds"] * 1.1
    assert found["seconds"] <= time.monotonic() - began


# ---- kernels ---------------------------------------------------------------------------------------------------------
HOSTS = {"node1": 1, "node2": 1}
KEY = {"device": {"name": "NVIDIA H100 80GB HBM3"}}
ROW = {"kind": "attention", "ms": 1.0, "why": ""}


def proof(**statuses):
    rows = {path: ROW | {"status": status, "why": f"it is {status}"} for path, status in statuses.items()}
    return {"key": KEY, "paths": rows, "fastest": {"attention": "sdpa"}, "seconds": 4.0}


def judged(answers, gpus=1, recipe="recipes/tiny/full.yaml", name="kernels"):
    job = recipe and make(recipe, [], None, dict(HOSTS))
    hosts = Recorded(Wanted(dict(HOSTS), job), {"actions.prove": answers}, {host: {"gpus": gpus} for host in HOSTS})
    return results_of(name, hosts)


@pytest.mark.parametrize("name", ["kernels", "all kernels"])
def test_what_is_proven_is_sound_and_the_fastest_is_named(name):
    proven = proof(sdpa="proven", eager="slower", flash_attention_3="absent")
    found = judged(dict.fromkeys(HOSTS, proven), name=name)
    assert [result.level for result in found] == ["green", "green"]
    assert found[0].value == "2 proven, fastest sdpa"


def test_a_path_that_computes_something_else_is_a_fault_of_that_host():
    wrong = proof(sdpa="proven", flash_attention_2="wrong")
    found = {result.host: result for result in judged({"node1": proof(sdpa="proven"), "node2": wrong})}
    assert (found["node1"].level, found["node2"].level) == ("green", "red")
    assert "flash_attention_2 on NVIDIA H100 80GB HBM3: it is wrong" in found["node2"].problem


@pytest.mark.parametrize("answer, level", [
    (proof(sdpa="proven", varlen="failed"), "yellow"),
    ({"problem": "recipes/x.yaml: no config.json"}, "grey"),
], ids=["a path breaks", "no model"])  # fmt: skip
def test_a_path_that_breaks_is_a_warning_and_a_model_that_cannot_be_had_no_fault_of_the_host(answer, level):
    found = judged(dict.fromkeys(HOSTS, answer))
    assert [result.level for result in found] == [level, level]


@pytest.mark.parametrize(
    ("gpus", "recipe", "says"), [(0, "recipes/tiny/full.yaml", "no GPU"), (1, None, "needs a recipe")]
)
def test_what_cannot_be_known_says_why(gpus, recipe, says):
    found = judged({}, gpus, recipe)
    assert {result.level for result in found} == {"grey"}
    assert says in found[0].problem


def test_no_recipe_with_images_is_rehearsed():
    found = judged({}, recipe="recipes/qwen3-vl-8b/full.yaml", name="dress rehearsal")
    assert [result.level for result in found] == ["grey", "grey"] and "tiny-vision" in found[0].problem


def test_a_rehearsal_gets_the_variables_that_the_checks_get(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    job = make("recipes/tiny/full.yaml", [], str(tmp_path / "hosts"))
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    hosts = Recorded(Wanted(job.hosts, job, {"MINE": "1"}), {}, {"node1": {}})
    code, said = asyncio.run(rehearsal._launch(job, hosts, "logs"))
    assert code == 0 and "--env MINE" in said
