"""Estimate every row of a CSV of published runs, beside what the runs measured."""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from brigade.errors import UserError
from brigade.plan.costs.estimate import Estimate, estimate, factors
from brigade.plan.costs.memory import GIB

from .parse_columns import Inexpressible
from .rows import as_published, job_of_row
from .verdict import OTHER_PROGRAMS, verdict

PREDICTED = (
    "pred_mem_gib",
    "pred_mem_allocated_gib",
    "pred_step_time_s",
    "pred_tok_s_gpu",
    "pred_mfu_pct",
    "fits",
    "reason",
    "pred_tok_s_gpu_low",
    "pred_tok_s_gpu_high",
    "pred_mem_gib_low",
    "pred_mem_gib_high",
)
# The columns that either format has to have. Others of published.csv that are not there count as empty: dp and grad_acc follow
# from the GPUs and the batch, the optimizer is AdamW, the precision bf16.
PUBLISHED = {"model", "n_gpus", "gpu", "framework", "task", "strategy", "mbs", "seq_len"}
OF_PLAYBOOK = {"model", "gpus", "dp", "tp", "pp", "zero", "mbs", "grad_acc"}


def expressed(row: Mapping[str, str]) -> Estimate:
    """Return the estimate of a row. Raises Inexpressible, or UserError for an unknown GPU or sizes that do not fit together."""
    job = job_of_row(as_published(row))
    result = estimate(job)
    if result.may_fit or (row.get("act_ckpt") or "").strip() or "n_gpus" not in row:
        return result
    if estimate(replace(job, checkpointing="full")).may_fit:
        raise Inexpressible(
            f"act_ckpt is empty, and the run fits only with layers computed again ({result.device_gib:.0f} of"
            f" {result.gpu.memory_gib:.0f} GiB without): the row has to say which"
        )
    return result


def predict(row: Mapping[str, str]) -> dict[str, Any]:
    """Return PREDICTED for one row; for one that cannot be expressed, only the reason."""
    try:
        result = expressed(row)
        figures = (
            result.device_gib,
            result.shown_gib - result.context / GIB,
            result.time.total,
            result.tokens_per_second_per_gpu,
            result.mfu,
        )
        reason = (
            ""
            if all(math.isfinite(figure) and figure > 0 for figure in figures)
            else "its figures are beyond all bounds"
        )
    except Inexpressible as error:
        reason = str(error)
    except UserError as error:
        reason = f"{error.place}: {error.problem} ({error.cure})"
    except Exception as error:  # one row in a thousand shall not take the others along
        reason = f"it cannot be estimated: {type(error).__name__}: {error}"
    if reason:
        return dict.fromkeys(PREDICTED, "") | {"reason": " ".join(reason.split())}
    return {
        "pred_mem_gib": f"{held_gib(result, row):.2f}",
        "pred_mem_allocated_gib": f"{result.allocated_gib:.2f}",
        "pred_step_time_s": f"{result.time.total:.4f}",
        "pred_tok_s_gpu": f"{result.tokens_per_second_per_gpu:.1f}",
        "pred_mfu_pct": f"{result.mfu:.2f}",
        "fits": verdict(result, row),
        "reason": "",
    } | _intervals(result, row)


def _intervals(result: Estimate, row: Mapping[str, str]) -> dict[str, str]:
    """Return the ends of the 80 % intervals: of the speed, and of the memory that the row's mem_kind says was measured.

    Where it does not say, that may be what torch allocates, or all that the card has in use. What a program keeps that nobody has
    compared is less sure than what train.py keeps.
    """
    fast, slow = result.time_interval()
    each = result.tokens_per_second_per_gpu * result.time.total
    low, high = factors("memory", OTHER_PROGRAMS)
    least = most = result.allocated_gib if counts_allocated(row) else held_gib(result, row)
    if not says_what(row):
        least, most = result.allocated_gib, held_gib(result, {"mem_kind": "device"})
    return {
        "pred_tok_s_gpu_low": f"{each / slow:.1f}",
        "pred_tok_s_gpu_high": f"{each / fast:.1f}",
        "pred_mem_gib_low": f"{low * least:.2f}",
        "pred_mem_gib_high": f"{high * most:.2f}",
    }


def held_gib(result: Estimate, row: Mapping[str, str]) -> float:
    """Return the GiB that a run holds: of the whole card where that was measured, else what torch's allocator reserves."""
    kind = row.get("mem_kind", "").lower()
    whole_card = "smi" in kind or "device" in kind
    beside = 0.0 if whole_card else result.context / GIB
    return min(result.shown_gib, result.gpu.memory_gib) - beside


def read_plain(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file of any columns; cells that are not there are "". Raises UserError for a file that is none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [{key: value or "" for key, value in row.items() if key is not None} for row in csv.DictReader(file)]
    except OSError as error:
        raise UserError(str(path), f"it cannot be read: {error.strerror}", "name a CSV file") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(str(path), "it is not text in CSV", "name a CSV file") from None


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; missing cells are "". Raises UserError for a file that is none, or of another format."""
    rows = read_plain(path)
    if not rows:
        raise UserError(str(path), "it has no rows", "name a CSV file with a header and rows")
    if missing := sorted((PUBLISHED if "n_gpus" in rows[0] else OF_PLAYBOOK) - rows[0].keys()):
        raise UserError(
            str(path),
            f"it lacks the columns {', '.join(missing)}",
            "give the columns of benchmarks/data/published.csv or benchmarks/data/playbook_h100.csv",
        )
    return rows


def predict_file(path: Path, out: Path) -> list[dict[str, str]]:
    """Write every row of `path` with its prediction to `out`. Raises UserError for a table of another format."""
    rows = read(path)
    if out.exists() and out.resolve() == path.resolve():
        raise UserError(str(out), "it is the table itself", "name another file for --out")
    names = [*rows[0], *(name for name in PREDICTED if name not in rows[0])]
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            done = [row | predict(row) for row in rows]
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(done)
    except OSError as error:
        raise UserError(
            str(out), f"it cannot be written: {error.strerror}", "name a file in a folder that exists"
        ) from None
    return done


def figure(row: Mapping[str, str], *names: str) -> float | None:
    """Return the first of the columns that holds a number above 0."""
    for name in names:
        try:
            if (value := float(row.get(name) or 0)) > 0:
                return value
        except ValueError:
            continue
    return None


def counts_allocated(row: Mapping[str, str]) -> bool:
    """Return whether a row says that its memory is what torch allocated, against reserved or not said."""
    return any(word in row.get("mem_kind", "").lower() for word in ("alloc", "active", "analytic"))


def says_what(row: Mapping[str, str]) -> bool:
    """Return whether a row says which memory was measured."""
    kind = row.get("mem_kind", "").lower()
    return bool(kind.strip()) and "unknown" not in kind


def errors(row: Mapping[str, str]) -> tuple[float | None, float | None]:
    """Return relative errors (predicted / measured - 1) of memory and of speed, where the row has them and its run was ok."""
    memory = speed = None
    if row.get("status", "ok") == "ok" and not row.get("reason"):
        seen, want = (
            figure(row, "peak_mem_gib", "mem_gb"),
            "pred_mem_allocated_gib" if counts_allocated(row) else "pred_mem_gib",
        )
        memory = float(row[want]) / seen - 1 if seen else None
        seen = figure(row, "tok_s_gpu")
        speed = float(row["pred_tok_s_gpu"]) / seen - 1 if seen else None
    return memory, speed


def quantiles(values: Iterable[float | None]) -> tuple[int, float, float]:
    """Return (how many, median, p90) of absolute values, in percent."""
    known = sorted(100 * abs(value) for value in values if value is not None)
    if not known:
        return 0, float("nan"), float("nan")
    return len(known), statistics.median(known), known[min(len(known) - 1, int(0.9 * len(known)))]


def summary(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return for each set its rows, median and p90 of absolute errors, and what was said of runs that did not fit."""
    sets: dict[str, list[Mapping[str, str]]] = defaultdict(list)
    for row in rows:
        sets[row.get("set") or row["model"]].append(row)
    table = []
    for name, members in sets.items():
        memory, speed = zip(*(errors(row) for row in members), strict=True)
        told = [row for row in members if not row.get("reason")]
        table.append(
            {
                "set": name,
                "rows": len(members),
                "expressed": len(told),
                "memory": quantiles(memory),
                "speed": quantiles(speed),
                "failed": sum(row.get("status", "ok") != "ok" for row in told),
                "failed_told": sum(row.get("status", "ok") != "ok" and row["fits"] != "yes" for row in told),
                "ran": sum(row.get("status", "ok") == "ok" for row in told),
                "ran_refused": sum(row.get("status", "ok") == "ok" and row["fits"] == "no" for row in told),
            }
        )
    return table
