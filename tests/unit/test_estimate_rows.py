"""Rows of published runs: what they are estimated as, and what gets a reason instead."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published import table
from benchmarks.published.rows import job_of_row
from brigade.errors import UserError
from brigade.planner.choice.estimate import estimate
from brigade.planner.choice.job import EAGER, FUSED
from brigade.planner.costs.states import first_stage_states

ROOT = Path(__file__).parents[2]


def test_torchtune_s_ladder_is_climbed():
    """Nine runs of one model on one A100, each with one more saving: nothing of their memory was fitted."""
    rows = [row for row in table.read(ROOT / "benchmarks" / "data" / "published.csv") if row["set"] == "torchtune"]
    told = [(row, table.predict(row)) for row in rows]
    assert [found["reason"] != "" for _, found in told] == [True] + [False] * 9  # the first one pads
    for row, found in told[1:]:
        assert float(found["pred_mem_allocated_gib"]) == pytest.approx(float(row["peak_mem_gib"]), rel=0.16), row["id"]


@pytest.mark.parametrize("source, median, worst", [("fms-acceleration", 0.005, 0.25), ("qwen", 0.07, 0.17)])
def test_memory_of_runs_with_transformers(source, median, worst):
    """HF Trainer: full, LoRA and QLoRA, dense and experts, alone, under FSDP and under ZeRO-3."""
    rows = [row for row in table.read(ROOT / "benchmarks" / "data" / "collected.csv") if row["set"] == source]
    off = [table.errors(row | table.predict(row))[0] for row in rows if row["status"] == "ok"]
    assert len(off) >= 27 and None not in off
    assert sorted(map(abs, off))[len(off) // 2] < median and max(map(abs, off)) < worst


def test_what_ran_out_of_memory_does_not_fit_and_what_ran_does():
    rows = [
        row for row in table.read(ROOT / "benchmarks" / "data" / "collected.csv") if row["set"] == "fms-acceleration"
    ]
    wrong = {row["id"] for row in rows if (row["status"] == "ok") != (table.predict(row)["fits"] == "yes")}
    assert wrong == {"fms-acceleration-036"}  # docs/planner-accuracy.md


@pytest.mark.parametrize("framework, precision, optimizer, wanted", [
    ("HF Trainer", "bf16", "AdamW", "adamw_torch"), ("TRL", "bf16", "", "adamw_torch"),
    ("HF Trainer", "bf16", "adamw_torch_fused", "adamw_torch_fused"), ("torchtitan", "bf16", "AdamW", "adamw_torch_fused"),
])  # fmt: skip
def test_a_row_s_adam(framework, precision, optimizer, wanted):
    row = table.read(ROOT / "benchmarks" / "data" / "collected.csv")[0]
    assert (
        job_of_row(row | {"framework": framework, "precision": precision, "optimizer": optimizer}).optimizer == wanted
    )


@pytest.mark.parametrize(
    "framework, quantised",
    [("HF Trainer (transformers 4.48)", True), ("TRL", True), ("HF Trainer (transformers 5.2)", False)],
)
def test_experts_were_linear_layers_before_transformers_5(framework, quantised):
    row = next(
        row for row in table.read(ROOT / "benchmarks" / "data" / "collected.csv") if row["model"] == "mixtral-8x7b"
    )
    made = job_of_row(row | {"framework": framework, "task": "qlora", "precision": "bf16"})
    assert made.linear_experts == quantised and (first_stage_states(made)[0].parameters < 30e9) == quantised


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
    made = job_of_row(row | {"framework": framework, "strategy": strategy, "zero": zero})
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


# ---- words -------------------------------------------------------------------------------------------------------
ROW = {"model": "llama3.1-8b", "params_b": "8.03", "layers": "32", "hidden": "4096", "ffn": "14336", "heads": "32",
       "kv_heads": "8", "vocab": "128256", "n_gpus": "8", "gpu": "A100-80GB", "inter_node": "-", "framework": "HF Trainer",
       "task": "sft-full", "strategy": "FSDP2", "mbs": "2", "grad_acc": "1", "seq_len": "2048", "precision": "bf16",
       "optimizer": "AdamW", "act_ckpt": "full", "kernels": ""}  # fmt: skip


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
    ({"task": "dora"}, "LoRA alone"), ({"precision": "fp32"}, "fp32 is not"), ({"precision": "TF32"}, "fp32 is not"),
    ({"precision": "int8"}, "16 bits and in FP8"), ({"strategy": "ZeRO-3", "precision": "pure bf16"}, "fp32 copy"),
    ({"optimizer": "Muon"}, "how many bytes"), ({"optimizer": "Foo"}, "how many bytes"),
    ({"optimizer": "AdamW, bf16 states"}, "bf16"),
    ({"optimizer": "SGD", "framework": "Megatron-Core"}, "under the engine megatron"), ({"act_ckpt": "some"}, "not clear"),
    ({"act_ckpt": "none", "kernels": "activation offload"}, "without checkpointing"), ({"ep": "8"}, "do not divide over ep"),
    ({"dp": "4"}, "are not its 8 GPUs"), ({"params_b": "13"}, "params_b says 13"), ({"params_b": "many"}, "params_b 'many'"),
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
    assert (
        table.predict(ROW | {"precision": "fp16 mixed"})
        == table.predict(ROW)
        == table.predict(ROW | {"precision": "amp_bf16"})
    )
    assert made(kernels="float8").fp8 and made(precision="mxfp8").fp8 and not made().fp8


def test_kernels_are_what_the_row_says():
    assert (made().kernels, made().loss, made().attention) == (EAGER, "released", "flash2")
    assert (made(kernels="liger").kernels, made(kernels="liger").loss) == (FUSED, "fused")
    assert (made(kernels="cut cross-entropy").kernels, made(kernels="cut cross-entropy").loss) == (EAGER, "fused")
    assert made(kernels="fused CE").loss == "fused" and made(kernels="chunked CE").loss == "chunked"
    assert (made(kernels="torch.compile").kernels, made(kernels="no torch.compile").kernels) == (FUSED, EAGER)
    assert {
        word: made(kernels=word).attention
        for word in ("eager", "eager attention", "no flash-attn", "sdpa", "FA2", "flash-attn 1", "FA3")
    } == {
        "eager": "flash2",  # of kernels that nothing compiles
        "eager attention": "eager",
        "no flash-attn": "eager",
        "sdpa": "flash2",
        "FA2": "flash2",
        "flash-attn 1": "flash1",
        "FA3": "flash3",
    }


@pytest.mark.parametrize("text, how", [
    ("", "none"), ("no", "none"), ("false", "none"), ("none (flash-attn)", "none"), ("gradient checkpointing", "full"),
    ("yes", "full"), ("True", "full"), ("full", "full"), ("selective", "attention"), ("selective-op", "half"),
])  # fmt: skip
def test_what_is_computed_again(text, how):
    assert made(act_ckpt=text).checkpointing == how


def test_adapters_have_the_row_s_rank_and_targets():
    whole = made(task="lora").trained
    for column in ("strategy", "kernels", "notes"):
        for text in ("r=64", "rank 64", "LoRA r64", "lora_r: 64"):
            assert made(task="lora", **{column: f"FSDP2, {text}"}).trained == 4 * whole, (column, text)
    two = made(task="lora", notes="LoRA r 8 on queries and values").trained
    assert two == 32 * 8 * (4096 + 4096 + 4096 + 1024) == made(task="lora", notes="r=8, q_proj, v_proj").trained
    assert (
        made(task="lora", notes="r=8 all-linear").trained
        == whole // 2
        > made(task="lora", notes="r=8 attention only").trained
    )
    assert made(task="sft", strategy="FSDP2 + QLoRA").method == made(task="lora", precision="nf4").method == "qlora"


# ---- models ------------------------------------------------------------------------------------------------------
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


# ---- whatever a table holds --------------------------------------------------------------------------------------
CELLS = st.one_of(
    st.sampled_from(["", "0", "-1", "inf", "nan", "1e308", "99999999", "3", "lora", "ZeRO-3", "x" * 300, "\0"]),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)
SOME = [
    row for name in ("published", "collected") for row in table.read(ROOT / "benchmarks" / "data" / f"{name}.csv")[::23]
]


@given(st.sampled_from(SOME), st.dictionaries(st.sampled_from(sorted(SOME[0])), CELLS, min_size=1, max_size=4))
def test_a_row_of_anything_gets_figures_or_a_reason(row, cells):
    found = table.predict(row | cells)
    assert set(found) == set(table.PREDICTED) and bool(found["reason"]) != bool(found["fits"])
    assert not found["reason"].startswith("it cannot be estimated"), found["reason"]
    assert found["reason"] or all(float(found[name]) >= 0 for name in table.PREDICTED[:5])


def test_no_row_takes_the_others_along(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "estimate", lambda job: 1 / 0)
    (tmp_path / "a.csv").write_text(
        ",".join(ROW) + "\n" + 2 * (",".join(f'"{cell}"' for cell in ROW.values()) + ",more\n") + "a\n"
    )
    done = table.predict_file(tmp_path / "a.csv", tmp_path / "out.csv")
    assert [row["reason"].split(":")[0] for row in done][:2] == ["it cannot be estimated"] * 2 and len(done) == 3
    assert table.read(tmp_path / "out.csv") == done


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "a.csv").write_text(",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n")
    for out in (tmp_path / "none" / "out.csv", tmp_path):
        with pytest.raises(UserError, match="it cannot be written"):
            table.predict_file(tmp_path / "a.csv", out)


def test_columns_that_are_needed_are_listed(tmp_path):
    (tmp_path / "a.csv").write_text("model,n_gpus,gpu\nllama3.1-8b,8,A100\n")
    with pytest.raises(UserError, match="lacks the columns framework, mbs, seq_len, strategy, task"):
        table.read(tmp_path / "a.csv")
    needed = {key: ROW[key] for key in table.PUBLISHED}
    (tmp_path / "b.csv").write_text(",".join(needed) + "\n" + ",".join(needed.values()) + "\n")
    (row,) = table.predict_file(tmp_path / "b.csv", tmp_path / "out.csv")
    assert row["fits"] and not row["reason"]


@pytest.mark.parametrize("more, said", [
    ({"kernels": "TiledMLP"}, "'tiledmlp'"), ({"strategy": "DeepSpeed ZeRO-3 + ring attention"}, "'ring attention'"),
    ({"notes": "CPU offload of the optimizer"}, "'cpu offload'"), ({"notes": "activation offload"}, "'activation offload'"),
])  # fmt: skip
def test_what_no_formula_has_is_refused_by_its_name(more, said):
    assert said in table.predict(ROW | more)["reason"]


def test_tiled_losses_and_ulysses_are_counted():
    assert made(kernels="tiled loss").loss == "tiled"
    long = {
        "n_gpus": "8",
        "dp": "1",
        "cp": "8",
        "seq_len": "131072",
        "mbs": "1",
        "strategy": "DeepSpeed ZeRO-3 + Ulysses",
        "zero": "3",
    }
    found = made(**long | {"grad_acc": "1", "gbs_seqs": ""})
    assert found.ours and found.context == 8 and found.tokens == 16384


def test_a_model_that_nobody_knows_is_estimated_by_its_widths():
    """In the playbook's short format too, whose two models have theirs built in."""
    widths = {"layers": "20", "hidden": "2560", "ffn": "6912", "heads": "20", "vocab": "50304"}
    row = {
        "model": "mine",
        "gpus": "8",
        "dp": "8",
        "tp": "1",
        "pp": "1",
        "zero": "1",
        "mbs": "1",
        "grad_acc": "4",
    } | widths
    assert not table.predict(row)["reason"]
    tied, untied = (table.predict(row | {"tied": said})["pred_mem_gib"] for said in ("yes", "no"))
    assert float(tied) < float(untied)
    assert "no column gives its widths" in table.predict({k: v for k, v in row.items() if k not in widths})["reason"]
