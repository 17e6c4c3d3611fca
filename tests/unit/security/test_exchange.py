"""What ranks tell each other: every type that is sent arrives as it was, and forged bytes run nothing."""

import base64
import collections
import math
import pathlib
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from brigade.errors import UserError
from brigade.train.distributed import exchange, ranks
from brigade.train.host.cluster import World
from brigade.train.local import hand_over
from brigade.train.local.elastic import ElasticPeers
from brigade.train.local.peers import Peers
from brigade.train.recipe.batch import Batch
from brigade.train.watch.measured_states import States
from testing.small_checkpoints import Forged

ROOT = pathlib.Path(__file__).parents[3]
SENT = {
    "nothing": None,
    "truth": [True, False],
    "numbers": [0, -1, 2**80, 0.1, -0.0, 1e-320, math.inf, -math.inf],
    "text": ["", "Zürich \0 \x1b[2J \ud800", "a" * 10_000],
    "what a host found": (("node1", 4711), ["checkpoint-3", None]),
    "token ids of answers": {0: [1, 2], 7: []},
    "files and sizes": ("node1", {"model.safetensors": 2**40}),
    "nested keys": {("a", 1): {None: ()}, "dict": [["tuple", 1]], "tuple": {}},
}
REFUSED = {
    "path": pathlib.Path("/"),
    "set": {1},
    "bytes": b"",
    "tensor": torch.ones(1),
    "numpy's integer": np.int64(1),
    "object": UserError("a", "b", "c"),
    "class": {"key": [int]},
}


def same(one, other):
    """Equal, and of equal types all the way down."""
    if type(one) is not type(other) or (hasattr(one, "__len__") and len(one) != len(other)):
        return False
    if isinstance(one, dict):
        return same([*one.items()], [*other.items()])
    return all(map(same, one, other)) if isinstance(one, list | tuple) else repr(one) == repr(other)


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_arrives_as_it_was(name):
    assert same(exchange.decode(exchange.encode(SENT[name]), "rank 1"), SENT[name])
    assert same(ranks.gather(SENT[name]), [SENT[name]]), "of one rank, too"


def test_what_derives_from_a_builtin_type_arrives_as_that():
    value = {"loss": np.float64(0.1), "options": collections.OrderedDict(a=1), "shape": torch.Size([2, 3])}
    expected = {"loss": 0.1, "options": {"a": 1}, "shape": (2, 3)}
    assert same(exchange.decode(exchange.encode(value), "rank 1"), expected)


def test_not_a_number_arrives():
    assert math.isnan(exchange.decode(exchange.encode(math.nan), "rank 1"))


@pytest.mark.parametrize("value", [
    Batch(8, 2, 4, 1, 1e-5, "why"), States(1, 2, 3, shapes=((2, 3), ()), frozen=(((4,), 1),)),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_records_are_sent_as_their_values(value):
    (arrived,) = ranks.gather(vars(value))
    assert type(value)(**arrived) == value


@pytest.mark.parametrize("name", REFUSED)
def test_other_types_are_refused_where_they_are_sent(name):
    with pytest.raises(TypeError, match="ranks do not send each other a"):
        ranks.gather({"here": [REFUSED[name]]})


FORGED = {
    "half a message": b'{"dict":[',
    "no text": b"\xff\xfe\0",
    "another kind": b'{"object":["os.system"]}',
    "two kinds": b'{"tuple":[],"dict":[]}',
    "no pairs": b'{"dict":[1]}',
    "a list as a key": b'{"dict":[[[],1]]}',
    "not a list": b'{"tuple":7}',
    "depth": b"[" * 10_000_000,
    "digits": b"1" * 100_000,
    "nothing": b"",
}


def forged(name, tmp_path):
    return pickle.dumps(Forged(tmp_path / "marker")) if name == "pickle" else FORGED[name]


@pytest.mark.parametrize("name", ["pickle", *FORGED])
def test_forged_bytes_run_nothing_and_name_their_sender(name, tmp_path, user_error):
    caught = user_error(exchange.decode, forged(name, tmp_path), "rank 3")
    assert "rank 3" in caught.place and "docs/security.md" in caught.cure
    assert not (tmp_path / "marker").exists()


def test_nothing_of_ours_exchanges_or_reads_pickles():
    # lm_eval calls gather_object of its models, and ours sends JSON there.
    calls = re.compile(r"((?<!def gather)_object(_list)?|pickle\.loads?|Unpickler)\(|weights_only=False")
    files = [*(ROOT / "brigade").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "train.py"]
    found = {path.relative_to(ROOT).as_posix() for path in files if calls.search(path.read_text())}
    assert found == {"brigade/train/upstream/unpickling.py"}, "it reads checkpoints, by a list of classes"


# ---- over collectives ----------------------------------------------------------------------------------------------
@pytest.fixture
def peers():
    """Two replicas of one rank each, in threads."""
    store = torch.distributed.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda number: Peers(store, number, 2, {}), range(2)))


def beside(act):
    """act() on the other one meanwhile."""
    other = threading.Thread(target=act, daemon=True)
    other.start()
    return other


def test_messages_of_different_lengths(peers):
    told = []
    values = ["a" * 1000, {"b": 1}]
    other = beside(lambda: told.append(peers[1].gather(values[1])))
    assert peers[0].gather(values[0]) == values
    other.join(10)
    assert told == [values]


def test_who_takes_a_rank_s_place_runs_nothing_in_the_others(peers, tmp_path, mistake):
    """Anybody can who reaches torch's store."""
    data = pickle.dumps(Forged(tmp_path / "marker"))

    def forger():
        peers[1]._all(torch.tensor([len(data)]))
        peers[1]._all(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    other = beside(forger)
    assert "replica 1" in mistake(peers[0].gather, None)
    other.join(10)
    assert not (tmp_path / "marker").exists()


def test_a_replica_of_an_elastic_run_runs_nothing_of_another(tmp_path, mistake):
    forged = base64.b64encode(pickle.dumps([Forged(tmp_path / "marker")])).decode()
    peers = object.__new__(ElasticPeers)
    peers.world = World(0, 0, 1, 1, "here", "launch")
    peers._say = lambda what: {"said": {"0": what["payload"], "1": forged}}
    assert "replica 1" in mistake(peers.gather, None)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("data", [b"", b"no weights", b"PK\x03\x04", pickle.dumps(Forged("marker"))])
def test_what_is_handed_over_to_a_replica_runs_nothing(data, tmp_path, monkeypatch, mistake):
    monkeypatch.chdir(tmp_path)
    assert "replica 1" in mistake(hand_over.unpack, None, None, data, "replica 1")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("size", [2**62, 0, -1])
def test_sizes_that_no_message_has(peers, size, mistake):
    other = beside(lambda: peers[1]._all(torch.tensor([size])))
    assert "replica 1" in mistake(peers[0].gather, None)
    other.join(10)
