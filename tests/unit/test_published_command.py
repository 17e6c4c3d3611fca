"""`python -m benchmarks.published TABLE.csv --out OUT.csv`: each row of a table of measured runs with its estimate."""

import csv
from pathlib import Path

import pytest

from benchmarks.published.__main__ import main
from benchmarks.published.table import PREDICTED, predict, summary
from brigade.plan.costs.estimate import factors
from testing.published_row import ROW

DATA = Path(__file__).parents[2] / "benchmarks" / "data"


def read(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["published.csv", "playbook_h100.csv"])
def test_every_row_comes_back_with_its_estimate(name, tmp_path, capsys):
    lines = (DATA / name).read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / name).write_text("".join(lines[:21]), encoding="utf-8")
    assert main([str(tmp_path / name), "--out", str(tmp_path / "out.csv")]) == 0
    said = capsys.readouterr().out
    assert "median" in said and f"Wrote {tmp_path / 'out.csv'}" in said
    given, found = read(tmp_path / name), read(tmp_path / "out.csv")
    assert list(found[0]) == [*given[0], *(column for column in PREDICTED if column not in given[0])]
    assert len(found) == len(given) == sum(one["rows"] for one in summary(found)) == 20
    for before, after in zip(given, found, strict=True):
        assert all(after[key] == value for key, value in before.items() if key not in PREDICTED)
        assert after["reason"] or (after["fits"] in ("yes", "maybe", "no") and float(after["pred_mem_gib"]) > 0)
        if not after["reason"]:
            speeds = [float(after[f"pred_tok_s_gpu{end}"]) for end in ("_low", "", "_high")]
            assert sorted(speeds) == speeds and speeds[0] < speeds[2]
    assert any(not row["reason"] for row in found)


@pytest.mark.parametrize("table, out, said", [
    ("none.csv", "out.csv", "it cannot be read"), ("a.csv", "a.csv", "it is the table itself"),
])  # fmt: skip
def test_a_mistake_is_named_and_no_file_is_written(table, out, said, tmp_path, capsys):
    text = "".join((DATA / "published.csv").read_text(encoding="utf-8").splitlines(keepends=True)[:3])
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert main([str(tmp_path / table), "--out", str(tmp_path / out)]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"] and (tmp_path / "a.csv").read_text() == text


@pytest.mark.parametrize("kind, about", [
    ("max_memory_allocated", "pred_mem_allocated_gib"), ("max_memory_reserved", "pred_mem_gib"), ("nvidia-smi", "pred_mem_gib"),
])  # fmt: skip
def test_the_interval_of_memory_is_about_what_was_measured(kind, about):
    found = predict(ROW | {"mem_kind": kind})
    low, high = (float(found[f"pred_mem_gib_{end}"]) / float(found[about]) for end in ("low", "high"))
    assert [low, high] == pytest.approx(factors("memory", "other programs"), rel=1e-3)
