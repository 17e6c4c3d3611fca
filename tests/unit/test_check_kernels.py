"""What check says of kernels that were proven, or were not, on each host's GPU. Proofs themselves: test_proving.py."""

import pytest

from brigade.check.checks import Wanted
from brigade.hosts.job import make
from testing.recorded_hosts import Recorded, results_of

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
    found = judged(
        {host: proof(sdpa="proven", eager="slower", flash_attention_3="absent") for host in HOSTS}, name=name
    )
    assert [result.level for result in found] == ["green", "green"]
    assert found[0].value == "2 proven, fastest sdpa"


def test_a_path_that_computes_something_else_is_a_fault_of_that_host():
    wrong = proof(sdpa="proven", flash_attention_2="wrong")
    found = {result.host: result for result in judged({"node1": proof(sdpa="proven"), "node2": wrong})}
    assert (found["node1"].level, found["node2"].level) == ("green", "red")
    assert "flash_attention_2 on NVIDIA H100 80GB HBM3: it is wrong" in found["node2"].problem


def test_a_path_that_breaks_is_a_warning():
    found = judged({host: proof(sdpa="proven", varlen="failed") for host in HOSTS})
    assert [result.level for result in found] == ["yellow", "yellow"]


@pytest.mark.parametrize(
    ("gpus", "recipe", "says"), [(0, "recipes/tiny/full.yaml", "no GPU"), (1, None, "needs a recipe")]
)
def test_what_cannot_be_known_says_why(gpus, recipe, says):
    found = judged({}, gpus, recipe)
    assert {result.level for result in found} == {"grey"}
    assert says in found[0].problem


def test_a_model_that_cannot_be_had_is_no_fault_of_the_host():
    found = judged({host: {"problem": "recipes/x.yaml: no config.json"} for host in HOSTS})
    assert {result.level for result in found} == {"grey"}


def test_no_recipe_with_images_is_rehearsed():
    found = judged({}, recipe="recipes/qwen3-vl-8b/full.yaml", name="dress rehearsal")
    assert [result.level for result in found] == ["grey", "grey"] and "tiny-vision" in found[0].problem
