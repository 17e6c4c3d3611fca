"""Every strategy gives the steps of a plain loop over two models, and kept words teach what the teacher itself does.

    python -m benchmarks.distillation_parity          # -> docs/evidence/distillation.md
    python -m benchmarks.distillation_parity --only kept

The cases are those of testing/distilling.py; those of one world size share one process group.
"""

import functools
import tempfile
from pathlib import Path

from benchmarks.pages import EVIDENCE, command_line, markdown, where, write
from benchmarks.preference_parity import DIVIDED, WHOLE, cell
from testing import preferences
from testing.distilling import BATCH, Case, plain, run_cases, worst
from testing.preferences import TRAINED, steps_of

FORMS = {"forward": "the teacher in each step", "few": "8 words kept"}
FIGURES = ("loss", "grad_norm", "divergence")
REFUSED = ("zero1_tp2", "zero3_tp2")
STRATEGIES = {name: ranks for name, ranks in (WHOLE | DIVIDED).items() if name not in REFUSED}
UNDER = {"single": 1, "ddp": 3, "zero3": 3, "fsdp2": 3}
# What it is called, by form and variant.
FURTHER = {
    ("reverse", ""): "KL(model, teacher)",
    ("jsd", ""): "JSD, beta 0.3",
    ("warm", ""): "temperature 2, weight 1",
    ("forward", "packed"): "KL(teacher, model), packed",
    ("forward", "padded"): "KL(teacher, model), padded",
    ("forward", "tiles"): "KL(teacher, model), tiled_loss: 7",
    ("forward", "recomputed"): "KL(teacher, model), layers recomputed",
}
LIVE = [Case("forward", variant="singly"), Case("warm", "ddp", 2, "singly"), Case("forward", "zero3", 2, "singly")]
TABLES = ("strategies", "variants", "kept")


def parity(folder: Path, cases: list[Case]) -> dict[Case, dict[str, float]]:
    """Return how far the steps of each case are from the plain loop's."""
    loop = functools.cache(functools.partial(plain, folder))
    return {
        case: worst(steps_of(log), loop(case.form, case.model, TRAINED if case.variant == "packed" else BATCH)[0])
        for case, log in run_cases(folder, cases).items()
    }


def strategies(folder: Path) -> str:
    cases = [Case(form, *each) for each in ({"single": 1} | STRATEGIES).items() for form in FORMS]
    found = parity(folder, cases)
    lines = [
        [name, ranks, *(cell(found[Case(form, name, ranks)], FIGURES) for form in FORMS)]
        for name, ranks in ({"single": 1} | STRATEGIES).items()
    ]
    return markdown(["strategy", "ranks", *FORMS.values()], lines)


def variants(folder: Path) -> str:
    found = parity(folder, [Case(form, *each, variant) for each in UNDER.items() for form, variant in FURTHER])
    lines = [
        [title, *(cell(found[Case(form, *each, variant)], FIGURES) for each in UNDER.items())]
        for (form, variant), title in FURTHER.items()
    ]
    return markdown(["", *(f"{name} on {ranks}" for name, ranks in UNDER.items())], lines)


def kept(folder: Path) -> str:
    """Return how far a teacher that reads once is from one that reads each micro-batch, and where not at all."""
    pairs = {case: case._replace(variant="all kept") for case in LIVE}
    logs = run_cases(folder, [*pairs, *pairs.values()])
    lines = []
    for live, other in pairs.items():
        steps = worst(steps_of(logs[other]), steps_of(logs[live]))
        ends = [preferences.held_out_of(logs[case])["divergence"] for case in (live, other)]
        figures = [*(steps[key] for key in FIGURES), abs(ends[1] - ends[0])]
        lines.append(
            [live.form, live.strategy, live.ranks, *(f"{each:.0e}" if each else "the same bits" for each in figures)]
        )
    return markdown(["form", "strategy", "ranks", "loss", "gradient norm", "divergence", "held-out divergence"], lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, help="tables (default: all)")
    for name in parser.parse_args().only:
        with tempfile.TemporaryDirectory() as folder:
            table = {"strategies": strategies, "variants": variants, "kept": kept}[name](Path(folder))
        print(table)
        write(EVIDENCE / "distillation.md", {f"distillation-{name}": f"{table}\n\nVersions: {where()['versions']}."})


if __name__ == "__main__":
    main()
