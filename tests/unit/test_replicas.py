"""Replicas that meet every H steps: which ranks one has, what cannot be one, and what is sent between them."""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch

from brigade.hosts.usage import heartbeats
from brigade.train.distributed import heartbeat
from brigade.train.distributed.process import this_process
from brigade.train.host.cluster import World
from brigade.train.local import peers as replicas
from brigade.train.local.local_steps import Rounds
from brigade.train.local.outer import cut, fragment_of
from brigade.train.local.peers import BLOCK, decode, encode
from brigade.train.run import directory as runs
from brigade.train.run import events, owner
from brigade.train.strategy import choose
from brigade.train.strategy.replicas import check_length
from brigade.train.watch import stopping as stops
from brigade.train.watch import watch_thread
from testing.strategies import FSDP2, changed, hsdp

ON = ["--sync_every", "5"]


def ranks(size, per_host, number=0):
    return World(number, number % per_host, size, per_host, f"node{number // per_host}", "torchrun")


# ---- what a replica is ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size, per_host, flags, replicas, kind", [
    (2, 1, [], 2, "single"),  # a rank on each host
    (4, 4, [], 4, "single"),  # one host
    (4, 2, [], 2, "ddp"),  # hosts of several ranks
    (4, 2, ["--sync_replica", "rank"], 4, "single"),
    (4, 2, ["--ds_config", "ds_configs/zero2.json"], 2, "zero2"),
    (8, 4, ["--accelerate_config", "FSDP2"], 2, "fsdp2"),
    (8, 4, ["--accelerate_config", "HSDP"], 4, "fsdp2"),  # its groups
])  # fmt: skip
def test_what_a_replica_is(load, tmp_path, size, per_host, flags, replicas, kind):
    for name, config in (("FSDP2", FSDP2), ("HSDP", hsdp(4, 2))):
        (tmp_path / name).write_text(json.dumps(config))
    flags = [str(tmp_path / word) if word in ("FSDP2", "HSDP") else word for word in flags]
    strategy = choose(load(*ON, *flags), ranks(size, per_host), {})
    assert (strategy.replicas, strategy.kind) == (replicas, kind)


def test_each_rank_knows_its_place():
    places = [ranks(8, 4, number).part(4) for number in range(8)]
    assert [(place.replica, place.rank, place.local_rank, place.size, place.local_size) for place in places] == [
        (number // 2, number % 2, number % 2, 2, 2) for number in range(8)
    ]
    assert [place.is_main_rank for place in places] == [True] + 7 * [False]


@pytest.mark.parametrize("size, per_host, parts, hosts", [
    (8, 2, 2, (2, 2)),
    (6, 3, 3, (1, 2, 1)),  # HSDP's groups: the second has a rank on each host
    (12, 4, 2, (2, 2)),  # one host is both's
    (9, 9, 3, (1, 1, 1)),
])  # fmt: skip
def test_a_replica_knows_its_ranks_on_each_host(size, per_host, parts, hosts):
    """The first of them leads there, and all together bring the files of a checkpoint."""
    places = [ranks(size, per_host, number).part(parts) for number in range(size)]
    for replica in range(parts):
        of_replica = [place for place in places if place.replica == replica]
        assert [place.rank for place in of_replica] == list(range(size // parts))
        assert {place.hosts for place in of_replica} == {hosts[replica]}
        for host in dict.fromkeys(place.host for place in of_replica):
            here = [(place.local_rank, place.local_size) for place in of_replica if place.host == host]
            assert here == [(number, len(here)) for number in range(len(here))]


# ---- bad input -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags, words", [
    (["--outer_optim", "nesterov"], ["flag --outer_optim", "without sync_every"]),
    (["--outer_momentum", "0.8"], ["flag --outer_momentum", "without sync_every"]),
    (["--sync_precision", "int8"], ["flag --sync_precision", "without sync_every"]),
    ([*ON, "--outer_learning_rate", "0.5"], ["flag --outer_learning_rate", "average", "nesterov"]),
    ([*ON, "--sync_fragments", "6"], ["flag --sync_fragments", "6 fragments in 5 steps"]),
    ([*ON, "--nonfinite", "rollback"], ["flag --nonfinite", "only one replica back"]),
    ([*ON, "--loss_spike", "3"], ["flag --loss_spike", "only one replica back"]),
    ([*ON, "--streaming", "--max_steps", "9"], ["flag --streaming", "every window"]),
    ([*ON, "--sync_replica", "host"], ["flag --sync_every", "a single replica"]),
    ([*ON, "--ddp_comm_hook", "bf16"], ["flag --ddp_comm_hook", "sync_precision"]),
    ([*ON, "--sync_replica", "rank", "--ddp_comm_hook", "power_sgd"], ["flag --ddp_comm_hook", "sync_precision"]),
    ([*ON, "--ds_config", "ds_configs/zero3_nvme.json"], ["flag --ds_config", "NVMe"]),
    ([*ON, "--ds_config", "ds_configs/zero1_tp2.json"], ["flag --ds_config", "tensor 2"]),
    ([*ON, "--accelerate_config", "accelerate_configs/fsdp2_tp2_1x4.yaml"], ["flag --accelerate_config", "tensor 2"]),
])  # fmt: skip
def test_what_cannot_be(load, mistake, flags, words):
    said = mistake(choose, load(*flags), ranks(4, 4), {})
    assert all(word in said for word in words), said


def test_a_replica_of_several_ranks_takes_a_hook(load):
    for size, per_host, also in [(4, 2, []), (1, 1, ["--rehearse"])]:  # where it is not known yet, it is not refused
        assert choose(load(*ON, "--ddp_comm_hook", "bf16", *also), ranks(size, per_host), {})


def test_a_single_rank_meets_nobody(load, mistake):
    said = mistake(choose, load(*ON), ranks(1, 1), {})
    assert "a single replica has nobody to meet" in said and "sync_replica" not in said  # it would not help one rank
    assert "sync_replica: rank" in mistake(choose, load(*ON, "--sync_replica", "host"), ranks(2, 2), {})
    assert choose(load(*ON, "--rehearse"), ranks(1, 1), {}).replicas == 1  # it starts its own ranks


def test_hosts_of_different_sizes(load, mistake):
    assert "hosts of different sizes" in mistake(choose, load(*ON), ranks(5, 2), {})


def test_a_round_is_no_longer_than_the_run_or_an_epoch(load, mistake):
    check_length(load(*ON), 5, 5)
    assert "the run has 4 steps" in mistake(check_length, load(*ON), 4, 9)
    assert "an epoch has 3 steps" in mistake(check_length, load(*ON), 30, 3)


def test_nvme_is_told_by_its_file(load, mistake):
    config = changed("zero_optimization.offload_optimizer", {"device": "nvme", "nvme_path": "auto"})
    assert "NVMe" in mistake(choose, load(*ON, cluster={"ds_config": config}), ranks(4, 4), {})


# ---- what is sent ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("precision", "width", "error"), [("fp32", 4, 0.0), ("bf16", 2, 2**-8), ("int8", 1 + 4 / 256, 1 / 254)]
)
def test_bytes_and_rounding(precision, width, error):
    """bf16's error is relative to each value, int8's to the largest of its block."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3, 4 * BLOCK, generator=draw) * torch.tensor([[1.0], [1e-6], [1e4]])
    sent = encode(values, precision)
    assert sent.dtype == torch.uint8 and sent.numel() == width * values.numel()
    blocks = values.view(3, -1, BLOCK).abs().amax(-1, keepdim=True).expand(-1, -1, BLOCK).reshape(3, -1)
    scale = values.abs() if precision == "bf16" else blocks
    assert ((decode(sent, precision) - values).abs() <= (error + 1e-6 * bool(error)) * scale).all()


def test_int8_hides_no_value_that_is_not_finite():
    values = torch.ones(1, 2 * BLOCK)
    values[0, 3] = float("inf")
    assert decode(encode(values, "int8"), "int8")[0, :BLOCK].isnan().any()
    assert not encode(torch.zeros(1, BLOCK), "int8").any()


def test_layers_go_round_the_fragments():
    layers = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(4)]
    names = ["model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight"]
    assert [fragment_of(name, 3) for name in names] == [0, 0, 1, 2, 0, 2, 2]
    assert {fragment_of(name, 1) for name in names} == {0}


def test_equal_parts_of_ranges_that_follow_each_other():
    memory = torch.arange(9.0)
    kept = [(("a", 0, 5), memory[:5]), (("b", 0, 4), memory[5:])]
    parts = [cut(kept, first, first + 3) for first in (0, 3, 6, 9)]
    ranges = [[range_ for range_, _ in part] for part in parts]
    assert ranges == [[("a", 0, 3)], [("a", 3, 5), ("b", 0, 1)], [("b", 1, 4)], []]
    flats = [flat for part in parts for _, flat in part]
    assert torch.cat(flats).equal(memory)
    assert {flat.untyped_storage().data_ptr() for flat in flats} == {memory.untyped_storage().data_ptr()}, "no copies"


# ---- one of several in a run -------------------------------------------------------------------------------------------
def replica_s_run(world, directory, every=50):
    recipe = SimpleNamespace(training=SimpleNamespace(sync_every=every))
    settings = SimpleNamespace(recipe=recipe)
    return SimpleNamespace(settings=settings, strategy=SimpleNamespace(replicas=2), world=world, directory=directory)


@pytest.mark.parametrize(("size", "number"), [(4, 6), (1, 1)])
def test_a_signal_is_told_by_the_launchers_number_of_its_rank(tmp_path, monkeypatch, size, number):
    stopping = stops.Stopping(replica_s_run(ranks(2 * size, size, number).part(2), tmp_path), None)
    monkeypatch.setattr(this_process.signals, "asked", int(signal.SIGTERM))
    state = SimpleNamespace(global_step=48, max_steps=49, is_world_process_zero=False)
    stopping.on_step_end(None, state, SimpleNamespace())
    assert stopping.by == f"SIGTERM to rank {number}"


def test_the_grace_of_a_stop_holds_one_synchronisation_for_each_that_comes(tmp_path):
    """Steps of a second, a synchronisation of a minute every 50 of them: two such steps and a round."""
    (tmp_path / runs.RECORD).touch()
    stopping, rounds, now = stops.Stopping(replica_s_run(ranks(2, 1).part(2), tmp_path), None), Rounds(50), 100.0
    for step in range(1, 300):
        now += 61 if step > 1 and step % 50 == 1 else 1
        stopping._measure(now, step)
        stopping.round = rounds.longest_after(now)
    assert stopping.round == 49 + 61 and stopping.grace <= stops.MARGIN + 2 * 61 + stopping.round
    assert stopping.grace > 150 and events.slowest(tmp_path, "grace") == pytest.approx(stopping.grace, abs=0.1)


@pytest.mark.parametrize("size, number, first, later", [
    (2, signal.SIGTERM, 10, 12),  # whoever sends it kills soon
    (2, signal.SIGINT, 900, 60),  # as long as a step may take that is no hang: the first one, and one after short ones
    (1, signal.SIGINT, math.inf, math.inf),  # nobody else could be gone
    (1, signal.SIGTERM, math.inf, math.inf),
])  # fmt: skip
def test_a_stop_waits_for_a_step_that_is_longer_than_the_ones_before(tmp_path, size, number, first, later):
    run = replica_s_run(ranks(size, 1), tmp_path)
    run.strategy.replicas = 1
    stopping = stops.Stopping(run, SimpleNamespace(resumed=0.0))
    this_process.heartbeat.begin("auto")
    assert stopping.deadline(100.0, number) == 100 + first
    for phase in heartbeat.OF_A_STEP:
        this_process.heartbeat.page[heartbeat.LONGEST + phase] = 0.5
    stopping.longest = 1.0
    assert stopping.deadline(100.0, number) == 100 + later
    stopping.meter.resumed = None  # an evaluation goes on
    assert stopping.deadline(100.0, number) == math.inf
    this_process.heartbeat.end()


def test_the_launchers_world_is_whole_again(monkeypatch):
    """deepspeed's launcher sets no LOCAL_WORLD_SIZE; a replica has one."""
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(replicas, "_renew", lambda *_: None)
    monkeypatch.setattr(this_process, "store", torch.distributed.HashStore())
    peers = object.__new__(replicas.Peers)
    peers.gather, peers.before = (lambda value: [value]), {"RANK": "3", "WORLD_SIZE": "4"}
    peers.rejoin()
    assert (os.environ["RANK"], os.environ.get("LOCAL_WORLD_SIZE")) == ("3", None)


def test_what_was_taken_is_released(tmp_path):
    """Where hosts have a directory each, a replica's own is another than the one that its rank took."""
    own = tmp_path / "replica-1"
    own.mkdir()
    run = SimpleNamespace(directory=own, owned=owner.take(tmp_path))
    runs.release(run)
    runs.release(run)  # once is enough
    assert not (tmp_path / owner.FILE).exists()


def test_top_sees_the_ranks_of_all_replicas(tmp_path):
    for number in range(4):
        world = ranks(4, 2, number).part(2)
        own = tmp_path / f"replica-{world.replica}" if world.replica else tmp_path
        watch_thread.Watch(replica_s_run(world, own)).write()
    seen = heartbeats(tmp_path)
    hosts = {rank: says["host"] for rank, says in seen.items()}
    assert hosts == {"0": "node0", "1": "node0", "2": "node1", "3": "node1"}


def test_what_other_replicas_leave_in_a_directory_is_no_run(tmp_path):
    """A replica that began later than the others once found their files there, and refused to begin."""
    (tmp_path / "replica-1").mkdir()
    watch_thread.Watch(replica_s_run(ranks(4, 2, 2).part(2), tmp_path / "replica-1")).write()
    assert [*tmp_path.glob("heartbeats/*")] and not runs._occupied(tmp_path)
    (tmp_path / "notes").touch()
    assert runs._occupied(tmp_path)
