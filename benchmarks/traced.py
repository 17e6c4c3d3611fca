"""Activations and logits: the formulas of brigade/plan beside a trace of the models' own code. No GPU is needed, or used.

python -m benchmarks.traced            # traces -> benchmarks/results/traced.jsonl, docs/evidence/traced.md
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks import pages
from benchmarks.pages import EVIDENCE, Row, markdown
from brigade.plan.costs.activations import activation_bytes, logit_bytes
from brigade.plan.costs.job import FUSED, Job
from brigade.plan.shape.built import versions
from brigade.plan.shape.find import known_config
from brigade.plan.shape.from_config import shape_of
from brigade.train.model.config_json import read_config
from testing.trace_settings import settings_of

RESULTS = pages.RESULTS / "traced.jsonl"
PAGE = EVIDENCE / "traced.md"
MODELS = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "qwen3-0.6b",
    "qwen3-8b",
    "gemma-3-1b-it",
    "phi-4",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
)
LENGTH = 4096
# name -> what of a Job is another than FSDP2 in bf16 with flash attention, torch's own kernels and no checkpointing
CASES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, checkpointing": {"checkpointing": "full"},
    "bf16, eager attention": {"attention": "eager"},
    "bf16, Liger": {"kernels": FUSED},
    "autocast": {"engine": "ddp"},
    "autocast, checkpointing": {"engine": "ddp", "checkpointing": "full"},
}


def rows() -> Iterator[Row]:
    """Each model and case, traced anew: bytes per token."""
    from brigade.errors import UserError
    from testing.traced_model import measure

    for model in MODELS:
        recipe = known_config(model)
        assert recipe
        config = read_config(recipe)
        shape = shape_of(config, model, model)
        for case, traits in CASES.items():
            job = replace(Job(shape, LENGTH, loss="released"), **traits)
            settings = settings_of(job)
            assert settings
            kept, back = activation_bytes(job)
            row: Row = {
                "model": model,
                "case": case,
                "length": LENGTH,
                "layers": shape.layers,
                "vocabulary": shape.vocab,
                "formula": {"kept": kept / LENGTH, "back": back / LENGTH, "loss": logit_bytes(job) / LENGTH},
            }
            began = time.perf_counter()
            try:
                found = measure(config, settings)
            except UserError as error:
                yield row | {"traced": None, "reason": error.problem, "versions": versions()}
                continue
            figures = {"kept": found.kept / shape.layers, "back": found.back, "loss": found.loss}
            seconds = round(time.perf_counter() - began, 1)
            yield row | {
                "traced": {name: value / LENGTH for name, value in figures.items()},
                "seconds": seconds,
                "versions": versions(),
            }


def table(results: list[Row]) -> str:
    heads = [
        f"{part}: {engine}" if engine == "formula" else engine
        for part in ("kept per layer", "beside, backward", "loss")
        for engine in ("formula", "traced", "off by")
    ]
    lines = []
    for row in results:
        cells = [row["model"], row["case"]]
        for part in ("kept", "back", "loss"):
            scale, digits = (row["vocabulary"], 2) if part == "loss" else (1, 0)
            guess = row["formula"][part]
            if row["traced"] is None:
                cells += [f"{guess / scale:,.{digits}f}", "not traced", ""]
                continue
            seen = row["traced"][part]
            off = f"{100 * (guess / seen - 1):+.1f} %" if seen else ""
            cells += [f"{guess / scale:,.{digits}f}", f"{seen / scale:,.{digits}f}", off]
        lines.append(cells)
    return markdown(["model", "case", *heads], lines)


def tables() -> dict[str, str]:
    results = pages.read(RESULTS)
    traced = [row for row in results if row["traced"]]
    kept = [100 * abs(row["formula"]["kept"] / row["traced"]["kept"] - 1) for row in traced]
    # What a micro-batch needs at most beside the states: all layers with the loss on top, or with a layer's backward pass.
    whole = [100 * abs(_most(row, "formula") / _most(row, "traced") - 1) for row in traced]
    seconds = [row["seconds"] for row in traced]
    summary = [
        ["error of what layers keep", f"{statistics.median(kept):.1f} %", f"{max(kept):.1f} %"],
        ["error of the most that a micro-batch needs", f"{statistics.median(whole):.1f} %", f"{max(whole):.1f} %"],
        ["time of a trace", f"{statistics.median(seconds):.1f} s", f"{max(seconds):.0f} s"],
    ]
    return {
        "summary": markdown([f"over {len(traced)} rows", "median", "worst"], summary)
        + f"\n\nVersions: {pages.in_words(results[0]['versions'])}.",
        "rows": table(results),
    }


def _most(row: Row, engine: str) -> float:
    return row[engine]["kept"] * row["layers"] + max(row[engine]["back"], row[engine]["loss"])


def main() -> None:
    pages.command_line(__doc__).parse_args()
    pages.save(RESULTS, list(rows()))
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
