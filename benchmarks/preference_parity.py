"""Every strategy gives the steps of a plain loop that shares no code with brigade, for each objective.

    python -m benchmarks.preference_parity          # -> docs/evidence/preferences.md

The cases are those of testing/preferences.py; those of one world size share one process group.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import EVIDENCE, command_line, markdown, where, write
from brigade.train.recipe import objectives
from testing.preferences import (
    ADAPTERS,
    ADAPTERS_FIRST,
    DORA,
    FORMS,
    NAMED,
    NAMED_SECOND,
    PACKED,
    QLORA,
    SECOND,
    TILED,
    Case,
    plain,
    run_cases,
    steps_of,
    worst,
)

# The first form of each -> its name for readers.
OBJECTIVES = {
    next(iter(each.loss_types), name): each.title for name, each in objectives.OBJECTIVES.items() if each.compares
}
FIGURES = ("loss", "grad_norm")
# strategy -> ranks; a reward model's head is not divided
WHOLE = {"ddp": 3, "zero1": 2, "zero2": 3, "zero2_offload": 2, "zero3": 3, "zero3_offload": 2, "fsdp2": 3, "hsdp": 4,
         "ddp_sp2": 2, "zero3_sp2": 2, "fsdp2_sp2": 2}  # fmt: skip
DIVIDED = {"zero1_tp2": 2, "zero3_tp2": 2, "ddp_tp2": 2, "fsdp2_tp2": 4, "zero1_pp2": 2, "ddp_pp2": 2, "fsdp2_ep2": 2}
UNDER = {"single": 1, "ddp": 3, "zero2": 3, "zero3": 3, "fsdp2": 3}
VARIANTS = {
    PACKED: "packing",
    TILED: "tiled_loss",
    SECOND: "the reference in memory",
    NAMED: "another reference",
    NAMED_SECOND: "another reference, in memory",
}
# With adapters: beside one process, whose reference is computed first.
ADAPTED = {ADAPTERS: "LoRA", ADAPTERS_FIRST: "LoRA, the reference computed first", DORA: "DoRA", QLORA: "QLoRA"}


def by_strategy() -> list[Case]:
    found = [Case(form, strategy, ranks) for strategy, ranks in WHOLE.items() for form in OBJECTIVES]
    return found + [Case(form, *each) for each in DIVIDED.items() for form in OBJECTIVES if form != "reward"]


def by_variant() -> list[Case]:
    return [Case("sigmoid", *each, variant) for each in UNDER.items() for variant in VARIANTS]


def adapted() -> list[Case]:
    return [Case("sigmoid", *each, variant) for each in [*UNDER.items()][1:] for variant in ADAPTED]


def against(case: Case) -> Case:
    return Case(case.form, variant=ADAPTERS_FIRST if case.variant == ADAPTERS else case.variant)


def cell(differences: dict[str, float] | None, figures: Sequence[str] = FIGURES) -> str:
    """Differences of losses and gradient norms; a dash where there is no such run."""
    return " / ".join(f"{differences[key]:.0e}" for key in figures) if differences else "-"


def main() -> None:
    command_line(__doc__).parse_args()
    singles, further = [Case(form) for form in FORMS], adapted()
    cases = [*singles, *by_strategy(), *by_variant(), *further, *map(against, further)]
    with tempfile.TemporaryDirectory() as folder:
        logs = run_cases(Path(folder), cases)
        differences: dict[Case, Any] = {
            case: worst(
                steps_of(log), steps_of(logs[against(case)]) if case.variant in ADAPTED else plain(Path(folder), case)
            )
            for case, log in logs.items()
        }
        first = {form: [step["loss"] for step in plain(Path(folder), Case(form))] for form in FORMS}
    single = [
        [
            form,
            f"{first[form][0]:.3f}",
            f"{first[form][-1]:.3f}",
            *(f"{differences[Case(form)][key]:.0e}" for key in FIGURES),
        ]
        for form in FORMS
    ]
    strategies = [
        [strategy, ranks, *(cell(differences.get(Case(form, strategy, ranks))) for form in OBJECTIVES)]
        for strategy, ranks in (WHOLE | DIVIDED).items()
    ]
    variants = [
        [title, *(cell(differences.get(Case("sigmoid", *each, variant))) for each in UNDER.items())]
        for variant, title in VARIANTS.items()
    ]
    variants += [
        [
            title,
            "compared with",
            *(cell(differences.get(Case("sigmoid", *each, variant))) for each in [*UNDER.items()][1:]),
        ]
        for variant, title in ADAPTED.items()
    ]
    tables = {
        "parity-one-process": markdown(["form", "first loss", "last loss", "loss", "gradient norm"], single),
        "parity-strategies": markdown(["strategy", "ranks", *OBJECTIVES.values()], strategies),
        "parity-variants": markdown(
            ["DPO with", *(f"{strategy} on {ranks}" for strategy, ranks in UNDER.items())], variants
        ),
        "parity-versions": f"Versions: {where()['versions']}.",
    }
    write(EVIDENCE / "preferences.md", tables)


if __name__ == "__main__":
    main()
