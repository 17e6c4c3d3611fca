"""The planner's formulas: what they count, what they refuse, and that published runs are about what they say."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brigade.errors import UserError
from brigade.estimate import table
from brigade.estimate.estimate import estimate
from brigade.estimate.hardware import catalogue, gpu
from brigade.estimate.host import host
from brigade.estimate.job import Job
from brigade.estimate.layer import FUSED
from brigade.estimate.links import links
from brigade.estimate.memory import GIB, memory, micro_batches_in_flight, stage_layers
from brigade.estimate.names import named_shape
from brigade.estimate.shape import FAMILIES, ModelShape, shape_of
from brigade.estimate.states import model_states

ROOT = Path(__file__).parents[2]
LLAMA_8B = named_shape(str(ROOT / "recipes" / "llama-3.1-8b"))
QWEN_MOE = named_shape(str(ROOT / "recipes" / "qwen3-30b-a3b"))
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
          "intermediate_size": 128}  # fmt: skip


def job(shape: ModelShape = LLAMA_8B, **options) -> Job:
    return Job(shape, **({"sequence": 4096, "data": 8, "stage": 3} | options))


# ---- shapes ------------------------------------------------------------------------------------------------------
def test_a_small_model_counted_by_hand():
    shape = shape_of(CONFIG, "a test")
    attention = 64 * 64 * 4 + 2 * 64  # q, k, v, o and two norms
    assert shape.parameters == 2 * 100 * 64 + 2 * (attention + 3 * 64 * 128) + 64
    assert shape_of(CONFIG | {"tie_word_embeddings": True}, "").parameters == shape.parameters - 100 * 64


def test_experts_are_active_by_top_k():
    whole, active = QWEN_MOE.parameters, QWEN_MOE.active
    assert whole == 30_532_122_624  # 61,064,245,248 bytes of published bf16 tensors
    assert whole - active == 48 * (128 - 8) * 3 * 2048 * 768


@pytest.mark.parametrize(
    "missing", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_a_config_without_a_needed_field(missing):
    config = {key: value for key, value in CONFIG.items() if key != missing}
    with pytest.raises(UserError) as error:
        shape_of(config, "config.json")
    assert missing in error.value.place and "does not state it" in error.value.problem


@pytest.mark.parametrize("value", [0, -1, "64", 1.5, True])
def test_a_size_that_is_none(value):
    with pytest.raises(UserError) as error:
        shape_of(CONFIG | {"hidden_size": value}, "config.json")
    assert repr(value) in error.value.problem


def test_sliding_windows_shorten_what_a_token_sees():
    shape = named_shape(str(ROOT / "recipes" / "gpt-oss-20b"))
    assert (shape.window, shape.windowed_layers) == (128, 12)
    assert shape.attended(4096) == (128 + 4096) / 2 and shape.attended(100) == 100


# ---- memory ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "engine, stage, kind",
    [("ddp", 0, "ddp"), ("zero", 1, "zero1"), ("zero", 2, "zero2"), ("zero", 3, "zero3"), ("fsdp2", 3, "fsdp2")],
)
def test_weights_and_optimizer_are_those_of_the_measured_formula(engine, stage, kind):
    found = memory(job(engine=engine, stage=stage))
    states = model_states(kind, LLAMA_8B.parameters, 8, half=True)
    assert found.weights == pytest.approx(states.parameters, rel=1e-9)
    assert found.optimizer == pytest.approx(states.optimizer, rel=1e-9)


@given(st.integers(1, 4), st.integers(256, 8192), st.sampled_from(["none", "full"]), st.sampled_from([0, 1, 2, 3]))
def test_more_tokens_never_take_less(micro, length, checkpointing, stage):
    small = job(
        micro_batch=micro, sequence=length, checkpointing=checkpointing, engine="zero" if stage else "ddp", stage=stage
    )
    large = replace(small, micro_batch=micro + 1)
    assert memory(large).allocated >= memory(small).allocated
    assert estimate(large).time.total > estimate(small).time.total


def test_each_thing_that_saves_memory_saves_some():
    plain = job(sequence=8192, micro_batch=2)
    for saving in ({"checkpointing": "full"}, {"kernels": FUSED}, {"loss": "fused"}, {"data": 64}, {"micro_batch": 1}):
        assert memory(replace(plain, **saving)).allocated < memory(plain).allocated, saving


def test_offload_leaves_the_optimizer_on_the_host():
    found = memory(job(engine="zero", stage=3, offload="optimizer"))
    assert found.optimizer == 0 and found.weights == 2 * LLAMA_8B.parameters / 8
    assert found.gradients == 2 * LLAMA_8B.vocab * LLAMA_8B.hidden  # the head's, which is whole until it is reduced


@pytest.mark.parametrize(
    "engine, stage, tensor", [("fsdp2", 3, 1), ("fsdp2", 3, 2), ("megatron", 1, 1), ("megatron", 1, 4)]
)
def test_expert_parallelism_moves_states_and_makes_none_disappear(engine, stage, tensor):
    """All experts' optimizer states exist once, however they are spread."""
    spread = [memory(job(QWEN_MOE, engine=engine, stage=stage, data=16, tensor=tensor, expert=expert)).optimizer
              for expert in (1, 2, 4, 8, 16)]  # fmt: skip
    assert spread == pytest.approx([spread[0]] * 5, rel=1e-6)


@given(st.sampled_from(["megatron", "nanotron"]), st.integers(1, 32))
def test_every_layer_has_a_stage(engine, stages):
    assert sum(stage_layers(job(engine=engine, stage=1, pipeline=stages, accumulation=64))) == LLAMA_8B.layers


@pytest.mark.parametrize("virtual, held", [(1, 8), (3, 8 * (1 + 7 / 24)), (12, 8 * (1 + 7 / 96))])
def test_interleaved_stages_keep_more_micro_batches(virtual, held):
    """Korthikanti et al. 2022, section 4.2.3, for the first of eight stages; the last one keeps its chunks of one at least."""
    wanted = job(engine="megatron", stage=1, pipeline=8, virtual=virtual, accumulation=64)
    assert micro_batches_in_flight(wanted, 0) == pytest.approx(held)
    assert micro_batches_in_flight(replace(wanted, accumulation=1), 0) == 1 <= micro_batches_in_flight(wanted, 7)


# ---- links -------------------------------------------------------------------------------------------------------
def test_rings_side_by_side_share_a_node_s_cards():
    """Under EFA one ring over many nodes does not fill them: its hops bound it, and four side by side have as much each."""
    device = gpu("H100")
    usual, efa = (links(device, named, 8) for named in ("3200 Gb/s", "EFA (3200Gb/s per node)"))
    rates = {net: [net.ring("all_reduce", 256 // stride, stride)[0] for stride in (1, 4, 8)] for net in (usual, efa)}
    assert rates[usual] == pytest.approx([8 * rates[usual][2], 2 * rates[usual][2], rates[usual][2]])
    assert rates[efa][0] == rates[efa][1] < rates[usual][1] and rates[efa][2] == rates[usual][2]
    assert usual.gbit == efa.gbit == pytest.approx(3200 * device.network / device.efficiency)


def test_what_a_host_holds():
    """Checkpoints of rehearsals have 12 bytes per parameter under DDP and FSDP2, 16 under ZeRO-2 and 14 under ZeRO-3 in bf16."""
    psi = LLAMA_8B.parameters
    kinds = {"ddp": 0, "fsdp2": 3}
    assert {host(job(engine=engine, stage=stage)).checkpoint / psi for engine, stage in kinds.items()} == {12}
    assert [host(job(engine="zero", stage=stage)).checkpoint / psi for stage in (1, 2, 3)] == [16, 16, 14]
    plain, offloaded = (host(job(engine="zero", offload=where)) for where in ("", "optimizer"))
    assert offloaded.training - plain.training == pytest.approx(1.5 * 16 * psi)  # eight ranks of one host
    loading = [
        host(job(engine=engine, stage=stage)).loading for engine, stage in (("ddp", 0), ("fsdp2", 3), ("zero", 3))
    ]
    assert loading[0] > loading[1] > 4 * psi and loading[2] < 8 * 9e9


# ---- bad input ---------------------------------------------------------------------------------------------------
def test_an_unknown_gpu_lists_the_known():
    with pytest.raises(UserError) as error:
        estimate(job(gpu="GTX 1080"))
    assert all(kind in error.value.problem for kind in catalogue()) and "under gpus: in" in error.value.cure


@pytest.mark.parametrize("name", ["h100", "H100-80GB", "h100_80gb", "NVIDIA H100 80GB HBM3", "DGX-H100"])
def test_a_gpu_has_several_names(name):
    assert gpu(name).kind == "H100 80GB"


@pytest.mark.parametrize("options, said", [
    ({"sequence": 0}, "sequence"), ({"micro_batch": -1}, "micro_batch"), ({"data": 0}, "data"),
    ({"tensor": 3}, "does not divide the model's 32 attention heads"), ({"pipeline": 33}, "more than the 32 layers"),
])  # fmt: skip
def test_sizes_that_cannot_be(options, said):
    with pytest.raises(UserError) as error:
        job(**options)
    assert said in str(error.value)


# ---- published runs ----------------------------------------------------------------------------------------------
def test_torchtune_s_ladder_is_climbed():
    """Nine runs of one model on one A100, each with one more saving: nothing of their memory was fitted."""
    rows = [row for row in table.read(ROOT / "benchmarks" / "data" / "published.csv") if row["set"] == "torchtune"]
    told = [(row, table.predict(row)) for row in rows]
    assert [found["reason"] != "" for _, found in told] == [True] + [False] * 9  # the first one pads
    for row, found in told[1:]:
        assert float(found["pred_mem_allocated_gib"]) == pytest.approx(float(row["peak_mem_gib"]), rel=0.16), row["id"]


def test_measured_columns_change_nothing():
    row = table.read(ROOT / "benchmarks" / "data" / "published.csv")[0]
    blind = row | dict.fromkeys(("step_time_s", "tok_s_gpu", "tflops_gpu", "mfu_pct", "peak_mem_gib", "status"), "")
    assert table.predict(row) == table.predict(blind)


@pytest.mark.parametrize("change, reason", [
    ({"gpu": "TPU v5e"}, "not in the catalogue"), ({"model": "unheard-of", "hidden": ""}, "does not give the dimensions"),
    ({"mbs": "many"}, "mbs 'many' is not a number"), ({"tp": "3"}, "does not divide"), ({"mbs": ""}, "mbs is not given"),
    ({"seq_len": "0"}, "not a whole number above 0"), ({"grad_acc": "4", "gbs_seqs": "31"}, "are not its 31 sequences"),
])  # fmt: skip
def test_a_row_that_cannot_be_expressed_has_a_reason(change, reason):
    row = table.read(ROOT / "benchmarks" / "data" / "published.csv")[0] | change
    found = table.predict(row)
    assert reason in found["reason"] and found["pred_mem_gib"] == ""


@pytest.mark.parametrize("framework, strategy, zero, wanted", [
    ("DeepSpeed 0.14", "ZeRO-2", "", ("zero", 2, "")),
    ("DeepSpeed", "ZeRO-3 + CPU offload (optimizer)", "3", ("zero", 3, "optimizer")),
    ("TRL", "zero3 offload of parameters", "", ("zero", 3, "all")), ("HF Trainer", "DDP", "0", ("ddp", 0, "")),
    ("axolotl", "FSDP2", "", ("fsdp2", 3, "")), ("Megatron-DeepSpeed", "3D", "", ("megatron-2022", 0, "")),
    ("DeepSpeed", "data parallel", "0", ("ddp", 0, "")),
])  # fmt: skip
def test_a_row_s_engine(framework, strategy, zero, wanted):
    row = table.read(ROOT / "benchmarks" / "data" / "published.csv")[0]
    made = table.job_of_row(row | {"framework": framework, "strategy": strategy, "zero": zero})
    assert (made.engine, made.stage, made.offload) == wanted and estimate(made).time.total > 0


def test_a_table_of_another_format(tmp_path):
    (tmp_path / "a.csv").write_text("model,gpus\nllama,8\n")
    with pytest.raises(UserError, match="lacks the columns dp, grad_acc, mbs, pp, tp, zero"):
        table.read(tmp_path / "a.csv")
    with pytest.raises(UserError, match="is the table itself"):
        source = tmp_path / "b.csv"
        source.write_text((ROOT / "benchmarks" / "data" / "published.csv").read_text())
        table.predict_file(source, source)


def test_every_row_comes_back(tmp_path):
    source = ROOT / "benchmarks" / "data" / "playbook_h100.csv"
    with source.open() as file:
        rows = list(csv.reader(file))
    part = tmp_path / "part.csv"
    part.write_text("\n".join(",".join(row) for row in rows[:1] + rows[1::100]) + "\n")
    done = table.predict_file(part, tmp_path / "out.csv")
    assert [[row[name] for name in rows[0]] for row in done] == rows[1::100]
    assert sum(one["rows"] for one in table.summary(done)) == len(done)


def test_every_family_can_be_estimated():
    for kind, family in FAMILIES.items():
        shape = shape_of(
            CONFIG | {"model_type": kind, "num_local_experts": 4, "num_experts_per_tok": 2} | dict(family.defaults),
            kind,
        )
        found = estimate(Job(shape, 128))
        assert found.memory.allocated / GIB > 0 and found.time.total > 0
