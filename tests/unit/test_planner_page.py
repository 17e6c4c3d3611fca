"""The planner's fitted constants and the page of its errors are what the tables of published runs give."""

import datetime
import re
import statistics
from dataclasses import FrozenInstanceError, replace
from types import SimpleNamespace

import pytest
import yaml

from benchmarks import ablations, baseline, pages, planner, planner_intervals, planner_rows, strangers, varying
from benchmarks.published import formulas, table
from brigade.plan import constants, hardware
from brigade.plan.costs.conventions import ENGINES
from brigade.train.recipe.files import REPOSITORY
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


def test_every_constant_has_its_unit_its_source_and_its_date():
    tables = [table.read(planner_rows.DATA / f"{name}.csv") for name in planner_rows.TABLES]
    rows = {row[of] for rows in tables for row in rows for of in ("id", "set")}
    for name, constant in constants.SOURCES.items():
        assert set(constant) - {"fitted"} == {"value", "unit", "source", "date"}, name
        assert isinstance(constant["date"], datetime.date) and constant["source"] and constant["unit"], name
        named = constant.get("fitted", "").split(", ")
        files = (planner_rows.DATA, REPOSITORY)
        known = [one in rows or any((folder / one).is_file() for folder in files) for one in named if one]
        assert all(known), f"{name}: {named}"
    read = re.findall(r"CONSTANTS\.(\w+)", "".join(path.read_text() for path in (REPOSITORY / "brigade").rglob("*.py")))
    assert {*read} == {*constants.SOURCES}  # a name that is no row's, and a row that no formula reads
    with pytest.raises(FrozenInstanceError):
        constants.CONSTANTS.contention = 0.0
    with pytest.raises(TypeError):
        constants.CONSTANTS.replica_width["fp32"] = 0


def test_nothing_is_fitted_to_strangers():
    def column(name, of):
        return {row[of] for row in table.read(planner_rows.DATA / f"{name}.csv")}

    fitted = [(name, of) for name in planner_rows.TABLES for of in ("id", "set", "source")]
    assert planner_rows.STRANGERS[0] not in planner_rows.TABLES
    assert all(not column(name, of) & column(planner_rows.STRANGERS[0], of) for name, of in fitted)


def test_a_stranger_is_held_where_the_others_interval_holds_it(monkeypatch):
    job = table.expressed(ROW).job
    measured = ROW | {"mfu_pct": "40", "mem_kind": "max_allocated"}
    rows = [measured | {"id": name, "set": name} for name in ("near", "far", "other")]
    near, far, other = (planner_rows.Run(row, job, 20.0, 1000.0) for row in rows)
    group = planner_intervals.Group([(near, 1.0), (far, 2.0), (other, 1.0)], (0.8, 1.2), [True, False, True], 3, 0.7)
    monkeypatch.setattr(strangers, "strangers", lambda: [near, far])
    monkeypatch.setattr(strangers, "groups", lambda what: {"all": group})
    monkeypatch.setattr(strangers, "other_programs", lambda: replace(group, between=(0.5, 2.0)))
    counts = [line.split(" | ") for line in strangers.coverage().splitlines()[2:]]
    kinds = {f"| {what}" for what in (strangers.ALLOCATED, strangers.SHOWN, strangers.FIRST_SIGHT, "time")}
    assert {line[0] for line in counts} == kinds
    for line in counts:
        assert line[2:] == ["2", "2", "1 (50%)", "4.00 |" if line[0] == f"| {strangers.FIRST_SIGHT}" else "1.50 |"]


def test_an_interval_of_memory_is_one_of_what_was_measured():
    """What torch allocates is not what it reserves: no run is in both."""
    runs = {what: {run.name for run in planner_intervals.measured(what)} for what in ("memory", "device")}
    assert all(runs.values()) and not runs["memory"] & runs["device"]


@pytest.mark.slow
def test_intervals_hold_sources_left_out_and_are_no_wider_than_that_needs():
    """Each source weighs alike: of all, and of those to whose rows no constant is fitted."""
    new = {run.name for run in planner_rows.strangers()}
    for what, widest in (("memory", 1.6), ("device", 2.0), ("time", 1.8)):
        inside, wide = planner_intervals.within(what), planner_intervals.widths(what)
        runs = [run for run in [*planner_rows.runs(), *planner_rows.strangers()] if run.name in inside]
        held = planner_intervals.covered([inside[run.name] for run in runs], [run.source for run in runs])
        assert 0.75 <= held <= 0.92, what
        assert statistics.median(wide[run.name] for run in runs) <= widest, what
        seen = [run for run in runs if run.name in new]
        assert len({run.source for run in seen}) >= planner_intervals.ENOUGH, what
        assert planner_intervals.covered([inside[run.name] for run in seen], [run.source for run in seen]) >= 0.7, what


def test_a_baseline_of_three_formulas_is_worse_than_the_planner():
    for what in ("memory", "device", "time"):
        strange = {run.name for run in planner_rows.strangers()}
        runs = [run for run, _ in baseline.group(what).rows if run.name in strange]
        ours, theirs = (
            statistics.median(abs((of.speed_error(run) if what == "time" else of.memory_error(run)) - 1) for run in runs)
            for of in (SimpleNamespace(speed_error=lambda run: planner_rows.speed_error(run, {}),
                                       memory_error=planner_rows.memory_error), baseline)
        )  # fmt: skip
        assert ours < theirs, what


def test_samples_of_varying_length_leave_blocks_behind(monkeypatch):
    """By the median of padded runs; TRL's rows, to which it is not fitted, are nearer with it. PEFT's empty the cache."""
    assert pytest.approx(varying.beyond_fragmentation(), abs=0.05) == formulas.VARYING
    runs = [run for run in planner_rows.strangers() if run.job.varying]
    assert {run.source for run in runs} == {"trl-colab"}

    def off():
        return [abs(planner_rows.memory_error(replace(run, job=table.expressed(run.row).job)) - 1) for run in runs]

    near = off()
    monkeypatch.setattr(formulas, "VARYING", 0.0)
    assert statistics.median(near) < 0.5 * statistics.median(off())


def test_other_programs_have_what_was_said_at_first_sight():
    """Not what is said since their code was read: another program's has not been."""
    seen, known = dict(planner_intervals.first_seen()), planner_rows.first_sight()
    assert len(seen) > 90 and all(run.says_what for run in seen)
    soon = {run.name: ratio for run, ratio in seen.items()}
    now = {run.name: planner_rows.memory_error(run) for run in seen}
    assert soon["kempnerforge-014"] < 0.4 < 0.9 < now["kempnerforge-014"]
    assert {row["round"] for row in known.values()} == {"1", "2", "3"}


def test_each_refinement_that_is_switched_off_has_a_row_and_is_on_again(monkeypatch):
    assert {*ablations.ABLATIONS} < {row["without"] for row in pages.read(ablations.FILE)}
    monkeypatch.setattr(ablations, "fit", lambda training: {"A100": 0.5})
    before, share = constants.CONSTANTS, hardware.gpu("A100 80GB").sustained
    launching, held = before.launch_seconds, ENGINES["zero"].host_sharded
    with ablations.without("launch-bound Python"):
        assert before.launch_seconds == 0 and hardware.gpu("A100 80GB").sustained == 0.5
    with ablations.without("launching under ZeRO-3 and FSDP2 takes longer"):
        assert ENGINES["zero"].host_sharded == 1 and before.launch_seconds == launching
    with ablations.without("attention's own rates"):
        assert not hardware.gpu("A100 80GB").attention_tflops
    assert before.launch_seconds == launching and ENGINES["zero"].host_sharded == held
    assert hardware.gpu("A100 80GB").sustained == share and hardware.gpu("A100 80GB").attention_tflops
