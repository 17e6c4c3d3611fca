"""How a model is divided into stages, which schedules there are, what is refused before a model is built, and what is computed
from a pipeline's time lines."""

import itertools
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks import bubble_lines
from brigade.train.engines.parallel import (
    pipeline_rules,
    pipeline_schedule,
    pipeline_split,
    pipeline_zero1,
)
from brigade.train.model.tiny import shrink
from brigade.train.recipe.batch import Batch
from brigade.train.strategy import Strategy, axis_keys, axis_rules, refusal
from brigade.train.strategy.axes import Axes


def tiny(name):
    return CONFIG_MAPPING[name].from_dict(shrink(CONFIG_MAPPING[name]().to_dict()))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 20), st.integers(1, 7))
def test_no_other_split_has_a_cheaper_dearest_stage(layers, head, stages):
    if stages > len(layers):
        with pytest.raises(ValueError):
            pipeline_split.split(layers, head, stages)
        return
    found = pipeline_split.split(layers, head, stages)
    assert [layer for each in found for layer in each] == [*range(len(layers))] and all(found)

    def dearest(ends):
        sums = [sum(layers[a:b]) for a, b in itertools.pairwise((0, *ends, len(layers)))]
        return max(*sums[:-1], sums[-1] + head) if stages > 1 else sums[-1] + head

    every = itertools.combinations(range(1, len(layers)), stages - 1)
    assert dearest(each.stop for each in found[:-1]) == min(map(dearest, every))


def test_a_head_counts_as_much_as_it_computes():
    """Llama 3.2 1B: 16 layers of 61 M parameters, and a head of 263 M."""
    assert [len(each) for each in pipeline_split.split([61] * 16, 263, 4)] == [5, 5, 5, 1]


@pytest.mark.parametrize("name, changes", [
    ("llama", {}), ("qwen2", {}), ("qwen3", {}), ("mistral", {}), ("gemma3", {}), ("gemma3_text", {}), ("phi3", {}),
    ("qwen3_moe", {}), ("gpt_oss", {}), ("gpt_neox", {}), ("phi", {}), ("jamba", {}),
    ("falcon_h1", {"embedding_multiplier": 5.0}), ("lfm2", {"full_attn_idxs": [2, 5]}), ("nemotron_h", {}),
])  # fmt: skip
def test_stages_compute_what_the_model_does(name, changes):
    """Whatever an architecture calls its embedding, its layers and the norm after them."""
    assert pipeline_split.tried(CONFIG_MAPPING[name](**changes), False) == ""


@pytest.mark.parametrize("name, changes, why", [
    ("gpt2", {}, "would drop again what its drop drops"), ("phi", {"embd_pdrop": 0.1}, "again what its embed_dropout drops"),
    ("opt", {}, "besides embedding, layers and norm its decoder has embed_positions"), ("bloom", {}, "no single norm after"),
    ("granite", {"embedding_multiplier": 12.0}, "they give a loss"), ("glm_moe_dsa", {}, "more than one result"),
    ("gemma4_text", {}, "its decoder has embed_tokens_per_layer"),
])  # fmt: skip
def test_what_is_no_such_decoder_is_refused(name, changes, why):
    assert why in pipeline_split.tried(CONFIG_MAPPING[name](**changes), False)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "falcon_h1"])
def test_a_stage_loads_its_own_weights_alone(name, tmp_path):
    config = tiny(name)
    whole = AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path)
    stages = [pipeline_split.class_of_stage(config, {n}, n == 0, n == 1).from_pretrained(tmp_path) for n in range(2)]
    held = [stage.state_dict() for stage in stages]
    everything = whole.state_dict()
    assert held[0].keys() | held[1].keys() == everything.keys()
    shared = held[0].keys() & held[1].keys()
    assert shared == ({"lm_head.weight", "model.language_model.embed_tokens.weight"} if name == "gemma3" else set())
    for state in held:
        assert all(torch.equal(tensor, everything[key]) for key, tensor in state.items())
    buffers = dict(whole.named_buffers())
    assert all(torch.equal(each, buffers[name]) for stage in stages for name, each in stage.named_buffers())
    assert type(stages[0]).__name__ == type(whole).__name__


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved1f1b", 2), ("zbv", 2), ("", 3)])
def test_every_stage_is_on_one_rank(schedule, virtual):
    some = Axes(stages=4, schedule=schedule, virtual=virtual)
    every = [stage for rank in range(4) for stage in pipeline_schedule.stages_of(some, rank)]
    assert sorted(every) == list(range(some.every_stage))
    for stage in range(some.every_stage):
        assert stage in pipeline_schedule.stages_of(some, pipeline_schedule.rank_of(some, stage))


def test_every_schedule_has_a_rule():
    assert pipeline_schedule.CLASSES.keys() == axis_rules.SCHEDULES.keys()


def test_the_bubble_is_what_the_papers_say():
    assert pipeline_schedule.bubble(Axes(stages=4), 12) == 3 / 15
    assert pipeline_schedule.bubble(Axes(stages=4, virtual=2), 12) == pytest.approx(3 / 27)
    zero = Axes(stages=4, schedule="interleavedzerobubble", virtual=2)
    assert pipeline_schedule.bubble(zero, 12) == pytest.approx(3 / (3 * 27 - 6))  # (p - 1) / (3 v m + p - 1)
    v_shaped = Axes(stages=4, schedule="zbv", virtual=2)
    assert pipeline_schedule.bubble(v_shaped, 12) == pipeline_schedule.bubble(zero, 12)
    assert pipeline_schedule.bubble(v_shaped, 4) == pytest.approx(
        3 / 15
    )  # in the place of 3 micro-batches that are missing


@pytest.mark.parametrize("wrong, said", [
    (Axes(stages=2, schedule="2f2b"), "'2f2b' is no schedule"),
    (Axes(stages=2, schedule="1f1b", virtual=2), "1f1b takes 1 of the pipeline's stages on each rank"),
    (Axes(stages=2, schedule="zbv"), "zbv takes 2 of the pipeline's stages on each rank, and virtual_stages is 1"),
    (Axes(stages=3), "needs a multiple of 3 ranks, and there are 4"),
])  # fmt: skip
def test_a_schedule_that_cannot_be_is_refused(wrong, said):
    assert said in axis_rules.problem(wrong, 4)[0]


@pytest.mark.parametrize("model, some, ds_config, accumulation, said", [
    ("llama", Axes(stages=3), {}, 4, "3 stages, but LlamaConfig has 2 layers"),
    ("llama", Axes(stages=2, virtual=2), {}, 4, "2 ranks x 2 stages on each = 4 stages, but LlamaConfig has 2 layers"),
    ("gpt2", Axes(stages=2), {}, 4, "cannot be divided into stages: each of them would drop again"),
    ("llama", Axes(stages=2, virtual=1), {"zero_optimization": {"offload_optimizer": {}}}, 4, "means nothing to it"),
    ("llama", Axes(stages=2), {"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}, 1, ""),
])  # fmt: skip
def test_what_cannot_be_is_told_before_the_model_is_built(model, some, ds_config, accumulation, said, user_error):
    strategy = Strategy("zero1", "pp", "pp.json", ds_config=ds_config, axes=some)
    settings = SimpleNamespace(recipe=SimpleNamespace(model=SimpleNamespace(trust_remote_code=False)))
    run = SimpleNamespace(strategy=strategy, settings=settings)
    batch = Batch(8, 8 // accumulation, accumulation, 1, 0.1)
    if not said:
        pipeline_rules.check(run, tiny(model), batch)
        return
    caught = user_error(pipeline_rules.check, run, tiny(model), batch)
    assert said in caught.problem and caught.place.startswith("pp.json: ")


@pytest.mark.parametrize("kind", ["zero2", "zero3", "fsdp2", "hsdp"])
def test_what_exchanges_with_each_micro_batch_is_refused(kind):
    assert "does not run under" in refusal(stages=True, kind=kind)["problem"]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 5))
def test_shares_of_zero1_are_every_element_once_and_equal(sizes, ranks):
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    held = [0] * ranks
    for each in pipeline_zero1.slices(parameters, ranks):
        assert (each.cut(each.parameter) == 0).all() and each.stop > each.start
        each.cut(each.parameter.data).fill_(1)
        held[each.owner] += each.stop - each.start
    assert all((parameter == 1).all() for parameter in parameters)
    assert sum(held) == sum(sizes) and max(held) <= -(-sum(sizes) // ranks)


def test_a_config_says_a_schedule_and_gets_it_back():
    some = Axes(stages=2, schedule="zbv", virtual=2)
    assert axis_keys.of_mesh(axis_keys.as_mesh(some)) == some
    assert axis_keys.of_ds_config(axis_keys.with_axes({"zero_optimization": {"stage": 1}}, some)) == some
    assert axis_keys.of_mesh({"pp_size": "2", "pp_schedule": "None"}) != some


# ---- the bubble ------------------------------------------------------------------------------------------------------
def line(*passes):
    """Passes without times: (stage, kind, micro-batch)."""
    return [(*each, 0.0, 0.0) for each in passes]


def one_stage_each(ranks, micro_batches, ahead):
    """Orders in which rank r computes ahead(r) forward passes, and from then on a backward one before each."""
    found = []
    for rank in range(ranks):
        first = min(ahead(rank), micro_batches)
        order = [(rank, "F", number) for number in range(first)]
        for number in range(micro_batches):
            order.append((rank, "B", number))
            if first + number < micro_batches:
                order.append((rank, "F", first + number))
        found.append(line(*order))
    return found


def by_torch(axes, micro_batches):
    """The order of torch's schedule for several stages on each rank."""
    stages = [
        MagicMock(num_stages=axes.every_stage, group_size=axes.stages, group_rank=0, stage_index=stage)
        for stage in pipeline_schedule.stages_of(axes, 0)
    ]
    order = pipeline_schedule.make(axes, stages, micro_batches).pipeline_order
    return [
        line(*((one.stage_index, one.computation_type.value, one.microbatch_index) for one in order[rank] if one))
        for rank in range(axes.stages)
    ]


def test_a_rank_idles_where_it_does_not_compute():
    lines = [[(0, "F", 0, 1.0, 2.0), (0, "B", 0, 4.0, 6.0)], [(1, "F", 0, 2.0, 3.0), (1, "B", 0, 3.0, 4.0)]]
    assert bubble_lines.step_seconds(lines) == 5
    assert bubble_lines.idle(lines) == [pytest.approx(2 / 5), pytest.approx(3 / 5)]
    assert bubble_lines.idle_between(lines) == [pytest.approx(2 / 5), 0]


def test_an_order_in_which_ranks_wait_for_each_other_is_told():
    lines = [line((0, "F", 0), (0, "B", 0), (0, "F", 1)), line((1, "F", 0), (1, "F", 1), (1, "B", 0))]
    with pytest.raises(ValueError, match="no rank can go on"):
        bubble_lines.replay(lines, lambda stage, kind: 1.0)


def test_passes_take_the_mean_of_their_stage_and_kind():
    lines = [[(0, "F", 0, 0.0, 1.0), (0, "F", 1, 1.0, 4.0)], [(1, "F", 0, 5.0, 6.0), (1, "F", 1, 6.0, 7.0)]]
    # 0 to 2, 2 to 4; and 2 to 3, 4 to 5
    assert bubble_lines.at_their_own_times(lines) == [pytest.approx(1 / 5), pytest.approx(3 / 5)]


@given(st.integers(2, 9), st.integers(1, 20))
def test_1f1b_and_gpipe_idle_as_their_formula_says(ranks, micro_batches):
    formula = (ranks - 1) / (micro_batches + ranks - 1)
    assert pipeline_schedule.bubble(Axes(stages=ranks), micro_batches) == pytest.approx(formula)
    for ahead in (lambda rank: ranks - rank, lambda rank: micro_batches):
        lines = one_stage_each(ranks, micro_batches, ahead)
        assert bubble_lines.by_order(lines) == [pytest.approx(formula)] * ranks
        assert bubble_lines.held(lines[0]) == min(ahead(0), micro_batches)


@given(
    st.sampled_from([("interleaved1f1b", 2), ("interleaved1f1b", 3), ("interleavedzerobubble", 2), ("zbv", 2)]),
    st.integers(2, 8),
    st.integers(1, 20),
)
def test_torchs_schedules_idle_as_their_formula_says(schedule, ranks, micro_batches):
    name, virtual = schedule
    some = Axes(stages=ranks, schedule=name, virtual=virtual)
    assume(not pipeline_schedule.refusal(some, micro_batches))
    formula = pipeline_schedule.bubble(some, micro_batches)
    lines = by_torch(some, micro_batches)
    assert bubble_lines.by_order(lines) == [pytest.approx(formula)] * ranks


def test_zbv_fills_everything_between_a_ranks_own_passes():
    lines = by_torch(Axes(stages=4, schedule="zbv", virtual=2), 8)
    replayed = bubble_lines.replay(lines, lambda stage, kind: 1.0)
    assert bubble_lines.idle_between(replayed) == [0] * 4
    assert [bubble_lines.held(each) for each in lines] == [4] * 4
