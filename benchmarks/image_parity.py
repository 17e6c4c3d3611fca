"""Training on images gives under every strategy the steps of a plain loop that reads one sample at a time.

    python -m benchmarks.image_parity          # -> docs/evidence/images.md

The cases are those of testing/image_runs.py; those of one world size share one process group.
"""

import argparse
import functools
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import EVIDENCE, markdown, where, write
from testing.image_rows import write_rows
from testing.image_runs import (
    ADAPTERS,
    EVERYWHERE,
    MODELS,
    PACKED,
    SMALL,
    TOWER,
    Case,
    plain,
    run_cases,
    worst,
)

UNDER = {"single": 1, "ddp": 3, "zero1": 2, "zero2": 3, "zero2_offload": 2, "zero3": 3, "fsdp2": 3, "hsdp": 4}
SEVERAL = {"ddp": 3, "zero2": 3, "zero3": 3, "fsdp2": 3}
VARIANTS = {"": "the tower frozen", PACKED: "packing", "sdpa": "sdpa", "padded": "padding_free: false"}
ADAPTED = {ADAPTERS: "LoRA", EVERYWHERE: "LoRA, on the tower, too", SMALL: "AdamW, steps without an image, on 2"}
COMPARED = "qwen3_vl"  # the model of variants


def alone(case: Case) -> Case:
    return Case(case.model, variant=case.variant)


def cell(differences: dict[str, float]) -> str:
    return " / ".join(f"{differences[key]:.0e}" for key in ("loss", "grad_norm"))


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    strategies = [Case(model, *each, TOWER) for model in MODELS for each in UNDER.items()]
    variants = [Case(COMPARED, *each, variant) for each in [("single", 1), *SEVERAL.items()] for variant in VARIANTS]
    adapted = [
        Case(COMPARED, strategy, 2 if variant == SMALL else ranks, variant)
        for strategy, ranks in SEVERAL.items()
        for variant in ADAPTED
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = run_cases(folder, [*strategies, *variants, *adapted, *map(alone, adapted)])
        rows = write_rows(folder)

        @functools.cache
        def of_loop(model: str, variant: str) -> list[dict[str, float]]:
            return plain(folder, Case(model, variant=variant), rows)[0]

        found: dict[Case, Any] = {}
        for case in strategies + variants:
            kind = case.variant if case.variant in (TOWER, PACKED) else ""
            found[case] = worst(logs[case], of_loop(case.model, kind))
        for case in adapted:
            found[case] = worst(logs[case], [entry for entry in logs[alone(case)] if "loss" in entry])
    lines = [
        [model, *(cell(found[Case(model, strategy, ranks, TOWER)]) for strategy, ranks in UNDER.items())]
        for model in MODELS
    ]
    head = ["model", *(f"{strategy} on {ranks}" for strategy, ranks in UNDER.items())]
    further = [
        [text, *(cell(found[case]) for case in variants if case.variant == variant)]
        for variant, text in VARIANTS.items()
    ]
    further += [
        [text, "compared with", *(cell(found[case]) for case in adapted if case.variant == variant)]
        for variant, text in ADAPTED.items()
    ]
    head_of_variants = [f"{COMPARED} with", "single on 1", *(f"{name} on {ranks}" for name, ranks in SEVERAL.items())]
    tables = {
        "image-parity": markdown(head, lines),
        "image-variants": markdown(head_of_variants, further),
        "image-versions": f"Versions: {where()['versions']}.",
    }
    write(EVIDENCE / "images.md", tables)


if __name__ == "__main__":
    main()
