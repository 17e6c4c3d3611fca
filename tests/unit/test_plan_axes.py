"""A plan's axes besides data parallelism: it proposes what train.py runs, takes an axis where it wins, and writes its file."""

import itertools
import re
import shlex
from functools import partial

import pytest
import yaml

from benchmarks import choosing
from brigade.__main__ import main
from brigade.lint.linter import lint
from brigade.plan.choice import workload
from brigade.plan.choice.explain import reason
from brigade.plan.choice.job_of_recipe import load_plan
from brigade.plan.choice.job_of_run import divisible
from brigade.plan.choice.search import divisions
from brigade.plan.choice.workload import CHOICES, Cluster, Workload
from brigade.plan.costs.memory import GIB
from brigade.plan.output import strategy_file
from brigade.plan.output.answer import speed_of
from brigade.plan.shape.find import named_shape
from brigade.train.strategy import refusal
from brigade.train.strategy.axes import NAMES
from testing.planning import chosen_for
from testing.ranks import REPOSITORY as ROOT

LLAMA, TIED, MOE = (named_shape(str(ROOT / "recipes" / name)) for name in ("llama-3.1-8b", "qwen3-4b", "qwen3-30b-a3b"))
H100 = Cluster("H100 80GB", 8, 2)


@pytest.fixture
def every_axis(monkeypatch):
    """As if train.py ran every pair that formulas know."""

    def known(about="", **facts):
        return refusal(about, **{key: value for key, value in facts.items() if key not in NAMES})

    monkeypatch.setattr(workload, "refusal", known)


# ---- what a plan may propose -------------------------------------------------------------------------------------
@pytest.mark.parametrize("method, model, length, batch", [
    ("full", "llama-3.1-8b", 4096, 128), ("qdora", "llama-3.1-8b", 4096, 128), ("lora", "qwen3-32b", 4096, 64),
    ("full", "qwen3-30b-a3b", 4096, 128), ("full", "qwen3-8b", 131_072, 16),
])  # fmt: skip
def test_a_plan_never_proposes_what_is_refused(method, model, length, batch):
    trained = 0 if method == "full" else 10**7
    ranked, _ = chosen_for(model, H100, method=method, trained=trained, length=length, batch=batch)
    assert ranked
    for candidate in ranked:
        axes = dict.fromkeys(candidate.estimate.job.axes.used, True)
        refused = refusal(method=method, kind=candidate.choice.kind, optim="adamw_torch_fused", **axes)
        assert refused is None, candidate.name


def test_every_kind_of_strategy_has_the_name_that_train_py_gives_it():
    kinds = {choice.name: choice.kind for choice in CHOICES if not choice.axes}
    assert set(kinds.values()) == {"ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp"}
    assert kinds["HSDP"] == "hsdp" and kinds["ZeRO-3 NVMe"] == kinds["ZeRO++"] == "zero3"
    assert {axis for choice in CHOICES for axis in choice.axes} == set(NAMES)


def test_fsdp2_is_given_no_parts_of_matrices_that_it_cannot_shard():
    """Three hosts of eight: no tensor size leaves it a number of ranks that divides Llama's 4096 columns."""
    for choice in CHOICES:
        if choice.engine == "fsdp2" and choice.axes == ("tensor",):
            found = [*divisions(Workload(LLAMA), Cluster("H100 80GB", 8, 3), choice)]
            assert bool(found) == (choice.group == "node"), choice.name


def test_sizes_divide_the_model_and_stay_inside_a_node(every_axis):
    for choice, shape, cluster in itertools.product(CHOICES, (LLAMA, MOE, TIED), (H100, Cluster("L4", 4, 3))):
        for axes in divisions(Workload(shape), cluster, choice):
            assert set(axes.used) == set(choice.axes) and cluster.gpus % axes.model == 0
            assert cluster.node_size % (axes.tensor * axes.sequence) == 0 and axes.every_stage < shape.layers
            assert not any(number % size for axis, size in axes.used.items() for number in divisible(shape, axis))
            assert cluster.gpus // axes.stages % axes.experts == 0
    choice = next(choice for choice in CHOICES if choice.axes == ("stages",))
    assert 3 in {axes.stages for axes in divisions(Workload(LLAMA), Cluster("L4", 4, 3), choice)}


@pytest.mark.parametrize("model, names", [
    ("qwen3-30b-a3b", {"EP x DDP", "EP x HSDP", "TP x EP x FSDP2", "SP x EP x FSDP2", "PP x EP x DDP", "TP x PP x EP x ZeRO-1"}),
    ("gpt-oss-20b", {"EP x DDP", "EP x HSDP", "PP x EP x DDP"}), ("llama-3.1-8b", set()),
])  # fmt: skip
def test_experts_are_divided_beside_every_axis_that_they_run_with(model, names):
    """docs/evidence/parity.md has each pair; gpt-oss has no plan for tensor groups, nor attention for parts of a sequence."""
    ranked, _ = chosen_for(model, H100)
    found = {candidate.choice.name for candidate in ranked if "experts" in candidate.choice.axes}
    assert names <= found and bool(names) == bool(found)
    assert not (model == "gpt-oss-20b" and any("TP" in name or "SP" in name for name in found))
    for candidate in (candidate for candidate in ranked if candidate.choice.name == "EP x DDP"):
        job = candidate.estimate.job
        assert (job.engine, job.shard_ranks) == ("fsdp2", 1) and job.expert > 1


def test_a_batch_of_fewer_sequences_than_gpus_is_planned_where_an_axis_takes_them(every_axis):
    ranked, winner = chosen_for("llama-3.1-8b", H100, length=131_072, batch=4)
    assert winner and all(candidate.estimate.job.data <= 4 for candidate in ranked)


# ---- what it chooses ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model, cluster, changes, axes", [
    ("llama-3.1-8b", H100, {"length": 131_072, "batch": 16}, {"sequence"}),
    ("qwen3-8b", Cluster("H100 80GB", 8, 1), {"length": 131_072, "batch": 8}, {"sequence"}),
    ("qwen3-235b-a22b", Cluster("H100 80GB", 8, 16, "1600 Gb/s"), {}, {"experts"}),
    ("gpt-oss-120b", Cluster("B200", 8, 2), {}, {"experts"}),
    ("qwen3-30b-a3b", Cluster("H100 80GB", 8, 4, "25 Gb/s"), {}, {"stages"}),
    ("gpt-oss-120b", Cluster("H100 80GB", 8, 16, "100 Gb/s"), {}, {"experts", "stages"}),
    ("llama-3.1-70b", Cluster("A100 80GB", 8, 4, "25 Gb/s"), {}, {"stages"}),
    ("qwen3-32b", Cluster("A100 80GB", 8, 2, "25 Gb/s"), {}, {"stages"}),
    ("llama-3.1-70b", Cluster("H100 80GB", 8, 16), {}, set()), ("llama-3.1-8b", Cluster("H100 80GB", 8, 1), {}, set()),
])  # fmt: skip
def test_an_axis_is_taken_where_it_wins(model, cluster, changes, axes, every_axis):
    ranked, winner = chosen_for(model, cluster, **changes)
    assert winner and axes <= set(winner.choice.axes) and bool(axes) == bool(winner.choice.axes) and winner.fits
    assert all(reason(candidate, winner) for candidate in ranked)


def test_a_frontier_model_fits_no_cluster_of_128_gpus_without_an_axis(every_axis):
    """405 billion parameters: 51 GiB of ZeRO-3's states on each, and a row's activations beside them."""
    ranked, winner = chosen_for("llama-3.1-405b", Cluster("A100 80GB", 8, 16), optimizer="adamw_torch_fused")
    assert winner and winner.choice.axes and winner.estimate.allocated_gib > 18 * 405e9 / 128 / GIB * 0.7
    plain = [c for c in ranked if not (c.choice.axes or c.choice.offload)]
    assert plain and not any(candidate.fits for candidate in plain)


# ---- files -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model, cluster, network, strategy, file, says", [
    ("qwen3-8b", "2x8", "25 Gb/s", "pp_zero1", "zero1_pp*.json", ("pipeline", "stages")),
    ("qwen3-8b", "1x8", "", "tp_zero1", "zero1_tp*.json", ("tensor_parallel", "autotp_size")),
    ("qwen3-8b", "1x8", "", "tp_fsdp2", "fsdp2_tp*.yaml", ("parallelism_config", "parallelism_config_tp_size")),
    ("qwen3-30b-a3b", "2x8", "", "ep_fsdp2", "fsdp2_ep*.yaml", ("parallelism_config", "parallelism_config_ep_size")),
    ("qwen3-30b-a3b", "2x8", "", "ep_ddp", "ddp_ep*.yaml", ("parallelism_config", "parallelism_config_ep_size")),
    ("qwen3-30b-a3b", "2x8", "", "tp_ep_hsdp", "hsdp_tp*_ep*.yaml", ("parallelism_config", "parallelism_config_tp_size")),
    ("qwen3-30b-a3b", "2x8", "", "tp_pp_ep_zero1", "zero1_tp*_pp*_ep*.json", ("expert_parallel", "autoep_size")),
    ("qwen3-8b", "2x8", "25 Gb/s", "sp_hsdp", "hsdp_sp*.yaml", ("parallelism_config", "parallelism_config_sp_size")),
    ("qwen3-0.6b", "1x8", "", "sp_ddp", "ddp_sp*.yaml", ("parallelism_config", "parallelism_config_sp_size")),
])  # fmt: skip
def test_a_written_plan_has_a_file_for_its_axes(
    model, cluster, network, strategy, file, says, tmp_path, monkeypatch, capsys, prints, every_axis
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("brigade.train.strategy.refusal", workload.refusal)
    monkeypatch.setattr(strategy_file, "_place", lambda kind, name, folder: folder / name)  # whatever is shipped
    words = ["plan", model, "--gpu", "H100", "--hostfile", f"hostfiles/{cluster}", "--strategy", strategy]
    words += ["--network", network] if network else []
    said = prints(0, *words, "--write", str(tmp_path))
    (path,) = tmp_path.glob(file)
    block, key = says
    assert yaml.safe_load(path.read_text())[block][key] > 1 and str(path) in said
    written = load_plan(tmp_path / "full.yaml", network)
    assert f"memory   {written.estimate.device_gib:.1f} GiB on each GPU" in said and "\naxes     " in said
    assert written.strategy.axes == written.estimate.job.axes and f"{written.strategy_name}" in said
    assert f"{written.strategy_name} on " in (tmp_path / "full.yaml").read_text()
    found = lint([str(tmp_path / "full.yaml")]).findings
    assert not [one for one in found if one.severity == "error" and "Brigade" not in one.problem and key not in one.at]
    assert main([*words, "--write", str(tmp_path)]) == 0 and "there already, unchanged" in capsys.readouterr().out


def test_a_file_that_is_shipped_is_taken_and_recipes_of_ours_share_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(strategy_file, "REPOSITORY", tmp_path)
    for folder in ("recipes/mine", "ds_configs", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    place = partial(strategy_file._place, "ds_configs", "zero1_pp4.json")
    assert place(tmp_path / "elsewhere") == tmp_path / "elsewhere" / "zero1_pp4.json"
    assert place(tmp_path / "recipes" / "mine") == tmp_path / "ds_configs" / "zero1_pp4.json"
    (tmp_path / "ds_configs" / "zero1_pp4.json").write_text("{}")
    assert place(tmp_path / "elsewhere") == tmp_path / "ds_configs" / "zero1_pp4.json"


@pytest.mark.slow
def test_a_cell_of_the_page_is_what_its_command_says(capsys, monkeypatch, every_axis):
    monkeypatch.chdir(ROOT)
    found = choosing.answer(choosing.ROWS["Qwen3 235B A22B"], choosing.COLUMNS["16 hosts"])
    assert main(shlex.split(found.command)[3:]) == 0
    name, _ = choosing.told(found.best).split(", ", 1)
    said = " ".join(capsys.readouterr().out.split())
    speed = speed_of(found.best.estimate)[0]
    assert name in said and f"speed {speed} tokens/s on each GPU" in said
    assert found.why.startswith(f"{found.plain.name}: ")


def test_the_page_says_why_where_it_chooses_the_slower_one():
    """Every cell has a choice in bold and another in parentheses: a slower choice has a reason, a faster one has none."""
    cells = re.findall(r"\*\*[^*|]*, ([\d,]+)\*\* \(([^,|]*), ([\d,]+)(: [^|)]+)?\) \|", choosing.PAGE.read_text())
    slower = [
        (name, why) for best, name, plain, why in cells if int(plain.replace(",", "")) > int(best.replace(",", ""))
    ]
    assert len(cells) > 10 and all(why for _, why in slower)
    assert {why for name, why in slower if "offload" in name} <= {": hosts' memory not told", ": may not fit"}


def test_what_train_py_does_not_run_is_named_as_such(plan, monkeypatch):
    monkeypatch.setattr(workload, "refusal", lambda **facts: {} if facts.get("tensor") else None)
    code, text = plan("qwen3-8b", "--gpu", "H100", "--strategy", "tp_zero1")
    assert code == 2 and "train.py does not run TP x ZeRO-1" in text
