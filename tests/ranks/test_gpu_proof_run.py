"""`make test-gpu` on fake GPUs (testing/fake_gpu/), with everything small: each part leaves its rows."""

import json
import sys
import tarfile

import pytest

from benchmarks.gpu_proof.parts import PARTS
from testing import fake_gpu
from testing.command_line import run_here

WHOLE = [part.name for part in PARTS]
# What CI has time for.
PARTLY = ["machine", "strategies", "shapes", "checkpoints"]
# A fake device has no speed: the time limit of a kernel's path can end it on a busy processor.
SURE = ("machine", "strategies", "shapes", "checkpoints", "waits")


@pytest.mark.parametrize("gpus, names", [
    pytest.param(1, PARTLY, marks=pytest.mark.slow, id="one GPU, four parts"),
    pytest.param(2, WHOLE, marks=pytest.mark.matrix, id="two GPUs, the whole"),
])  # fmt: skip
def test_the_proof_on_fake_gpus(gpus, names, tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--small", "--output", tmp_path, "--only", *names]
    done = run_here(command, 1500, OMP_NUM_THREADS="1", **fake_gpu.environment(gpus))
    report, page = json.loads((tmp_path / "report.json").read_text()), (tmp_path / "report.md").read_text()
    assert list(report["parts"]) == names, done.stdout + done.stderr
    assert report["machine"]["gpus"] == gpus and "With --small" in page
    assert not [each for each in report["fell_short"] if each["part"] in SURE], report["fell_short"]
    assert all(part["rows"] for part in report["parts"].values()), report["fell_short"]
    assert done.returncode == (1 if report["fell_short"] else 0)
    with tarfile.open(done.stdout.splitlines()[-1].rpartition(": ")[2]) as packed:
        names = {name.rpartition("/")[2] for name in packed.getnames()}
    logs = {f"{name}.log" for name in ("qwen3-0.6b-full-base", "zero3", *report["parts"])}
    assert {"report.json"} | logs <= names
    assert report["parts"]["machine"]["rows"][1]["figures"] == {"segments_grow": [True] * gpus}
    of = "1 GPU" if gpus == 1 else "2 GPUs"
    rows = report["parts"]["strategies"]["rows"]
    assert [row["what"] for row in rows] == [
        "one GPU, fp32", "one GPU, bf16", f"fsdp2 bf16, {of}", f"zero3 resumed, {of}",
    ]  # fmt: skip
    assert all(0 <= row["figures"]["difference"] <= row["figures"]["bound"] for row in rows)
    (shape,), (saved,) = (report["parts"][name]["rows"] for name in ("shapes", "checkpoints"))
    assert shape["figures"]["tokens_per_second"] > 0 and saved["figures"]["gib"] > 0
