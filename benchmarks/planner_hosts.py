"""What hosts hold, beside the planner's formulas: memory that others measured (data/host_memory.csv), and checkpoints that
`python -m benchmarks.hosts` measured (results/hosts.csv)."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from brigade.plan.costs.host_memory import host, resident
from brigade.plan.costs.job import Job
from brigade.plan.shape.from_config import shape_of

from .hosts import MODEL, RESULTS
from .pages import markdown, read

PUBLISHED = Path(__file__).with_name("data") / "host_memory.csv"
STRATEGIES = {
    "DDP": ("ddp", 0),
    "FSDP2": ("fsdp2", 3),
    "ZeRO-1": ("zero", 1),
    "ZeRO-2": ("zero", 2),
    "ZeRO-3": ("zero", 3),
}


@dataclass(frozen=True)
class Held:
    """Bytes that were measured, and by formula. what: the run in words"""

    source: str
    what: str
    measured: float
    predicted: float


def published() -> list[Held]:
    """Memory of a host while it trains."""
    found = []
    for row in read(PUBLISHED):
        offloaded = float(row["bytes_offloaded_per_parameter"]) * float(row["parameters_b"]) * 1e9 / int(row["nodes"])
        predicted = resident(int(row["ranks_per_node"]), 0.0, offloaded)
        found.append(Held(row["source"], f"{row['model']}: {row['run']}", float(row["host_gb"]) * 1e9, predicted))
    return found


@cache
def _cases() -> list[tuple[dict[str, str], Job]]:
    shape = shape_of(MODEL | {"model_type": "llama", "tie_word_embeddings": True}, "")
    found = []
    for row in read(RESULTS):
        engine, stage = STRATEGIES[row["strategy"]]
        adapters = 0 if row["method"] == "full" else int(row["trained"])
        ranks = int(row["ranks"])
        method: Any = row["method"]
        job = Job(
            shape,
            sequence=512,
            gpu="RTX 4090",
            data=ranks,
            node_size=ranks,
            engine=engine,
            stage=stage,
            method=method,
            trained=adapters,
            optimizer=row["optimizer"],
        )
        found.append((row, job))
    return found


def checkpoints() -> list[Held]:
    found = []
    for row, job in _cases():
        what = f"{row['strategy']}, {row['method']}, {row['optimizer']}"
        found.append(Held(row["strategy"], what, int(row["checkpoint_bytes"]), host(job).checkpoint))
    return found


def memory_table() -> str:
    """Published figures, and by how much the formula is off."""
    lines = []
    for one in published():
        off = f"{100 * (one.predicted / one.measured - 1):+.0f}%"
        lines.append([one.source, one.what, f"{one.measured / 1e9:,.2f}", f"{one.predicted / 1e9:,.2f}", off])
    return markdown(["source", "run", "measured, GB", "by formula", "off"], lines)


def disk_table() -> str:
    lines = []
    for one in checkpoints():
        off = 100 * (one.predicted / one.measured - 1)
        lines.append([one.what, f"{one.measured / 1e6:,.1f}", f"{one.predicted / 1e6:,.1f}", f"{off:+.1f}%"])
    return markdown(["checkpoint", "measured, MB", "by formula", "off"], lines)
