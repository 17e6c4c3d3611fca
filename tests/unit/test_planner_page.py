"""The planner's fitted constants and the page of its errors are what the tables of published runs give."""

import re

import pytest
import yaml

from benchmarks import planner, planner_rows, strangers
from benchmarks.published import table
from brigade.plan import hardware
from testing.published_row import ROW


@pytest.mark.slow
def test_constants_and_page_are_what_the_tables_give(capsys):
    """Whoever changes a formula writes them anew with python -m benchmarks.planner."""
    assert planner.main(["--check"]) == 0, capsys.readouterr().out
    assert strangers.main(["--check"]) == 0, "run python -m benchmarks.strangers"


def test_a_fitted_share_is_written_where_it_stands(monkeypatch, tmp_path):
    before = yaml.safe_load(hardware.CATALOGUE.read_text())["gpus"]
    after = yaml.safe_load(planner.catalogue({"A100": 0.5, "RTX 4090": 1.25}))["gpus"]
    new = {"A100 40GB": 0.5, "A100 80GB": 0.5, "A800 80GB": 0.5, "RTX 4090": 1.25}
    assert after == {kind: entry | ({"sustained": new[kind]} if kind in new else {}) for kind, entry in before.items()}
    (tmp_path / "none.yaml").write_text(re.sub(r"sustained: [\d.]+, ", "", hardware.CATALOGUE.read_text()))
    monkeypatch.setattr(hardware, "CATALOGUE", tmp_path / "none.yaml")
    with pytest.raises(SystemExit, match="RTX 4090 has no `sustained`"):
        planner.catalogue({"RTX 4090": 1.25})


def test_nothing_is_fitted_to_strangers():
    def column(name, of):
        return {row[of] for row in table.read(planner_rows.DATA / f"{name}.csv")}

    fitted = [(name, of) for name in planner_rows.TABLES for of in ("id", "set", "source")]
    assert strangers.NAMES[0] not in planner_rows.TABLES
    assert all(not column(name, of) & column(strangers.NAMES[0], of) for name, of in fitted)


def test_a_stranger_is_judged_by_the_interval_that_plan_prints(monkeypatch):
    job, answer = table.expressed(ROW).job, table.predict(ROW)
    memory, speed = float(answer["pred_mem_gib"]), float(answer["pred_tok_s_gpu"])
    runs = [
        planner_rows.Run(place, ROW | {"mfu_pct": "40", "set": name}, job, memory * off, speed * off)
        for place, (name, off) in enumerate({"near": 1.0, "far": 3.0}.items())
    ]
    monkeypatch.setattr(strangers, "strangers", lambda: runs)
    counts = [line.split(" | ") for line in strangers.coverage().splitlines()[2:]]
    assert {line[0] for line in counts} == {"| memory", "| time"}
    assert {tuple(line[2:]) for line in counts} == {("2", "2", "1 (50%) |")}
