"""A run writes its own page: renewed at evaluations, at its end, and when it fails; and goes on where that fails."""

import sys

import pytest

import train
from brigade.report import records
from brigade.train.distributed import ranks
from brigade.train.distributed.process import this_process
from brigade.train.recipe.files import read_yaml
from brigade.train.run import page
from testing import runs
from testing.command_line import as_flags

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    shared = runs.write_inputs(tmp_path_factory.mktemp("inputs"))
    return [*shared, "--max_steps", "6", "--eval_steps", "2", "--save_steps", "3", "--report_page", "true"]


@pytest.fixture
def begun(monkeypatch):
    """The pages that were begun, and what had been logged by then."""
    found, start = [], page._start

    def note(directory):
        found.append((directory / "events.jsonl").read_text().count('"event": "evaluation"'))
        return start(directory)

    monkeypatch.setattr(page, "_start", note)
    return found


def test_a_run_has_a_page_that_says_what_it_recorded(flags, tmp_path, begun, capsys):
    output = tmp_path / "run"
    train.main([*flags, "--profile", "{start: 3, steps: 1}", "--output_dir", str(output)])
    assert f"How it went, for the browser: {output}/report.html." in capsys.readouterr().out
    assert begun == [2, 4], "the first evaluation with a step; the next came too soon; the end"
    text = (output / "report.html").read_text()
    assert 'class="verdict succeeded"' in text and "Content-Security-Policy" in text
    (record,) = records.read_records([output])
    last = record.steps[-1]
    kept = "grad_norm learning_rate tokens_per_second_per_gpu seconds_forward seconds_backward tokens"
    assert all(last[key] > 0 for key in kept.split()), last
    parts = [step[f"seconds_{part}"] for step in record.steps for part in ("data", "forward", "backward", "optimizer")]
    assert sum(parts) == pytest.approx(sum(step["step_time"] for step in record.steps), rel=0.5)
    assert record.checkpoints == [3, 6] and not record.notes
    (began,) = records.events_of(record, "first step")
    phases = began["phases"]
    ends = [phase["began"] + phase["seconds"] for phase in phases]
    assert [phase["began"] for phase in phases] == pytest.approx([0.0, *ends[:-1]], abs=0.002), "without a gap"
    assert ends[-1] == pytest.approx(began["seconds"], abs=0.01) and began["step"] == 1
    names = [phase["name"] for phase in phases]
    assert [name for name in names if name in ("settings", "data", "model", "first evaluation", "first step")] == [
        "settings", "data", "model", "first evaluation", "first step",
    ], "as long as the process was not started for the run, its start is not counted"  # fmt: skip
    assert "starting Python" not in names and not this_process.timeline.end(), "nothing is taken down after it"
    (traced,) = records.events_of(record, "profile")
    assert (traced["step"], traced["rank"]) == (3, 0) and (output / "profile" / "rank-0.json.gz").stat().st_size > 1000
    assert traced["parts"]["computing"] > 0 and len(traced["kernels"]) == 5
    assert "Longest operations" in text and "Traced steps" in text


def test_memory_is_measured_by_part(flags, tmp_path):
    output = tmp_path / "run"
    train.main([*flags, *as_flags(max_steps=10, save_steps=None, report_page=False, output_dir=str(output))])
    parts = read_yaml(output / "run.yaml")["run"]["prediction"]["measured"]["parts"]
    assert parts["weights"] == parts["gradients"] == pytest.approx(parts["optimizer"] / 2, rel=0.01)
    assert parts["peak"] > sum(parts[name] for name in ("weights", "gradients", "optimizer"))
    assert not (output / "report.html").exists()


def test_a_run_that_fails_has_a_page_with_the_verdict(flags, tmp_path, monkeypatch):
    class Left(Exception):
        pass

    def leave(code):
        raise Left

    output = tmp_path / "run"
    monkeypatch.setattr(ranks.os, "_exit", leave)
    with pytest.raises(Left):
        train.main([*flags, "--learning_rate", "1e30", "--warmup_steps", "0", "--output_dir", str(output)])
    this_process.signals.leaving.release()
    text = (output / "report.html").read_text()
    assert 'class="verdict failed"' in text and "It failed at step 1 of 6: rank 0 on" in text
    assert "not finite" in text


def test_an_error_in_the_page_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert not page.write(tmp_path)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert not page.write(tmp_path)
    said = capsys.readouterr().err
    assert said.count("warning: no page of") == 2


def test_a_page_that_hangs_is_given_up(tmp_path, monkeypatch, capsys):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert not page.write(tmp_path, limit=0.2)
    assert "was not written within" in capsys.readouterr().err
