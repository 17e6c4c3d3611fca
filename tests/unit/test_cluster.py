"""Who started us, the hostfile's grammar, and that each file in hostfiles/ is what its name says."""

import socket

import pytest
from deepspeed.launcher.runner import fetch_hostfile
from hypothesis import given
from hypothesis import strategies as st

from brigade.errors import UserError
from brigade.train.distributed import process_group
from brigade.train.host.cluster import World, world_from_environment
from brigade.train.recipe.hostfile import read_hostfile
from testing.shipped import shipped

# What each launcher puts into the environment of rank 5 of 8 on two hosts (seen with torch 2.13, DeepSpeed 0.19.8,
# Accelerate 1.15). accelerate launch starts torchrun's elastic agent.
COMMON = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
LAUNCHERS = {
    "torchrun": {"LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none"},
    "deepspeed": {"LOCAL_SIZE": "4", "CROSS_RANK": "1", "CROSS_SIZE": "2"},
    "accelerate": {"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "ACCELERATE_MIXED_PRECISION": "no"},
    "environment": {"LOCAL_WORLD_SIZE": "4"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_world_of_each_launcher(launcher):
    world = world_from_environment(COMMON | LAUNCHERS[launcher])
    assert world == World(5, 1, 8, 4, socket.gethostname(), launcher, world.host_count)
    assert world.hosts == 2 and not world.is_main_rank


@pytest.mark.parametrize("hosts, numbers, told, problem", [
    ("aa", (0, 1), {}, ""),  # both on this host, by hand
    ("aa", (0, 0), {}, "host a 2 of 2 ranks are here, with LOCAL_RANK 0, 0, and LOCAL_WORLD_SIZE is 2"),
    ("ab", (0, 0), {}, "host a 1 of 2 ranks are here, with LOCAL_RANK 0, and LOCAL_WORLD_SIZE is 2"),
    ("ab", (0, 0), {"LOCAL_WORLD_SIZE": "1"}, ""),
    ("ab", (0, 0), {"LOCAL_SIZE": "1"}, ""),
    ("aab", (0, 1, 0), {"LOCAL_SIZE": "2"}, "host b 1 of 3 ranks are here, with LOCAL_RANK 0, and LOCAL_WORLD_SIZE is 2"),
    ("aa", (0, 0), {"LOCAL_WORLD_SIZE": "1"}, "host a 2 of 2 ranks"),  # of two agents, or two hosts of one name
    ("aa", (1, 2), {"LOCAL_WORLD_SIZE": "2"}, "with LOCAL_RANK 1, 2"),
])  # fmt: skip
def test_the_ranks_of_a_host_are_as_each_is_told(hosts, numbers, told, problem, mistake):
    """Each host would have left half of its files out of a checkpoint."""
    size = world_from_environment({"RANK": "0", "WORLD_SIZE": str(len(hosts)), **told}).local_size
    places = [(host, number, size) for host, number in zip(hosts, numbers, strict=True)]
    if problem:
        said = " ".join(mistake(process_group._check_places, places).split())
        assert problem in said and "LOCAL_WORLD_SIZE for each rank" in said
    else:
        process_group._check_places(places)


@pytest.mark.parametrize("environment, problem", [
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, "SLURM_STEP_NUM_TASKS=4 this is one of several tasks"),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 this is one of several tasks"),
    ({"SLURM_STEP_NUM_TASKS": "4", "RANK": "", "WORLD_SIZE": ""}, "unset SLURM_STEP_NUM_TASKS"),
    ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK=first it is not a whole number"),
])  # fmt: skip
def test_what_would_train_alone_or_is_no_number_is_refused(environment, problem, mistake):
    assert problem in " ".join(mistake(world_from_environment, environment).split())


def test_hosts_of_different_sizes_are_counted_by_the_launcher():
    first = dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}
    told = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2"}
    assert world_from_environment(COMMON | first | told).hosts == 2


def test_deepspeeds_launcher_sets_what_we_read():
    import inspect

    from deepspeed.launcher import launch

    source = inspect.getsource(launch.main)
    assert 'current_env["LOCAL_SIZE"]' in source and "current_env[CROSS_SIZE]" in source
    assert launch.CROSS_SIZE == "CROSS_SIZE"


@pytest.mark.parametrize("environment", [
    {}, {"LOCAL_RANK": "0"}, {"ACCELERATE_MIXED_PRECISION": "no"}, {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""},
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
])  # fmt: skip
def test_a_lone_process(environment):
    world = world_from_environment(environment)
    assert (world.rank, world.local_rank, world.size, world.local_size, world.launcher) == (0, 0, 1, 1, "python")
    assert world.is_main_rank and world.hosts == 1


def test_exactly_one_rank_speaks():
    worlds = [world_from_environment(COMMON | LAUNCHERS["torchrun"] | {"RANK": str(rank)}) for rank in range(8)]
    assert [world.is_main_rank for world in worlds] == [True] + [False] * 7


# ---- hostfiles ---------------------------------------------------------------------------------------------------
names = st.from_regex(r"[a-z0-9]([a-z0-9.\-]{0,12}[a-z0-9])?", fullmatch=True)
hosts = st.dictionaries(names, st.integers(1, 64), min_size=1, max_size=8)
space = st.sampled_from([" ", "  ", "\t", " \t "])
noise = st.sampled_from(["", "   ", "# a comment", "  # node9 slots=8", "#node1 slots=1"])


@given(hosts, st.data())
def test_valid_files_come_back_whole_and_in_order(folder, hosts, data):
    lines = []
    for name, slots in hosts.items():
        lines += data.draw(st.lists(noise, max_size=2))
        lines.append(f"{data.draw(st.sampled_from(['', ' ']))}{name}{data.draw(space)}slots={slots}")
    path = folder / "valid"
    path.write_text("\n".join(lines) + data.draw(st.sampled_from(["", "\n", "\n\n"])))
    assert list(read_hostfile(path).items()) == list(hosts.items())


@given(hosts)
def test_deepspeed_reads_the_same(folder, hosts):
    path = folder / "both"
    path.write_text("".join(f"{name} slots={slots}\n" for name, slots in hosts.items()))
    assert dict(fetch_hostfile(str(path))) == read_hostfile(path)


BROKEN = [
    "node1: slots=8", "node1 slots=8x", "node1 slots = 8", "node1 slots=", "node1 slots=0", "node1 slots=-1",
    "node1 slots=8.5",
    "node1", "slots=8", "node1 8", "node1 slots=8 slots=8", "node1 slots=8 # spare", "node1 slot=8",
    "node1,node2 x slots=8", '"node1" slots=8', "'node1' slots=8", "node-[1-4] slots=8", "node1,node2 slots=8",
    "node1 max_slots=8", "node1 slots=8,",
]  # fmt: skip


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_line_is_named(tmp_path, mistake, line):
    path = tmp_path / "hosts"
    path.write_text(f"# two hosts\nnode0 slots=8\n\n{line}\n")
    message = mistake(read_hostfile, path)
    assert f"{path}, line 4" in message and repr(line.strip()) in message and "slots=8" in message.splitlines()[-1]


@given(hosts, st.data())
def test_a_host_that_stands_twice_is_an_error_that_names_line_and_host(folder, hosts, data):
    again = data.draw(st.sampled_from(sorted(hosts)))
    path = folder / "twice"
    path.write_text("".join(f"{name} slots={slots}\n" for name, slots in hosts.items()) + f"{again} slots=3\n")
    with pytest.raises(UserError, match=f"line {len(hosts) + 1}") as caught:
        read_hostfile(path)
    assert repr(again) in caught.value.problem


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_file_is_read_or_is_a_users_mistake(folder, content):
    path = folder / "any"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    try:
        found = read_hostfile(path)
    except UserError:
        return
    assert found and all(slots > 0 for slots in found.values())


def test_a_byte_order_mark_is_refused_since_deepspeed_takes_it_for_a_part_of_the_name(tmp_path, mistake):
    path = tmp_path / "hosts"
    path.write_text("node1 slots=8\n", encoding="utf-8-sig")
    assert list(fetch_hostfile(str(path))) == ["\ufeffnode1"]
    message = mistake(read_hostfile, path)
    assert f"{path}, line 1" in message and "byte order mark" in message and "sed -i" in message
    path.write_text("node1 slots=8\n", encoding="utf-16")
    assert "is not text" in mistake(read_hostfile, path)


def test_missing_and_empty_files_and_directories_are_not_called_by_each_others_name(tmp_path, mistake):
    missing = mistake(read_hostfile, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in missing and "No such file" in missing
    assert "cannot be read" in mistake(read_hostfile, tmp_path)
    (tmp_path / "empty").write_text("# nothing\n\n")
    assert "names no host" in mistake(read_hostfile, tmp_path / "empty")


# ---- the files of hostfiles/ -----------------------------------------------------------------------------------------
HOSTFILES = shipped("hostfiles/*")


@pytest.mark.parametrize("path", HOSTFILES, ids=lambda path: path.name)
def test_hostfile_is_as_named(path):
    hosts, slots = map(int, path.name.split("x"))
    names = [f"node{number}" for number in range(1, hosts + 1)] if hosts > 1 else ["localhost"]  # which needs no ssh
    assert fetch_hostfile(str(path)) == read_hostfile(path) == dict.fromkeys(names, slots)
