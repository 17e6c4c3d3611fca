"""What the planner says of replicas that meet every H steps: what a round sends, takes and holds, and when it is advised."""

import json
import math
import re
import shlex
from dataclasses import replace

import pytest
import torch
import yaml

from brigade.plan.choice.job_of_recipe import job_of
from brigade.plan.constants import CONSTANTS
from brigade.plan.costs.communication import held, round_seconds, sent, synchronising
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.host_memory import host
from brigade.plan.costs.job import Job, Replicas
from brigade.plan.hardware import gpu
from brigade.plan.runs.calibrate import job_of_record, record
from brigade.plan.shape.find import named_shape
from brigade.train.local import peers
from brigade.train.local.local_steps import OVERLAP
from brigade.train.recipe import flags
from testing.ranks import REPOSITORY as ROOT

pytestmark = pytest.mark.usefixtures("in_the_repository")
TINY = named_shape(str(ROOT / "recipes" / "tiny"))
LORA = "recipes/llama-3.1-8b/lora.yaml"
SLOW = ["--hostfile", "hostfiles/2x8", "--network", "1 Gb/s"]


def job(count=2, ranks=1, node_size=1, engine="ddp", **replicas):
    each = {"engine": engine, "data": ranks, "node_size": node_size}
    return Job(TINY, 128, 4, link="0.2 Gb/s", replicas=Replicas(count, **replicas), **each)


# ---- a round ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count, precision, kilobytes", [(2, "fp32", 9465), (4, "fp32", 14199), (2, "int8", 2400)])
def test_what_leaves_a_host_is_what_was_counted_on_real_hosts(count, precision, kilobytes):
    """Table local-steps of docs/evidence/local-training.md: one rank on each host, kB per step times H."""
    assert sent(job(count, precision=precision)) == pytest.approx(1e3 * kilobytes, rel=0.01)


def test_ranks_share_their_host_s_link():
    one = sent(job(2))
    assert sent(job(2, ranks=8, node_size=8)) == pytest.approx(one)  # a host sends the model once
    assert sent(job(2, ranks=8, node_size=4)) == pytest.approx(one / 2)  # a replica on two hosts
    # Each of a host's eight exchanges with eight of the other host's, and the ring leaves the host once.
    assert sent(job(16, node_size=8)) == pytest.approx(4 * TINY.parameters * (8 * 8 / 16 + 15 / 16))
    assert sent(job(8, node_size=8)) == 0


def test_constants_are_those_of_what_runs():
    assert CONSTANTS.replica_overlap == OVERLAP
    values = torch.zeros(1, 4 * peers.BLOCK)
    widths = {name: peers.encode(values, name).numel() / values.numel() for name in ("fp32", "bf16", "int8")}
    assert widths == CONSTANTS.replica_width


def test_a_round_s_end_is_shared_by_its_steps_and_fragments_hide_it():
    card = gpu("H100 80GB")
    network, beside = round_seconds(job(), card)
    assert network == pytest.approx(8 * sent(job()) / (0.2e9 * 0.85 * 0.6))
    assert synchronising(job(every=20), card, 1.0) == pytest.approx((network + beside) / 20)
    assert synchronising(job(every=math.inf), card, 1.0) == synchronising(job(count=1), card, 1.0) == 0
    in_four = job(every=20, fragments=4)  # each has five steps to cross
    assert synchronising(in_four, card, 1.0) == pytest.approx(beside / 20)
    assert synchronising(in_four, card, network / 40) == pytest.approx((network / 2 + beside) / 20)


def test_host_memory_and_disk():
    values = TINY.parameters
    for outer, fragments, each, more in (("average", 1, 26, 0), ("nesterov", 1, 30, 4), ("nesterov", 2, 19, 8)):
        one, several = job(1, 4, 4), job(2, 4, 4, outer=outer, fragments=fragments)
        assert held(several) == pytest.approx(each * values)  # of a host, whose four ranks have the model once
        assert host(several).training == pytest.approx(host(one).training + each * values)
        assert host(several).checkpoint == pytest.approx(2 * (host(one).checkpoint + more * values))


# ---- a recipe --------------------------------------------------------------------------------------------------------
def of_recipe(*words):
    return job_of(flags.load(["--recipe", "recipes/llama-3.1-8b/full.yaml", "--hostfile", "hostfiles/4x8", *words]))


def test_a_replica_is_a_job_of_its_own_ranks():
    plain, found = of_recipe(), of_recipe("--sync_every", "50", "--sync_precision", "bf16", "--outer_optim", "nesterov")
    assert found.replicas == Replicas(4, 50, "bf16", 1, "nesterov") and found.data == 8
    same = ("gpus", "nodes", "tokens_per_step", "micro_batch", "accumulation")
    assert [getattr(found, name) for name in same] == [getattr(plain, name) for name in same]
    alone = estimate(replace(found, replicas=Replicas()))
    result = estimate(found)
    assert result.time.across == 0 < result.time.synchronising and result.memory == alone.memory
    assert result.time.total == pytest.approx(alone.time.total + result.time.synchronising)
    assert result.allocated_gib > estimate(plain).allocated_gib  # states are sharded over eight ranks, not 32
    assert job_of_record(yaml.safe_load(yaml.safe_dump(record(found))), "run.yaml") == found


def test_a_recipe_with_sync_every_is_planned(plan):
    code, text = plan(LORA, *SLOW, "--sync_every", 50)
    assert code == 0 and "\nAt " not in text and "2 of 8 GPUs meet every 50 steps: 0.17 GB leave a host" in text
    assert "x accumulation 1 x 16 GPUs" in text
    best = json.loads(plan(LORA, *SLOW, "--sync_every", 50, "--json")[1])["plans"][0]
    assert (best["replicas"], best["sync_every"], best["data"], best["gpus"]) == (2, 50, 8, 16)
    code, text = plan("qwen3-8b", "--gpu", "H100", "--sync_every", "50")
    assert code == 2 and "a recipe is planned with it" in text


# ---- the line --------------------------------------------------------------------------------------------------------
def section():
    return (ROOT / "docs/local-training.md").read_text().partition("## What the planner says")[2].partition("\n## ")[0]


def test_the_page_s_lines_are_what_the_command_prints(plan):
    words = shlex.split(re.search(r"python -m brigade plan (.*)", section())[1])
    rows = re.findall(r"^\| `'(.*?)'` \| (.*?) \|$", section(), re.M)
    assert len(rows) == 4
    for network, said in rows:
        lines = [line for line in plan(*words[:-1], network)[1].splitlines() if line.startswith("At ")]
        assert lines == ([said] if said.startswith("At ") else [])


def test_the_smallest_of_the_numbers_that_keep_the_limit(plan):
    advice = json.loads(plan(LORA, *SLOW, "--json")[1])["advice"]
    every = int(re.search(r"sync_every (\d+) takes 1\.0[0-5]x", *advice)[1])
    before = CONSTANTS.replica_every[CONSTANTS.replica_every.index(every) - 1]
    found = {}
    for number in (before, every):
        parts = json.loads(plan(LORA, *SLOW, "--sync_every", number, "--json")[1])["plans"][0]["seconds"]
        found[number] = sum(parts.values()) / (sum(parts.values()) - parts["synchronising"])
    assert found[every] <= CONSTANTS.replica_most < found[before]


def test_for_a_model_the_best_strategy_inside_a_host_counts(plan):
    words = ["llama-3.1-8b", "--gpu", "H100", "--hostfile", "hostfiles/4x8"]
    code, text = plan(*words, "--network", "25 Gb/s")
    assert code == 0
    assert re.search(r"^At 25 Gbit/s: sync_every \d+ takes \S+x the step .* \(PP 4 x \w+[-\w]*: ", text, re.M)
    assert "At " not in plan(*words)[1]  # the usual network
    assert "At " not in plan(*words, "--network", "25 Gb/s", "--global_batch_size", 126)[1]


@pytest.mark.parametrize("changes", [
    {"data": {"streaming": True}}, {"training": {"nonfinite": "rollback"}}, {"training": {"max_steps": 4}},
    {"cluster": {"ds_config": "ds_configs/zero1_tp2.json"}}, {"cluster": {"ds_config": "ds_configs/zero3_nvme.json"}},
])  # fmt: skip
def test_no_line_where_it_is_refused(plan, tmp_path, changes):
    document = yaml.safe_load((ROOT / LORA).read_text())
    for part, values in changes.items():
        document[part] |= values
    path = tmp_path / "lora.yaml"
    path.write_text(yaml.safe_dump(document))
    (tmp_path / "config.json").write_text((ROOT / LORA).with_name("config.json").read_text())
    lines = [
        re.findall("^(?:time|At) ", plan(name, *SLOW[:2], "--network", "0.05 Gb/s")[1], re.M) for name in (LORA, path)
    ]
    assert lines == [["time ", "At "], ["time "]]
