"""Model states: the formulas, under the axes too, what a rehearsal makes of measured bytes, and counting storages once."""

import csv
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import pages, states, states_axes
from benchmarks.parity_cases import NAMES, sizes_of
from brigade.plan.costs.division import stage_states, stages
from brigade.plan.costs.job import Job, axis_fields
from brigade.plan.shape.from_config import shape_of
from brigade.plan.shape.lora import ALL, trained_parameters
from brigade.train.step.rehearse import PARTS, STEPS, _judge
from brigade.train.strategy import Strategy
from brigade.train.strategy.axes import Axes
from brigade.train.strategy.state_bytes import cut_parameters, model_states
from brigade.train.watch import measured_states
from brigade.train.watch.measured_states import OneStep, States, storages

KINDS = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
# A rehearsed Llama: embedding, two layers, norms.
LAYER = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128), (64,), (64,)]
SHAPES = ((4096, 64), *LAYER, *LAYER, (64,))
SIZES = [math.prod(shape) for shape in SHAPES]
LOSSES = [8.0 - step / 10 for step in range(STEPS)]


def strategy(kind: str, **options) -> Strategy:
    return Strategy(kind, kind, "a test", **options)  # type: ignore[arg-type]


def measured(kind: str, ranks: int, half: bool = False, sizes: list[int] = SIZES) -> list[States]:
    """What the ranks would hold under `kind`, with nothing padded and nothing kept whole."""
    held = []
    for cut in cut_parameters(sizes, ranks):
        formula = model_states(kind, sum(sizes), ranks, half, cut=cut)
        figures = (int(getattr(formula, part)) for part in PARTS)
        held.append(States(*figures, half=half and kind.startswith("zero"), shapes=SHAPES))
    return held


def test_what_was_measured_is_what_the_formulas_say() -> None:
    """docs/evidence/states.md's rows, of DeepSpeed's and FSDP2's ranks, against today's formulas: within 1 %."""
    config = json.loads((states.pages.REPOSITORY / "recipes/tiny/config.json").read_text()) | states.MODEL
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    sizes = [parameter.numel() for parameter in model.parameters()]
    rows = list(csv.DictReader(states.RESULTS.open()))
    assert {(row["strategy"], int(row["world_size"])) for row in rows} == {
        (name, ranks) for name in states.STRATEGIES for ranks in (1, 2, 4, 8)
    }
    for row in rows:
        kind, ranks, half = states.STRATEGIES[row["strategy"]][0], int(row["world_size"]), row["precision"] == "bf16"
        cut = cut_parameters(sizes, ranks)[int(row["fullest_rank"])]
        formula = model_states(kind, int(row["model_parameters"]), ranks, half, cut=cut)
        assert sum(sizes) == int(row["model_parameters"])
        assert formula.total == pytest.approx(int(row["total_measured"]), rel=0.01), row


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_rehearsal_accepts_sharded_states(kind: str, ranks: int, half: bool) -> None:
    _judge(strategy(kind), LOSSES, list(LOSSES), measured(kind, ranks, half))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("claimed, true", [
    ("zero1", "ddp"), ("zero2", "ddp"), ("zero3", "ddp"), ("fsdp2", "ddp"), ("zero3", "zero2"), ("fsdp2", "zero3"),
])  # fmt: skip
def test_a_rehearsal_rejects_states_that_are_not_sharded(claimed: str, true: str, ranks: int, half: bool) -> None:
    with pytest.raises(RuntimeError, match=f"{claimed} does not shard as it should: rank 0 holds"):
        _judge(strategy(claimed), LOSSES, LOSSES, measured(true, ranks, half))


def test_a_rehearsal_rejects_gradients_that_are_not_sharded() -> None:
    with pytest.raises(RuntimeError, match="gradients"):
        _judge(strategy("zero2"), LOSSES, LOSSES, measured("zero1", 8))


def test_one_rank_that_holds_too_much_is_named() -> None:
    held = measured("fsdp2", 4)
    held[2] = replace(held[2], optimizer=4 * held[2].optimizer)
    with pytest.raises(RuntimeError, match=r"rank 2 holds .* of optimizer"):
        _judge(strategy("fsdp2"), LOSSES, LOSSES, held)


def test_hsdp_is_judged_by_its_shard_group() -> None:
    hsdp = strategy("hsdp", replicate=2, shard=2)
    held = measured("fsdp2", 2) * 2
    _judge(hsdp, LOSSES, LOSSES, held)
    with pytest.raises(RuntimeError, match="parameters"):
        _judge(strategy("fsdp2"), LOSSES, LOSSES, held)


def test_hpz_keeps_a_second_copy_of_the_parameters() -> None:
    held = [replace(states, parameters=2 * states.parameters) for states in measured("zero3", 4)]
    zero3 = {"zero_optimization": {"stage": 3}}
    with pytest.raises(RuntimeError, match="parameters"):
        _judge(strategy("zero3", ds_config=zero3), LOSSES, LOSSES, held)
    zero3["zero_optimization"]["zero_hpz_partition_size"] = "auto"  # type: ignore[assignment]
    _judge(strategy("zero3", ds_config=zero3), LOSSES, LOSSES, held)


LOST = [math.inf] * STEPS


@pytest.mark.parametrize(
    "first, second", [(LOSSES, [*LOSSES[:-1], LOSSES[-1] + 1e-7]), (LOSSES, LOSSES[3:]), (LOST, list(LOST))]
)
def test_a_resumed_run_must_give_the_same_losses_which_are_numbers(first: list[float], second: list[float]) -> None:
    with pytest.raises(RuntimeError, match="losses differ"):
        _judge(strategy("ddp"), first, second, measured("ddp", 2))


@pytest.mark.parametrize(
    ("kind", "half", "times"), [("zero1", True, 4), ("zero2", True, 8), ("zero1", False, 2), ("zero2", False, 4)]
)
def test_the_textbook_savings_are_limits_for_many_ranks(kind: str, half: bool, times: float) -> None:
    ddp = model_states("ddp", 10**9, 1, half).total
    assert ddp == 16 * 10**9
    assert ddp / model_states(kind, 10**9, 10**6, half).total == pytest.approx(times, rel=1e-4)
    assert ddp / model_states(kind, 10**9, 8, half).total < 0.9 * times


@given(st.sampled_from(KINDS), st.integers(1, 10**6), st.integers(1, 512), st.booleans())
def test_more_ranks_never_hold_more_each(kind: str, parameters: int, ranks: int, half: bool) -> None:
    fewer, more = (model_states(kind, parameters, n, half) for n in (ranks, ranks + 1))
    assert all(getattr(more, part) <= getattr(fewer, part) for part in PARTS)


@given(st.integers(1, 10**8), st.integers(1, 512), st.booleans())
def test_stage_3_is_one_nth_and_each_stage_holds_no_more_than_the_one_before(n: int, ranks: int, half: bool) -> None:
    assert model_states("zero3", n, ranks, half).total == pytest.approx(model_states("zero3", n, 1, half).total / ranks)
    totals = [model_states(kind, n, ranks, half).total for kind in ("zero1", "zero2", "zero3")]
    assert totals == sorted(totals, reverse=True)


def test_zero3_copies_gradients_to_fp32_one_sub_group_at_a_time() -> None:
    assert model_states("zero3", 70 * 10**9, 8, True).gradients == 2 * 70e9 / 8 + 4 * 10**9


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 12))
def test_cut_parameters(sizes: list[int], ranks: int) -> None:
    """Against a row of elements, each with its parameter's number written on it."""
    row = [number for number, size in enumerate(sizes) for _ in range(size)]
    length = math.ceil(len(row) / ranks)
    held = [sum(sizes[number] for number in set(row[rank * length : (rank + 1) * length])) for rank in range(ranks)]
    assert cut_parameters(sizes, ranks) == [max(0, elements - length) for elements in held]
    assert cut_parameters(sizes, 1) == [0]


def test_storages_count_shared_memory_once() -> None:
    buffer = torch.zeros(100)
    given = [buffer[:50], {"view": buffer[50:].view(5, 10)}, None, torch.zeros(3), torch.empty(9, device="meta")]
    found = storages(given)
    assert sorted(found.values()) == [12, 400]
    assert {device for device, _ in found} == {"cpu"}


def test_weights_under_adapters_are_held_without_gradients_and_states() -> None:
    """70 B frozen parameters in 4 bits and 0.2 B trained ones, in bf16 on 8 ranks, by hand."""
    frozen, trained = 35e9, 2 * 10**8
    ddp = model_states("ddp", trained, 8, True, frozen=frozen)
    assert (ddp.parameters, ddp.gradients, ddp.optimizer) == (35e9 + 4 * trained, 4 * trained, 8 * trained)
    zero3 = model_states("zero3", trained, 8, True, frozen=frozen)
    assert zero3.parameters == (35e9 + 2 * trained) / 8 and zero3.optimizer == 12 * trained / 8
    assert model_states("zero2", trained, 8, True, frozen=frozen).parameters == 35e9 + 2 * trained


@pytest.mark.parametrize("whole", [False, True])
def test_a_rehearsal_sees_whether_frozen_weights_are_sharded(whole: bool) -> None:
    formula = model_states("fsdp2", 2000, 4, True, frozen=2 * sum(SIZES))
    held = States(
        int(formula.parameters) * (4 if whole else 1),
        int(formula.gradients),
        int(formula.optimizer),
        shapes=((1000, 2),),
        frozen=tuple((shape, 2) for shape in SHAPES),
    )
    if whole:
        with pytest.raises(RuntimeError, match="parameters"):
            _judge(strategy("fsdp2"), LOSSES, LOSSES, [held] * 4)
    else:
        _judge(strategy("fsdp2"), LOSSES, LOSSES, [held] * 4)


@pytest.mark.parametrize("broken", [False, True])
def test_a_step_goes_on_where_its_states_cannot_be_told(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    watched = OneStep(None, None, None, model=model, optimizer=optimizer)
    if broken:
        monkeypatch.delattr(measured_states, "storages")
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    assert watched.end(None, None, None)[:2] == ((0, 0) if broken else (80, 80))
    assert not optimizer._optimizer_step_pre_hooks


# ---- states under the axes -------------------------------------------------------------------------------------------
ROWS = pages.read(states_axes.RESULTS)
DIVIDED = {name: kind for kind, name in NAMES.items()}
CONFIG = json.loads((pages.REPOSITORY / "recipes/tiny/config.json").read_text()) | states.MODEL


def planned(row):
    """The formula of today for a row's stage."""
    sizes = sizes_of(row["divided"])
    sizes["stages"] = sizes.pop("pipeline", 1)
    sizes.pop("data", None)
    kind, over = DIVIDED[row["strategy"]], Axes(**sizes)
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
