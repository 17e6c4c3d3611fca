"""Model states per rank: the bytes of the tensors that each rank holds, beside the formulas.

    python -m benchmarks.states            # measures -> benchmarks/results/states.csv, docs/evidence/states.*

Each case is two steps of train.py on a Llama of 3.95 million parameters with AdamW, two micro-batches per step.
Cases of one world size share one process group. No GPU is needed: the tensors are the same.
"""

import contextlib
import io
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import EVIDENCE, Row, markdown
from brigade.train.strategy.state_bytes import cut_parameters, model_states
from testing.command_line import as_flags
from testing.on_ranks import on_ranks
from testing.runs import forget, write_inputs

RESULTS = pages.RESULTS / "states.csv"
PAGE = EVIDENCE / "states.md"
WORLD_SIZES = (1, 2, 4, 8)
GLOBAL_BATCH = 16
PARTS = ("parameters", "gradients", "optimizer")
CELLS = (*PARTS, "total", "formula", "difference")
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
MICRO_BATCHES = 2  # per step: accumulation shows what a strategy keeps meanwhile
# name -> kind, flags
STRATEGIES: dict[str, tuple[str, list[str]]] = {
    "DDP": ("ddp", ["--ds_config", "none"]),
    **{f"ZeRO-{stage}": (f"zero{stage}", ["--ds_config", f"ds_configs/zero{stage}.json"]) for stage in (1, 2, 3)},
    "FSDP2": ("fsdp2", ["--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml"]),
}


# ---- measuring ---------------------------------------------------------------------------------------------------
def prepare(folder: Path) -> list[str]:
    """Model, data and recipe; returns the flags that all cases share."""
    shared = write_inputs(folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps(config | MODEL))
    heldout = folder / "heldout.jsonl"
    heldout.write_text("".join(heldout.read_text().splitlines(keepends=True)[:2]))
    recipe = json.loads((folder / "full.yaml").read_text())
    recipe["training"] |= {
        "global_batch_size": GLOBAL_BATCH,
        "max_steps": 2,
        "eval_steps": None,
        "optim": "adamw_torch",
    }
    (folder / "full.yaml").write_text(json.dumps(recipe))
    return shared


def measure(world_size: int, folder: Path, timeout: float = 1200) -> list[Row]:
    """All cases of one world size, in one process group."""
    return on_ranks(_rows, prepare(folder), str(folder), ranks=world_size, timeout=timeout)[0]


def _rows(shared: list[str], folder: str) -> list[Row]:
    """One rank: run every case through train.py itself."""
    import train
    from brigade.train.distributed import ranks
    from brigade.train.host.cluster import world_from_environment
    from brigade.train.watch.measured_states import StateBytes

    world, rows = world_from_environment(), []
    for (name, (kind, flags)), half in itertools.product(STRATEGIES.items(), (False, True)):
        counter = StateBytes()
        micro_batch = GLOBAL_BATCH // world.size // MICRO_BATCHES
        output = f"{folder}/outputs/{name}-{half}"
        flags = flags + as_flags(bf16=half, output_dir=output, per_device_train_batch_size=micro_batch)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = train.main([*shared, *flags], callbacks=(counter,))
        forget(trainer)
        del trainer
        assert counter.states is not None
        held = ranks.gather([getattr(counter.states, part) for part in PARTS])
        rows.append(_row(name, kind, half, held, [math.prod(shape) for shape in counter.states.shapes]))
    return rows


def _row(name: str, kind: str, half: bool, held: list[list[int]], sizes: list[int]) -> Row:
    """Return the row of the rank that holds most; `least_total` is that of the one that holds least."""
    rank = max(range(len(held)), key=lambda r: sum(held[r]))
    formula = model_states(kind, sum(sizes), len(held), half, cut=cut_parameters(sizes, len(held))[rank])
    row: Row = {
        "strategy": name,
        "precision": "bf16" if half else "fp32",
        "world_size": len(held),
        "micro_batches_per_step": MICRO_BATCHES,
        "model_parameters": sum(sizes),
        "fullest_rank": rank,
    }
    return row | beside_formula(held[rank], formula) | {"least_total_measured": min(map(sum, held))}


def beside_formula(held: list[int], formula: Any) -> Row:
    """Return a row's figures of one rank. held: bytes of each of PARTS; formula: the same, and their total, as attributes"""
    row: Row = {f"{part}_measured": size for part, size in zip(PARTS, held, strict=True)}
    row |= {f"{part}_formula": round(getattr(formula, part)) for part in PARTS}
    row |= {"total_measured": sum(held), "total_formula": round(formula.total)}
    return row | {"difference_percent": round(100 * (sum(held) / formula.total - 1), 3)}


# ---- the page ----------------------------------------------------------------------------------------------------
def table(rows: list[Row]) -> str:
    """Bytes per parameter of the model, on the rank that holds most: measured, and by how much the formula is off."""
    lines = [[row["precision"], row["strategy"], row["world_size"], *cells(row)] for row in rows]
    return markdown(["precision", "strategy", "ranks", *CELLS], lines)


def cells(row: Row) -> list[str]:
    """Return CELLS of a row: bytes per parameter, and how far the formula is off."""
    keys = (*(f"{part}_measured" for part in (*PARTS, "total")), "total_formula")
    figures = [f"{int(row[key]) / int(row['model_parameters']):.2f}" for key in keys]
    return [*figures, f"{float(row['difference_percent']):+.2f} %"]


def largest_difference(rows: list[Row], name: Callable[[Row], str]) -> str:
    """Say how far the formula is off at most, and where rows were measured. name: of a row"""
    worst = max(rows, key=lambda row: abs(float(row["difference_percent"])))
    difference = f"{abs(float(worst['difference_percent'])):.2f} % ({name(worst)})"
    return (
        f"Largest difference between formula and measurement: {difference}.\n\n"
        f"Measured on: {rows[0]['machine']}; {rows[0]['versions']}."
    )


def savings() -> str:
    """How many times less than DDP's 16 bytes per parameter one rank holds, by formula, at N ranks."""
    sizes, many = (1, 2, 4, 8, 16, 64, 512), 10**9  # a model so large that nothing but its size counts
    lines = []
    limits = {"ZeRO-1": ("4x", "2x"), "ZeRO-2": ("8x", "4x"), "ZeRO-3": ("0.8 N", "0.67 N"), "FSDP2": ("N", "N")}
    for half, (name, limit) in itertools.product((True, False), limits.items()):
        kind, _ = STRATEGIES[name]
        figures = (f"{16 * many / model_states(kind, many, n, half).total:.3g}x" for n in sizes)
        lines.append(["bf16" if half else "fp32", name, *figures, limit[not half]])
    return markdown(["precision", "strategy", *(f"N = {n}" for n in sizes), "limit"], lines)


def draw(rows: list[Row], path: Path) -> None:
    """Stacked bars of the three parts, measured; a mark where the formula puts the top of each part."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(PARTS, ("#0072B2", "#E69F00", "#009E73"), strict=True))  # Okabe and Ito: colour-blind-safe
    names = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states and master copy"}
    figure, axes = plt.subplots(2, 1, figsize=(12, 8.4), sharex=True, sharey=True, layout="constrained")
    for axis, precision in zip(axes, ("bf16", "fp32"), strict=True):
        ticks = []
        for row in (row for row in rows if row["precision"] == precision):
            world_size = int(row["world_size"])
            x = list(STRATEGIES).index(row["strategy"]) * 5 + WORLD_SIZES.index(world_size)
            ticks.append((x, world_size))
            bottom = by_formula = 0.0
            for part in PARTS:
                height = int(row[f"{part}_measured"]) / int(row["model_parameters"])
                axis.bar(x, height, 0.82, bottom, color=colours[part], zorder=2)
                bottom += height
                by_formula += int(row[f"{part}_formula"]) / int(row["model_parameters"])
                axis.plot(x, by_formula, "D", color="black", markeredgecolor="white", markersize=5, zorder=3)
            axis.annotate(f"{bottom:.1f}", (x, bottom), (0, 6), "data", "offset points", ha="center", fontsize=9)
        axis.set_xticks([x for x, _ in ticks], [str(n) for _, n in ticks])
        axis.set_title(
            "bf16 (DDP and FSDP2: fp32 weights, computing in bf16)" if precision == "bf16" else "fp32",
            loc="left",
            fontsize=11,
        )
        axis.margins(x=0.01)
        axis.set_ylabel("bytes per parameter on one rank")
        axis.set_ylim(0, 29)
        axis.tick_params(labelbottom=True)
        axis.grid(axis="y", color="#dddddd", zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
        for index, name in enumerate(STRATEGIES):
            axis.annotate(name, (index * 5 + 1.5, 27), ha="center", fontweight="bold")
    axes[1].set_xlabel("number of ranks")
    handles: list[Any] = [plt.Rectangle((0, 0), 1, 1, color=colours[part]) for part in PARTS]
    handles.append(plt.Line2D([], [], marker="D", color="black", markeredgecolor="white", linestyle=""))
    figure.legend(
        handles,
        [*(names[part] for part in PARTS), "the same by formula, added up"],
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def tables() -> dict[str, str]:
    rows = pages.read(RESULTS)
    measured = largest_difference(rows, "{strategy}, {precision}, {world_size} ranks".format_map)
    return {"states": table(rows), "savings": savings(), "measured": measured}


def main() -> None:
    pages.command_line(__doc__).parse_args()
    rows: list[Row] = []
    for world_size in WORLD_SIZES:
        print(f"{world_size} ranks ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(world_size, Path(folder))
    order = {name: place for place, name in enumerate(STRATEGIES)}
    rows.sort(key=lambda row: (row["precision"], order[row["strategy"]], row["world_size"]))
    where = pages.where()
    pages.save(RESULTS, [row | where for row in rows])
    pages.write(PAGE, tables())
    draw(pages.read(RESULTS), PAGE.with_suffix(".png"))


if __name__ == "__main__":
    main()
