"""Peaks by the names that drivers give, and the FLOPs of a token. An unknown device gets no figure, never a guess."""

import pytest

from brigade.plan.choice.search import candidates
from brigade.plan.choice.workload import Cluster, Workload
from brigade.plan.hardware import calibration, catalogue, gpu, gpu_of_device
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
])  # fmt: skip
def test_unknown_names(name):
    assert gpu_of_device(name) is None


@pytest.mark.parametrize("name", [
    "NVIDIA L40G",  # neither L4 nor L40
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of the card
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA GeForce RTX 4090 Max-Q", "NVIDIA GeForce RTX 4090 D v2", "NVIDIA GeForce RTX 3090 Ti Laptop GPU",
    "NVIDIA H200 NVL",  # 835
])  # fmt: skip
def test_a_name_that_only_begins_like_a_known_one_is_unknown(name):
    assert gpu_of_device(name) is None


def test_every_entry_has_numbers_and_source():
    optional = {
        "matmul_tflops",
        "sustained",
        "attention_tflops",
        "node_gbit",
        "host_gib",
        "nvme_gb",
        "bf16",
        "integrated",
    }
    for name, entry in catalogue().items():
        assert (
            set(entry) - optional == {*calibration.NUMBERS, "driver", "names", "source", "generation"}
            and entry["source"]
        ), name
        assert min(entry[key] for key in calibration.NUMBERS) > 0, name
        assert entry.get("matmul_tflops", 1) <= entry["bf16_tflops"], name


@pytest.mark.parametrize("written, kind", [
    ("H100 SXM", "H100 80GB"), ("H100-SXM-80GB", "H100 80GB"), ("A800-80GB", "A800 80GB"), ("A100 (paper, 80GB)", "A100 80GB"),
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
    entry = error.cure.partition("own.yaml: ")[2].partition("; ")[0]
    assert entry.startswith("gpus: {'Foo 9000': {driver: NAME, memory_gib: ...,")
    (tmp_path / "written.yaml").write_text(entry.replace("...", "10").replace("NAME", "Foo"))
    monkeypatch.setenv("BRIGADE_CALIBRATION", str(tmp_path / "written.yaml"))
    assert gpu("Foo 9000").hbm_gb_s == 10 and gpu_of_device("Foo").kind == "Foo 9000"


def test_a_gpu_in_the_hosts_memory_has_nowhere_to_offload_to():
    spark = gpu("DGX Spark")
    assert spark.integrated
    shape = named_shape(str(REPOSITORY / "recipes" / "qwen3-8b"))
    found = {each.label for each in candidates(Workload(shape), Cluster("DGX Spark", 1, 1))}
    assert found and not any("offload" in name or "NVMe" in name for name in found)


def test_a_chip_that_no_run_was_fitted_to_reaches_what_its_generation_does():
    known, unknown = gpu("H100"), gpu("H20")
    share = known.product_rate / 989e12
    assert known.seen and not unknown.seen
    assert min(0.48, share) <= unknown.product_rate / 148e12 <= share
    least = min(
        gpu("H100 94GB").product_rate / 989e12, gpu("GB200").product_rate / 2500e12, gpu("B200").product_rate / 2250e12
    )
    assert gpu("MI300X").product_rate / 1307e12 == pytest.approx(least, rel=0.05)  # of all that were fitted


def test_flops_of_a_token_by_hand():
    # PaLM 540B, arXiv 2204.02311: 6 x 540.35e9 + 12 x 118 layers x 48 heads x 256 x 2048 tokens; heads x 256 = 12288
    assert flops_per_token(540_350_000_000, 118, 12_288, 2048) == 3_242_100_000_000 + 35_634_806_784
    # One layer of hidden size 2, 10 parameters, 3 tokens: 60 for the weights, 72 for attention.
    assert flops_per_token(10, 1, 2, 3) == 132


def test_utilisation_is_in_percent_of_the_peak():
    # 989e12 / 1e9 tokens/s would be all of it
    assert utilisation(989_000, 1e9, gpu_of_device("NVIDIA H200").bf16_tflops) == pytest.approx(100)
    assert utilisation(98_900, 1e9, gpu_of_device("NVIDIA H200").bf16_tflops) == pytest.approx(10)
