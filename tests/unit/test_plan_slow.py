"""What is possible and slow is named and not chosen, and axes of which few runs are published win by their slow end alone."""

import json
import shlex
from dataclasses import replace

import pytest
import yaml

from benchmarks import planner_rows
from benchmarks.planner_intervals import ENOUGH
from brigade.__main__ import main
from brigade.plan.choice import explain
from brigade.plan.choice.goals import answer, pick
from brigade.plan.choice.job_of_recipe import load_plan
from brigade.plan.choice.search import chosen
from brigade.plan.choice.workload import CHOICES, Candidate, Cluster, Workload
from brigade.plan.shape.find import named_shape
from testing.planning import chosen_for

pytestmark = pytest.mark.usefixtures("in_the_repository")
ON_DISKS = ["qwen3-14b", "--gpu", "A100 80GB"]
OVER_10_GBE = ["llama-3.1-70b", "--hostfile", "hostfiles/2x8", "--gpu", "H100", "--network", "10 GbE"]


# ---- possible and slow -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words, strategy, why, cures", [
    (ON_DISKS, "ZeRO-3 NVMe on 1 x 1 A100 80GB", "its states go through the hosts' disks", [
        "2 GPUs instead of 1", "GiB of memory in each host instead of", "LoRA instead of",
    ]),
    (OVER_10_GBE, "ZeRO-3 offload param on 2 x 8 H100 80GB", "of its step waits for the network", [
        "1 node instead of 2", "3,200 Gbit/s between nodes instead of 10", "LoRA instead of",
    ]),
])  # fmt: skip
def test_what_is_slow_is_named_first_and_recommended_by_nobody(plan, words, strategy, why, cures):
    code, text = plan(*words)
    first, second, *rest = text.splitlines()
    assert code == 1 and first.startswith(f"Possible and slow: {strategy}") and "tokens/s" in first
    assert "No strategy is recommended here" in first and why in first
    assert all(cure in first for cure in cures), first
    assert second.startswith("Write it all the same: ")
    assert any("possible and slow" in line for line in rest) and not any("chosen" in line for line in rest)


def test_what_is_slow_is_written_where_it_is_asked_for_by_name(plan, tmp_path, capsys):
    code, text = plan(*ON_DISKS, "--write", tmp_path / "mine")
    second = text.splitlines()[1]
    assert code == 1 and not (tmp_path / "mine").exists()
    assert second.startswith("Not written. Write it all the same: ") and "--strategy zero3_nvme" in second
    words = shlex.split(second.partition("python -m brigade ")[2])
    assert main(words) == 0
    written = load_plan(tmp_path / "mine" / "full.yaml").estimate  # as train.py reads it
    assert written.job.offload == "nvme"
    assert f"memory   {written.device_gib:.1f} GiB on each GPU" in capsys.readouterr().out
    assert "--strategy zero3_nvme --optim sgd" in plan(*ON_DISKS, "--optim", "sgd")[1].splitlines()[1]
    code, text = plan(*ON_DISKS, "--strategy", "zero3_nvme")
    assert code == 0 and text.startswith("Fits, and is slow: ZeRO-3 NVMe on 1 x 1 A100 80GB")


def test_a_recipe_that_mostly_waits_fits_and_is_slow(plan):
    for network, slow in (("10 GbE", True), ("3200 Gb/s", False)):
        code, text = plan("recipes/llama-3.1-70b/full.yaml", "--network", network)
        assert code == 0 and text.startswith("Fits, and is slow, with " if slow else "Fits with ")


def test_of_a_strategy_that_does_not_fit_the_smallest_change_is_another(plan):
    words = ["qwen3-14b", "--gpu", "H100", "--hostfile", "hostfiles/1x8"]
    code, text = plan(*words, "--strategy", "ddp")
    assert code == 1 and text.startswith(
        "No strategy that was named fits. The smallest change that does: another strategy (leave --strategy out) or "
    )
    assert plan(*words)[0] == 0


def test_json_chooses_nothing_that_is_slow(plan):
    code, text = plan(*ON_DISKS, "--json")
    found = json.loads(text)
    assert code == 1 and found["chosen"] is None and found["advice"][-1].startswith("Possible and slow: ZeRO-3 NVMe")
    (slow,) = (one for one in found["plans"] if one["fits"])
    assert slow["reason"].startswith("possible and slow: ") and slow["step_seconds"]


def test_the_fewest_gpus_are_of_those_that_are_not_slow():
    whole = answer(Workload(named_shape("qwen3-14b")), Cluster("A100 80GB", 8, 1))
    found, _ = pick(whole, "fewest-gpus")
    assert found.winner and found.winner.choice.offload != "nvme" and found.cluster.gpus == 2


def test_what_mostly_computes_is_not_slow_whatever_it_waits_for():
    """Offload on one card takes a while, and is what a user without a second one can do."""
    for cluster in (Cluster("RTX 4090", 1, 1, host_gib=256), Cluster("L40S", 1, 1)):
        _, winner = chosen_for("llama-3.1-8b", cluster, length=2048)
        assert winner and winner.choice.offload and not winner.estimate.slow


# ---- axes of which few runs are published ------------------------------------------------------------------------
@pytest.mark.slow
def test_unproven_are_the_axes_of_which_fewer_than_five_sources_published_a_run():
    sources = {choice.axes: set() for choice in CHOICES}
    for run in planner_rows.runs() + planner_rows.strangers():
        sources.setdefault(tuple(run.job.axes.used), set()).add(run.source)
    for choice in CHOICES:
        assert choice.unproven == (len(sources[choice.axes]) < ENOUGH), (choice.name, len(sources[choice.axes]))


def candidate(choice: str, of: Candidate, seconds: float) -> Candidate:
    """Another strategy with the estimate of a candidate, stretched to so many times its seconds."""
    result = of.estimate
    times = vars(result.time)
    estimate = replace(result)
    estimate.__dict__["time"] = replace(result.time, **{name: value * seconds for name, value in times.items()})
    return replace(of, choice=next(one for one in CHOICES if one.name == choice), estimate=estimate)


def test_unproven_axes_win_by_the_slow_end_of_their_interval_alone():
    _, plain = chosen_for("llama-3.1-8b", Cluster("A100 80GB", 8, 1))
    assert plain and not plain.choice.axes
    slow_end = plain.estimate.time_interval()[1] / plain.seconds
    a_little, much = (candidate("TP x EP x FSDP2", plain, share / slow_end) for share in (1.1, 0.9))
    assert a_little.seconds < 0.95 * plain.seconds and chosen([a_little, plain]) is plain
    assert "few published runs" in explain.reason(a_little, plain)
    assert chosen([much, plain]) is much
    proven = candidate("EP x FSDP2", plain, 1.1 / slow_end)
    assert chosen([proven, plain]) is proven  # by what is expected
    assert chosen([a_little]) is a_little  # nothing else fits


def test_a_recommendation_of_unproven_axes_says_so(plan, tmp_path):
    code, text = plan(
        "qwen3-235b-a22b", "--hostfile", "hostfiles/16x8", "--gpu", "H100", "--strategy", "tp_ep_fsdp2", "pp_ep_zero1"
    )
    assert code == 0 and "note     axes unproven: fewer than five sources have published runs of " in text


# ---- what is refused names what is answered ----------------------------------------------------------------------
def test_where_a_model_is_not_divided_what_does_not_fit_says_why(plan):
    words = ["qwen3.5-27b", "--hostfile", "hostfiles/1x8", "--gpu", "H100", "--global_batch_size", 16]
    code, text = plan(*words, "--max_length", 131_072)
    first = text.splitlines()[0]
    assert code == 1 and "sequences of 32,768 tokens instead of 131,072" in first
    assert "sequence groups (a mixer's state goes from token to token" in first
    assert plan(*words, "--max_length", 32_768)[0] == 0  # which is answered


def test_hosts_of_unequal_slots_have_no_groups_and_are_told_the_nearest(plan, tmp_path):
    (tmp_path / "hosts").write_text("a slots=8\nb slots=4\n")
    words = ["qwen3-8b", "--gpu", "H100", "--hostfile", tmp_path / "hosts"]
    code, text = plan(*words, "--strategy", "tp_zero1", "hsdp")
    assert code == 2 and "need hosts with as many slots each" in text and "name zero1 or fsdp2" in text
    assert plan(*words, "--strategy", "zero1", "fsdp2")[0] == 0


def test_no_command_is_printed_that_would_be_refused(plan, tmp_path):
    """Phi-4 has plain rotary embeddings of 16,384 positions, and its maker says nothing of more."""
    words = ["phi-4", "--gpu", "H200", "--method", "lora"]
    code, text = plan(*words, "--max_length", 32_768)
    second = text.splitlines()[1]
    assert code == 0 and "give at most --max_length 16384" in second and "Write it: " not in text
    assert "rope_parameters: {rope_type: yarn, factor: 2.0, original_max_position_embeddings: 16384}" in second
    assert plan(*words, "--max_length", 16_384, "--write", tmp_path)[0] == 0
    path = tmp_path / "lora.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["data"]["max_length"] = 32_768
    path.write_text(yaml.safe_dump(recipe))
    assert plan(path)[0] == 2  # as train.py refuses it
    rope = yaml.safe_load(second.rpartition("rope_parameters: ")[2].removesuffix(", and plan it."))
    path.write_text(yaml.safe_dump(recipe | {"model": recipe["model"] | {"rope_parameters": rope}}))
    (answered,) = json.loads(plan(path, "--json")[1])["plans"]
    assert answered["max_length"] == 32_768 and answered["allocated_gib"] > 0
