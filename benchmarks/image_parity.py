"""Training on images gives under every strategy the steps of a plain loop that reads one sample at a time.

    python -m benchmarks.image_parity                        # -> docs/evidence/images.md
    python -m benchmarks.image_parity --only methods axes    # only these tables anew, a part of the cases
    python -m benchmarks.image_parity --models mistral3      # only this model's lines, beside those that are there

The cases are those of testing/image_runs.py; those of one world size share one process group.
"""

import functools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pages import EVIDENCE, TABLE, command_line, markdown, where, write
from testing.image_rows import write_rows
from testing.image_runs import (
    ADAPTERS,
    CHECKPOINTING,
    DORA,
    EVEN,
    EVERYWHERE,
    IN_TENSOR_GROUPS,
    MODELS,
    PACKED,
    QLORA,
    RSLORA,
    SMALL,
    TILED,
    TOWER,
    Case,
    loop_of,
    plain,
    run_cases,
)
from testing.preferences import steps_of, worst

UNDER = {"single": 1, "ddp": 3, "zero1": 2, "zero2": 3, "zero2_offload": 2, "zero3": 3, "fsdp2": 3, "hsdp": 4}
SEVERAL = {"ddp": 3, "zero2": 3, "zero3": 3, "fsdp2": 3}
VARIANTS = {"": "the tower frozen", PACKED: "packing", "sdpa": "sdpa", "padded": "padding_free: false"}
ADAPTED = {ADAPTERS: "LoRA", EVERYWHERE: "LoRA, on the tower, too", SMALL: "AdamW, steps without an image, on 2"}
METHODS = {
    TILED: "tiled_loss 5, tiled_mlp 7",
    CHECKPOINTING: "activation_checkpointing",
    ADAPTERS: "LoRA",
    RSLORA: "rsLoRA",
    DORA: "DoRA",
    QLORA: "QLoRA",
}
TENSOR = {"ddp_tp2": 2, "zero3_tp2": 2, "fsdp2_tp2": 4}
SEQUENCE = {"ddp_sp2": 2, "zero3_sp2": 2, "fsdp2_sp2": 4}
LORA = {"single": 1, "ddp": 3, "zero3": 3, "fsdp2": 3}
IN_PARTS = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "llava_onevision", "llava/pixtral", "mistral3")
COMPARED = "qwen3_vl"  # the model of variants and methods
PARTS = ("strategies", "methods", "lora", "axes")
PAGE = EVIDENCE / "images.md"


def alone(case: Case) -> Case:
    return Case(case.model, variant=case.variant)


def cell(differences: dict[str, float]) -> str:
    return " / ".join(f"{differences[key]:.0e}" for key in ("loss", "grad_norm"))


class Grid(NamedTuple):
    """A table: a line of cases for each of its names. columns: strategy -> number of ranks; corner: what names are"""

    corner: str
    columns: dict[str, int]
    lines: dict[str, list[Case]]

    def markdown(self, found: dict[Case, Any], further: Sequence[Sequence[str]] = ()) -> str:
        head = [self.corner, *(f"{strategy} on {ranks}" for strategy, ranks in self.columns.items())]
        return markdown(
            head, [*([name, *(cell(found[case]) for case in of)] for name, of in self.lines.items()), *further]
        )


def of_models(columns: dict[str, int], models: Iterable[str], variant: str = TOWER) -> Grid:
    lines = {model.removesuffix(EVEN): [Case(model, *each, variant) for each in columns.items()] for model in models}
    return Grid("model", columns, lines)


def of_variants(variants: dict[str, str]) -> Grid:
    columns = {"single": 1} | SEVERAL
    lines = {text: [Case(COMPARED, *each, variant) for each in columns.items()] for variant, text in variants.items()}
    return Grid(f"{COMPARED} with", columns, lines)


def beside_others(name: str, table: str, order: Sequence[str]) -> str:
    """Return the page's table of this name with the lines of another one added, or in place of those of the same model.

    Raises ValueError where the page's has other columns.
    """
    head, rule, *new = table.splitlines()
    head_there, _, *there = next(found[3] for found in TABLE.findall(PAGE.read_text()) if found[1] == name).splitlines()
    if head_there != head:
        raise ValueError(f"{PAGE}: {name} has other columns: {head_there}")
    lines = {line.split("|")[1].strip(): line for line in [*there, *new]}
    return "\n".join([head, rule, *(lines[model] for model in order if model in lines)])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="which tables; default: all")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, help="only these models' lines; the page keeps its others"
    )
    options = parser.parse_args()
    only, models = options.only, options.models
    if models and where()["versions"] not in PAGE.read_text():
        parser.error(f"{PAGE} was measured with other versions: leave out --models")
    grids: dict[str, Grid] = {}
    if "strategies" in only:
        grids |= {"image-parity": of_models(UNDER, MODELS), "image-variants": of_variants(VARIANTS)}
    if "methods" in only:
        grids["image-methods"] = of_variants(METHODS)
    if "lora" in only:
        grids["image-lora"] = of_models(LORA, MODELS, EVERYWHERE)
    if "axes" in only:
        grids |= {"image-tensor": of_models(TENSOR, IN_TENSOR_GROUPS), "image-sequence": of_models(SEQUENCE, IN_PARTS)}
    orders = {name: [*grid.lines] for name, grid in grids.items()}
    if models:
        chosen = {
            name: {model: line for model, line in grid.lines.items() if model in models} for name, grid in grids.items()
        }
        grids = {name: grid._replace(lines=chosen[name]) for name, grid in grids.items() if chosen[name]}
    with_loop = [case for grid in grids.values() for line in grid.lines.values() for case in line]
    adapted = [
        Case(COMPARED, strategy, 2 if variant == SMALL else ranks, variant)
        for strategy, ranks in SEVERAL.items()
        for variant in (ADAPTED if "strategies" in only and not models else ())
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = run_cases(folder, [*with_loop, *adapted, *map(alone, adapted)])
        rows = write_rows(folder)

        @functools.cache
        def of_loop(model: str, variant: str) -> list[dict[str, float]]:
            return plain(folder, Case(model, variant=variant), rows)[0]

        steps = {case: steps_of(log) for case, log in logs.items()}
        found: dict[Case, Any] = {case: worst(steps[case], of_loop(case.model, loop_of(case))) for case in with_loop}
        for case in adapted:
            found[case] = worst(steps[case], steps[alone(case)])
    tables = {name: grid.markdown(found) for name, grid in grids.items()}
    if models:
        tables = {name: beside_others(name, table, orders[name]) for name, table in tables.items()}
    if adapted:
        further = [
            [text, "compared with", *(cell(found[case]) for case in adapted if case.variant == variant)]
            for variant, text in ADAPTED.items()
        ]
        tables["image-variants"] = grids["image-variants"].markdown(found, further)
        tables["image-versions"] = f"Versions: {where()['versions']}."
    write(PAGE, tables)


if __name__ == "__main__":
    main()
