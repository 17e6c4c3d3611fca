"""Triton kernels judged without a GPU: what is rounded, what a table marks, and a kernel that is wrong on purpose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import triton_interpreter, triton_kernels
from benchmarks.pages import REPOSITORY

PACKAGES = Path(os.environ.get("BRIGADE_TRITON") or REPOSITORY / ".venv/triton")
WRONG = """
import dataclasses, json, sys
from benchmarks import triton_compiler, triton_interpreter, triton_kernels

triton_interpreter.correct()
triton_compiler.pretend(90)
from benchmarks.triton_cases import CASES

class Longer(__import__("torch").autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, back: 1.02 * back)

case = CASES["SwiGLU"]
longer = dataclasses.replace(case, fused=lambda a, b: case.fused(Longer.apply(a), b))
print(json.dumps([triton_kernels.numbers("SwiGLU", one) for one in (case, longer)]))
"""


def test_values_are_rounded_as_torch_rounds_them():
    values = torch.randn(4096) * torch.logspace(-30, 30, 4096)
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 0.0, float("inf"), -float("inf"), 3.4e38])
    values = torch.cat((values, ties))
    bits = triton_interpreter.to_bf16(values.numpy())
    assert np.array_equal(bits, values.bfloat16().view(torch.uint16).numpy())
    assert np.array_equal(triton_interpreter.from_bf16(bits), values.bfloat16().float().numpy())
    assert np.isnan(triton_interpreter.from_bf16(triton_interpreter.to_bf16(np.array([np.nan], np.float32))))


def test_a_table_marks_what_spills_what_does_not_fit_and_what_is_off():
    kernel = {
        "operation": "norm",
        "kernel": "forward",
        "size": "width 8",
        "dtype": "bf16",
        "arch": "sm_120",
        "registers": 40,
        "tuned": "BK 8",
    }
    sound, spilling = kernel | {"spilled": 0, "shared": 2048}, kernel | {"spilled": 16, "shared": 1024}
    large = kernel | {"spilled": 0, "shared": 100 * 1024}
    assert triton_kernels.cell([sound]) == "40, 2 KiB"
    assert (
        triton_kernels.cell([spilling, sound, large]) == "40, 2 KiB"
    )  # of a kernel that tunes itself, one that is sound is enough
    assert triton_kernels.cell([spilling]) == "**40, 1 KiB, spills 16 bytes (width 8, bf16)**"
    assert triton_kernels.cell([large]) == "**40, 100 KiB, does not fit (width 8, bf16)**"
    assert triton_kernels.cell([sound, spilling | {"tuned": ""}]) == triton_kernels.cell(
        [spilling]
    )  # but not of several forms
    assert "| 3, 1, 1 |" in triton_kernels.tuned_table([spilling, sound, large])
    row = {"operation": "norm", "dtype": "bf16", "kind": "gradient", "tensor": "x", "eager": 0.01, "allowed": 0.03}
    told = [triton_kernels.beside([row | {"error": error}], "norm", "bf16", "gradient") for error in (0.02, 0.04)]
    assert told == ["2.0e-02 (1.0e-02)", "**4.0e-02 (1.0e-02), x**"]


# ---- with Triton -----------------------------------------------------------------------------------------------------
def run(*command):
    assert (PACKAGES / "triton").is_dir(), f"there is no Triton in {PACKAGES}: `make triton` puts it there"
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, *command], cwd=REPOSITORY, env=environment, text=True, capture_output=True)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_kernel_whose_gradient_is_too_long_is_found_and_the_true_one_is_not():
    sound, longer = json.loads(run("-c", WRONG).splitlines()[-1])
    assert [row for row in sound if row["error"] > row["allowed"]] == []
    found = {(row["dtype"], row["kind"], row["tensor"]) for row in longer if row["error"] > row["allowed"]}
    assert {("fp32", "gradient", "a"), ("fp32", "bias", "a"), ("bf16", "bias", "a")} <= found


@pytest.mark.slow
def test_the_committed_figures_of_a_norm_are_those_of_this_interpreter_and_compiler():
    name = "RMSNorm, 1 + weight"
    rows = [json.loads(line) for line in run("-m", "benchmarks.triton_kernels", "--only", name).splitlines()]
    numbers, compiled = ([row for row in rows if key in row] for key in ("allowed", "registers"))
    assert all(row["error"] <= row["allowed"] for row in numbers) and len(numbers) == 6
    committed = [
        row for row in triton_kernels.read(triton_kernels.RESULTS / "triton_registers.csv") if row["operation"] == name
    ]
    assert [{key: str(value) for key, value in row.items()} for row in compiled] == committed
