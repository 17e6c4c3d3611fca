"""Formulas of very long rows: their activations against traces of the models' own code, and what is computed twice."""

from dataclasses import replace

import pytest

from benchmarks import long_context, pages
from brigade.plan.costs import activations, memory
from brigade.plan.costs.job import Job
from brigade.plan.costs.step_time import step_time
from brigade.plan.shape.find import named_shape

ROWS = pages.read(long_context.RESULTS)


def name(row):
    return f"{row['model']}, {row['objective']}, {row['tiles']}, {row['ranks']}"


@pytest.mark.parametrize("row", [row for row in ROWS if row["tiles"] != "loss"], ids=name)
def test_long_rows_take_what_traces_of_the_models_code_say(row):
    """With and without tiles of loss and MLPs, of a row in parts and whole: what a layer and the loss need at their peaks."""
    tiles = {"loss": "tiled", "tiled_mlp": True} if row["tiles"] != "none" else {"loss": "released"}
    tokens = row["tokens"] * long_context.ANSWERS[row["objective"]]
    job = Job(named_shape(row["model"]), tokens, context=row["ranks"], checkpointing="full", **tiles)
    kept, back = activations.activation_bytes(job)
    assert kept * job.shape.layers == pytest.approx(row["kept"], rel=0.05)
    assert back == pytest.approx(row["back"], rel=0.01)
    assert activations.logit_bytes(job) == pytest.approx(row["loss"], abs=memory.GIB / 8)


def test_an_mlp_in_tiles_is_computed_once_more():
    plain = Job(named_shape("llama-3.1-8b"), 131_072, checkpointing="full", loss="tiled")
    tiled = replace(plain, tiled_mlp=True)
    assert 1.03 < step_time(tiled).compute / step_time(plain).compute < 1.10
