"""The table of paths (paths.yaml), and what a host lacks for one."""

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import yaml

from ..errors.tables import Fields

Row = Fields
TABLE = Path(__file__).with_name("paths.yaml")
PROVEN, SLOWER, WRONG, FAILED, ABSENT = "proven", "slower", "wrong", "failed", "absent"
ATTENTION, LIGER, LAYERS, SET, OPTIMIZER, DTYPE = "attention", "liger", "layers", "set", "optimizer", "dtype"
PROMPTS, ONCE = "prompts", "prompts_once"
# Kinds that are tried with the attention that the recipe names, or with the fastest that agrees.
WITH_ATTENTION = (SET, PROMPTS)


@functools.cache
def table() -> dict[str, Row]:
    """{path: its row, with its "kind"}."""
    document = yaml.safe_load(TABLE.read_text())
    return {name: {"kind": kind, **row} for kind, rows in document.items() for name, row in rows.items()}


def lacking(row: Row, device: Row, dtype: str) -> str:
    """Why this device cannot compute a path in this dtype; "" where it may try. device: as from proofs.device()"""
    gpu, capability = device["type"] == "cuda", device.get("capability")
    if row.get("gpu") and not gpu:
        return "it needs a GPU"
    if row.get("half") and dtype == "fp32":
        return "it computes in bf16 and fp16 only"
    if gpu and capability and (dtype != "fp32" or row["kind"] == DTYPE) and capability < row.get("capability", 0):
        return f"it needs compute capability {row['capability']}, and {device['name']} has {capability}"
    if row.get("package") and importlib.util.find_spec(row["package"]) is None:
        return f"{row['package']} is not installed"
    if row.get("available") and not called(row["available"]):
        return "its package is not installed"
    return ""


def called(name: str, *given: object) -> Any:
    """Call a function by its name, `module:function`, and return what it returns."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*given)
