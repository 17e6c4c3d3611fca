"""Peaks by the names that drivers give, and the FLOPs of a token: an unknown device gets no figure, never a guess. And what
measured runs teach: factors in the user's own file, which estimates then go by."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from brigade.__main__ import main
from brigade.plan import hardware
from brigade.plan.choice.search import candidates
from brigade.plan.choice.workload import Cluster, Workload
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.job import Job
from brigade.plan.hardware import calibration, catalogue, gpu, gpu_of_device
from brigade.plan.runs import calibrate
from brigade.plan.shape.find import named_shape
from brigade.train.recipe.files import REPOSITORY
from brigade.train.watch.flops import flops_per_token, utilisation


# Names as torch.cuda.get_device_name() gives them.
@pytest.mark.parametrize("name, tflops", [
    ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A100 80GB PCIe", 312),
    ("NVIDIA A100-PCIE-40GB", 312),
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
    ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA L40", 181),
    ("NVIDIA A10G", 70),
    ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA GeForce RTX 3090", 71), ("NVIDIA A10", 125), ("Tesla V100-SXM2-32GB", 125),
    ("Tesla V100-PCIE-32GB", 112),
    ("NVIDIA H20", 148), ("NVIDIA H800", 989), ("AMD Instinct MI300X", 1307), ("NVIDIA GeForce RTX 5090", 209.5),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 65.96), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
    ("NVIDIA GB10", 118.9),
])  # fmt: skip
def test_known_names(name, tflops):
    assert gpu_of_device(name).bf16_tflops == tflops


@pytest.mark.parametrize("name", [
    "", "cpu", "Tesla P100-PCIE-16GB", "NVIDIA H20Z", "NVIDIA GeForce RTX 2080", "h100", "NVIDIA H100",
    "NVIDIA L40G",  # neither L4 nor L40
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of the card
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA GeForce RTX 4090 Max-Q", "NVIDIA GeForce RTX 4090 D v2", "NVIDIA GeForce RTX 3090 Ti Laptop GPU",
    "NVIDIA H200 NVL",  # 835
])  # fmt: skip
def test_unknown_names_some_of_which_begin_like_a_known_one(name):
    assert gpu_of_device(name) is None


def test_every_entry_has_numbers_and_source():
    needed = {*calibration.NUMBERS, "driver", "names", "source", "generation"}
    optional = {"matmul_tflops", "sustained", "attention_tflops", "node_gbit"}
    optional |= {"host_gib", "nvme_gb", "bf16", "integrated"}
    for name, entry in catalogue().items():
        assert set(entry) - optional == needed and entry["source"], name
        assert min(entry[key] for key in calibration.NUMBERS) > 0, name
        assert entry.get("matmul_tflops", 1) <= entry["bf16_tflops"], name


@pytest.mark.parametrize("written, kind", [
    *((name, "H100 80GB") for name in ("h100", "H100 SXM", "H100-SXM-80GB", "h100_80gb", "NVIDIA H100 80GB HBM3", "DGX-H100")),
    ("A800-80GB", "A800 80GB"), ("A100 (paper, 80GB)", "A100 80GB"),
    ("B200-SXM", "B200"), ("H200-SXM-141GB", "H200"), ("4090 24GB", "RTX 4090"), ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
    ("A100 80GB PCIe", "A100 PCIe 80GB"), ("A100-PCIe", "A100 PCIe 80GB"), ("A800 80GB PCIe", "A800 PCIe 80GB"),
    ("a6000", "RTX A6000"), ("6000 ada", "RTX 6000 Ada"), ("V100 16GB", "V100 16GB"), ("V100-PCIE-32GB", "V100 PCIe 32GB"),
    ("3080 ti", "RTX 3080 Ti"), ("a10", "A10"), ("a100-40g", "A100 40GB"),
    ("H100 PCIe 80GB", "H100 PCIe"), ("H100 94GB", "H100 94GB"), ("NVIDIA GeForce RTX 5090", "RTX 5090"), ("DGX-GB200", "GB200"),
    ("RTX PRO 6000", "RTX PRO 6000"), ("DGX Spark", "GB10"), ("4080", "RTX 4080"), ("5080", "RTX 5080"),
    ("3060", "RTX 3060 12GB"),
    ("RTX 3060 12GB", "RTX 3060 12GB"), ("4060 Ti 8GB", "RTX 4060 Ti 8GB"), ("4090 laptop", "RTX 4090 Laptop"),
    ("RTX 5090 Laptop GPU", "RTX 5090 Laptop"), ("RTX PRO 6000 Blackwell 96GB", "RTX PRO 6000"), ("A5000", "RTX A5000"),
])  # fmt: skip
def test_a_card_is_known_by_what_people_write(written, kind):
    assert gpu(written).kind == kind


@pytest.mark.parametrize("written, near", [
    ("H1000", "H100 80GB"),
    ("A100 30GB", "A100 40GB"),
    ("B2000", "B200"),
    ("H10O", "H100 80GB"),
    ("4090 48GB", "RTX 4090"),
])  # fmt: skip
def test_a_card_that_nobody_has_suggests_the_nearest(written, near, user_error):
    assert f"did you mean {near!r}" in user_error(gpu, written).cure


def test_a_card_that_is_not_there_shows_the_entry_to_write(tmp_path, monkeypatch, user_error):
    monkeypatch.setenv("BRIGADE_CALIBRATION", str(tmp_path / "own.yaml"))
    error = user_error(gpu, "Foo 9000")
    assert "known are A100 40GB, A100 80GB, H100" in error.problem and f"({len(catalogue())} in all)" in error.problem
    entry = error.cure.partition("own.yaml: ")[2].partition("; ")[0]
    assert entry.startswith("gpus: {'Foo 9000': {driver: NAME, memory_gib: ...,")
    (tmp_path / "written.yaml").write_text(entry.replace("...", "10").replace("NAME", "Foo"))
    monkeypatch.setenv("BRIGADE_CALIBRATION", str(tmp_path / "written.yaml"))
    assert gpu("Foo 9000").hbm_gb_s == 10 and gpu_of_device("Foo").kind == "Foo 9000"


def test_a_gpu_in_the_hosts_memory_has_nowhere_to_offload_to():
    spark = gpu("DGX Spark")
    assert spark.integrated
    shape = named_shape(str(REPOSITORY / "recipes" / "qwen3-8b"))
    found = {each.choice.name for each in candidates(Workload(shape), Cluster("DGX Spark", 1, 1))}
    assert found and not any("offload" in name or "NVMe" in name for name in found)


def test_a_chip_that_no_run_was_fitted_to_reaches_what_its_generation_does():
    known, unknown = gpu("H100"), gpu("H20")
    share = known.product_rate / 989e12
    assert known.seen and not unknown.seen
    assert min(0.48, share) <= unknown.product_rate / 148e12 <= share
    fitted = {"H100 94GB": 989e12, "GB200": 2500e12, "B200": 2250e12}
    least = min(gpu(name).product_rate / peak for name, peak in fitted.items())
    assert gpu("MI300X").product_rate / 1307e12 == pytest.approx(least, rel=0.05)


def test_flops_of_a_token_by_hand():
    # PaLM 540B, arXiv 2204.02311: 6 x 540.35e9 + 12 x 118 layers x 48 heads x 256 x 2048 tokens; heads x 256 = 12288
    assert flops_per_token(540_350_000_000, 118, 12_288, 2048) == 3_242_100_000_000 + 35_634_806_784
    # One layer of hidden size 2, 10 parameters, 3 tokens: 60 for the weights, 72 for attention.
    assert flops_per_token(10, 1, 2, 3) == 132


def test_utilisation_is_in_percent_of_the_peak():
    # 989e12 / 1e9 tokens/s would be all of it
    assert utilisation(989_000, 1e9, gpu_of_device("NVIDIA H200").bf16_tflops) == pytest.approx(100)
    assert utilisation(98_900, 1e9, gpu_of_device("NVIDIA H200").bf16_tflops) == pytest.approx(10)


# ---- calibration -----------------------------------------------------------------------------------------------------
KIND = "H100 80GB"
INSIDE = Job(named_shape("qwen3-8b"), 4096, engine="fsdp2", stage=3, data=8, checkpointing="full", gpu=KIND)
ACROSS = replace(INSIDE, data=32, link="400 Gb/s")
HIDDEN = replace(INSIDE, data=16, micro_batch=8, accumulation=4, link="3200 Gb/s")
TENS = ("bf16_tflops", "peer_gb_s", "pcie_gb_s", "sms")
OWN = {"driver": "My GPU", "memory_gib": 20, "hbm_gb_s": 100} | dict.fromkeys(TENS, 10)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where factors go in this test; not there yet."""
    path = tmp_path / "own" / "calibration.yaml"
    monkeypatch.setenv(calibration.VARIABLE, str(path))
    return path


@pytest.fixture
def ran(tmp_path):
    """ran("one", job, seconds): the directory of a run that measured so many seconds per step."""

    def write(name, job, seconds, **more):
        told = {"measured": {"step_time": seconds}, "job": calibrate.record(job) | more}
        path = tmp_path / "runs" / name / "run.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"run": {"prediction": told}}))
        return path.parent

    return write


def seconds(job):
    return estimate(job).time.total


def entry(file, name="efficiency", kind=KIND):
    return yaml.safe_load(file.read_text())["factors"][kind][name]


def test_without_a_file_nothing_changes(file, monkeypatch):
    before = [seconds(INSIDE), seconds(ACROSS)]
    monkeypatch.setenv(calibration.VARIABLE, "")
    assert before == [seconds(INSIDE), seconds(ACROSS)] and calibration.where() is None
    assert (hardware.gpu(KIND).efficiency, hardware.gpu(KIND).network) == (1.0, 1.0)


def test_the_file_is_the_users(monkeypatch):
    monkeypatch.delenv(calibration.VARIABLE)
    assert calibration.where() == Path("~/.config/brigade/calibration.yaml").expanduser()


def test_a_run_inside_a_node_moves_the_prediction_to_what_it_measured(file, ran):
    wanted = 1.3 * seconds(INSIDE)
    assert calibrate.calibrate([ran("one", INSIDE, wanted)], file) == [f"{KIND}: efficiency none -> 0.7692 (1 run)"]
    assert seconds(INSIDE) == pytest.approx(wanted, rel=1e-3)
    assert entry(file)["runs"] == {str(file.parents[1] / "runs" / "one"): 0.7692}


def test_runs_over_several_nodes_then_settle_the_network(file, ran):
    calibrate.calibrate([ran("one", INSIDE, 1.1 * seconds(INSIDE))], file)
    wanted = 1.2 * seconds(ACROSS)
    lines = calibrate.calibrate([ran("two", ACROSS, wanted)], file)
    assert any(line.startswith(f"{KIND}: network none -> 0.") for line in lines)
    assert seconds(ACROSS) == pytest.approx(wanted, rel=1e-3)
    assert seconds(INSIDE) == pytest.approx(1.1 * step(INSIDE), rel=1e-3)  # the network is none of its business


def step(job):
    """Seconds without any factor."""
    return estimate(job, replace(hardware.gpu(job.gpu), efficiency=1.0, network=1.0)).time.total


def test_efficiency_alone_leaves_the_networks_bandwidth_as_it_is(file, ran):
    device = replace(hardware.gpu(KIND), efficiency=0.5)
    slow, fast = estimate(ACROSS, device).time, estimate(ACROSS).time
    assert slow.compute == pytest.approx(2 * fast.compute) and slow.across < 1.9 * fast.across


def test_the_median_over_runs_old_and_new(file, ran):
    base = seconds(INSIDE)
    folders = [ran(str(factor), INSIDE, factor * base) for factor in (1.0, 1.25, 2.0)]
    calibrate.calibrate(folders[:1], file)
    assert calibrate.calibrate(folders[1:], file) == [f"{KIND}: efficiency 1.0 -> 0.8 (3 runs, 0.5 to 1.0)"]
    assert calibrate.calibrate(folders[1:], file) == [f"{KIND}: efficiency stays 0.8 (3 runs, 0.5 to 1.0)"]
    # A run that is measured anew counts once, and one whose directory is gone keeps its factor.
    (folders[0] / "run.yaml").unlink()
    ran("1.25", INSIDE, 1.6 * base)
    lines = calibrate.calibrate(folders[1:2], file)
    assert lines == [f"{KIND}: efficiency 0.8 -> 0.625 (3 runs, 0.5 to 1.0)"] and len(entry(file)["runs"]) == 3


@pytest.mark.parametrize("job, factor", [(HIDDEN, 1.0), (ACROSS, 0.3)])
def test_a_run_that_says_nothing_of_the_network(file, ran, job, factor):
    calibrate.calibrate([ran("one", INSIDE, seconds(INSIDE))], file)
    told = calibrate.calibrate([ran("two", job, factor * seconds(job))], file)
    assert any("two says nothing of the network" in line for line in told) and "network" not in file.read_text()


def test_and_nothing_else_that_would_settle_anything(file, ran, mistake):
    message = mistake(calibrate.calibrate, [ran("two", ACROSS, 0.3 * seconds(ACROSS))], file)
    assert "nothing follows" in message and "inside one node first" in message and not file.exists()


def test_a_users_own_gpu_and_words_stay(file, ran):
    file.parent.mkdir()
    entered = yaml.safe_dump(OWN, default_flow_style=True).strip()
    theirs = f"# ours, bought in May\ngpus:\n  My GPU: {entered}   # a guess\n"
    file.write_text(theirs + "factors:\n  My GPU:\n    efficiency: {factor: 2, runs: {/gone: 2}}\n# the end\n")
    job = replace(INSIDE, gpu="My GPU")
    assert hardware.gpu_of_device("My GPU").efficiency == 2 and hardware.gpu("my-gpu").memory_gib == 20
    assert hardware.gpu_of_device("My GPU").bf16_tflops == 10 and hardware.gpu(KIND).efficiency == 1
    assert seconds(job) == pytest.approx(step(job) / 2)
    calibrate.calibrate([ran("one", job, step(job)), ran("two", INSIDE, step(INSIDE))], file)
    assert file.read_text().startswith(theirs + "# the end\nfactors:\n")
    runs = {"/gone": 2, str(file.parents[1] / "runs" / "one"): 1.0}
    assert entry(file, kind="My GPU") == {"factor": 1.5, "runs": runs}


def test_an_entry_of_the_same_name_goes_before_the_catalogues(file):
    file.parent.mkdir()
    file.write_text(yaml.safe_dump({"gpus": {KIND: OWN | {"driver": "NVIDIA H100 80GB HBM3"}}}))
    assert hardware.gpu(KIND).memory_gib == 20 and hardware.gpu_of_device("NVIDIA H100 80GB HBM3").bf16_tflops == 10


# ---- mistakes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("document, words", [
    ("gpus: [1", ["not YAML"]),
    ("- 1", ["list"]),
    ({"gpu": {}}, ["calibration.yaml: gpu", "'gpus'"]),
    ({"factors": 3}, ["factors", "3 is not keys and values"]), ({"factors": {KIND: None}}, [KIND, "null is not keys"]),
    ({"factors": {KIND: {"speed": {}}}}, [f"factors.{KIND}.speed", "no such factor"]),
    ({"factors": {KIND: {"network": {"factor": 0}}}}, [f"factors.{KIND}.network: factor", "0 is not"]),
    ({"factors": {KIND: {"network": {"factor": 1, "runs": {"/a": "fast"}}}}}, ["network: /a", "'fast'"]),
    ({"gpus": {"Mine": OWN | {"sms": None}}}, ["gpus.Mine.sms", "None"]),
    ({"gpus": {"Mine": OWN | {"driver": "("}}}, ["gpus.Mine.driver", "'('"]),
    ({"gpus": {"Mine": OWN | {"memory": 3}}}, ["gpus.Mine.memory", "memory_gib"]),
    ({"gpus": {"Mine": OWN | {"names": "mine"}}}, ["gpus.Mine.names", "'mine'"]),
])  # fmt: skip
def test_a_broken_file(file, mistake, document, words):
    file.parent.mkdir()
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    message = mistake(hardware.catalogue)
    assert all(word in message for word in ["calibration.yaml", *words]), message


def test_a_file_of_comments_alone_is_none(file):
    file.parent.mkdir()
    file.write_text("# nothing measured yet\n")
    assert hardware.gpu(KIND).efficiency == 1.0


def test_a_run_that_measured_nothing(file, ran, mistake, tmp_path):
    assert "there is no run.yaml" in mistake(calibrate.calibrate, [tmp_path], file)
    folder = ran("old", INSIDE, 1.0)
    (folder / "run.yaml").write_text("run: {identity: x}\n")
    assert "tenth step" in mistake(calibrate.calibrate, [folder], file)
    (folder / "run.yaml").write_text("run: {prediction: {none: it computes in fp32}}\n")
    assert "no estimate of this run: it computes in fp32" in mistake(calibrate.calibrate, [folder], file)
    assert "step_time" in mistake(calibrate.calibrate, [ran("nan", INSIDE, float("nan"))], file)
    assert "run.prediction.job" in mistake(calibrate.calibrate, [ran("odd", INSIDE, 1.0, speed=3)], file)
    assert not file.exists()


# ---- the command -------------------------------------------------------------------------------------------------
def test_the_command(ran, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(calibration.VARIABLE, "")
    folder, file = str(ran("one", INSIDE, 2 * seconds(INSIDE))), str(tmp_path / "mine.yaml")
    assert main(["plan", "--calibrate", folder]) == 2 and "--calibration FILE" in capsys.readouterr().err
    assert main(["plan", "qwen3-8b", "--calibration", file]) == 2 and "there is no file" in capsys.readouterr().err
    assert main(["plan", "--calibrate", folder, "--calibration", file]) == 0
    assert "efficiency none -> 0.5 (1 run)" in (said := capsys.readouterr().out) and f"Wrote {file}" in said
    words = ["plan", "qwen3-0.6b", "--gpu", KIND, "--calibration", file]
    assert main(words) == 0 and "counted in: efficiency 0.5" in capsys.readouterr().out
