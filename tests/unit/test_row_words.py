"""Words of a published row: engines, kernels, optimizers and models in any spelling."""

import pytest

from benchmarks.published import table
from benchmarks.published.rows import job_of_row
from brigade.plan.costs.estimate import estimate
from brigade.plan.costs.job import EAGER, FUSED
from testing.published_row import ROW


def made(**changes):
    return job_of_row(ROW | changes)


def why(**changes):
    found = table.predict(ROW | changes)
    assert found["pred_mem_gib"] == "" and found["reason"]
    return found["reason"]


@pytest.mark.parametrize("strategy, zero, framework, wanted", [
    ("ZeRO stage 3", "", "TRL", ("zero", 3, "")), ("ZeRO_3", "", "axolotl", ("zero", 3, "")), ("zero3", "3", "", ("zero", 3, "")),
    ("Z3", "", "LLaMA-Factory", ("zero", 3, "")), ("DeepSpeed stage 2", "", "Lightning", ("zero", 2, "")),
    ("DeepSpeed-Z1", "", "HF Trainer", ("zero", 1, "")), ("", "3", "DeepSpeed", ("zero", 3, "")),
    ("DP", "2", "Accelerate + DeepSpeed", ("zero", 2, "")), ("", "", "HF Trainer + DeepSpeed ZeRO-3", ("zero", 3, "")),
    ("ZeRO-3 without offload", "", "TRL", ("zero", 3, "")), ("ZeRO-2 + optimizer offload", "", "TRL", ("zero", 2, "optimizer")),
    ("ZeRO-3 + CPU offload of optimizer and params", "", "TRL", ("zero", 3, "all")),
    ("ZeRO-3 NVMe offload", "", "DeepSpeed", ("zero", 3, "nvme")), ("ZeRO-Infinity", "", "DeepSpeed", ("zero", 3, "nvme")),
    ("ZeRO-Offload", "", "DeepSpeed", ("zero", 2, "optimizer")), ("FSDP", "", "HF Trainer", ("fsdp-bf16", 3, "")),
    ("FSDP2", "3", "TRL", ("fsdp2", 3, "")), ("FULL_SHARD", "3", "LitGPT", ("fsdp-bf16", 3, "")),
    ("FSDP SHARD_GRAD_OP", "", "Accelerate", ("fsdp-bf16", 2, "")), ("DDP", "", "torchtitan", ("ddp", 0, "")),
    ("DDP", "", "Lightning", ("ddp", 0, "")),
    ("deepspeed_stage_3_offload", "", "Lightning", ("zero", 3, "all")), ("FSDP2, CPU offload off", "", "TRL", ("fsdp2", 3, "")),
    ("ZeRO-3", "3", "Megatron-DeepSpeed", ("zero", 3, "")), ("ZeRO-1", "1", "Megatron-DeepSpeed", ("megatron-2022", 1, "")),
    ("ds_z3_config.json", "3", "LLaMA-Factory, deepspeed 0.15.3", ("zero", 3, "")),  # a version is no stage
    ("ds_z2_offload_config.json", "", "LLaMA-Factory", ("zero", 2, "optimizer")), ("ZeRO Stage-III", "", "", ("zero", 3, "")),
    ("3D", "", "NeMo 2.0", ("megatron", 1, "")), ("FSDP", "", "torchtune", ("pure", 3, "")),
])  # fmt: skip
def test_a_strategy_in_any_spelling(strategy, zero, framework, wanted):
    found = made(strategy=strategy, zero=zero, framework=framework)
    assert (found.engine, found.stage, found.offload) == wanted and estimate(found).time.total > 0


def test_a_single_gpu_needs_no_strategy():
    assert made(strategy="", n_gpus="1", task="lora").engine == made(strategy="QLoRA r=8", n_gpus="1").engine == "ddp"
    assert made(strategy="ZeRO++ hpZ", n_gpus="16").hpz == made(strategy="HSDP", n_gpus="16").shard == 8


@pytest.mark.parametrize(
    "strategy, quantised", [("ZeRO++", True), ("ZeRO++ (hpZ)", False), ("ZeRO++ hpZ + qwZ + qgZ", True)]
)
def test_what_zero_plus_plus_sends(strategy, quantised):
    found = made(strategy=strategy, n_gpus="16")
    assert (found.engine, found.stage, found.hpz, found.quantised) == ("zero", 3, 8, quantised)


@pytest.mark.parametrize("changes, said", [
    ({"strategy": "FSDP + CPU offload"}, "offload without DeepSpeed"), ({"strategy": ""}, "not known here"),
    ({"strategy": "Gemini"}, "not known here"), ({"strategy": "ZeRO-2", "zero": "3"}, "the column zero 3"),
    ({"strategy": "ZeRO-3 MiCS"}, "MiCS"), ({"zero": "4"}, "there is no ZeRO-4"),
    ({"framework": "", "strategy": "", "zero": ""}, "not known here"),
    ({"framework": "DeepSpeed", "strategy": ""}, "no ZeRO stage"),
    ({"framework": "Unsloth"}, "unsloth"), ({"framework": "MaxText (JAX)"}, "its framework"),
    ({"task": "dpo"}, "more than a forward"),
    ({"task": "dora"}, "only LoRA"), ({"precision": "fp32"}, "fp32 is not"), ({"precision": "TF32"}, "fp32 is not"),
    ({"precision": "int8"}, "16 bits and in FP8"), ({"strategy": "ZeRO-3", "precision": "pure bf16"}, "fp32 copy"),
    ({"optimizer": "Muon"}, "how many bytes"), ({"optimizer": "Foo"}, "how many bytes"),
    ({"optimizer": "AdamW, bf16 states"}, "bf16"),
    ({"optimizer": "SGD", "framework": "Megatron-Core"}, "under the engine megatron"), ({"act_ckpt": "some"}, "not clear"),
    ({"act_ckpt": "none", "kernels": "activation offload"}, "without checkpointing"), ({"ep": "8"}, "do not divide over ep"),
    ({"dp": "4"}, "are not its 8 GPUs"), ({"params_b": "13"}, "params_b says 13"), ({"params_b": "many"}, "params_b 'many'"),
    ({"framework": "torchtitan 2026-03", "kernels": "graph_trainer"}, "compiler places gathers"),
    ({"act_ckpt": "selective-op", "kernels": "float8 rowwise, abs saved by SAC"}, "saved by sac"),
    ({"task": "MLM pretraining of an encoder"}, "only decoders"), ({"model": "my-roberta"}, "only decoders"),
    ({"kernels": "my own triton kernels"}, "kernels are not known"), ({"seq_len": "1000000000"}, "than anybody"),
    ({"gpu": "H100 SXM", "gpu_mem_gb": "24"}, "'H100 SXM' has 79 GiB"), ({"gpu_mem_gb": "some"}, "gpu_mem_gb 'some'"),
    ({"n_gpus": "16", "inter_node": "two tin cans"}, "'two tin cans' is no network"), ({"gpu": "H100 XXL"}, "did you mean"),
    ({"framework": "InternEvo", "strategy": "ZeRO-1"}, "framework 'InternEvo' is none"),
    ({"inter_node": "0 Gb/s"}, "0 Gb/s"), ({"task": "lora", "strategy": "DDP rank 0"}, "rank 0"),
])  # fmt: skip
def test_what_no_formula_covers_is_said(changes, said):
    assert said in why(**changes)


@pytest.mark.parametrize("text, key", [
    ("AdamW (fused)", "adamw_torch_fused"), ("FusedAdam", "adamw_torch_fused"), ("", "adamw_torch"),
    ("AdamW 8-bit", "adamw_8bit"), ("bnb adamw_8bit", "adamw_8bit"), ("paged AdamW 8bit", "paged_adamw_8bit"),
    ("paged_adamw_32bit", "paged_adamw"), ("SGD", "sgd"), ("SGD with momentum", "sgd_momentum"), ("Adafactor", "adafactor"),
    ("Lion", "lion"), ("LAMB", "lamb"), ("Adam-mini", "adam_mini"),
])  # fmt: skip
def test_an_optimizer_keeps_its_own_bytes(text, key):
    assert made(optimizer=text).optimizer == key


def test_precision_is_what_the_row_says():
    assert made(precision="pure bf16").engine == made(precision="bf16-true", strategy="DDP").engine == "pure"
    assert estimate(made(precision="pure bf16")).allocated_gib < estimate(made()).allocated_gib
    for mixed in ("fp16 mixed", "amp_bf16"):
        assert table.predict(ROW | {"precision": mixed}) == table.predict(ROW)
    assert made(kernels="float8").fp8 and made(precision="mxfp8").fp8 and not made().fp8


def test_kernels_are_what_the_row_says():
    assert (made().kernels, made().loss, made().attention) == (EAGER, "released", "flash2")
    assert (made(kernels="liger").kernels, made(kernels="liger").loss) == (FUSED, "fused")
    assert (made(kernels="cut cross-entropy").kernels, made(kernels="cut cross-entropy").loss) == (EAGER, "fused")
    assert made(kernels="fused CE").loss == "kernel" and made(kernels="chunked CE").loss == "chunked"
    assert made(kernels="fused cross-entropy", framework="HF Trainer (transformers 4.45)").loss == "upcast"
    assert made(kernels="chunked loss incl. lm_head").loss == made(kernels="chunked_nll").loss == "tiled"
    assert made(kernels="TiledMLP").tiled_mlp and not made().tiled_mlp
    assert made(kernels="torch.compile").kernels == FUSED | {"experts"}
    assert made(kernels="no torch.compile").kernels == EAGER


@pytest.mark.parametrize("kernels, attention", [
    ("eager", "flash2"),  # of kernels that nothing compiles
    ("eager attention", "eager"), ("no flash-attn", "eager"), ("sdpa", "flash2"), ("FA2", "flash2"), ("flash-attn 1", "flash1"),
    ("FA3", "flash3"), ("flash-attn 4", "flash4"), ("varlen attention", "flash2"),
])  # fmt: skip
def test_attention_is_what_the_row_says(kernels, attention):
    assert made(kernels=kernels).attention == attention


@pytest.mark.parametrize("text, how", [
    ("", "none"), ("no", "none"), ("false", "none"), ("none (flash-attn)", "none"), ("gradient checkpointing", "full"),
    ("checkpoint=False", "none"), ("gradient_checkpointing: false", "none"), ("GC off", "none"), ("use_gc: True", "full"),
    ("activation checkpointing, no offload", "full"),
    ("yes", "full"), ("True", "full"), ("full", "full"), ("selective", "attention"), ("selective-op", "half"),
])  # fmt: skip
def test_what_is_computed_again(text, how):
    assert made(act_ckpt=text).checkpointing == how


def test_a_row_of_megatron_says_that_nothing_is_hidden():
    for notes, engine in (("", "megatron"), ("overlap flags off", "megatron-plain"), ("no overlap", "megatron-plain"),
                          ("tp_comm_overlap=False", "megatron-plain"), ("tp_comm_overlap: true", "megatron")):  # fmt: skip
        assert made(framework="Megatron-Core", notes=notes).engine == engine, notes


def test_adapters_have_the_row_s_rank_and_targets():
    whole = made(task="lora").trained
    for column in ("strategy", "kernels", "notes"):
        for text in ("r=64", "rank 64", "LoRA r64", "lora_r: 64"):
            assert made(task="lora", **{column: f"FSDP2, {text}"}).trained == 4 * whole, (column, text)
    two = made(task="lora", notes="LoRA r 8 on queries and values").trained
    assert two == 32 * 8 * (4096 + 4096 + 4096 + 1024) == made(task="lora", notes="r=8, q_proj, v_proj").trained
    every, attention = (made(task="lora", notes=f"r=8 {of}").trained for of in ("all-linear", "attention only"))
    assert every == whole // 2 > attention
    assert made(task="lora", notes="r=8, gate_proj, up_proj, down_proj").targets == "m"
    assert made(task="sft", strategy="FSDP2 + QLoRA").method == made(task="lora", precision="nf4").method == "qlora"


# ---- models ------------------------------------------------------------------------------------------------------
def test_a_head_has_a_width_of_its_own_where_the_parameters_say_so():
    wide = {"model": "seed-oss-36b", "layers": "64", "hidden": "5120", "ffn": "27648", "heads": "80", "vocab": "155136"}
    assert made(**wide, params_b="36.15").shape.head_dim == 128


def test_a_model_is_what_its_parameters_say():
    assert made(params_b="8").shape == made(params_b="").shape == made().shape
    small = {"model": "my-1b", "layers": "16", "hidden": "2048", "ffn": "8192", "heads": "32"}
    assert made(**small, params_b="1.24").shape.tied and not made(**small, params_b="1.5").shape.tied
    assert made(model="qwen3-30b-a3b", params_b="30.5", hidden="2048", layers="48").shape.experts == 128
    mixtral = made(model="Mixtral-8x7B", params_b="46.7", vocab="32000").shape
    assert (mixtral.experts, mixtral.top_k, round(mixtral.parameters / 1e9, 1)) == (8, 2, 46.7)
    assert "mixture of experts" in why(model="some-moe", params_b="46.7")
    for name in ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B-Base", "gemma3-27b", "gpt oss 20b"):
        assert made(model=name, hidden="", params_b="").shape.parameters > 7e9
    assert made(model="Llama-3.1-8B").shape.head_dim == 128 and "does not give" in why(model="Llama-9", hidden="")


@pytest.mark.parametrize(
    "column", ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "n_gpus", "mbs", "seq_len", "tp"]
)
@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "1.5", "a few", "1e400"])
def test_a_size_that_is_none_is_a_reason(column, value):
    assert column in why(**{"model": "mine", "params_b": "", column: value})
