"""docs/evidence/states.md where more than the data is divided: what ranks hold is what the planner says."""

import json
import math

import pytest

from benchmarks import pages, states, states_axes
from benchmarks.parity_cases import NAMES, sizes_of
from brigade.plan.costs.job import Job, axis_fields
from brigade.plan.costs.stages import stages
from brigade.plan.costs.states import stage_states
from brigade.plan.shape.from_config import shape_of
from brigade.plan.shape.lora import ALL, trained_parameters
from brigade.train.strategy.axes import Axes

ROWS = pages.read(states_axes.RESULTS)
KINDS = {name: kind for kind, name in NAMES.items()}
CONFIG = json.loads((pages.REPOSITORY / "recipes/tiny/config.json").read_text()) | states.MODEL


def planned(row):
    """The formula of today for a row's stage."""
    sizes = sizes_of(row["divided"])
    sizes["stages"] = sizes.pop("pipeline", 1)
    sizes.pop("data", None)
    kind, over = KINDS[row["strategy"]], Axes(**sizes)
    data = over.data(int(row["ranks"]))
    spread = {"engine": "zero", "stage": int(kind[-1])} if kind.startswith("zero") else {"engine": kind, "stage": 0}
    if kind in ("fsdp2", "hsdp"):
        spread = {"engine": "fsdp2", "stage": 3, "shard": data // 2 * over.sequence if kind == "hsdp" else 0}
    if kind == "ddp" and over.experts > 1:  # FSDP2 with shards of one rank; in a pipeline axis_fields says what runs
        spread = {"engine": "fsdp2", "stage": 3, "shard": 1} if over.stages == 1 else spread
    base, _, adapters = row["model"].partition("+")
    shape = shape_of(CONFIG | states_axes.MODELS[base], "config.json")
    if adapters:
        spread |= {"method": "lora", "trained": trained_parameters(shape, states_axes.LORA["lora_r"], [], ALL, False)}
    job = Job(shape, 64, optimizer="adamw_torch", **spread | axis_fields(over, int(row["ranks"])))
    return job, stage_states(job, stages(job)[int(row["stage"])])[0]


@pytest.mark.parametrize("axis", states_axes.PLAN)
def test_every_case_of_the_page_was_measured(axis):
    wanted = {
        (divided, NAMES[kind], model, str(stage))
        for divided, kinds, models in states_axes.PLAN[axis]
        for kind in kinds.split()
        for model in models.split()
        for stage in range(sizes_of(divided).get("pipeline", 1))
    }
    keys = ("divided", "strategy", "model", "stage")
    assert {tuple(row[key] for key in keys) for row in ROWS if row["axis"] == axis} == wanted


def test_each_rank_holds_what_the_planner_says():
    """To 1 %. Gradients of ZeRO-1 and 2 depend on which parameters a slice cuts: the page has that, the planner has not."""
    for row in ROWS:
        assert abs(float(row["difference_percent"])) <= 1, row
        job, formula = planned(row)
        assert job.gpus == math.prod(sizes_of(row["divided"]).values()) == int(row["ranks"])
        parts = ("parameters", "optimizer") if job.engine == "zero" and job.stage < 3 else states.PARTS
        held = sum(int(row[f"{part}_measured"]) for part in parts)
        assert sum(getattr(formula, part) for part in parts) == pytest.approx(held, rel=0.01), row
