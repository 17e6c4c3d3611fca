"""What a published row says of the memory that its program keeps: read, or refused by name."""

import pytest

from benchmarks.published import table
from benchmarks.published.rows import job_of_row
from brigade.plan.costs.estimate import estimate, factors
from testing.published_row import ROW

LORA = {"framework": "TRL", "task": "lora", "strategy": "single", "n_gpus": "1", "act_ckpt": "none"}
OVER_FP32 = "bf16 (mixed): autocast over weights in fp32"


def made(**changes):
    return job_of_row(ROW | changes)


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
