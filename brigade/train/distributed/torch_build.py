"""What torch is built for, by its version.py: importing torch takes seconds, and sets up what has to be set up before."""

import ast
import importlib.util
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Build(NamedTuple):
    """cuda, hip: versions of CUDA ("13.0") and ROCm that torch is built for; None where it is not, or nothing tells."""

    cuda: str | None = None
    hip: str | None = None


def read() -> Build:
    """Return what the installed torch is built for."""
    with suppress(OSError, ValueError, SyntaxError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text()
            assigned = dict(re.findall(r"^(\w+)\b[^=\n]*=\s*(.+)$", text, re.MULTILINE))
            return Build(*(ast.literal_eval(assigned.get(name, "None")) for name in ("cuda", "hip")))
    return Build()
