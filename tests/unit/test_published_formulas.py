"""Formulas of engines that train.py does not run: what they share with the planner's, and where they differ."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.job import ENGINES, PublishedJob
from brigade.plan.costs import conventions
from brigade.plan.costs.division import division
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.job import FUSED, Job
from brigade.plan.costs.memory import moments
from brigade.plan.costs.step_time import step_time
from brigade.plan.shape.find import named_shape
from testing.ranks import REPOSITORY as ROOT

LLAMA_8B = named_shape(str(ROOT / "recipes" / "llama-3.1-8b"))
QWEN_MOE = named_shape(str(ROOT / "recipes" / "qwen3-30b-a3b"))


def published(shape=LLAMA_8B, **options):
    return PublishedJob(shape, **({"sequence": 4096, "data": 8, "stage": 3} | options))


@pytest.mark.parametrize("engine", conventions.ENGINES)
@pytest.mark.parametrize("method, trained", [("full", 0), ("lora", 10**7), ("qlora", 10**7)])
def test_what_train_py_runs_too_is_estimated_the_same(engine, method, trained):
    """Without a tensor, context, pipeline or expert group; the planner's own answers are what its users get."""
    stage = {"ddp": 0, "stages": 1}.get(engine, 3)
    options = {"engine": engine, "stage": stage, "method": method, "trained": trained, "data": 16, "kernels": FUSED}
    for more in ({}, {"checkpointing": "full", "attention": "eager"}, {"loss": "tiled", "tiled_mlp": True}):
        ours, theirs = (kind(LLAMA_8B, 4096, **options | more) for kind in (Job, PublishedJob))
        assert estimate(ours).memory == estimate(theirs).memory and step_time(ours) == step_time(theirs)
        assert estimate(ours).device_gib == pytest.approx(estimate(theirs).device_gib)


@pytest.mark.parametrize("kind, options", [
    (Job, {"stage": 3}),
    *((PublishedJob, {"engine": "megatron", "stage": 1, "tensor": tensor}) for tensor in (1, 4)),
])  # fmt: skip
def test_expert_parallelism_moves_states_and_makes_none_disappear(kind, options):
    """All experts' optimizer states exist once, however they are spread."""
    jobs = [kind(QWEN_MOE, 4096, data=16, expert=size, **options) for size in (1, 2, 4, 8, 16)]
    assert [estimate(job).memory.optimizer for job in jobs] == pytest.approx(
        [estimate(jobs[0]).memory.optimizer] * 5, rel=1e-6
    )


@given(st.sampled_from(["megatron", "nanotron"]), st.integers(1, 32))
def test_every_layer_has_a_stage(engine, stages):
    job = published(engine=engine, stage=1, pipeline=stages, accumulation=64)
    assert sum(division(job).layers) == LLAMA_8B.layers


def test_foreach_kernels_copy_second_moments_in_bf16_too():
    *_, step = moments(published(sequence=16, data=1, stage=0, engine="pure", optimizer="adamw_torch"))
    assert step.allocated == pytest.approx(10 * LLAMA_8B.parameters)


def test_a_step_in_the_backward_pass_leaves_no_gradients():
    plain = published(engine="pure", data=1, stage=0, checkpointing="full")
    within = replace(plain, step_in_backward=True)
    assert estimate(plain).memory.gradients > 0 == moments(within)[-1].gradients
    assert estimate(within).memory.allocated < estimate(plain).memory.allocated


def test_offloaded_activations_leave_one_layer_s():
    plain = published(checkpointing="full", sequence=2**17)
    offloads = estimate(replace(plain, offload_activations=True)).memory
    assert 2 * offloads.activations < estimate(plain).memory.activations


def test_dropout_takes_memory_and_time_in_eager_attention():
    plain = published(attention="eager", engine="megatron-2022", stage=1)
    dropped = replace(plain, dropout=True)
    assert estimate(dropped).memory.activations > 1.1 * estimate(plain).memory.activations
    assert step_time(dropped).compute > step_time(plain).compute


def test_fp8_is_faster_and_more_so_with_megatron_s_kernels():
    plain = published(sequence=8192, micro_batch=4, gpu="B200")
    gains = [
        step_time(one).compute / step_time(replace(one, fp8="tensor")).compute
        for one in (plain, replace(plain, kernels=plain.kernels | {"norm", "softmax"}))
    ]
    assert 1.1 < gains[0] < 1.4 < gains[1] < 2.4


def test_a_chip_bounds_others_stacks_too_but_for_products_in_fp8():
    job = published(gpu="A100 80GB", micro_batch=8)
    own = Job(**{field.name: getattr(job, field.name) for field in fields(Job)})
    assert estimate(job).least_seconds == estimate(own).least_seconds > 0
    assert estimate(replace(job, fp8="tensor")).least_seconds == 0


def test_a_ring_is_hidden_behind_long_attention_and_an_exchange_is_not():
    ring = published(context=8, sequence=2**17, data=1)
    assert step_time(ring).inside < step_time(replace(ring, ulysses=True)).inside


def test_the_planner_s_table_of_engines_is_its_own():
    assert not {"megatron", "pure", "nanotron"} & conventions.ENGINES.keys()
    assert conventions.ENGINES.keys() < ENGINES.keys()
