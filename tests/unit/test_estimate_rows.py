"""Rows of published runs: what they are estimated as, and what gets a reason instead."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published import table
from benchmarks.published.rows import job_of_row
from brigade.errors import UserError
from brigade.plan.costs.division import first_stage_states
from brigade.plan.costs.estimate import estimate
from testing.published_row import ROW

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
PUBLISHED, COLLECTED = (table.read(DATA / f"{name}.csv") for name in ("published", "collected"))


def test_torchtune_s_ladder_is_climbed():
    """Nine runs of one model on one A100, each with one more saving: nothing of their memory was fitted."""
    rows = [row for row in PUBLISHED if row["set"] == "torchtune"]
    told = [(row, table.predict(row)) for row in rows]
    assert [found["reason"] != "" for _, found in told] == [True] + [False] * 9  # the first one pads
    for row, found in told[1:]:
        assert float(found["pred_mem_allocated_gib"]) == pytest.approx(float(row["peak_mem_gib"]), rel=0.16), row["id"]


@pytest.mark.parametrize("source, median, worst", [
    ("fms-acceleration", 0.005, 0.06),  # HF Trainer: full, LoRA and QLoRA, dense and experts, alone and under FSDP1
    ("qwen", 0.05, 0.13),  # HF Trainer alone and under ZeRO-3: memory of the whole card
    ("ml-engineering", 0.04, 0.14),  # DeepSpeed up to 262,144 tokens: what torch reserved
    ("torchao-2025", 0.01, 0.01),  # FSDP2 of torchtitan: what torch reserved
    ("lambda-qwen3-moe", 0.03, 0.05),  # FSDP2 and expert parallelism of torchtitan, some of it computed again
    ("arctic-training", 0.10, 0.14),  # Ulysses over 64 GPUs, with tiles and activations on the host: of the whole card
    ("simumax", 0.01, 0.015),  # Megatron-Core with tensor, pipeline and context groups: what torch allocated
])  # fmt: skip
def test_memory_of_published_runs(source, median, worst):
    rows = [row for row in COLLECTED if row["set"] == source]
    off = [table.errors(row | table.predict(row))[0] for row in rows if row["status"] == "ok"]
    off = [one for one in off if one is not None]
    assert len(off) >= 7
    assert sorted(map(abs, off))[len(off) // 2] < median and max(map(abs, off)) < worst


def test_no_run_of_any_table_that_ran_out_of_memory_is_called_fitting():
    for rows in (PUBLISHED, COLLECTED):
        failed = [row for row in rows if row["status"] != "ok"]
        told = {row["id"]: table.predict(row)["fits"] for row in failed}
        assert len(told) >= 5 and "yes" not in told.values(), told


def test_what_ran_out_of_memory_does_not_fit_and_what_ran_does():
    rows = [row for row in COLLECTED if row["set"] == "fms-acceleration"]
    told = {row["id"]: (row["status"] == "ok", table.predict(row)["fits"] != "no") for row in rows}
    assert [name for name, (ran, fits) in told.items() if ran != fits] == []
    assert sum(not ran for ran, _ in told.values()) == 25


def test_blocks_of_cuda_graphs_are_not_given_back():
    """So a run that torch's allocator would squeeze onto a card without them does not fit with them."""
    row = ROW | {"model": "llama3.1-8b", "framework": "torchtitan 2026-08", "strategy": "FSDP2", "mbs": "3"}
    row |= {"gpu": "H100-80GB", "seq_len": "8192", "act_ckpt": "selective-op"}
    plain = table.predict(row | {"kernels": "torch.compile"})
    assert plain["fits"] == "maybe"
    assert table.predict(row | {"kernels": "torch.compile, CUDA graphs"})["fits"] == "no"
    assert table.predict(row | {"kernels": "torch.compile, CUDA graphs off"})["fits"] == "maybe"


@pytest.mark.parametrize("framework, precision, optimizer, wanted", [
    ("HF Trainer", "bf16", "AdamW", "adamw_torch"), ("TRL", "bf16", "", "adamw_torch"),
    ("HF Trainer", "bf16", "adamw_torch_fused", "adamw_torch_fused"), ("torchtitan", "bf16", "AdamW", "adamw_torch_fused"),
])  # fmt: skip
def test_a_row_s_adam(framework, precision, optimizer, wanted):
    said = {"framework": framework, "precision": precision, "optimizer": optimizer}
    assert job_of_row(COLLECTED[0] | said).optimizer == wanted


@pytest.mark.parametrize("framework, quantised", [
    ("HF Trainer (transformers 4.48)", True), ("TRL", True), ("HF Trainer (transformers 5.2)", False),
])  # fmt: skip
def test_experts_were_linear_layers_before_transformers_5(framework, quantised):
    row = next(row for row in COLLECTED if row["model"] == "mixtral-8x7b")
    made = job_of_row(row | {"framework": framework, "task": "qlora", "precision": "bf16"})
    assert made.linear_experts == quantised and (first_stage_states(made)[0].parameters < 30e9) == quantised


def test_measured_columns_change_nothing():
    row = PUBLISHED[0]
    blind = row | dict.fromkeys(("step_time_s", "tok_s_gpu", "tflops_gpu", "mfu_pct", "peak_mem_gib", "status"), "")
    assert table.predict(row) == table.predict(blind)


@pytest.mark.parametrize("change, reason", [
    ({"gpu": "TPU v5e"}, "not in the catalogue"), ({"model": "unheard-of", "hidden": ""}, "does not give the dimensions"),
    ({"mbs": "many"}, "mbs 'many' is not a number"), ({"tp": "3"}, "does not divide"), ({"mbs": ""}, "mbs is not given"),
    ({"seq_len": "0"}, "not a whole number above 0"), ({"grad_acc": "4", "gbs_seqs": "31"}, "are not its 31 sequences"),
])  # fmt: skip
def test_a_row_that_cannot_be_expressed_has_a_reason(change, reason):
    found = table.predict(PUBLISHED[0] | change)
    assert reason in found["reason"] and found["pred_mem_gib"] == ""


@pytest.mark.parametrize("framework, strategy, zero, wanted", [
    ("DeepSpeed 0.14", "ZeRO-2", "", ("zero", 2, "")),
    ("DeepSpeed", "ZeRO-3 + CPU offload (optimizer)", "3", ("zero", 3, "optimizer")),
    ("TRL", "zero3 offload of parameters", "", ("zero", 3, "all")), ("HF Trainer", "DDP", "0", ("ddp", 0, "")),
    ("axolotl", "FSDP2", "", ("fsdp2", 3, "")), ("Megatron-DeepSpeed", "3D", "", ("megatron-2022", 0, "")),
    ("DeepSpeed", "data parallel", "0", ("ddp", 0, "")), ("DeepSpeed 0.5.10", "ZeRO-3", "", ("zero-2021", 3, "")),
    ("DeepSpeed of 2021", "ZeRO-3", "3", ("zero-2021", 3, "")), ("DeepSpeed", "DeepSpeed 0.5 ZeRO-3", "", ("zero-2021", 3, "")),
    ("DeepSpeed 0.5.10", "ZeRO-3 + CPU offload (optimizer)", "", ("zero-2021", 3, "optimizer")),
    ("DeepSpeed 0.5.10", "ZeRO-2", "", ("zero", 2, "")),
])  # fmt: skip
def test_a_row_s_engine(framework, strategy, zero, wanted):
    made = job_of_row(PUBLISHED[0] | {"framework": framework, "strategy": strategy, "zero": zero})
    assert (made.engine, made.stage, made.offload) == wanted and estimate(made).time.total > 0


def test_a_table_of_another_format(tmp_path, mistake):
    for text, lacks in (("model,gpus\nllama,8\n", "dp, grad_acc, mbs, pp, tp, zero"),
                        ("model,n_gpus,gpu\nllama3.1-8b,8,A100\n", "framework, mbs, seq_len, strategy, task")):  # fmt: skip
        (tmp_path / "a.csv").write_text(text)
        assert f"lacks the columns {lacks}" in mistake(table.read, tmp_path / "a.csv")
    with pytest.raises(UserError, match="is the table itself"):
        source = tmp_path / "b.csv"
        source.write_text((DATA / "published.csv").read_text())
        table.predict_file(source, source)


# ---- whatever a table holds --------------------------------------------------------------------------------------
CELLS = st.one_of(
    st.sampled_from(["", "0", "-1", "inf", "nan", "1e308", "99999999", "3", "lora", "ZeRO-3", "x" * 300, "\0"]),
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
)
SOME = [*PUBLISHED[::23], *COLLECTED[::23]]


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


def test_where_nothing_can_be_written(tmp_path, mistake):
    (tmp_path / "a.csv").write_text(",".join(ROW) + "\n" + ",".join(ROW.values()) + "\n")
    for out in (tmp_path / "none" / "out.csv", tmp_path):
        assert "it cannot be written" in mistake(table.predict_file, tmp_path / "a.csv", out)


def test_columns_that_are_needed_are_enough(tmp_path):
    needed = {key: ROW[key] for key in table.PUBLISHED}
    (tmp_path / "b.csv").write_text(",".join(needed) + "\n" + ",".join(needed.values()) + "\n")
    (row,) = table.predict_file(tmp_path / "b.csv", tmp_path / "out.csv")
    assert row["fits"] and not row["reason"]


@pytest.mark.parametrize("more, said", [
    ({"kernels": "asyncTP"}, "'asynctp'"), ({"strategy": "DeepSpeed ZeRO-2 + ZenFlow"}, "'zenflow'"),
    ({"kernels": "float8 eager"}, "'float8 eager'"),
    ({"strategy": "DeepSpeed ZeRO-3 + ring attention"}, "'ring attention'"),
    ({"notes": "CPU offload of the optimizer"}, "'cpu offload'"), ({"notes": "activation offload"}, "'activation offload'"),
])  # fmt: skip
def test_what_no_formula_has_is_refused_by_its_name(more, said):
    assert said in table.predict(ROW | more)["reason"]


def test_tiled_losses_and_ulysses_are_counted():
    assert job_of_row(ROW | {"kernels": "tiled loss"}).loss == "tiled"
    long = {"n_gpus": "8", "cp": "8", "seq_len": "131072", "mbs": "1", "strategy": "DeepSpeed ZeRO-3 + Ulysses"}
    found = job_of_row(ROW | long | {"dp": "1", "zero": "3", "grad_acc": "1", "gbs_seqs": ""})
    assert found.ulysses and found.context == 8 and found.tokens == 16384


def test_a_model_that_nobody_knows_is_estimated_by_its_widths():
    """In the playbook's short format too, whose two models have theirs built in."""
    widths = {"layers": "20", "hidden": "2560", "ffn": "6912", "heads": "20", "vocab": "50304"}
    ones = dict.fromkeys(("tp", "pp", "zero", "mbs"), "1")
    row = {"model": "mine", "gpus": "8", "dp": "8", "grad_acc": "4"} | ones | widths
    assert not table.predict(row)["reason"]
    tied, untied = (table.predict(row | {"tied": said})["pred_mem_gib"] for said in ("yes", "no"))
    assert float(tied) < float(untied)
    assert "no column gives its widths" in table.predict({k: v for k, v in row.items() if k not in widths})["reason"]


def test_gaps_that_single_rows_showed_are_closed():
    """FSDP2 that keeps its layers gathered; an all-to-all under selective checkpointing; attention at 8,192 to 262,144 tokens
    beside states on hosts with PCIe 5."""
    rows = {row["id"]: row for row in COLLECTED}
    cases = [(name, "mem_gib", "peak_mem_gib", 0.1) for name in ("torchtitan-prs-2025-008", "lambda-qwen3-moe-019")]
    cases += [(f"ml-engineering-{number:03d}", "tok_s_gpu", "tok_s_gpu", 0.18) for number in range(1, 15)]
    for name, predicted, measured, within in cases:
        found = float(table.predict(rows[name])[f"pred_{predicted}"])
        assert found == pytest.approx(float(rows[name][measured]), rel=within), name


@pytest.mark.parametrize("source, wanted", [
    ("arXiv 2104.04473 table 2", "zero-2021"), ("https://arxiv.org/abs/2104.04473", "zero-2021"),
    ("arXiv 2311.00257", "zero"), ("deepspeedai/DeepSpeed#2021", "zero"), ("a blog that looks back on 2021", "zero"),
])  # fmt: skip
def test_a_paper_s_number_tells_how_old_its_deepspeed_is(source, wanted):
    row = ROW | {"framework": "DeepSpeed", "strategy": "ZeRO-3", "source": source}
    assert job_of_row(row).engine == wanted
    assert job_of_row(row | {"framework": "DeepSpeed 0.16"}).engine == "zero"


@pytest.mark.parametrize("said, copies", [
    ("hpZ", 8), ("hpZ 4", 4), ("zero_hpz_partition_size: 2", 2), ("hpZ=1", 0), ("hpZ 0", 0), ("", 0),
])  # fmt: skip
def test_how_many_ranks_share_the_second_copy(said, copies):
    assert job_of_row(ROW | {"framework": "DeepSpeed", "strategy": f"ZeRO-3 {said}", "n_gpus": "8"}).hpz == copies


@pytest.mark.parametrize("strategy", ["ZeRO-3 hpZ 3", "ZeRO-3 hpZ 16", "ZeRO-2 hpZ 8"])
def test_a_second_copy_that_cannot_be_is_refused(strategy):
    assert "hpZ" in table.predict(ROW | {"framework": "DeepSpeed", "strategy": strategy, "n_gpus": "8"})["reason"]


def test_zero_3_over_hundreds_of_ranks_is_not_promised_too_much():
    """Narayanan et al. 2021, table 2: the same batch took as long on 1,536 GPUs as on 768."""
    rows = [row for row in COLLECTED if row["set"] == "narayanan21"]
    for row in rows:
        found = table.predict(row)
        assert (found["fits"] != "no") == (row["status"] == "ok"), row["id"]
        if row["status"] == "ok":
            assert 0.8 < float(found["pred_tok_s_gpu"]) / float(row["tok_s_gpu"]) < 1.6, row["id"]
    assert len(rows) == 7


def test_zero3_s_streams_are_counted_where_memory_is_short():
    """Llama 3 8B on eight RTX 3090s ran out of memory with 0.7 GiB to spare by what torch allocates (LLaMA-Factory #5977)."""
    row = ROW | {"gpu": "RTX 3090", "framework": "LLaMA-Factory, deepspeed 0.15.3", "strategy": "ds_z3_config.json"}
    found = table.predict(row | {"seq_len": "1024", "mbs": "1"})
    assert found["fits"] == "no" and float(found["pred_mem_allocated_gib"]) < 22.5
