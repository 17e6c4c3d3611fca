"""`plan --write` makes recipes that lint and train.py take, never over a file of another content; and what plan refuses."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from brigade.__main__ import main
from brigade.lint.linter import lint
from brigade.plan.choice.explain import reason, smallest_change
from brigade.plan.choice.job_of_recipe import job_of, load_plan, published_model
from brigade.plan.choice.search import candidates, chosen, fastest
from brigade.plan.choice.workload import CHOICES, Cluster, Workload
from brigade.plan.output.answer import known
from brigade.plan.output.write import strategy_keys
from brigade.plan.shape.find import named_shape
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
from testing import marks
from testing.planning import chosen_for
from testing.ranks import REPOSITORY as ROOT

pytestmark = pytest.mark.usefixtures("in_the_repository")
PLAIN = tuple(choice for choice in CHOICES if not choice.axes)
CLUSTERS = {"1x1": [], "1x8": ["--hostfile", "hostfiles/1x8"], "2x8": ["--hostfile", "hostfiles/2x8"]}
CASES = [
    ("qwen3-4b", "full", "1x8", "A100 80GB"), ("qwen3-4b", "qlora", "1x1", "A10G"), ("gpt-oss-20b", "lora", "2x8", "L40S"),
    ("qwen3-8b", "full", "1x1", "H100 80GB"), ("llama-3.1-70b", "full", "2x8", "B200"),
]  # fmt: skip
FURTHER = [
    ("qwen3-4b", "lora", "1x1", "H100 80GB"), ("llama-3.1-8b", "lora", "1x8", "A100 80GB"),
    ("qwen3-235b-a22b", "lora", "2x8", "H200"),
]  # fmt: skip


def plan(*words):
    return main(["plan", *map(str, words)])


@pytest.mark.parametrize("model, method, cluster, gpu", marks.cases(*CASES, slow=FURTHER))
def test_what_it_writes_is_what_it_planned(model, method, cluster, gpu, tmp_path, capsys):
    folder = tmp_path / "mine"
    words = [model, "--method", method, "--gpu", gpu, *CLUSTERS[cluster], "--global_batch_size", 64]
    assert plan(*words, "--write", folder) == 0
    path = folder / f"{method}.yaml"
    assert (folder / "config.json").read_bytes() == (ROOT / "recipes" / model / "config.json").read_bytes()
    said = capsys.readouterr().out
    written = load_plan(path)  # as train.py reads it
    assert f"memory   {written.estimate.device_gib:.1f} GiB on each GPU" in said
    time = written.estimate.time.total
    assert f"time     {known(time, *written.estimate.time_interval())[0]} s per step" in said
    assert f"{written.estimate.device_gib:.1f} of" in path.read_text()
    report = lint([str(path)])
    assert not [finding for finding in report.findings if finding.severity != "note"]
    assert plan(*words, "--write", folder) == 0 and "there already, unchanged" in capsys.readouterr().out


def test_every_comment_fits_the_line_and_the_rate_reads_as_others_do(tmp_path):
    assert plan("llama-3.1-8b", "--method", "lora", "--gpu", "H100", "--write", tmp_path) == 0
    text = (tmp_path / "lora.yaml").read_text()
    lines = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 130 and "learning_rate: 2.0e-4\n" in text
    assert "lora_modules_to_save" not in text and re.search(r"chat_template: tulu +# of words", text)


def test_a_deadline_that_nothing_keeps_is_no_success(capsys):
    words = ["llama-3.1-8b", "--method", "lora", "--gpu", "H100", "--tokens", "1e9", "--deadline"]
    assert plan(*words, "0.1") == 1
    assert "No size of this cluster is sure to keep the deadline of 0.1 h" in capsys.readouterr().out
    assert plan(*words, "0.1", "--json") == 1 and plan(*words, "1000") == 0


@pytest.mark.parametrize("gpu, goal, size, lines", [
    ("RTX 4090", ["--goal", "fewest-gpus"], "1 x 4", "node1 slots=4\n"),
    ("A100 80GB", ["--deadline", 20], "1 x 8", "node1 slots=8\n"),
])  # fmt: skip
def test_a_recipe_for_fewer_hosts_or_slots_has_a_hostfile_of_those(gpu, goal, size, lines, tmp_path, capsys):
    words = ["qwen3-8b", "--gpu", gpu, "--hostfile", "hostfiles/2x8", *goal, "--write", tmp_path]
    assert plan(*words) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert f"on {size} {gpu}" in first
    hosts = tmp_path / f"hosts_{size.replace(' ', '')}"
    assert hosts.read_text() == lines
    start = f"python -m brigade launch {tmp_path}/full.yaml --hostfile {hosts}"
    assert second == f"Start: {start}" and f"# Start:    {start}\n" in (tmp_path / "full.yaml").read_text()
    assert not [finding for finding in lint([str(tmp_path / "full.yaml")]).findings if finding.severity != "note"]
    assert plan(tmp_path / "full.yaml") == 0 and f"on {size} {gpu}" in capsys.readouterr().out.splitlines()[0]
    assert plan(*words) == 0 and "there already, unchanged" in capsys.readouterr().out


def test_what_is_trained_whole_is_one_key_and_said(tmp_path, capsys):
    words = ["llama-3.1-8b", "--method", "lora", "--gpu", "H100"]
    assert plan(*words) == 0 and "\ntrains 42 M in adapters only\n" in capsys.readouterr().out
    ends = ["--lora_modules_to_save", "embed_tokens,lm_head"]
    assert plan(*words, *ends, "--write", tmp_path) == 0
    said = "\ntrains 42 M in adapters + 1,051 M in embed_tokens and lm_head, because lora_modules_to_save names them\n"
    assert said in capsys.readouterr().out
    text = (tmp_path / "lora.yaml").read_text()
    assert "  lora_modules_to_save: [embed_tokens, lm_head]\n" in text
    assert re.search(r"chat_template: llama3 +# a base", text)
    assert plan(tmp_path / "lora.yaml") == 0 and said in capsys.readouterr().out
    assert plan("llama-3.1-8b", "--gpu", "H100", *ends) == 2 and "trains them anyway" in capsys.readouterr().err
    assert plan("llama-3.2-1b", "--method", "lora", "--gpu", "H100", *ends) == 2 and "ties" in capsys.readouterr().err


def test_a_folder_elsewhere_is_none_of_ours_whatever_its_name(tmp_path):
    (tmp_path / "llama-3.1-8b").mkdir()
    shutil.copy("recipes/llama-3.1-8b/config.json", tmp_path / "llama-3.1-8b")
    assert published_model(str(tmp_path / "llama-3.1-8b")).hub == str(tmp_path / "llama-3.1-8b")
    assert published_model("someone/llama-3.1-8b").hub == "someone/llama-3.1-8b"
    for name in ("llama-3.1-8b", "recipes/llama-3.1-8b", "recipes/llama-3.1-8b/config.json", "meta-llama/Llama-3.1-8B"):
        assert published_model(name).hub == "meta-llama/Llama-3.1-8B"


def test_a_file_of_another_content_is_left_alone(tmp_path, capsys):
    words = ["qwen3-4b", "--gpu", "H100 80GB", "--method", "lora", "--write", tmp_path / "lora.yaml"]
    (tmp_path / "lora.yaml").write_text("model: {model_name_or_path: mine}\ntraining: {global_batch_size: 8}\n")
    assert plan(*words) == 2
    assert "not overwritten" in capsys.readouterr().err and "mine" in (tmp_path / "lora.yaml").read_text()
    (tmp_path / "lora.yaml").unlink()
    shutil.copy("recipes/phi-4/config.json", tmp_path / "config.json")
    assert plan(*words) == 2
    assert "config.json" in capsys.readouterr().err and not (tmp_path / "lora.yaml").exists()


def test_a_cluster_without_a_file_of_its_own_gets_the_strategy_in_the_recipe(tmp_path):
    (tmp_path / "hosts").write_text("".join(f"n{i} slots=4\n" for i in range(3)))
    words = ["gpt-oss-120b", "--method", "lora", "--gpu", "A100 80GB", "--hostfile", tmp_path / "hosts"]
    words += ["--strategy", "fsdp2"]
    assert plan(*words, "--global_batch_size", 12, "--write", tmp_path) == 0
    settings = flags.load(["--recipe", str(tmp_path / "lora.yaml")])
    assert settings.recipe.cluster.accelerate_config["distributed_type"] == "FSDP"
    assert job_of(settings).engine == "fsdp2" and job_of(settings).gpus == 12
    assert not lint([str(tmp_path / "lora.yaml")]).counts()["error"]


def test_a_model_with_a_vision_tower_is_written(tmp_path, capsys):
    assert plan("gemma-3-4b-it", "--gpu", "H100 80GB", "--method", "lora", "--write", tmp_path) == 0
    assert "carries a vision tower" in capsys.readouterr().out and (tmp_path / "lora.yaml").exists()


def test_rows_beyond_the_positions_are_written_where_the_maker_says_how(tmp_path, capsys):
    """Qwen3-8B: 40,960 positions, and 131,072 by YaRN over 32,768 (its page on the Hub)."""
    words = ["qwen3-8b", "--gpu", "H100", "--hostfile", "hostfiles/1x8", "--global_batch_size", 16]
    assert plan(*words, "--max_length", 131_072, "--write", tmp_path) == 0
    recipe = flags.load(["--recipe", str(tmp_path / "full.yaml")]).recipe
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert recipe.model.rope_parameters == rope
    assert plan(*words, "--max_length", 40_960, "--write", tmp_path / "short") == 0
    assert flags.load(["--recipe", str(tmp_path / "short" / "full.yaml")]).recipe.model.rope_parameters is None
    assert plan(*words, "--max_length", 131_080, "--write", tmp_path / "long") == 2
    told = capsys.readouterr().err
    assert "--max_length" in told and "positions for 131072" in told and not (tmp_path / "long").exists()


def test_the_network_that_was_planned_for_is_the_recipes(tmp_path, capsys):
    words = ["qwen3-8b", "--gpu", "A100", "--hostfile", "hostfiles/2x8", "--network", "25 Gb/s"]
    assert plan(*words, "--write", tmp_path) == 0
    capsys.readouterr()
    slow = load_plan(tmp_path / "full.yaml")
    assert slow.estimate.job.link == "25 Gb/s" and "25 Gb/s between hosts" in (tmp_path / "full.yaml").read_text()
    usual = load_plan(tmp_path / "full.yaml", "1600 Gb/s").estimate
    assert usual.job.link == "1600 Gb/s" and usual.time.across < slow.estimate.time.across
    text = (tmp_path / "full.yaml").read_text().replace("network: 25 Gb/s", "network: fast")
    (tmp_path / "full.yaml").write_text(text)
    assert plan(tmp_path / "full.yaml") == 2 and "'fast' states no rate" in capsys.readouterr().err


def test_experts_are_planned_under_zero3_like_other_layers():
    """Transformers 5 has the experts of a layer in one parameter, which every rank gathers, wherever it sends its tokens: the
    rows zero3+deepseek_v3 of docs/evidence/parity.md."""
    ranked, winner = chosen_for("qwen3-30b-a3b", Cluster("H100 80GB", 8, 2), method="lora", trained=13_369_344)
    zero3 = next(candidate for candidate in ranked if candidate.choice.name == "ZeRO-3")
    assert winner and zero3.fits and zero3.seconds < 1.5 * winner.seconds


def test_slow_networks_and_the_cpus_adam_are_named():
    ranked, winner = chosen_for("llama-3.1-8b", Cluster("A100 80GB", 8, 2, "25 Gb/s"), choices=PLAIN)
    reasons = {candidate.choice.name: reason(candidate, winner) for candidate in ranked}
    assert winner.choice.group == "node"  # which gathers inside of nodes
    assert "gathers all weights over 25 Gbit/s, which wants 400" in reasons["ZeRO-3"]
    ranked, winner = chosen_for("llama-3.1-8b", Cluster("A100 80GB", 8, 2, "400 Gb/s"), choices=PLAIN)
    assert "the CPU's Adam" in next(reason(c, winner) for c in ranked if c.choice.name == "ZeRO-3 offload")


def test_what_no_gpu_has_tried_is_an_estimate_only():
    ranked, winner = chosen_for("llama-3.1-70b", Cluster("H100 80GB", 8, 4))
    only = {candidate.choice.name: candidate for candidate in ranked if candidate.choice.why_only}
    assert only.keys() == {"ZeRO++"} and winner and not winner.choice.why_only
    assert all(reason(candidate, winner).startswith("estimate only") for candidate in only.values() if candidate.fits)


def test_offload_is_for_what_fits_in_no_other_way():
    _, small = chosen_for("qwen2.5-0.5b", Cluster("RTX 4090", 1, 1), length=2048)
    _, large = chosen_for("qwen3-8b", Cluster("H100 80GB", 1, 1))
    assert not small.choice.offload and large.choice.offload


def test_offload_is_weighed_where_the_hosts_are_told():
    """405B over a slow network: ZeRO-3 with offload gathers half as often as sequence parallelism beside ZeRO-3."""
    slow, usual = Cluster("H100 80GB", 8, 16, "400 Gb/s"), {"optimizer": "adamw_torch_fused"}
    ranked, winner = chosen_for("llama-3.1-405b", slow, **usual)
    offload = next(candidate for candidate in ranked if candidate.choice.offload == "optimizer")
    assert offload.fits and offload.seconds < 0.8 * winner.seconds and not winner.choice.offload
    assert "--host_memory" in reason(offload, winner)
    ranked, winner = chosen_for("llama-3.1-405b", replace(slow, host_gib=2048), **usual)
    assert winner.choice.offload == "optimizer" and not any("is not known" in reason(c, winner) for c in ranked)
    told = replace(slow, nvme_gb=30_000)
    assert chosen_for("llama-3.1-405b", told, **usual)[1].choice.offload != "nvme"  # slow, and named by nobody
    _, winner = chosen_for("llama-3.1-405b", told, asked=True, **usual)
    assert winner.choice.offload == "nvme"  # the one whose hosts are told


def test_what_hosts_lack_is_told_and_never_chosen():
    """Full 8B on one gaming card goes to the host's memory or its disks, if they are large enough."""
    bare = Cluster("RTX 4090", 1, 1, host_gib=64, nvme_gb=100)
    ranked, winner = chosen_for("llama-3.1-8b", bare, length=1024)
    said = " ".join(reason(candidate, winner) for candidate in ranked)
    assert winner is None and "GiB of memory, of 64 (--host_memory)" in said and "of 100 (--nvme)" in said
    ranked, winner = chosen_for("llama-3.1-8b", replace(bare, nvme_gb=500), length=1024)
    assert winner is None and fastest(ranked).choice.offload == "nvme"
    _, winner = chosen_for("llama-3.1-8b", replace(bare, host_gib=512), length=1024)
    assert winner.choice.offload in ("optimizer", "all")


def test_what_may_not_fit_is_not_chosen():
    """Two people on LLaMA-Factory's issue 6999: 32B under ZeRO-3 on eight cards of 80 GB runs out of memory at 1,024 tokens."""
    ranked, winner = chosen_for("qwen3-32b", Cluster("A100 80GB", 8, 1), length=1024)
    (zero3,) = (one for one in ranked if one.name == "ZeRO-3")
    assert zero3.estimate.may_fit and not zero3.fits and winner is not zero3 and winner.fits
    assert re.fullmatch(r"may not fit: up to 8\d of 79 GiB", reason(zero3, winner))
    # Where nothing else is asked for nothing is chosen.
    only = tuple(choice for choice in CHOICES if choice.name == "ZeRO-3")
    ranked, winner = chosen_for(
        "qwen3-32b", Cluster("A100 80GB", 8, 1), length=1024, choices=only, optimizer="adamw_torch_fused"
    )
    assert winner is None and [one.estimate.may_fit for one in ranked] == [True]


@pytest.mark.parametrize("model, method, change", [
    ("llama-3.1-8b", "full", "LoRA instead of training all weights"), ("qwen3-14b", "lora", "QLoRA instead of LoRA"),
])  # fmt: skip
def test_the_smallest_change_goes_through_the_methods(model, method, change):
    bare = Cluster("RTX 4090", 1, 1, host_gib=32, nvme_gb=10)
    workload = Workload(named_shape(model), 1024, 8, method, trained=64_225_280 if method == "lora" else 0)
    assert chosen(candidates(workload, bare)) is None and change in smallest_change(workload, bare)


@pytest.mark.parametrize("model, method, kernels", [
    ("llama-3.1-8b", "full", "torch.compile"), ("llama-3.1-8b", "lora", "torch"), ("qwen3-30b-a3b", "full", "torch"),
])  # fmt: skip
def test_layers_are_compiled_where_that_is_proven(model, method, kernels):
    """tests/ranks/test_compile.py: all weights of dense models, under the engines that train.py runs."""
    trained = 10**7 if method == "lora" else 0
    ranked, winner = chosen_for(model, Cluster("H100 80GB", 8, 2), method=method, trained=trained)
    assert winner is not None and winner.kernels.removesuffix(", loss in tiles") == kernels
    never = {c.choice.name for c in ranked if c.kernels == "torch.compile" and (c.choice.axes or c.choice.offload)}
    assert not never


@pytest.mark.parametrize(
    "gpu, nodes, method", [("H100 80GB", 2, "full"), ("A100 80GB", 4, "lora"), ("L40S", 1, "full")]
)
def test_every_reason_is_one(gpu, nodes, method):
    """A micro-batch is named where it is smaller, and a simpler strategy where it is simpler."""
    trained = 10**7 if method == "lora" else 0
    ranked, winner = chosen_for("qwen3-4b", Cluster(gpu, 8, nodes), method=method, trained=trained)
    assert winner is not None
    for candidate in ranked:
        said = reason(candidate, winner)
        if found := re.search(r"micro-batch (\d+) against (\d+)", said):
            assert int(found[1]) < int(found[2]), said
        if "is simpler" in said:
            assert candidate.choice.rank > winner.choice.rank, said


def test_more_gpus_in_one_host_come_before_more_hosts():
    bare = Cluster("A100 40GB", 1, 1)
    assert "GPUs instead of 1" in smallest_change(Workload(named_shape("llama-3.1-8b"), 4096, 8), bare)


def test_more_hosts_help_where_slots_are_unequal_too():
    uneven = Cluster.of("RTX 4090", [8, 7])
    fsdp2 = tuple(choice for choice in CHOICES if choice.name == "FSDP2")
    workload = Workload(named_shape("qwen3-32b"), 1024, uneven.batch(1), choices=fsdp2)
    assert chosen(candidates(workload, uneven)) is None
    assert "8 nodes instead of 2" in smallest_change(workload, uneven)


def test_kernels_are_torchs_unless_asked(capsys):
    assert plan("qwen3-4b", "--gpu", "H100 80GB", "--method", "lora") == 0
    assert "--liger plans with it" in capsys.readouterr().out
    assert plan("qwen3-4b", "--gpu", "H100 80GB", "--method", "lora", "--liger") == 0
    assert "--liger plans with it" not in capsys.readouterr().out


@pytest.mark.parametrize("kind, said", [
    ("bert", "is an encoder"),
    ("whisper", "has an encoder and a decoder"),
    ("wav2vec2", "is a speech model"),
    ("qwen2_vl", "reads images and text"),
    ("vit", "is a vision model"),
])  # fmt: skip
def test_what_is_no_causal_language_model_is_refused_for_what_it_is(kind, said, tmp_path, capsys, mistake):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    assert plan(tmp_path, "--gpu", "H100") == 2
    assert f"train.py trains causal language models, and '{kind}' {said}" in capsys.readouterr().err
    settings = flags.load(["--model_name_or_path", str(tmp_path)])
    assert said in mistake(load_config, settings)


def test_a_name_on_the_hub_without_a_network_ends_at_once(tmp_path):
    """In a process of its own: it tells Hugging Face's libraries to stay offline."""
    unreachable = {"HF_ENDPOINT": "https://hub.invalid", "HF_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    words = [sys.executable, "-m", "brigade", "plan", "someone/nothing", "--gpu", "H100"]
    told = subprocess.run(words, capture_output=True, text=True, env=unreachable, timeout=60)
    assert told.returncode == 2 and told.stdout == "" and len(told.stderr.splitlines()) == 3
    assert "hub.invalid does not resolve, and the cache does not have it" in told.stderr


def test_fsdp2_with_offload_is_proposed_and_written(tmp_path):
    """14B in full on four A100s of 40 GB needs the host's memory: FSDP2 with offload is as fast as DeepSpeed's."""
    cluster = Cluster("A100 40GB", 4, 1, host_gib=512)
    ranked, winner = chosen_for("qwen3-14b", cluster)
    (fsdp2,) = (one for one in ranked if one.name == "FSDP2 offload")
    assert winner.choice.offload and fsdp2.fits and fsdp2.seconds < 1.05 * winner.seconds
    assert reason(fsdp2, winner) == f"as fast, but {winner.name} is simpler"
    assert strategy_keys(fsdp2) == {"accelerate_config": "accelerate_configs/fsdp2_offload_1x4.yaml"}
    # On cards of 24 GB it is the fastest that fits.
    ranked, winner = chosen_for("qwen3-8b", Cluster("RTX 4090", 8, 1, host_gib=512))
    assert winner.name == "FSDP2 offload"
    assert winner.seconds < 0.95 * min(c.seconds for c in ranked if c.fits and c is not winner)
    config = strategy_keys(winner)["accelerate_config"]
    assert config["fsdp_config"] == {"fsdp_version": 2, "fsdp_offload_params": True}
