"""benchmarks/preferences.py without its runs: which rows its programs read, and what its tables say."""

import json
from pathlib import Path

import numpy as np

from benchmarks import preferences
from testing import plain_preferences as plain


def test_programs_read_the_same_rows_in_the_same_order(monkeypatch, tmp_path):
    monkeypatch.setattr(preferences, "WORK", tmp_path)
    data = preferences.build(preferences.RUNS["kto"], tiny=True)
    rows, drawn = data["rows"], [json.loads(line) for line in Path(data["drawn"]).read_text().splitlines()]
    keys = plain.Keys(global_batch_size=preferences.BATCH, max_steps=preferences.STEPS, seed=preferences.SHARED["seed"])
    order = [item for items in plain.steps(len(rows), keys) for item in items]
    assert drawn == [rows[item] for item in order]
    samples = [plain.Tokens([at, 100 + at], 1, 2) for at in range(len(rows))]
    other = [sample.ids[1] - 100 for sample in plain.mismatched(samples, 2)]
    assert [order[at] for at in data["others"]] == [other[item] for item in order]
    assert 0.5 < np.mean([row["label"] for row in rows]) < 0.8
    assert all(pair["chosen"] != pair["rejected"] for pair in preferences.rows_of("pairs", 44))


def test_every_loss_is_among_the_runs():
    names = plain.Keys._fields
    compared = [run for run in preferences.RUNS.values() if run.rows != "answers"]
    keys = [{name: value for name, value in run.keys.items() if name in names} for run in compared]
    assert {plain.form_of(plain.Keys(**each)) for each in keys} == {*plain.PAIRS, *plain.JUDGED}


def test_tables():
    def history(*losses):
        return {"history": [{"loss": loss, "grad_norm": 1.0} for loss in losses]}

    steps = range(preferences.STEPS)
    results = {"plain": history(*(1.0 for _ in steps)), "trl": history(*(1.0 + 0.01 * step for step in steps))}
    assert preferences.losses(results).splitlines()[2] == "| 1 | 1.000000 | 1.000000 | 0.0e+00 |"
    assert preferences.losses(results).splitlines()[-1] == "| 10 | 1.000000 | 1.090000 | 9.0e-02 |"
    assert "| loss | TRL | 0.0e+00 | 9.0e-02 |" in preferences.agreement(results)


def test_results_keep_the_newest_rows_of_each_name(monkeypatch, tmp_path):
    monkeypatch.setattr(preferences, "RESULTS_FILE", tmp_path / "preferences.jsonl")
    assert preferences.tables() == {}
    for seconds in (9.0, 18.0):
        ours, theirs = ({"seconds": each, "peak_memory_gib": 2.0, "others": 0.01} for each in (seconds, 36.0))
        for name in preferences.SHORT:
            assert bool(preferences.tables()) == (seconds == 18.0)  # none before it has all of its lines
            rows = preferences.side_by_side.rows_of(f"{name}-short", {"ours": [ours] * 3, "trl": [theirs] * 3}, 36)
            preferences.side_by_side.keep(preferences.RESULTS_FILE, rows)
    ((name, table),) = preferences.tables().items()
    expected = "| DPO, pairs | 3 | 2.00 (2.00 to 2.00) | 1.00 (1.00 to 1.00) | 2.00 (2.00 to 2.00) | 2.00 GiB | 2.00 GiB | 1% |"
    assert name == "preferences-short" and table.splitlines()[2] == expected


def test_the_odds_ratios_term():
    ours = {"loss": 2.05, "rewards/chosen": -0.2}  # 2.0 of likelihood, and 0.1 x 0.5
    theirs = {"loss": 9.0, "rewards/chosen": -0.2, "log_odds_ratio": -0.5}
    results = {"ours": {"history": [ours]}, "trl": {"history": [theirs]}}
    assert preferences.odds(results, 0.1) == "The odds ratio's term at step 1: Brigade 0.500000, TRL 0.500000."
