"""Rows of published runs: what they are estimated as, and what gets a reason instead."""

import csv
from pathlib import Path

import pytest

from brigade.errors import UserError
from brigade.estimate import table
from brigade.estimate.estimate import estimate
from brigade.estimate.rows import job_of_row

ROOT = Path(__file__).parents[2]


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
