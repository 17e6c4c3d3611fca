"""Model states per rank under tensor, sequence, pipeline and expert parallelism, beside the planner's formulas.

    python -m benchmarks.states_axes                    # measures -> benchmarks/results/states_axes.csv, docs/evidence/states.md
    python -m benchmarks.states_axes --only pipeline    # only these cases; the rows of the others stay
    python -m benchmarks.states_axes --missing          # only what has no row yet

As states.py: two steps of train.py in bf16 with AdamW, two micro-batches each. The formula is what the planner makes of the run
itself: its recipe, strategy and ranks, as a Job (brigade/plan/choice/job_of_run.py), stage by stage.
"""

import contextlib
import io
import json
import math
import tempfile
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import pages, states
from benchmarks.pages import Row, markdown
from benchmarks.parity_cases import NAMES, Plan, axes_of, order, sizes_of
from benchmarks.states import GLOBAL_BATCH, MICRO_BATCHES, PARTS
from testing import axes
from testing.command_line import as_flags
from testing.on_ranks import on_ranks
from testing.runs import forget

RESULTS = pages.RESULTS / "states_axes.csv"
# How ranks are divided, strategies, models. Groups of one process each: parity_axes.py says why.
PLAN: Plan = {
    "tensor": [
        ("tensor 2", "zero1 zero2 zero3 fsdp2", "tied untied"),
        ("tensor 2 x data 2", "zero1 zero2 zero3 fsdp2", "tied untied"),
        ("tensor 2 x data 4", "zero1 zero2 zero3 fsdp2 hsdp", "untied"),
        ("tensor 2", "zero1 zero2 zero3 fsdp2", "tied+lora untied+lora"),
        ("tensor 2 x data 2", "zero1 zero2 zero3 fsdp2 ddp", "untied+lora"),
    ],
    "sequence": [
        ("sequence 2", "ddp zero1 zero2 zero3 fsdp2", "untied"),
        ("sequence 2 x data 2", "ddp zero1 zero2 zero3 fsdp2 hsdp", "untied"),
        ("sequence 2 x data 4", "zero3 fsdp2", "untied"),
        ("sequence 2 x data 2", "ddp zero1 zero2 zero3 fsdp2 hsdp", "untied+lora"),
    ],
    "pipeline": [
        ("pipeline 2", "ddp", "tied untied"),
        ("pipeline 2 x data 2", "ddp zero1", "tied untied"),
        ("pipeline 4", "ddp", "tied untied"),
        ("pipeline 2 x tensor 2", "ddp zero1", "tied untied"),
        ("pipeline 2 x data 4", "zero1", "untied"),
        ("pipeline 2 x tensor 2 x data 2", "zero1", "untied"),
        ("pipeline 4 x data 2", "zero1", "untied"),
        ("pipeline 2 x data 2", "ddp zero1", "untied+lora"),
        ("pipeline 2 x tensor 2", "zero1", "tied+lora untied+lora"),
    ],
    "experts": [
        ("experts 2", "fsdp2", "experts"),
        ("experts 2 x data 2", "fsdp2", "experts"),
        ("experts 4", "fsdp2", "experts"),
        ("experts 2 x data 4", "fsdp2", "experts"),
        ("experts 4 x data 2", "fsdp2", "experts"),
        ("experts 2 x data 2", "hsdp ddp", "experts"),
        ("experts 4", "hsdp ddp", "experts"),
        ("experts 2 x data 4", "hsdp", "experts"),
        ("experts 2 x tensor 2", "fsdp2", "experts"),
        ("experts 2 x tensor 2 x data 2", "fsdp2", "experts"),
        ("experts 2 x pipeline 2", "ddp zero1", "experts"),
        ("experts 2 x pipeline 2 x data 2", "zero1", "experts"),
        ("experts 2 x data 2", "fsdp2 hsdp ddp", "experts+lora"),
        ("experts 2 x pipeline 2", "zero1", "experts+lora"),
    ],
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "experts": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "tie_word_embeddings": False,
    },
}


LORA = {"use_peft": True, "lora_r": 64}  # of a model with "+lora", on all linear layers


# ---- measuring ---------------------------------------------------------------------------------------------------
def strategy(kind: str, divided: str) -> list[str]:
    """Flags of a strategy with these sizes."""
    sizes = sizes_of(divided)
    over = axes_of(sizes)
    return axes.flags(over, kind, **axes.two_copies(kind, over, math.prod(sizes.values())))


def measure(axis: str, there: Container[tuple[str, ...]] = (), timeout: float = 600) -> list[Row]:
    """The cases of one axis, each number of ranks and strategy in one group of processes.

    there: (divided, strategy, model) of those to leave out
    """
    groups: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for divided, kinds, models in PLAN[axis]:
        for kind in kinds.split():
            ranks = math.prod(sizes_of(divided).values())
            todo = [(divided, model) for model in models.split() if (divided, NAMES[kind], model) not in there]
            groups.setdefault((ranks, kind), []).extend(todo)
    rows: list[Row] = []
    for (ranks, kind), cases in groups.items():
        if not cases:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shared = states.prepare(folder)
            for model, changes in MODELS.items():
                (folder / model).mkdir()
                config = json.loads((folder / "model" / "config.json").read_text()) | changes
                (folder / model / "config.json").write_text(json.dumps(config))
            given = (shared, name, axis, kind, cases)
            rows += on_ranks(_rows, *given, ranks=ranks, timeout=timeout)[0]
        print(f"{axis}, {ranks} ranks, {kind}: {len(cases)} cases", flush=True)
    return rows


def _rows(shared: list[str], folder: str, axis: str, kind: str, cases: list[list[str]]) -> list[Row]:
    """One rank: run every case through train.py itself."""
    import train
    from brigade.train.distributed import ranks
    from brigade.train.host.cluster import world_from_environment
    from brigade.train.watch.measured_states import StateBytes, States

    world, rows = world_from_environment(), list[Row]()
    for divided, model in cases:
        counter = StateBytes()
        data = axes_of(sizes_of(divided)).data(world.size)
        base, _, adapters = model.partition("+")
        flags = as_flags(
            **LORA if adapters else {},
            bf16=True,
            model_name_or_path=f"{folder}/{base}",
            output_dir=f"{folder}/outputs/{divided}-{model}",
            per_device_train_batch_size=GLOBAL_BATCH // data // MICRO_BATCHES,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            words = [*shared, *strategy(kind, divided), *flags]
            trainer = train.main(words, callbacks=(counter,))
        run, config = trainer.run, trainer.model.config.to_dict()
        forget(trainer)
        del trainer
        held = [States(**values) for values in ranks.gather(vars(counter.states))]
        of = {
            "axis": axis,
            "ranks": world.size,
            "divided": divided,
            "strategy": NAMES[kind],
            "model": model,
        }
        rows += [of | row for row in compared(run, config, held)]
    return rows


def compared(run: Any, config: dict[str, Any], held: list[Any]) -> list[Row]:
    """One row for each stage of a run: of its rank that holds most. held: States of every rank"""
    from brigade.plan.choice.job_of_run import job_of_run
    from brigade.plan.costs.division import stages

    recipe, size = run.settings.recipe, run.world.size
    job = job_of_run(recipe, run.strategy, run.batch, size, size, config, "H100 80GB")
    rows = []
    for stage in stages(job):
        of_stage = [rank for rank in range(size) if run.strategy.axes.place(rank, size).stage == stage.place]
        rank = max(of_stage, key=lambda rank: held[rank].total)
        formula = _formula(job, stage, run.strategy, rank, held[rank].shapes)
        row: Row = {"stage": stage.place, "model_parameters": job.shape.parameters, "fullest_rank": rank}
        row |= states.beside_formula([getattr(held[rank], part) for part in PARTS], formula)
        rows.append(row | {"least_total_measured": min(held[other].total for other in of_stage)})
    return rows


def _formula(job: Any, stage: Any, strategy: Any, rank: int, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """The planner's; under ZeRO-1 and 2 with the parameters that a slice cuts, which it leaves out (docs/evidence/states.md: c).

    shapes: of what the rank has of each parameter before it is sharded
    """
    from brigade.plan.costs.division import frozen_bytes, stage_states
    from brigade.train.strategy.state_bytes import cut_parameters, model_states

    formula, _ = stage_states(job, stage)
    if job.engine != "zero" or job.stage == 3:
        return formula
    place, n = strategy.axes.place(rank, job.gpus), job.shard_ranks
    of_rank = place.data * job.context + place.sequence
    cut = cut_parameters([math.prod(shape) for shape in shapes], n)[of_rank]
    frozen = frozen_bytes(job, stage.parameters)
    return model_states(strategy.kind, round(stage.trained), n, half=True, optim=job.optimizer, cut=cut, frozen=frozen)


# ---- the page ----------------------------------------------------------------------------------------------------
def table(rows: list[Row]) -> str:
    """Bytes per parameter of the model, on the rank of a stage that holds most, and by how much the formula is off."""
    lines = []
    for row in rows:
        stage = row["stage"] if "pipeline" in row["divided"] else "-"
        model = row["model"].replace("+lora", ", LoRA")
        lines.append([row["ranks"], row["divided"], row["strategy"], model, stage, *states.cells(row)])
    return markdown(["ranks", "divided", "strategy", "model", "stage", *states.CELLS], lines)


def tables() -> dict[str, str]:
    rows = pages.read(RESULTS)
    measured = states.largest_difference(rows, "{divided}, {strategy}, {model}".format_map)
    return {"states-axes": table(rows), "states-axes-measured": measured}


def main() -> None:
    parser = pages.command_line(__doc__)
    parser.add_argument("--only", choices=PLAN, nargs="+", default=list(PLAN), help="measure only these axes")
    parser.add_argument("--missing", action="store_true", help="measure only what has no row of results yet")
    options = parser.parse_args()
    where = pages.where()
    for axis in options.only:
        kept = pages.read(RESULTS) if RESULTS.exists() else []
        kept = kept if options.missing else [row for row in kept if row["axis"] != axis]
        there = {(row["divided"], row["strategy"], row["model"]) for row in kept}
        found = kept + [row | where for row in measure(axis, there)]
        pages.save(RESULTS, sorted(found, key=partial(order, PLAN)))
    pages.write(states.PAGE, tables())


if __name__ == "__main__":
    main()
