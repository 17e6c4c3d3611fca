"""What hosts must have alike. Hosts are threads here, and a directory that they do not share has another path on each;
tests/cluster/test_launch.py has both on real hosts."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoConfig

from brigade.errors import UserError
from brigade.train.distributed import consistency, ranks, shared_directory
from brigade.train.host.cluster import OWN_NUMBER, World
from brigade.train.model.tokenizer import load_tokenizer
from brigade.train.strategy import Strategy

DDP, ZERO3 = Strategy("ddp", "ddp", ""), Strategy("zero3", "zero3", "")


@pytest.fixture
def on_hosts(monkeypatch):
    """on_hosts(work, count): work(world) on so many hosts of one rank each; its results, or the UserErrors, by rank."""
    monkeypatch.setattr(shared_directory, "PATIENCE", 0.05)

    def call(work, count):
        here, slots, barrier = threading.local(), [None] * count, threading.Barrier(count, timeout=60)

        def gather(value):
            slots[here.rank] = value
            barrier.wait()
            values = list(slots)
            barrier.wait()
            return values

        @contextmanager
        def agreed(world):
            error = None
            try:
                yield
            except UserError as caught:
                error = caught
            if told := next(filter(None, gather(error)), None):
                raise told

        monkeypatch.setattr(ranks, "gather", gather)
        monkeypatch.setattr(ranks, "agreed", agreed)

        def one(rank):
            here.rank = rank
            try:
                return work(World(rank, 0, count, 1, f"node{rank + 1}", "torchrun", count))
            except UserError as error:
                return error

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    return call


UNSEEN = "node2 (and 1 more) does not see what node1 writes"
PLACES = {
    # the directory that each host sees, strategy, the checkpoint that each found, words of the refusal or the answer
    "one": ("aaa", ZERO3, "333", True),
    "one each": ("abc", DDP, "333", False),
    "one each, with half of every checkpoint": ("abc", ZERO3, "333", UNSEEN),
    "two of three": ("abb", DDP, "333", f"{UNSEEN} there, while other hosts do"),
    "a read-only one": ("aa!", ZERO3, "333", "cannot be written"),
    "one checkpoint each": ("abc", DDP, "3-3", "none on node2, but 3 on node1"),
    "not mounted on one": ("aab", ZERO3, "33-", "none on node3, but 3 on node1"),
    "not mounted on the first": ("baa", DDP, "-33", "none on node1, but 3 on node2"),
    "behind": ("abc", DDP, "343", "3 on node1, but 4 on node2"),
}
AT_FAULT = {  # of a refusal: whose it is, and which hosts are at fault where it says so
    "a read-only one": ("host", ()),  # the one that says so; all of them: agreed() knows
    "one checkpoint each": ("host", ("node2",)),
    "not mounted on one": ("host", ("node3",)),
    "not mounted on the first": ("host", ("node1",)),
    "behind": ("host", ("node1", "node3")),
}


@pytest.mark.parametrize("name", PLACES)
def test_who_shares_the_output_directory(name, on_hosts, tmp_path):
    places, strategy, found, expected = PLACES[name]
    (tmp_path / "!").touch()  # no directory can be made below a file

    def work(world):
        checkpoint = found[world.rank]
        directory = tmp_path / places[world.rank] / "outputs" / "run"
        return shared_directory.is_shared(
            directory, None if checkpoint == "-" else Path(checkpoint), world, strategy.writes_in_parts
        )

    for answer in on_hosts(work, 3):
        assert answer is expected if isinstance(expected, bool) else expected in str(answer)
        assert isinstance(expected, bool) or (answer.whose, answer.hosts) == AT_FAULT.get(name, ("user", ()))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.name != "!")
    assert not any("host" in path for path in left)
    assert bool(left) is isinstance(expected, bool), left  # what was refused left nothing


@pytest.mark.parametrize(
    "places, expected", [("aaa", True), ("abc", "all ranks of a host would write its checkpoints")]
)
def test_ranks_with_one_gpu_each_need_a_directory_that_hosts_share(places, expected, on_hosts, tmp_path, monkeypatch):
    """LOCAL_RANK is 0 for all of them then, and who has that writes for its host where each has a directory of its own."""
    monkeypatch.setenv(OWN_NUMBER, "1")

    def work(world):
        return shared_directory.is_shared(tmp_path / places[world.rank] / "run", None, world, DDP.writes_in_parts)

    for answer in on_hosts(work, 3):
        assert answer is True if expected is True else expected in str(answer)
    assert any(tmp_path.iterdir()) is (expected is True), "what was refused left nothing"


def test_the_first_key_that_differs_is_named_with_both_values_and_hosts(on_hosts, load):
    """Also a key deep in a model's configuration; where the model lies and what last used it are no differences."""

    def seen(rate, eps, place):
        settings = load("--learning_rate", rate)
        config = AutoConfig.for_model("gemma3", text_config={"rms_norm_eps": eps, "num_hidden_layers": 62})
        config.name_or_path = config.text_config.name_or_path = place
        tokenizer = load_tokenizer(settings, 10**9)
        tokenizer("used", padding="max_length", max_length=int(rate[0]), truncation=True)
        return {"recipe": settings.recipe.model_dump(mode="json"), **consistency.of_model(config, tokenizer, None)}

    alike, elsewhere = seen("1e-5", 1e-6, "/here"), seen("1e-5", 1e-6, "/there")
    cases = {
        "model's configuration: text_config.rms_norm_eps\n  1e-05 on node3, but 1e-06": seen("1e-5", 1e-5, "/here"),
        "the recipe: training.learning_rate\n  2e-05 on node3, but 1e-05 on node1": seen("2e-5", 1e-5, "/here"),
        "": elsewhere,
    }
    for words, other in cases.items():
        hosts = [alike, elsewhere, other]
        for answer in on_hosts(lambda world, hosts=hosts: consistency.check(hosts[world.rank], world), 3):
            assert words in str(answer) if words else answer is None


def test_a_digest_of_large_weights_is_cheap_and_sees_another_checkpoint(tmp_path):
    for number in range(100):  # 400 GB, of which this disk holds nothing
        with (tmp_path / f"model-{number:05}.safetensors").open("wb") as file:
            file.truncate(4 * 2**30)
    began = time.process_time()
    first = consistency.digests(tmp_path)
    assert time.process_time() - began < 2 and len(first) == 100
    for name, place in {"model-00007.safetensors": 1, "model-00050.safetensors": 4 * 2**30 - 9}.items():
        with (tmp_path / name).open("r+b") as file:
            file.seek(place)
            file.write(b"another")
    with (tmp_path / "model-00099.safetensors").open("ab") as file:
        file.write(b"longer")
    (tmp_path / "modeling_own.py").write_text("code of the model")
    again = consistency.digests(tmp_path)
    changed = {name for name in again if again[name] != first.get(name)}
    assert changed == {f"model-{number:05}.safetensors" for number in (7, 50, 99)} | {"modeling_own.py"}
