"""What a published row says beside its columns: read with its effect on memory and time, or refused by name."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import table
from benchmarks.published.rows import job_of_row
from brigade.plan.costs.estimate import estimate, factors
from testing.published_row import ROW

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
MEGATRON = {"framework": "Megatron-Core", "strategy": "TP+DP", "tp": "4", "act_ckpt": "none", "gpu": "H100-80GB"}
MIXTURE = {"model": "qwen3-30b-a3b", "params_b": "30.5", "hidden": "2048", "layers": "48", "ep": "4"}
GPT3 = {"model": "gpt3-7b", "params_b": "", "heads": "32", "kv_heads": "", "ffn": "", "vocab": "51200"}


def made(**changes):
    return job_of_row(ROW | changes)


def why(**changes):
    found = table.predict(ROW | changes)
    assert found["pred_mem_gib"] == "" and found["reason"]
    return found["reason"]


@pytest.mark.parametrize("column, text, divides", [
    ("notes", "", True), ("notes", "no sequence parallel", False), ("kernels", "sequence_parallel: false", False),
    ("strategy", "TP4 without SP", False), ("strategy", "TP4 SP+DP2", True), ("notes", "sequence parallelism off", False),
    ("act_ckpt", "selective+SP", True), ("notes", "--no-sequence-parallel", False),
])  # fmt: skip
def test_no_sequence_parallel_keeps_what_stands_between_blocks_whole(column, text, divides):
    found = made(**MEGATRON | {column: text})
    assert found.sequence_parallel is divides
    whole, parts = (estimate(replace(found, sequence_parallel=each)).memory.activations for each in (False, True))
    assert whole > 1.3 * parts


def test_megatron_lm_of_2022_has_sequence_parallelism_only_where_it_says_so():
    """Korthikanti et al. 2022: activations of 59.25 GiB with tensor parallelism alone, with nothing computed again."""
    with (DATA / "published.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    assert not job_of_row(rows["korthikanti22-003"]).sequence_parallel
    assert job_of_row(rows["korthikanti22-004"]).sequence_parallel
    found = table.predict(rows["korthikanti22-003"])
    assert float(found["pred_mem_allocated_gib"]) == pytest.approx(104.8, rel=0.03)


@pytest.mark.parametrize("text, said", [
    ("ETP 1", "expert tensor parallelism by 1 under tensor parallelism by 2"), ("expert_tensor_parallel_size=1", "by 1 under"),
    ("no expert tensor parallelism", "by 1 under"), ("ETP 2", ""), ("expert tensor parallel", ""), ("", ""),
])  # fmt: skip
def test_experts_over_other_tensor_groups_are_refused(text, said):
    changes = MIXTURE | {"framework": "Megatron-Core", "strategy": "TP+EP", "tp": "2", "gpu": "B200", "notes": text}
    assert (said in why(**changes)) if said else made(**changes).tensor == 2


@pytest.mark.parametrize("text", [
    "layernorm", "norm only", "selective (core_attn, layernorm)", "recompute rmsnorm", "selective: mlp", "moe_act",
])  # fmt: skip
def test_parts_of_a_layer_that_are_computed_again_are_refused_by_name(text):
    assert "again is not modelled" in why(act_ckpt=text) or "is not clear" in why(act_ckpt=text)


@pytest.mark.parametrize("text, refused", [
    ("deterministic algorithms", True), ("torch.use_deterministic_algorithms(True)", True), ("--deterministic-mode", True),
    ("CUBLAS_WORKSPACE_CONFIG=:4096:8", True), ("non-deterministic", False), ("deterministic: false", False),
    ("no deterministic kernels", False), ("deterministic algorithms off", False), ("deterministic data order", False),
])  # fmt: skip
def test_deterministic_kernels_are_refused(text, refused):
    assert bool(table.predict(ROW | {"notes": text})["reason"]) is refused


@pytest.mark.parametrize("column, text, ranks", [
    ("notes", "", 8), ("notes", "2 nodes of 4", 4), ("gpu", "GB200-NVL72", 72), ("gpu", "DGX-GB200", 72),
    ("notes", "4 nodes x 4", 4), ("notes", "4 GPUs per node", 4), ("gpus_per_node", "4", 4), ("notes", "4 A100s a node", 4),
    ("inter_node", "4 x HDR a node of 4", 4), ("notes", "4-GPU nodes", 4), ("notes", "nodes with 80 GB", 8),
    ("notes", "16 GPUs on 2 nodes", 8), ("notes", "NVL72 racks", 72),
])  # fmt: skip
def test_a_node_has_as_many_gpus_as_the_row_says(column, text, ranks):
    assert made(n_gpus="16", **{column: text}).node_size == ranks


def test_nodes_of_four_cross_the_network_and_racks_do_not():
    long = {"n_gpus": "8", "seq_len": "512", "mbs": "1", "gpu": "H100-80GB"}
    four, eight = made(**long, notes="2 nodes of 4"), made(**long)
    assert (four.nodes, eight.nodes) == (2, 1) and four.link == "1600 Gb/s"
    assert estimate(four).time.across > 0 == estimate(eight).time.across
    assert made(**long | {"n_gpus": "64", "gpu": "GB200-NVL72"}).nodes == 1
    assert made(n_gpus="16", strategy="HSDP", notes="4 nodes of 4").shard == 4
    assert "no node has 9000" in why(gpus_per_node="9000")


def test_gradients_in_bf16_take_half_of_megatrons():
    usual, half = made(**MEGATRON), made(**MEGATRON, notes="bf16 gradients")
    both = [estimate(one) for one in (usual, half)]
    assert both[1].memory.gradients == pytest.approx(both[0].memory.gradients / 2)
    assert both[1].time.total < both[0].time.total
    for text in ("bf16 grads", "grad_reduce_in_fp32=False", "bf16 reduce", "reduce_dtype: bf16", "gradients in bf16"):
        assert made(**MEGATRON, notes=text).half_gradients, text
    for text in ("bf16, fp32 gradients", "bf16 param/fp32 reduce", "bf16 compute, fp32 params/grads, fp32 reduce"):
        assert not made(**MEGATRON, notes=text).half_gradients, text
    sharded = [made(n_gpus="16", notes=text).conventions for text in ("", "bf16 reduce")]
    assert [one.reduced for one in sharded] == [4, 2] and [one.gradients for one in sharded] == [4, 4]
    assert "gradients in bf16" in why(framework="nanotron", strategy="TP", notes="bf16 gradients")


@pytest.mark.parametrize("changes, engine", [
    ({"framework": "PyTorch FSDP1", "strategy": "FULL_SHARD"}, "pure-fsdp1"),
    ({"framework": "HF Trainer", "strategy": "FSDP1"}, "pure-fsdp1"),
    ({"framework": "torchtitan", "strategy": "DDP"}, "pure"), ({"framework": "torchtitan"}, "pure"),
])  # fmt: skip
def test_pure_bf16_is_so_beside_the_name_of_any_engine(changes, engine):
    assert made(precision="pure bf16", **changes).engine == engine


def test_engines_that_keep_an_fp32_copy_are_not_pure():
    assert "Megatron keeps an fp32 copy" in why(**MEGATRON, precision="pure bf16")
    assert "Nanotron keeps" in why(framework="nanotron", strategy="TP", precision="pure bf16")


@pytest.mark.parametrize("framework, text, dropped", [
    ("Megatron-LM", "", True), ("Megatron-LM H100", "", True), ("Megatron-LM", "dropout 0", False),
    ("Megatron-LM", "no dropout", False), ("Megatron-LM", "hidden_dropout=0.0", False),
    ("Megatron-Bridge", "", False), ("Megatron-Bridge", "dropout 0.1", True),
])  # fmt: skip
def test_dropout_is_what_the_framework_does_by_default(framework, text, dropped):
    found = made(**GPT3, framework=framework, strategy="TP", tp="8", notes=text)
    assert found.dropout is dropped
    plain = replace(found, dropout=False, checkpointing="none")
    assert estimate(replace(plain, dropout=True)).memory.activations > estimate(plain).memory.activations


def test_llamas_drop_nothing_by_default():
    assert not made(**MEGATRON | {"framework": "Megatron-LM core"}).dropout and not made().dropout


def test_adapters_drop_by_default_in_ms_swift_litgpt_and_trl():
    frameworks = {"ms-swift": True, "litgpt": True, "TRL": True, "HF Trainer": False, "LLaMA-Factory": False}
    for framework, drops in frameworks.items():
        assert made(framework=framework, task="lora").adapter_dropout is drops, framework
    assert not made(framework="TRL", task="lora", notes="lora_dropout 0").adapter_dropout
    assert made(task="lora", strategy="DDP, lora_dropout=0.1").adapter_dropout


@pytest.mark.parametrize("text", [
    "unfused cross-entropy",
    "no fused CE",
    "cross_entropy_loss_fusion: false",
    "vanilla cross-entropy",
    "non-fused loss",
])  # fmt: skip
def test_an_unfused_loss_is_no_kernel(text):
    assert made(kernels=text).loss == "released"
    assert made(kernels=f"torch.compile, {text}").loss == "released"
    assert made(**MEGATRON, kernels=text).loss == "unfused" and made(**MEGATRON).loss == "kernel"
    assert made(framework="llm-foundry/Composer FSDP1", kernels=text).loss == "full"
    more = estimate(made(**MEGATRON, kernels=text)).memory.logits / estimate(made(**MEGATRON)).memory.logits
    assert 1.2 < more <= 1.5


# ---- models ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, mixes", [
    ("deepseek-llm-7b", False), ("deepseek-coder-6.7b", False), ("DeepSeek-R1-Distill-Llama-8B", False),
    ("deepseek-math-7b", False), ("deepseek-v2-4-layers", True), ("DeepSeek-V3", True), ("deepseek-coder-v2-lite", True),
    ("DeepSeek-R1", True), ("deepseek-moe-16b", True),
])  # fmt: skip
def test_deepseek_in_a_name_is_no_mixture(name, mixes):
    changes = {"model": name, "params_b": "8.03"}
    assert ("mixture of experts" in why(**changes)) if mixes else made(**changes).shape.experts == 0


def test_a_squared_relu_has_no_gate():
    wide = {
        "layers": "32",
        "hidden": "6144",
        "ffn": "24576",
        "heads": "48",
        "kv_heads": "8",
        "vocab": "256000",
        "params_b": "15.6",
    }
    for changes in (
        {"model": "nemotron-4-15b"},
        {"model": "mine", "notes": "squared ReLU"},
        {"model": "mine", "kernels": "relu^2"},
    ):
        shape = made(**wide | changes).shape
        assert shape.family.squared and not shape.family.gated
        assert shape.parameters / 1e9 == pytest.approx(15.6, rel=0.02)
    assert "an MLP without a gate" in why(**wide, model="mine")
    assert made(model="Llama-3.1-Nemotron-Nano-8B").shape.family.gated


# ---- checkpointing that is not told --------------------------------------------------------------------------------
def test_an_empty_column_does_not_compute_again():
    assert made(act_ckpt="").checkpointing == "none" and not table.predict(ROW | {"act_ckpt": ""})["reason"]
    tight = {"act_ckpt": "", "gpu": "A100-40GB", "mbs": "1", "seq_len": "4096"}
    assert "act_ckpt is empty, and the run fits only with layers computed again" in why(**tight)
    assert not table.predict(ROW | tight | {"act_ckpt": "full"})["reason"]
    assert table.predict(ROW | tight | {"act_ckpt": "none"})["fits"] == "no"
    assert table.predict(ROW | tight | {"seq_len": "262144"})["fits"] == "no"  # with or without


# ---- the memory that its program keeps -------------------------------------------------------------------------------
LORA = {"framework": "TRL", "task": "lora", "strategy": "single", "n_gpus": "1", "act_ckpt": "none"}
OVER_FP32 = "bf16 (mixed): autocast over weights in fp32"


def memory(**changes):
    return estimate(made(**changes)).memory


def test_frozen_weights_in_fp32_have_a_16_bit_copy_for_each_product_under_autocast():
    half, whole = memory(**LORA), memory(**LORA, precision=OVER_FP32)
    assert whole.weights - half.weights == pytest.approx(2 * 8.03e9, rel=0.01)
    assert whole.buffers - half.buffers == pytest.approx(2 * 7.5e9, rel=0.01)  # all but the embedding's
    again = LORA | {"act_ckpt": "full"}
    assert memory(**again, precision=OVER_FP32).buffers - memory(**again).buffers < whole.buffers / 30
    assert memory(**LORA, precision="bf16, fp32 adapters") == half


@pytest.mark.parametrize("task", ["lora", "sft-full"])
def test_autocast_over_sharded_fp32_weights_is_refused(task):
    found = table.predict(ROW | {"task": task, "strategy": "FSDP full_shard", "precision": OVER_FP32})
    assert "autocast over sharded fp32 weights" in found["reason"] and not found["pred_mem_gib"]
    assert made(strategy="FSDP2", precision="bf16 compute, fp32 params").engine == "fsdp2"
    assert made(strategy="FSDP2", precision="bf16 (mixed): weights in fp32").engine == "fsdp2"


@pytest.mark.parametrize("changes", [
    {"task": "lora", "strategy": "FSDP2"}, {"task": "lora", "strategy": "DeepSpeed ZeRO-3"}, LORA | {"task": "qlora"},
])  # fmt: skip
def test_frozen_weights_in_fp32_that_no_formula_counts_are_refused(changes):
    found = table.predict(ROW | changes | {"precision": "bf16 (mixed), base in fp32"})
    assert "fp32 weights" in found["reason"] and not found["pred_mem_gib"]


def test_weights_in_16_bits_are_so_whatever_products_are_in():
    eight = {"kernels": "torchao float8", "framework": "Lightning (torch)"}
    found = made(**eight, precision="float8 linear, weights in bf16")
    assert (found.engine, bool(found.fp8)) == ("pure", True)
    assert made(**eight, precision="float8 linear").engine == "fsdp2"


@pytest.mark.parametrize("notes, precision, size", [
    ("gradients stay whole while a step accumulates", "bf16", 4), ("accumulates under no_sync", "bf16 (pure)", 2),
    ("accumulates under no_sync", "bf16 (pure): reduced in fp32", 4), ("without no_sync", "bf16", 0), ("", "bf16", 0),
])  # fmt: skip
def test_gradients_that_wait_for_the_last_micro_batch_are_whole(notes, precision, size):
    several = {"framework": "Lightning (torch)", "grad_acc": "4", "precision": precision}
    more = memory(**several, notes=notes).buffers - memory(**several).buffers
    assert more == pytest.approx(size * 8.03e9, rel=0.01)
    assert memory(**several | {"grad_acc": "1"}, notes=notes) == memory(**several | {"grad_acc": "1"})


def test_a_loss_in_16_bits_takes_eight_bytes_of_a_logit_and_gathers_what_tensor_groups_divide():
    torchtune = {"framework": "torchtune", "precision": "bf16 (pure)"}
    logits = 2 * 2048 * 128256
    usual, half = (memory(**torchtune, kernels=kernels).logits for kernels in ("", "loss in bf16"))
    assert usual - half == pytest.approx(6 * logits, rel=0.01)
    divided = memory(**torchtune, kernels="loss in bf16", tp="4", strategy="FSDP2, tensor parallel").logits
    assert 8 * logits <= divided <= 8.2 * logits


def test_the_memory_of_a_program_that_nobody_compared_is_less_sure_than_train_py_s():
    """Its interval is that of programs that were seen for the first time, and it fits where the upper end does."""
    found, answer = estimate(made(strategy="FSDP2")), table.predict(ROW | {"mem_kind": "max_allocated"})
    low, high = (end / found.allocated_gib for end in found.memory_interval())
    assert (low, high) == pytest.approx(factors("memory", "on the GPU"))
    assert float(answer["pred_mem_gib_low"]) < low * found.allocated_gib
    assert float(answer["pred_mem_gib_high"]) > high * found.allocated_gib
    fits = {gpu: table.predict(ROW | {"gpu": gpu, "mem_kind": "max_allocated"}) for gpu in ("A100-80GB", "A100-40GB")}
    for gpu, row in fits.items():
        assert (row["fits"] == "yes") == (float(row["pred_mem_gib_high"]) + 1 < float(gpu[5:7])), row
    assert {row["fits"] for row in fits.values()} == {"yes", "maybe"}


@pytest.mark.parametrize("kind", ["", "unknown"])
def test_memory_of_an_unknown_kind_may_be_what_is_allocated_or_all_of_the_card(kind):
    """From the lower end of the one to the upper end of the other."""

    def ends(kind):
        found = table.predict(ROW | {"mem_kind": kind})
        return float(found["pred_mem_gib_low"]), float(found["pred_mem_gib_high"])

    assert ends(kind) == (ends("max_allocated")[0], ends("nvidia-smi")[1])
