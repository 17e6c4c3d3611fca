"""Triton kernels that a run may take, judged without a GPU: their numbers in Triton's interpreter, their registers by compiling.

    make triton
    PYTHONPATH=.venv/triton .venv/bin/python -m benchmarks.triton_kernels

writes benchmarks/results/triton_numbers.csv, triton_registers.csv and the tables of docs/evidence/triton-kernels.md in some 15
minutes. --only NAME judges one operation, prints its rows and writes nothing. Numbers and each GPU have a process of their own:
whether kernels are interpreted, and which configurations libraries choose, is decided when they are imported.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from brigade.kernels.compare import FACTORS, FLOORS, HALF, ROUNDOFF

from . import triton_compiler, triton_interpreter
from .pages import EVIDENCE, RESULTS, Row, command_line, markdown, read, save, write

ALLOWED = {"forward": "logits", "gradient": "gradients", "bias": "bias"}  # as docs/evidence/kernels.md allows
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# ---- numbers -------------------------------------------------------------------------------------------------------------
def outcome(case: Any, function: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[list, dict]:
    """([outputs], {input: gradient}) in fp32, of a call with inputs in this dtype; what comes back is fixed random numbers."""
    given = {}
    for name, tensor in tensors.items():
        floating = tensor.is_floating_point()
        given[name] = tensor.to(dtype if floating and name not in case.single else tensor.dtype, copy=True)
        given[name].requires_grad_(floating and name not in case.constant)
    outputs = function(**given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.manual_seed(1)
    back = [
        torch.randn(output.shape).to(output.dtype) if output.dim() else torch.ones_like(output) for output in outputs
    ]
    torch.autograd.backward(outputs, [one.clone() for one in back])
    gradients = {name: given[name].grad.float() for name in given if given[name].requires_grad}
    return [output.detach().float() for output in outputs], gradients


def far(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, relative to the reference's largest element."""
    return ((ours - reference).abs().max() / reference.abs().max()).item()


def errors(ours: tuple[list, dict], reference: tuple[list, dict]) -> dict[str, dict[str, float]]:
    """{forward, gradient, bias} by tensor. bias: the share of the reference's gradient in ours, less 1"""
    forward = {str(i): far(*pair) for i, pair in enumerate(zip(ours[0], reference[0], strict=True))}
    gradient = {name: far(ours[1][name], reference[1][name]) for name in reference[1]}
    share = {name: (ours[1][name] * full).sum() / full.square().sum() for name, full in reference[1].items()}
    return {
        "forward": forward,
        "gradient": gradient,
        "bias": {name: abs(one.item() - 1) for name, one in share.items()},
    }


def numbers(name: str, case: Any) -> list[Row]:
    """A row for each dtype and kind of error, with eager's: of the tensor whose error is largest beside what is allowed."""
    torch.manual_seed(0)
    tensors = case.inputs(**case.small)
    reference, rows = outcome(case, case.eager, tensors, torch.float32), []
    for dtype in DTYPES:
        ours = errors(outcome(case, case.fused, tensors, DTYPES[dtype]), reference)
        eager = errors(outcome(case, case.eager, tensors, DTYPES[dtype]), reference)
        package = f"{case.package} {version(case.package)}"
        for kind, limit in ALLOWED.items():
            floor = FLOORS.get(dtype, HALF)[limit] * ROUNDOFF[dtype]
            allowed = {tensor: max(FACTORS[limit] * eager[kind][tensor], floor) for tensor in eager[kind]}
            worst = max(ours[kind], key=lambda tensor: ours[kind][tensor] / allowed[tensor])
            row = {
                "operation": name,
                "package": package,
                "models": case.models,
                "dtype": dtype,
                "kind": kind,
                "tensor": worst,
            }
            rows.append(row | {"error": ours[kind][worst], "eager": eager[kind][worst], "allowed": allowed[worst]})
    return rows


# ---- registers -----------------------------------------------------------------------------------------------------------
def registers(name: str, case: Any, arch: int) -> list[Row]:
    """A row for each kernel, configuration, dtype and size of an operation."""
    rows = []
    for size, values in case.large.items():
        torch.manual_seed(0)
        tensors = case.inputs(**values)
        for dtype in ("bf16",) if case.halves else DTYPES:
            with tempfile.TemporaryDirectory() as cache, triton_compiler.compiled(Path(cache)) as found:
                outcome(case, case.fused, tensors, DTYPES[dtype])
            rows += [{"operation": name, "size": size, "dtype": dtype, "arch": f"sm_{arch}"} | row for row in found]
    return rows


# ---- processes -----------------------------------------------------------------------------------------------------------
def worker(arch: int | None, only: str | None) -> list[Row]:
    """What a process of its own computes. arch: None for numbers"""
    if arch is None:
        triton_interpreter.correct()
    triton_compiler.pretend(arch or 90)
    triton_compiler.first_configuration()
    from .triton_cases import CASES

    torch.set_num_threads(1)
    cases = {name: case for name, case in CASES.items() if only in (None, name)}
    rows: list[Row] = []
    for name, case in cases.items():
        rows += numbers(name, case) if arch is None else registers(name, case, arch)
        print(f"{name}: {f'sm_{arch}' if arch else 'numbers'}", file=sys.stderr, flush=True)
    return rows


def apart(arch: int | None, only: str | None) -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.triton_kernels", "--worker", str(arch or 0)]
    environment = os.environ | {"TRITON_INTERPRET": "0" if arch else "1"}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows.json"
        subprocess.run(
            [*command, "--rows", str(file), *(["--only", only] if only else [])], check=True, env=environment
        )
        return json.loads(file.read_text())


# ---- the page ------------------------------------------------------------------------------------------------------------
def beside(rows: list[Row], operation: str, dtype: str, kind: str) -> str:
    """An error beside eager's in the same precision; bold where more than what is allowed."""
    (row,) = [row for row in rows if (row["operation"], row["dtype"], row["kind"]) == (operation, dtype, kind)]
    error, eager, allowed = (float(row[key]) for key in ("error", "eager", "allowed"))
    text = f"{error:.1e}" if dtype == "fp32" else f"{error:.1e} ({eager:.1e})"
    return f"**{text}, {row['tensor']}**" if error > allowed else text


def numbers_table(rows: list[Row]) -> str:
    shown = [(dtype, kind) for dtype in DTYPES for kind in ALLOWED]
    head = ["operation", "of", "models", *(f"{dtype} {kind}" for dtype, kind in shown)]
    operations = {row["operation"]: row for row in rows}
    return markdown(
        head,
        (
            [name, row["package"], row["models"], *(beside(rows, name, *one) for one in shown)]
            for name, row in operations.items()
        ),
    )


def limit(arch: str) -> int:
    return int(triton_compiler.GPUS[int(arch.removeprefix("sm_"))]["max_shared_mem"])


def fits(row: Row) -> bool:
    return int(row["shared"]) <= limit(row["arch"])


def burden(row: Row) -> tuple[bool, int, int]:
    """What makes a compiled kernel worse than another, the gravest first."""
    return not fits(row), int(row["spilled"]), int(row["registers"])


def cell(rows: list[Row]) -> str:
    """The worst of one kernel's sizes, dtypes and forms for one GPU; of those that it tunes itself, the best."""
    tuned: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["tuned"]:
            tuned.setdefault((row["size"], row["dtype"]), []).append(row)
    worst = max(
        [row for row in rows if not row["tuned"]] + [min(group, key=burden) for group in tuned.values()], key=burden
    )
    text, where = f"{worst['registers']}, {int(worst['shared']) / 1024:.0f} KiB", f"{worst['size']}, {worst['dtype']}"
    if int(worst["spilled"]):
        text += f", spills {worst['spilled']} bytes ({where})"
    if not fits(worst):
        text += f", does not fit ({where})"
    return f"**{text}**" if int(worst["spilled"]) or not fits(worst) else text


def registers_table(rows: list[Row]) -> str:
    architectures = list(dict.fromkeys(row["arch"] for row in rows))
    kernels = dict.fromkeys((row["operation"], row["kernel"]) for row in rows)
    lines = []
    for kernel in kernels:
        here = [row for row in rows if (row["operation"], row["kernel"]) == kernel]
        by_arch = [[row for row in here if row["arch"] == arch] for arch in architectures]
        lines.append([*kernel, *(cell(those) if those else "-" for those in by_arch)])
    return markdown(["operation", "kernel", *architectures], lines)


def tuned_table(rows: list[Row]) -> str:
    """How many configurations a kernel tunes itself among, how many of them spill, how many take too much shared memory."""
    architectures, lines = list(dict.fromkeys(row["arch"] for row in rows)), []
    tuned = dict.fromkeys((row["operation"], row["kernel"]) for row in rows if row["tuned"])
    for kernel in tuned:
        here = [row for row in rows if (row["operation"], row["kernel"]) == kernel]
        by_arch = [[row for row in here if row["arch"] == arch] for arch in architectures]
        counts = [
            f"{len(those)}, {sum(int(row['spilled']) > 0 for row in those)}, {sum(not fits(row) for row in those)}"
            if those
            else "-"
            for those in by_arch
        ]
        lines.append([*kernel, *counts])
    return markdown(["operation", "kernel", *architectures], lines)


def tables() -> dict[str, str]:
    judged, compiled = read(RESULTS / "triton_numbers.csv"), read(RESULTS / "triton_registers.csv")
    return {
        "triton-numbers": numbers_table(judged),
        "triton-registers": registers_table(compiled),
        "triton-tuned": tuned_table(compiled),
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", help="one operation, as the tables name it")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        options.rows.write_text(json.dumps(worker(options.worker or None, options.only)))
        return 0
    judged = apart(None, options.only)
    compiled = [row for arch in triton_compiler.GPUS for row in apart(arch, options.only)]
    if options.only:
        for row in judged + compiled:
            print(json.dumps(row))
        return 0
    save(RESULTS / "triton_numbers.csv", judged)
    save(RESULTS / "triton_registers.csv", compiled)
    write(EVIDENCE / "triton-kernels.md", tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
