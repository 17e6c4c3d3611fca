"""What `plan` answers beside a strategy: fewer hosts, money, deadlines, JSON, lighter optimizers, and thirty questions."""

import json
import re
from dataclasses import replace

import pytest
import yaml

from benchmarks import questions
from brigade.__main__ import main
from brigade.plan.choice import goals
from brigade.plan.choice.explain import reason
from brigade.plan.choice.goals import Answer, answer, pick, price
from brigade.plan.choice.search import candidates
from brigade.plan.choice.workload import Cluster, Workload
from brigade.plan.costs.estimate import intervals
from brigade.plan.costs.step_time import step_time
from brigade.plan.shape.find import described, named_shape
from brigade.train.model.tiny import shrink
from testing.planning import chosen_for
from testing.ranks import REPOSITORY as ROOT

pytestmark = pytest.mark.usefixtures("in_the_repository")
SLOW = Cluster("H100 80GB", 8, 2, "10 GbE")


def test_each_question_of_the_page_has_an_answer():
    """That it is today's is test_pages.py's business."""
    assert len(questions.QUESTIONS) == 30
    answers = re.findall(r"\n    \$ .*\n    \S", questions.PAGE.read_text())
    assert len(answers) == 30  # each command has a line of answer at least


def test_more_hosts_over_a_slow_network_are_called_slower():
    whole = answer(Workload(named_shape("llama-3.1-8b")), SLOW)
    found, (first, *_) = pick(whole, "")
    assert found is whole and re.match(r"More is not faster: on 1 host with 8 GPUs .* against", first)
    assert re.search(r"[\d,]+00 tokens/s in all against [\d,]+00, both as expected", first)
    fastest, _ = pick(whole, "fastest")
    assert fastest.cluster.nodes == 1 and fastest.speed > whole.speed


def test_goals_and_deadlines_choose_the_size():
    whole = answer(Workload(named_shape("qwen3-8b")), Cluster("H100 80GB", 8, 2))
    sizes = {goal: pick(whole, goal)[0] for goal in ("fastest", "cheapest", "fewest-gpus")}
    assert sizes["fastest"].speed >= max(one.speed for one in sizes.values())
    assert sizes["cheapest"].gpu_hours() <= min(one.gpu_hours() for one in sizes.values())
    assert sizes["fewest-gpus"].cluster.gpus <= min(one.cluster.gpus for one in sizes.values())
    assert "by what is expected of each" in pick(whole, "cheapest")[1][0]
    hours = 1.01 * sizes["fastest"].slow_hours(2e9)
    kept, (said, *_) = pick(whole, "", hours, 2e9)
    assert kept.slow_hours(2e9) <= hours and "at the slow end of the interval, which the deadline is judged by" in said
    _, (said,) = pick(whole, "", hours / 10, 2e9)
    assert said.startswith("No size of this cluster is sure to keep the deadline")


def test_halves_of_a_cluster_of_any_size_are_tried(monkeypatch):
    asked = []
    monkeypatch.setattr(goals, "answer", lambda _, cluster: asked.append(cluster) or Answer(None, cluster, [], None))
    assert not [*goals.sizes(Workload(named_shape("qwen3-8b")), Cluster("GB200", 72, 1100), inside=True)]
    assert [cluster.nodes for cluster in asked if cluster.node_size == 72] == [2**power for power in range(11)]
    assert [cluster.gpus for cluster in asked if cluster.node_size < 72] == [1, 2, 4, 8, 16, 32, 64]


def test_a_deadline_within_the_interval_is_not_kept():
    """What is expected would keep it, and the slow end would not."""
    whole = answer(Workload(named_shape("llama-3.1-8b")), Cluster("H100 80GB", 8, 1))
    between = (whole.hours(1e9) + whole.slow_hours(1e9)) / 2
    assert whole.hours(1e9) < between < whole.slow_hours(1e9)
    found, (said,) = pick(whole, "", between)
    assert found.slow_hours(1e9) > between and said.startswith("No size of this cluster is sure to keep the deadline")


@pytest.mark.parametrize("key", ["logits_scaling", "logit_scale"])
def test_no_loss_in_tiles_is_proposed_where_the_model_scales_its_logits(key):
    """A run refuses it (brigade/train/loss/tiled.py)."""
    document = json.loads((ROOT / "recipes/llama-3.1-8b/config.json").read_text()) | {"model_type": "granite"}

    def in_tiles(config):
        ranked = candidates(Workload(described(config, "x")), Cluster("H100 80GB", 8, 2))
        return any(one.estimate.job.loss == "tiled" for one in ranked)

    assert in_tiles(document | {key: 1.0}) and not in_tiles(document | {key: 8.0})


def test_eight_bit_moments_come_before_offload():
    """70B on 16 H100: Adam in 8 bits under ZeRO-3 trains a quarter faster than with the hosts' memory."""
    ranked, winner = chosen_for("llama-3.1-70b", Cluster("H100 80GB", 8, 2))
    assert winner and winner.estimate.job.optimizer == "adamw_8bit" and "adamw_8bit" in winner.name
    offload = next(one for one in ranked if one.choice.offload and one.fits)
    assert offload.seconds > 1.2 * winner.seconds
    usual, _ = chosen_for("llama-3.1-8b", Cluster("H100 80GB", 8, 2))
    assert not any(one.lighter for one in usual)  # where the usual one fits nothing else is taken


def test_eight_bit_moments_come_before_an_axis_that_makes_training_much_slower():
    """405B on 128 H100s: sequence groups make room for fp32 moments, at half the speed."""
    ranked, winner = chosen_for("llama-3.1-405b", Cluster("H100 80GB", 8, 16))
    usual = next(one for one in ranked if one.fits and one.choice.axes and not one.lighter)
    assert winner and winner.lighter and not winner.choice.axes and usual.seconds > 1.3 * winner.seconds


def test_eight_bit_moments_that_are_faster_but_not_taken_say_why():
    ranked, winner = chosen_for("llama-3.1-405b", Cluster("A100 80GB", 8, 18), batch=288)
    faster = [one for one in ranked if one.lighter and one.fits and winner and one.seconds < winner.seconds]
    assert winner and not winner.lighter and faster
    assert all("8-bit moments are for" in reason(one, winner) for one in faster)


def test_adapters_are_not_offloaded_where_they_fit():
    card = Cluster("RTX 4090", 1, 1, host_gib=64)
    ranked, winner = chosen_for("llama-3.1-8b", card, method="lora", trained=42_000_000)
    assert winner and winner.name == "DDP" and any(one.fits and one.choice.offload for one in ranked)
    assert not any("0% " in reason(one, winner) for one in ranked)


def test_what_is_expected_is_the_formula_s_and_lies_within_its_interval():
    """Llama 3.1 8B on eight A100s, compiled, with nothing computed again: more of the peak than the best published run."""
    _, winner = chosen_for("llama-3.1-8b", Cluster("A100 80GB", 8, 1))
    found, s = winner.estimate, winner.estimate.job.shape
    rate = found.tokens_per_second_per_gpu * (6 * s.active + 6 * s.layers * s.query_width * 4096) / 312e12
    assert rate > intervals()["best"]["fused"]["A100 80GB"] and found.time == step_time(found.job, found.gpu)
    fast, slow = found.time_interval()
    assert fast < found.time.total < slow
    # No product is faster than 271 TFLOPS there. A slower card's best product cuts the interval, but not what is expected.
    assert found.least_seconds < fast
    for peak in (0.9, 0.8):
        slower = replace(found, gpu=replace(found.gpu, matmul_tflops=271 * peak, sustained=1.15))
        fast, slow = slower.time_interval()
        assert slower.least_seconds == pytest.approx(found.least_seconds / peak)
        assert fast == slower.least_seconds < slower.time.total < slow
    faster = replace(found, gpu=replace(found.gpu, efficiency=1.1))  # the user's own runs were
    assert faster.least_seconds == pytest.approx(found.least_seconds / 1.1)


def test_what_nvidia_smi_will_show_is_said_with_its_interval(plan):
    _, said = plan("qwen3-8b", "--gpu", "H100 80GB", "--hostfile", "hostfiles/1x8")
    told = r"nvidia-smi shows ([\d.]+) of 79.1 GiB in use \(80 % interval: ([\d.]+) to ([\d.]+)\)"
    shown, low, high = map(float, re.search(told, said).groups())
    assert low < shown <= high <= 80


def test_what_a_card_lacks_says_the_margin():
    for model, nodes in (("llama-3.1-70b", 2), ("qwen3-32b", 1)):
        ranked, winner = chosen_for(model, Cluster("H100 80GB", 8, nodes))
        said = [reason(one, winner) for one in ranked]
        assert not any("by 0 GiB" in one for one in said)
        assert all("margin" in one for one in said if "out of memory" in one or "would leave" in one)


def test_json_is_what_its_page_documents(plan):
    keys = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/plan-json.md").read_text(), re.M)
    documented = set(re.findall(r"`(\w+)`", "".join(keys)))
    for words in (["qwen3-8b", "--gpu", "H100", "--price", "2"], ["recipes/llama-3.1-8b/lora.yaml"]):
        code, text = plan(*words, "--json")
        found = json.loads(text)
        best = found["plans"][found["chosen"]]
        assert code == 0 and {*found, *best} == documented and best["fits"]
        assert sum(best["memory_gib"].values()) == pytest.approx(best["allocated_gib"], rel=1e-3)
        assert best["usd_per_billion_tokens"] > 0
    code, text = plan("llama-3.1-70b", "--gpu", "L4", "--json")
    assert code == 1 and json.loads(text)["chosen"] is None
    assert "Nothing that train.py runs" in json.loads(text)["advice"][-1]


def test_prices_are_listed_with_a_date_and_a_user_s_own_goes_before():
    assert price("H100 80GB")[0] > price("A100 80GB")[0] > 0 and re.search(r"20\d\d", price("H100 80GB")[1])
    assert price("H100 80GB", 1.5) == (1.5, "--price") and price("A40") == (0.0, "")


def test_hosts_of_unequal_slots_are_planned(plan, tmp_path):
    (tmp_path / "hosts").write_text("a slots=8\nb slots=4\n")
    code, text = plan("qwen3-8b", "--gpu", "H100", "--hostfile", tmp_path / "hosts", "--global_batch_size", 96)
    assert code == 0 and "12 GPUs on 2 hosts, H100 80GB" in text and not re.search(r"HSDP|hpZ|[TSPE]P \d", text)
    slow = ["llama-3.1-8b", "--gpu", "H100", "--hostfile", tmp_path / "hosts", "--network", "10 GbE"]
    assert "\nMore is not faster: on 1 host with 8 GPUs" in plan(*slow)[1]  # the larger one alone
    _, text = plan(*slow, "--goal", "fastest")
    assert "sizes of this cluster by what is expected of each: 1 host with 8 GPUs" in text


def test_positions_are_warned_of(plan, tmp_path):
    code, text = plan("qwen3-8b", "--gpu", "H200", "--max_length", 65536, "--method", "lora")
    assert code == 0 and "more than the 40,960 positions of qwen3-8b" in text
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    code, text = plan(tmp_path, "--gpu", "H200", "--max_length", 2048)  # learned positions are what they are
    assert code == 2 and "more than the 1,024 positions" in text and "give at most 1024" in text


def test_sparse_attention_is_named(plan, tmp_path):
    from transformers import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING["deepseek_v32"]().to_dict())
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = plan(tmp_path, "--gpu", "H200", "--max_length", 512)
    assert code == 0 and "is sparse (index_topk 2048): this counts attention to all earlier tokens" in text


def test_a_narrow_terminal_gets_a_narrow_answer(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["plan", "llama-3.1-8b", "--gpu", "H100", "--hostfile", "hostfiles/2x8"]) == 0
    assert max(map(len, re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines())) <= 80


def test_a_cluster_on_which_nothing_fits_has_no_speed():
    nothing = Answer(Workload(named_shape("llama-3.1-405b")), Cluster("L4", 1, 1), [], None)
    assert nothing.speed == 0 and pick(nothing, "")[1] == []


def test_a_card_without_bf16_is_planned_and_written_in_fp16(plan, tmp_path):
    code, text = plan("qwen3-0.6b", "--gpu", "V100", "--write", tmp_path / "v100.yaml")
    assert code == 0 and "\nThe V100 32GB has no bf16" in text and "torch.compile" not in text
    training = yaml.safe_load((tmp_path / "v100.yaml").read_text())["training"]
    assert training["fp16"] is True and "bf16" not in training
    code, text = plan("recipes/qwen3-0.6b/full.yaml", "--gpu", "T4")
    assert code == 2 and "the T4 has no bf16" in text and "use fp16" in text


def test_smaller_sizes_are_not_handicapped_by_a_batch_that_only_all_hosts_divide(plan, tmp_path):
    (tmp_path / "odd").write_text("a slots=8\nb slots=3\n")
    words = ["llama-3.1-8b", "--hostfile", tmp_path / "odd", "--gpu", "H100", "--json"]
    found = json.loads(plan(*words, "--goal", "cheapest")[1])
    best = found["plans"][found["chosen"]]
    assert best["gpus"] <= 8 and best["stages"] == 1  # as fast on each GPU as on eight of another hostfile
    assert best["micro_batch"] * best["accumulation"] * best["data"] % 88 == 0


def test_hosts_that_may_not_hold_what_is_offloaded_are_said_to(plan):
    words = ["llama-3.2-3b", "--gpu", "4090", "--json", "--strategy", "zero2_offload", "zero3_nvme"]
    plans = {one["strategy"]: one for one in json.loads(plan(*words)[1])["plans"]}
    offload = plans["ZeRO-2 offload"]
    assert not offload["fits"] and offload["host_gib"] < 64 and offload["device_gib"] < 20
    assert re.search(r"each host may need up to \d+ GiB of memory, of 64", offload["reason"])
    plans = json.loads(plan(*words, "--host_memory", 128)[1])["plans"]
    assert next(one for one in plans if one["strategy"] == "ZeRO-2 offload")["fits"]


def test_where_experts_lie_on_several_ranks_it_says_what_no_interval_has(plan):
    words = ["qwen3-30b-a3b", "--gpu", "H200", "--hostfile", "hostfiles/2x8", "--strategy"]
    more = "more tokens for its experts than its share"
    said = {name: more in plan(*words, name)[1] for name in ("fsdp2", "ep_fsdp2")}
    assert said == {"fsdp2": False, "ep_fsdp2": True}


def test_memory_of_what_is_offloaded_is_unseen(plan):
    words = ["llama-3.1-8b", "--gpu", "RTX 4090", "--hostfile", "hostfiles/1x8", "--strategy"]
    _, text = plan(*words, "zero3_offload")
    assert "memory unseen: fewer than five sources have published such runs (offload)" in text
    assert "memory unseen" not in plan(*words, "zero3")[1]


def test_a_width_that_is_told_is_kept_in_a_pipe_too(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, text = plan("llama-3.1-70b", "--hostfile", "hostfiles/2x8", "--gpu", "H100")
    assert code == 0 and max(map(len, text.splitlines())) <= 80
    assert re.search(r"batch +micro-batch \d+ x accumulation \d+ x 16 data-parallel ranks; recomputes", text)


def test_what_does_not_fit_has_no_speed_and_no_price(plan):
    plans = json.loads(plan("llama-3.1-405b", "--gpu", "4090", "--json")[1])["plans"]
    assert plans and not any(one["fits"] for one in plans)
    figures = ("tokens_per_second_per_gpu", "usd_per_billion_tokens", "seconds")
    assert {one[key] for one in plans for key in figures} == {None}


def test_adapters_are_named_where_all_weights_need_offload(plan):
    words = ["qwen3-32b", "--gpu", "L40S", "--hostfile", "hostfiles/1x8", "--max_length", 8192]
    text = plan(*words, "--strategy", "zero3", "zero3_offload")[1]
    assert re.search(r"--method lora trains the same tokens sooner", text)
