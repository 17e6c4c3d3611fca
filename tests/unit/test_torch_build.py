"""What torch is built for, compared with the driver, the GPU and whose GPUs they are; each refusal names the index that suits."""

import pytest
import torch

from brigade.check.checks import NotHere
from brigade.check.probes import sameness
from brigade.hosts import host_facts
from brigade.train.distributed import devices, torch_build
from brigade.train.host.cluster import World
from brigade.train.step import preflight
from testing.same_hosts import LOOK
from testing.same_hosts import judged as judged_by_check

CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.mark.parametrize("driver, cuda, capability, says", [
    ("535.129.03", "13.0", None, ("535.129.03", "CUDA 13.0", "580 or newer", "index cu126")),
    ("570.86.15", "13.2", (9, 0), ("580 or newer", "index cu126")),
    ("570.86.15", "13.0", (7, 0), ("580 or newer", "index cu126")),
    ("570.86.15", "13.0", (10, 0), ("580 or newer", "!index")),  # cu126 has no code for it
    ("470.42.01", "12.8", None, ("525 or newer", "!index")),  # none of this torch is for CUDA 11
    ("390.48", "11.8", None, ("450 or newer", "!index")),
    ("580.65.06", "13.0", None, ()),
    ("535.129.03", "12.6", None, ()),  # minor versions of CUDA 12 run on the first driver for it
    ("600.1", "14.0", None, ()),  # nobody knows yet what that wants
    (None, "13.0", None, ()),
    ("535.129.03", None, None, ()),
])  # fmt: skip
def test_a_driver_is_compared_with_the_cuda_that_torch_is_built_for(driver, cuda, capability, says):
    found = torch_build.too_old(driver, cuda, capability)
    assert bool(found) == bool(says)
    _says(" ".join(found or ()), says)


@pytest.mark.parametrize("capability, architectures, driver, says", [
    ((7, 0), CU130, "580.65.06", ("sm_70", "sm_75, sm_80", "install torch from PyTorch's index cu126")),  # V100
    ((6, 0), CU130, None, ("sm_60", "index cu126")),
    ((10, 0), CU126, "580.65.06", ("sm_100", "install torch from PyTorch's index cu130")),  # B200
    ((12, 0), CU126, "580.65.06", ("sm_120", "index cu130")),  # RTX 5090
    ((12, 0), CU126, "570.86.15", ("a newer driver, and torch from PyTorch's index cu130",)),
    ((3, 7), CU126, "580.65.06", ("sm_37", "another GPU", "!index")),  # K80
    ((10, 0), ["sm_90a"], "580.65.06", ("sm_100",)),
    ((9, 0), ["sm_86", "sm_100"], None, ("sm_90",)),
    ((8, 0), ["sm_86", "sm_90"], None, ("sm_80",)),
    ((8, 9), CU130, None, ()),  # RTX 4090: sm_86 runs there
    ((8, 9), CU126, None, ()),
    ((12, 1), CU130, None, ()),  # GB10
    ((10, 3), CU130, None, ()),  # B300
    ((9, 0), CU126, None, ()),
    ((9, 0), ["sm_90a"], None, ()),
    ((10, 3), ["sm_100f"], None, ()),
    ((13, 0), CU130, None, ()),  # by compute_120
    ((7, 0), [], None, ()),  # a build that does not tell
    ((7, 0), ["native"], None, ()),
])  # fmt: skip
def test_a_gpu_is_compared_with_what_torch_has_code_for(capability, architectures, driver, says):
    found = torch_build.without_code(capability, architectures, driver)
    assert bool(found) == bool(says), found
    _says(" ".join(found or ()), says)


def test_a_rank_on_a_gpu_without_code_is_refused_before_it_computes_and_check_finds_it(mistake, monkeypatch):
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "get_device_name": "Tesla V100-SXM2-32GB",
        "get_device_capability": (7, 0),
        "get_arch_list": CU130,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "driver_version", lambda: "580.65.06")
    rank = World(1, 1, 2, 2, "node1", "torchrun")
    message = mistake(preflight._check_gpu, rank)
    assert "host node1, GPU 1 (Tesla V100-SXM2-32GB)" in message and "sm_70" in message and "index cu126" in message
    assert {*sameness.loaded()["without_code"]} == {"0", "1"}
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm's names are others
    preflight._check_gpu(rank)
    assert not sameness.loaded()["without_code"]


@pytest.fixture
def amd(monkeypatch, tmp_path):
    """amd(*nodes): a host of which KFD tells these nodes, each (number, its properties); None: an unreadable number."""

    def make(*nodes):
        for place, (number, properties) in enumerate(nodes):
            (tmp_path / str(place)).mkdir()
            (tmp_path / str(place) / "gpu_id").write_text("" if number is None else f"{number}\n")
            if properties:
                (tmp_path / str(place) / "properties").write_text(properties)
        monkeypatch.setattr(devices, "KFD", tmp_path)
        monkeypatch.setattr(host_facts, "KFD", tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(devices, "count_by_driver", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)

    return make


MI300X = "cpu_cores_count 0\nsimd_count 1216\ngfx_target_version 90402\n"
PROCESSOR = (0, "cpu_cores_count 96\ngfx_target_version 0\n")
RYZEN = "cpu_cores_count 0\nsimd_count 4\ngfx_target_version 100306\n"


@pytest.mark.parametrize("nodes, count", [
    ([PROCESSOR, PROCESSOR, *[(51140, MI300X)] * 8], 8),
    ([(0, None), (7, None), (9, None)], 2),  # nothing but the number
    ([PROCESSOR, (None, None), (4719, MI300X)], 1),  # of a container that may use one of two
    ([PROCESSOR, (17432, RYZEN)], 0),  # graphics inside a desktop's processor
    ([PROCESSOR], 0),
    ([], 0),
])  # fmt: skip
@pytest.mark.parametrize("cuda, hip, says", [
    ("13.0", None, ("for CUDA 13.0, which is NVIDIA's", "index rocm7.2", "CUDA_VISIBLE_DEVICES= ")),
    (None, None, ("a build for CPUs", "index rocm7.2", "CUDA_VISIBLE_DEVICES= ")),
    (None, "7.2.0", ("for ROCm 7.2.0 sees none", "render and video", "!index")),
])  # fmt: skip
def test_gpus_of_amd_are_counted_and_refused_whatever_torch_is(amd, monkeypatch, nodes, count, cuda, hip, says):
    """A host with eight of them was one without GPUs for PyPI's torch, and trained on its processor."""
    amd(*nodes)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert host_facts.gpus() == devices.count_of_amd(devices.KFD) == count
    found = devices.unseen({})
    assert bool(found) == bool(count)
    if found:
        _says(" ".join(found), (f"{count} GPU", *says))
    assert devices.unseen({"CUDA_VISIBLE_DEVICES": ""}) is None


def test_check_has_a_row_for_them():
    own = {"driver": None, "amd": 8, "torch": {"cuda": None, "hip": "7.2.0"}}
    blind = {"node1": {"sees": False}, "node2": {"sees": False}}
    (fit,), (red,) = judged_by_check("driver", own, own | {"torch": LOOK["torch"]}, gpus=8, sees=blind).values()
    assert (fit.level, fit.value) == ("green", "AMD's for ROCm 7.2.0")
    assert red.level == "red" and "8 GPUs of AMD's" in red.problem and "rocm7.2" in red.cure
    with pytest.raises(NotHere):  # NVIDIA's, in a container that does not tell the driver
        judged_by_check("driver", {"driver": None, "amd": 0}, gpus=8)


def _says(text, words):
    """Assert that a text has these words, and none that begin with `!`."""
    for word in words:
        assert (word.lstrip("!") in text) != word.startswith("!"), (word, text)
