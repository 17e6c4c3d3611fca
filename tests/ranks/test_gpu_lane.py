"""Every engine and axis on fake GPUs (testing/fake_gpu/) gives one process's losses on the CPU (docs/evidence/fake-gpu.md)."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import waits as committed_waits
from testing import fake_gpu, gpu_lane, marks, parity, run_files, runs, waits
from testing.command_line import as_flags, run_here
from testing.launch_commands import COMMANDS, with_own_port
from testing.ranks import run_ranks

BIN = Path(sys.executable).parent
AVERAGING = "local/outer.py"  # by way of the hosts, once in a round of replicas
RESUMED = ("ddp", "zero3", "fsdp2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory, asked_for):
    cases = {gpu_lane.reference_of(name): gpu_lane.reference(name) for name in asked_for("name")}
    return runs.run_cases(1, list(cases.values()), tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def results(tmp_path_factory, asked_for):
    return gpu_lane.run(
        asked_for("name"), lambda: tmp_path_factory.mktemp("gpus"), asked_for("resumed"), asked_for("asking")
    )


every_case = pytest.mark.parametrize(
    "name",
    marks.cases(
        *gpu_lane.QUICK,
        slow=[name for name in gpu_lane.EVERY if name not in (*gpu_lane.QUICK, *gpu_lane.SIBLINGS)],
        matrix=gpu_lane.SIBLINGS,
    ),
)


def assert_losses(found, expected, precision, name):
    differences = parity.worst(found, expected)
    assert all(differences[key] <= gpu_lane.TOLERANCE[precision] for key in ("loss", "eval_loss")), (name, differences)


@every_case
def test_a_gpu_gives_the_losses_of_the_cpu(name, reference, results):
    assert_losses(results[name], reference[gpu_lane.reference_of(name)], gpu_lane.EVERY[name].precision, name)


@every_case
def test_the_allocator_has_read_its_setting_when_cuda_starts(name, results):
    """torch reads it once: set after the group of ranks was made, it had no effect, and the run's table said that it had."""
    assert results[name]["growing"] == [True] * gpu_lane.EVERY[name].ranks


@every_case
def test_the_host_waits_where_the_page_says(name, results):
    """On every rank, and in no line of ours in each micro-step. A pipeline computes them in one call, where such a line would
    wait twice."""
    found = results[name]["waits"]
    assert found["micro_steps"] == 2 and not waits.in_each_micro_step(found)
    assert sorted(rank for group in found["ranks"] for rank in group["ranks"]) == [*range(gpu_lane.EVERY[name].ranks)]
    ours = [each for group in found["ranks"] for each in waits.of_ours(group["waits"]) if AVERAGING not in each["line"]]
    assert all(each["step"] <= 1 for each in ours)
    assert found["ranks"] == committed_waits.rows()[name]["ranks"], "python -m benchmarks.waits writes the page anew"


@pytest.mark.parametrize("asking", ["ddp bf16"])
def test_a_wait_in_each_micro_step_is_found(asking, results):
    """Also where rank 0, which logs, does not wait."""
    report = results[f"{asking}, asking"]["waits"]
    (found,) = waits.in_each_micro_step(report)
    assert found == {"line": "testing/disturbances.py ask", "why": "item", "micro-step": 1, "step": 0, "log line": 0}
    assert [group["ranks"] for group in report["ranks"] if found in group["waits"]] == [[1]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "resumed"), [(name, name) for name in RESUMED], ids=RESUMED)
def test_a_run_that_died_twice_goes_on_bit_for_bit(name, resumed, results):
    again = results[f"{resumed}, stopped"]
    assert again == {key: results[name][key] for key in again}


@pytest.mark.slow
def test_the_routers_loss_is_that_of_the_cpu_and_waits_for_nothing_in_each_micro_step(tmp_path_factory):
    """With the forward passes that count ahead, in fp32 and in bf16."""
    names, asked = ("ddp experts bf16", "fsdp2 experts", "fsdp2 experts bf16"), ["--router_aux_loss_coef", "0.5"]
    alone = gpu_lane.reference(names[0])
    alone["flags"] += asked
    (expected,) = runs.run_cases(1, [alone], tmp_path_factory.mktemp("alone"), steps=gpu_lane.STEPS).values()
    cases = [gpu_lane.run_case(name) | {"waits": gpu_lane.STEPS} for name in names]
    for case in cases:
        case["flags"] += asked
    found = runs.run_cases(2, cases, tmp_path_factory.mktemp("gpus"), steps=gpu_lane.STEPS, gpus=True)
    for name in names:
        assert_losses(found[name], expected, gpu_lane.EVERY[name].precision, name)
        assert not waits.in_each_micro_step(found[name]["waits"]), name


@pytest.mark.slow
def test_objectives_and_methods_are_those_of_the_cpu_and_wait_for_nothing_in_each_micro_step(tmp_path_factory):
    """Adapters are continued that the same run in one process has left. What is saved is the same."""
    folder, alone, cases = tmp_path_factory.mktemp("alone"), [], []
    for name, (asked, strategies) in gpu_lane.BESIDES.items():
        asked = [str(folder / flag) if flag.startswith("outputs/") else flag for flag in asked]
        for strategy in strategies:
            case = gpu_lane.run_case(strategy)
            case |= {"name": f"{name}, {strategy}", "flags": [*case["flags"], *asked], "waits": gpu_lane.STEPS}
            cases.append(case)
        case = gpu_lane.reference("zero3")
        alone.append(case | {"name": name, "flags": [*case["flags"], *asked]})
    for name, (strategy, asked) in gpu_lane.OTHERWISE.items():
        case = gpu_lane.run_case(strategy)
        counted = {} if "auto" in asked else {"waits": gpu_lane.STEPS}  # it takes the whole step for one micro-step
        cases.append(case | {"name": f"plain, {name}", "flags": [*case["flags"], *asked]} | counted)
    alone.append(gpu_lane.reference("zero3") | {"name": "plain"})
    expected = runs.run_cases(1, alone, folder, steps=gpu_lane.STEPS)
    found = runs.run_cases(2, cases, tmp_path_factory.mktemp("gpus"), steps=gpu_lane.STEPS, gpus=True)
    for name, result in found.items():
        assert_losses(result, expected[name.partition(",")[0]], "bf16" if name in gpu_lane.ROUGHLY else "fp32", name)
        assert "waits" not in result or not waits.in_each_micro_step(result["waits"]), name


@pytest.mark.slow
def test_pairs_share_their_prompts_where_the_device_has_proven_it(tmp_path):
    """In fp32 by SDPA, in bf16 by FlashAttention, of which a kernel is planted that aligns the first query with the first key."""
    flags = [*gpu_lane.LANE, *gpu_lane.DPO, "--packing", "true", "--optim", "sgd", "--learning_rate", "0.6"]
    flags += [*runs.write_inputs(tmp_path), "--per_device_train_batch_size", "2", "--dataloader_num_workers", "0"]
    cases = [
        {"name": f"{precision} {asked}", "flags": [*flags, *gpu_lane.PRECISIONS[precision], "--share_prompts", asked]}
        for precision in ("fp32", "bf16")
        for asked in ("false", "true")
    ]
    aligned = {"cache": str(tmp_path / "cache"), "variables": {"FAKE_GPU_ALIGNS": "top-left"}}
    cases += [
        {"name": asked, "flags": [*flags, "--bf16", "--share_prompts", asked]} | aligned for asked in ("auto", "true")
    ]
    for case in cases:
        case["flags"] += ["--output_dir", str(tmp_path / case["name"])]
    found, done = runs.run_all(1, cases, tmp_path, 600, gpus=True)
    assert list(found) == [case["name"] for case in cases[:-1]] and done.returncode, done.stderr[-3000:]
    once, why = "once for both answers of a pair", r"with varlen: logits are off by \S+, rounding allows"
    assert all(once in found[f"{precision} true"]["said"] for precision in ("fp32", "bf16"))
    assert re.search(f"once for each answer: {why}", " ".join(found["auto"]["said"].split()))
    assert re.search(
        f"--share_prompts\\s+.*the answers of a pair cannot share the tokens of their prompt: {why}", done.stderr
    )
    for name, other in (("fp32 true", "fp32 false"), ("bf16 true", "bf16 false"), ("auto", "bf16 false")):
        losses = [run_files.figures(found[each]["log"], "loss")["loss"] for each in (name, other)]
        tolerance = 0 if name == "auto" else gpu_lane.TOLERANCE[name.partition(" ")[0]]
        assert losses[0] == pytest.approx(losses[1], rel=tolerance, abs=0) and len(losses[0]) == gpu_lane.STEPS


def away(one, other):
    """The distance between two models' weights."""
    return sum((one[key].float() - other[key].float()).square().sum() for key in one).sqrt()


HYBRID = [*gpu_lane.PACKING, "--attn_implementation", "sdpa"]


@pytest.mark.slow
@pytest.mark.parametrize("model, names, asked, part", [
    ("minimax_m2", ("ddp experts bf16", "fsdp2 experts"), ["--router_bias_update_rate", "0.1"], "router_bias"),
    ("qwen3_5_text", ("ddp bf16", "zero3 bf16", "fsdp2"), HYBRID, "on_host"),
])  # fmt: skip
def test_what_a_model_needs_besides_waits_for_nothing(model, names, asked, part, tmp_path_factory):
    """Routers' biases, neither where tokens are counted nor where the bias follows them; and layers with a state, which divide
    samples by lengths that the host knows."""
    cases = [gpu_lane.run_case(name) | {"waits": gpu_lane.STEPS, "model": model} for name in names]
    alone = gpu_lane.reference(names[0]) | {"model": model}
    for case in (alone, *cases):
        case["flags"] += asked
    folder, of_gpus = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("gpus")
    (expected,) = runs.run_cases(1, [alone], folder, steps=gpu_lane.STEPS).values()
    found = runs.run_cases(2, cases, of_gpus, steps=gpu_lane.STEPS, gpus=True)
    base = load_file(folder / model / "model.safetensors")
    trained = load_file(folder / "outputs" / alone["name"] / "model.safetensors")
    for name in names:
        precision = gpu_lane.EVERY[name].precision
        assert_losses(found[name], expected, precision, name)
        # The base is in fp32: under DeepSpeed in bf16, whose weights are in bf16, what is saved is their master copies.
        saved = load_file(of_gpus / "outputs" / name / "model.safetensors")
        assert saved.keys() == trained.keys() and all(saved[key].dtype == base[key].dtype for key in saved), name
        assert away(saved, trained) <= max(0.2, gpu_lane.TOLERANCE[precision]) * away(base, trained), name
        assert not all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values()), name
        waited = [each for group in found[name]["waits"]["ranks"] for each in group["waits"]]
        assert waited and not [each for each in waits.of_ours(waited) if part in each["line"]], waited


@pytest.mark.slow
def test_answers_are_those_of_the_cpu(tmp_path_factory):
    """And the model is rehearsed, judged and talked to on a GPU."""
    given = []
    for gpus in (False, True):
        folder = tmp_path_factory.mktemp("answers")
        case = gpu_lane.run_case("zero3") if gpus else gpu_lane.reference("zero3")
        case["flags"] = [*runs.write_inputs(folder), *case["flags"], "--eval_answers", "3"]
        case["flags"] += ["--output_dir", str(folder / "run")]
        rehearsal = {"name": "rehearsal", "flags": [*case["flags"], "--rehearse"]}
        cases = [case, rehearsal] if gpus else [case]
        found, done = runs.run_all(2 if gpus else 1, cases, folder, 300, longest_answer=6, gpus=gpus)
        assert len(found) == len(cases), done.stderr[-2000:]
        given.append([answer["answer"] for answer in run_files.answers(folder / "run")])
    assert given[0] == given[1] and len(given[0]) == 3
    asked = ["--question", "What is the class `filecmp.dircmp`?", "--max_new_tokens", "3"]
    for verb, *more in (["eval"], ["chat", *asked]):
        words = [sys.executable, "-m", "brigade", verb, folder / "run", *more]
        done = run_here(words, 250, **fake_gpu.environment(1))
        assert done.returncode == 0, (verb, done.stdout[-1000:], done.stderr[-3000:])


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_that_step_and_no_more(tmp_path, monkeypatch):
    more = as_flags(max_steps=4, save_steps=1, attn_implementation="varlen", async_save=False)
    flags = [*runs.write_inputs(tmp_path), *more, "--ds_config", "none", "--output_dir", str(tmp_path / "run")]
    monkeypatch.setenv("BRIGADE_TEST_FAULT", "killed-in-forward")
    assert run_ranks("testing.hanging", *flags, ranks=2, timeout=200, gpus=True).returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    monkeypatch.delenv("BRIGADE_TEST_FAULT")
    again = run_ranks("testing.hanging", *flags, ranks=2, timeout=200, gpus=True)
    assert again.returncode == 0, again.stderr[-2000:]
    assert json.loads((tmp_path / "run/success.json").read_text())["steps"] == 4


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path, monkeypatch):
    more = as_flags(max_steps=4, attn_implementation="varlen", hang_timeout=15, save_steps="null")
    flags = [*runs.write_inputs(tmp_path), *more, "--ds_config", "none", "--output_dir", str(tmp_path / "run")]
    monkeypatch.setenv("BRIGADE_TEST_FAULT", "sleeping-in-forward")
    done = run_ranks("testing.hanging", *flags, ranks=2, timeout=200, gpus=True)
    assert done.returncode == 1, done.stderr[-3000:]
    said = r"rank 1 on \S+ has hung in the forward pass since step 3; rank 0 waits for it in "
    assert re.search(said, done.stderr), done.stderr
    assert "_sleep" in (tmp_path / "run/heartbeats/rank-1.stacks").read_text()


@pytest.mark.slow
@pytest.mark.cases(name="zero3")
def test_ranks_that_see_one_gpu_each_train_as_those_that_see_all(tmp_path, results):
    case = gpu_lane.run_case("zero3")
    flags = [*runs.write_inputs(tmp_path), *case["flags"], "--output_dir", str(tmp_path / "run")]
    done = run_ranks("testing.one_gpu_each", *flags, ranks=2, timeout=200, gpus=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert run_files.losses_of(tmp_path / "run") == results["zero3"]["loss"]


def launch_here(folder):
    """The words of `launch` for two ranks on this host, and what the run says of them."""
    (folder / "here").write_text("localhost slots=2\n")
    words = ["python", "-m", "brigade", "launch", "recipes/tiny/full.yaml", "--hostfile", str(folder / "here")]
    return [*words, "--log_dir", str(folder / "logs"), "--ds_config", "ds_configs/zero2.json"], "world size 2", "zero2"


# accelerate starts its ranks by torchrun's agent, and leaves the GPUs that they see alone, too.
@pytest.mark.parametrize("launcher", marks.cases(slow=["torchrun", "deepspeed", "launch"], matrix=["accelerate-ddp"]))
def test_a_launcher_starts_a_rank_on_each_gpu_that_is_asked_for(launcher, tmp_path):
    """`deepspeed --num_gpus` takes the first, and is refused where others are asked for (tests/unit/test_visible_gpus.py). One of
    them proves its kernels first, as a run does that names none."""
    asked = "0,1" if launcher == "deepspeed" else "2,3"
    words, world_size, strategy = (COMMANDS | {"launch": launch_here(tmp_path)})[launcher]
    short = as_flags(max_steps=2, max_train_samples=100, max_eval_samples=10, eval_answers=0, report_page=False)
    proves = launcher == "torchrun"
    short += [] if proves else ["--attn_implementation", "varlen"]
    variables = fake_gpu.environment(4) | {"PATH": f"{BIN}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": asked}
    words = [*with_own_port(words), *short, "--output_dir", tmp_path / "run"]
    done = run_here([BIN / words[0], *words[1:]], 250, **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert world_size in done.stdout and f"strategy       {strategy} " in done.stdout
    assert "cuda" in done.stdout and ("proven here" in done.stdout) == proves
    assert ("asks for GPUs, and this host's ranks use 2, 3" in done.stdout) == (launcher == "launch")
    assert json.loads((tmp_path / "run/success.json").read_text())["steps"] == 2
