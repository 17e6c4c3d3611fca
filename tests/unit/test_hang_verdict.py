"""Who is blamed for a hang, and in which words."""

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, pipelining

from brigade.train.distributed import process_group
from brigade.train.distributed.hang_verdict import Silent, names, sentence
from brigade.train.upstream import flight_records

REDUCE = {"collective": "nccl:_reduce_scatter_base", "number": 812, "group": "0"}


def ranks(*others, **last):
    """Ranks on two hosts in step 41, of which the last one is told apart."""
    told = [*others, last]
    usual = {"phase": "backward", "step": 41}
    return [Silent(rank, f"node{1 + rank // 2}", **(usual | one)) for rank, one in enumerate(told)]


@pytest.mark.parametrize("last, says", [
    ({"phase": "data", "collective": ""},
     "rank 3 on node2 has waited in data loading since step 41; ranks 0-2 wait for it in reduce-scatter"),
    ({"phase": "measuring", "collective": ""},
     "rank 3 on node2 has hung in Brigade's own measurement of its device (a product of two matrices) since step 41; "
     "ranks 0-2 wait for it in reduce-scatter"),
    ({"phase": "forward", "step": 40, "stopped": True, "answers": False},
     "rank 3 on node2 has been stopped (SIGSTOP, or a debugger) since step 40; ranks 0-2 wait for it in reduce-scatter"),
    ({"answers": False},
     "rank 3 on node2 has not answered since step 41; last seen in the backward pass; "
     "ranks 0-2 wait for it in reduce-scatter"),
    (REDUCE | {"number": 811}, "rank 3 on node2 has waited in reduce-scatter, number 811, since step 41; "
                               "ranks 0-2 wait for it in reduce-scatter"),
    (REDUCE | {"collective": "nccl:all_reduce"},
     "rank 3 on node2 has waited in all-reduce, number 812, since step 41; ranks 0-2 wait for it in reduce-scatter"),
    (REDUCE, "ranks 0-3 have waited for each other in reduce-scatter, number 812, since step 41: the network between them, "
             "or a device, has stopped without an error"),
], ids=["data", "measuring", "stopped", "dumb", "behind", "elsewhere", "nobody"])  # fmt: skip
def test_the_culprit_is_who_is_not_where_the_others_wait(last, says):
    assert sentence(ranks(REDUCE, REDUCE, REDUCE, **last)) == says


def test_without_records_the_one_that_has_come_least_far_is_the_culprit():
    assert sentence(ranks({}, {}, {}, phase="forward")).startswith(
        "rank 3 on node2 has hung in the forward pass since step 41"
    )
    gathering = {"phase": "optimizer"}  # what the others measured
    said = sentence(ranks(gathering, gathering, gathering, phase="measuring"))
    assert said.startswith("rank 3 on node2 has hung in Brigade's own measurement")


def test_one_rank_that_waits_while_all_others_compute_is_not_to_blame():
    """Three ranks sleep in their data loaders: the one in a collective waits for them."""
    asleep = {"phase": "data", "collective": ""}
    said = sentence(ranks(asleep, asleep, asleep, **REDUCE))
    waiting = "ranks 0-2 on node1, node2 have waited in data loading since step 41"
    assert said == f"{waiting}; rank 3 waits for them in reduce-scatter"


def test_in_a_pipeline_the_next_stage_waits_for_the_culprit_and_the_other_pipelines_for_both():
    """Ranks 0 and 1 are a pipeline, 2 and 3 another one: each stage adds up its gradients with that of the other."""
    exchange = {"phase": "forward", "collective": flight_records.EXCHANGE}
    others = [{"collective": "gloo:all_reduce", "number": 3, "group": group} for group in ("3", "4")]
    for phase, what in (("data", "waited in data loading"), ("forward", "hung in the forward pass")):
        told = sentence(ranks({"phase": phase, "collective": ""}, exchange, *others[:1], **others[1]))
        assert told == f"rank 0 on node1 has {what} since step 41; ranks 1-3 wait for it in all-reduce"
    waiting = "ranks 0-1 have waited for each other in the exchange between stages since step 41: the network"
    assert sentence(ranks(exchange, **exchange)).startswith(waiting)


def test_a_stage_that_waits_for_another_is_in_an_exchange_though_gloo_records_none():
    recorded, until, told = {"fr": {"entries": [{"retired": True}]}}, threading.Lock(), []
    until.acquire()

    def look():
        try:
            told.append(flight_records.waits_in(recorded))
        finally:
            until.release()

    threading.Timer(0.2, look).start()
    pipelining.schedules._wait_batch_p2p([SimpleNamespace(wait=until.acquire)])
    assert told == [{"collective": flight_records.EXCHANGE}]
    assert flight_records.waits_in(recorded) == {"collective": ""} and flight_records.waits_in({}) == {}


def test_names():
    assert [names([3]), names([2, 0, 1]), names([0, 1, 5])] == ["rank 3", "ranks 0-2", "ranks 0-1, 5"]


def test_a_rank_that_waits_for_one_that_writes_is_in_a_wait_for_all_ranks(monkeypatch):
    """Rank 0 writes the last model, or no longer does: whoever waits for it, without a clock, is not the culprit."""
    store, told = HashStore(), []
    monkeypatch.setattr(process_group, "_get_default_store", lambda: store)
    monkeypatch.setattr(process_group.dist, "get_world_size", lambda: 2)

    def look_and_come():
        while not store.check(["brigade/waits"]):
            time.sleep(0.01)
        time.sleep(0.05)
        told.append(flight_records.waits_in({"fr": {"entries": [{"retired": True}]}}))
        store.add("brigade/waits", 1)

    writer = threading.Thread(target=look_and_come)
    writer.start()
    process_group.wait_for_all()
    writer.join()
    assert told == [{"collective": "the wait for all ranks"}]
    late = [Silent(0, "a", "checkpoint", 9, collective=""), Silent(1, "b", "checkpoint", 9, **told[0])]
    assert sentence(late) == (
        "rank 0 on a has waited in saving since step 9; rank 1 waits for it in the wait for all ranks"
    )
