"""What `python -m brigade report` reads, compares and writes. The page in a browser: test_report_browser.py."""

import csv
import fcntl
import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from brigade.__main__ import main
from brigade.report import charts, comparing, facts, figures, page, records
from brigade.train.run import events
from brigade.train.run import page as run_page
from brigade.train.step.report_events import ReportEvents
from brigade.train.strategy import Strategy
from testing.recorded import append, write_run

SCRIPT = "<script>window.hacked = 1</script>"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def read(*directories):
    return records.read_records(list(directories))


# ---- reading -----------------------------------------------------------------------------------------------------
def test_a_restart_replaces_the_steps_that_it_trained_anew_and_is_counted(run):
    for event in (
        {"event": "failed", "text": "rank 1 on node2: killed", "time": "2026-01-02T03:06:00+00:00"},
        {"event": "started", "step": 180, "hosts": ["node1"], "time": "2026-01-02T03:07:25.2+00:00"},
        {"event": "step", "step": 181, "loss": 7.5, "time": "2026-01-02T03:07:26+00:00"},
    ):
        append(run, **event)
    (run / "success.json").unlink()
    (record,) = read(run)
    assert [entry["step"] for entry in record.steps][-2:] == [180, 181] and record.steps[-1]["loss"] == 7.5
    first, second = records.attempts(record)
    assert (first.ended_by, second.step, second.lost) == ("rank 1 on node2: killed", 180, 20)
    assert second.idle == pytest.approx(120, abs=1)
    assert record.verdict == ("ended", "It ended before its end, at step 181 of 200, and left no word why: it was killed, "
                              "or its host went away.")  # fmt: skip


def test_figures_that_only_the_log_has_outlive_a_restart(run):
    log = {"step": 200, "eval_loss": 0.7, "eval_rewards/accuracies": 0.9}
    (run / "trainer_state.json").write_text(json.dumps({"log_history": [log]}))
    append(run, event="started", step=180)
    append(run, event="evaluation", step=200, loss=0.7)
    last = read(run)[0].evaluations[-1]
    assert (last["step"], last["loss"], last["rewards/accuracies"]) == (200, 0.7, 0.9)


def test_the_verdict_of_a_run_that_failed_is_its_last_word(run):
    (run / "success.json").unlink()
    append(run, event="failed", step=200, text="rank 1 on node2: CUDA out of memory")
    assert read(run)[0].verdict == ("failed", "It failed at step 200 of 200: rank 1 on node2: CUDA out of memory")


@pytest.mark.parametrize("name, content, note", [
    ("events.jsonl", '{"event": "step", "st', "events.jsonl: 1 line of it is broken"),
    ("events.jsonl", '[1]\n"step"\n', "events.jsonl: 2 lines of it are broken"),
    ("answers.jsonl", "\x00\xff{", "answers.jsonl: 1 line of it is broken"),
    ("trainer_state.json", '{"log_history": [', "trainer_state.json is broken"),
    ("run.yaml", "run: [", "run.yaml"),
    ("run.yaml", "- 1\n", "holds a list"),
])  # fmt: skip
def test_what_is_broken_is_named_and_the_rest_is_shown(run, name, content, note):
    with (run / name).open("a" if name.endswith("l") and "run" not in name else "w") as file:
        file.write(content)
    (record,) = read(run)
    assert any(note in said for said in record.notes), record.notes
    assert len(record.steps) == 200 and page.html([record])


@pytest.mark.parametrize("loss", [None, "abc", [1], {}, True, 10**400, -0.0])
def test_a_log_may_hold_anything(run, loss):
    append(run, event="step", step=201, loss=loss, tokens=loss, seconds_data=loss, steps=loss)
    append(run, event="evaluation", step="later", loss=loss)
    append(run, event="started", step=None, hosts="node1")
    append(run, event="checkpoint", step=loss, bytes=loss)
    assert page.html(read(run))


def test_a_run_of_plain_transformers_is_shown_as_far_as_it_goes(tmp_path):
    log = [{"step": n, "loss": 3.0 / n, "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": n / 10} for n in range(1, 6)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*log, {"step": 5, "eval_loss": 0.7}]}))
    (record,) = read(tmp_path)
    assert len(record.steps) == 5 and record.evaluations[0]["loss"] == 0.7
    assert "There is no readable run.yaml" in record.notes[0] and page.html([record])


def test_a_directory_without_a_run_is_refused_in_words(tmp_path, mistake):
    assert "there is no such directory" in mistake(read, tmp_path / "none")
    (tmp_path / "one.yaml").touch()
    assert "it is a file, not a directory" in mistake(read, tmp_path / "one.yaml")
    assert "it has neither run.yaml, events.jsonl nor trainer_state.json" in mistake(read, tmp_path)
    assert main(["report", str(tmp_path)]) == 2


def test_files_of_another_user_are_refused_in_words(run, mistake):
    run.chmod(0o700)
    me = os.geteuid()
    if me:
        run.chmod(0)
    else:
        os.seteuid(65534)
    try:
        said = mistake(read, run)
    finally:
        os.seteuid(me)
        run.chmod(0o700)
    assert "Permission denied" in said


def test_a_run_that_has_not_logged_yet_has_a_page(tmp_path):
    write_run(tmp_path / "run", steps=1, ended="")
    (tmp_path / "run/events.jsonl").unlink()
    (record,) = read(tmp_path / "run")
    assert "No step has been logged yet." in record.notes and "Nothing of it was logged." in page.html([record])


# ---- figures -----------------------------------------------------------------------------------------------------
def test_thinning_keeps_every_spike():
    values = np.sin(np.arange(100_000) / 500).tolist()
    values[31_234], values[77_777], values[50_000] = 99.0, -99.0, math.nan
    places = charts.kept(values, 1_000)
    assert {0, 31_234, 50_000, 77_777, 99_999} <= set(places) and len(places) < 1_100
    assert figures.running_mean([1.0, math.nan, 3.0, 5.0], 2)[1:] == [1.0, 3.0, 4.0]


def test_values_that_are_no_numbers_are_gaps_that_are_named(run):
    append(run, event="step", step=201, loss=math.nan, grad_norm=math.inf, tokens_per_second_per_gpu=-math.inf)
    loss = figures.all_figures(read(run))[0]
    assert loss.broken == ["training: 1 values are NaN or infinite, the first at step 201"]
    text = charts.text_of(charts.chart(loss))
    assert "NaN" not in text and '"value":null' in text
    assert "the first at step 201" in page.html(read(run))


def test_time_and_memory_are_told_by_part(run):
    found = {figure.name: figure for figure in figures.all_figures(read(run))}
    (bar,) = found["time"].bars
    assert bar.parts["forward"] == pytest.approx(24) and bar.parts["evaluation"] == pytest.approx(16.5)
    assert bar.parts["checkpoint"] == pytest.approx(3.0)
    measured, planned = found["memory"].bars
    parts = {"weights": 0.4, "gradients": 0.4, "optimizer": 0.8, "everything else": 0.15}
    assert measured.parts == pytest.approx(parts)
    assert planned.parts["activations"] == 0.1


def test_a_start_is_told_by_phase(run):
    append(run, event="first step", step=181, seconds=2.0, phases=[
        {"name": "imports", "began": 0.0, "seconds": 0.5}, {"name": "rendezvous", "began": 0.5, "seconds": 1.0},
        {"name": "imports", "began": 1.5, "seconds": 0.5},
    ])  # fmt: skip
    append(run, event="first step", step=190, seconds=2.0, phases=[{"name": "imports", "began": 0.0, "seconds": "two"}])
    (start,) = (figure for figure in figures.all_figures(read(run)) if figure.name == "start")
    first, again, broken = start.bars
    assert (first.name, list(first.parts)[-1], first.parts["the rest"]) == ("start 1", "the rest", pytest.approx(0.02))
    assert sum(first.parts.values()) == pytest.approx(9.5) and again.parts == {"imports": 1.0, "rendezvous": 1.0}
    assert not broken.parts
    assert "Until the first step" in page.html(read(run))


def test_pictures_and_csv_files_hold_the_same_figures(run, prints):
    append(run, event="step", step=201, loss=123.5, tokens=1)
    said = prints(0, "report", str(run))
    assert f"{run}/report.html" in said and "10 figures, each as PNG and CSV" in said
    folder = run / "report_files"
    assert (folder / "training-loss.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((folder / "training-loss.csv").open()))
    of_run = [row for row in rows if row["line"] == "training"]
    assert len(of_run) == 201 and float(of_run[-1]["training loss"]) == 123.5


# ---- several runs ------------------------------------------------------------------------------------------------
def test_what_differs_comes_first(tmp_path):
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", changes={"training": {"learning_rate": 1e-3}}, commit="abc")
    head, rows = comparing.differences(read(one, two))
    assert head == ["key", "one", "two"]
    assert rows == [["training.learning_rate", "0.003", "0.001"], ["commit", "0123456789ab", "abc"]]


def test_a_difference_is_told_with_an_interval_that_holds_it(tmp_path):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", lower=0.05)
    conclusion, training, held_out = comparing.verdict(*read(one, two))
    assert conclusion == "two and one: two has the lower loss."
    low, high = (float(word) for word in training.removesuffix(".").rpartition("interval ")[2].split(" to "))
    assert low < -0.05 < high < 0 and high - low < 0.02 and "evaluations" in held_out


def test_what_the_data_cannot_tell_is_said(tmp_path):
    one, two = write_run(tmp_path / "one", seed=1), write_run(tmp_path / "two", lower=0.003, seed=2)
    assert comparing.verdict(*read(one, two))[0] == "two and one: the data cannot tell which loss is lower."
    short = write_run(tmp_path / "short", steps=8, evaluate=4)
    said = comparing.verdict(*read(one, short))
    assert "too little was logged" in said[0] and "too few for an interval" in said[1]
    other = write_run(tmp_path / "other", lower=1.0, data="0" * 16)
    (refused,) = comparing.verdict(*read(one, other))
    assert "different data" in refused


@pytest.mark.parametrize("one, two, said", [
    ({"objective": "dpo"}, {"objective": "ipo"}, "different losses (objective), which cannot"),
    ({"objective": "dpo"}, {"objective": "dpo", "loss_type": "hinge"}, "different losses (loss_type), which cannot"),
    ({"objective": "dpo"}, {"objective": "dpo", "beta": 0.5, "label_smoothing": 0.1},
     "different losses (beta and label_smoothing), which cannot"),
    ({"objective": "dpo"}, {"objective": "dpo", "beta": 0.1, "loss_type": "sigmoid"}, "has the lower loss"),  # the defaults
    ({"objective": "dpo"}, {"objective": "dpo", "share_prompts": False, "reference": "model"}, "has the lower loss"),
    ({"objective": "dpo"}, {"objective": "dpo", "reference": "a/model"}, "different losses (reference), which cannot"),
    ({}, {"label_smoothing_factor": 0.1}, "has the lower loss"),  # held-out loss is the cross-entropy
    ({}, {"neftune_noise_alpha": 5.0}, "has the lower loss"),  # noise is in training alone
    ({}, {"objective": "distill", "teacher": "somebody/else"}, "has the lower loss"),
])  # fmt: skip
def test_losses_are_compared_where_they_are_the_same(tmp_path, one, two, said):
    first = write_run(tmp_path / "one", changes={"training": one})
    second = write_run(tmp_path / "two", lower=0.05, changes={"training": two})
    conclusion, *reasons = comparing.verdict(*read(first, second))
    assert said in conclusion
    if {"label_smoothing_factor", "neftune_noise_alpha", "teacher"} & two.keys():
        assert "Training loss: they minimise different losses" in reasons[0] and "95 % interval" in reasons[1]


def test_held_out_losses_of_other_samples_are_not_compared(tmp_path):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", lower=0.05)
    for run, counts in ((one, (2000,) * 21), (two, (9, *(5000,) * 20))):
        lines, left = map(json.loads, (run / "events.jsonl").read_text().splitlines()), iter(counts)
        counted = [line | ({"samples": next(left)} if line["event"] == "evaluation" else {}) for line in lines]
        (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in counted))
    conclusion, training, held_out = comparing.verdict(*read(one, two))
    assert held_out == "Held-out loss: it is of 2,000 and 5,000 samples, and cannot be compared (max_eval_samples)."
    assert conclusion == "two and one: two has the lower loss." and "95 % interval" in training


def test_runs_with_other_batches_are_compared_at_the_same_tokens(tmp_path):
    one = write_run(tmp_path / "one", noise=0.001)
    two = write_run(tmp_path / "two", steps=400, noise=0.001, changes={"training": {"global_batch_size": 8}})
    lines = (json.loads(line) for line in (two / "events.jsonl").read_text().splitlines())
    halved = [line | ({"tokens": line["tokens"] / 2} if "tokens" in line else {}) for line in lines]
    (two / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in halved))
    assert "(by tokens)" in comparing.verdict(*read(one, two))[1]


def test_nine_in_ten_intervals_or_more_hold_the_truth():
    """The noise is autocorrelated, so that the usual standard error would be too small."""
    draw = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        noise = np.convolve(draw.normal(0, 1, 130), np.ones(6) / 6, "valid")
        low, high = comparing.interval(noise[:120] + 0.2)
        held += low < 0.2 < high
    assert held >= 90, held


def test_an_interval_is_that_of_all_drawn_values_without_a_matrix_of_them():
    values = np.random.default_rng(0).normal(0.2, 1, 500)
    length = 16  # 2 x 500^(1/3)
    starts = np.random.default_rng(0).integers(0, 485, (comparing.DRAWS, 32))
    drawn = values[(starts[:, :, None] + np.arange(length)).reshape(comparing.DRAWS, -1)[:, :500]].mean(axis=1)
    low, high = comparing.interval(values)
    blocks = 500 / length
    reach = np.percentile(np.random.default_rng(0).standard_t(blocks - 1, 40 * comparing.DRAWS), 97.5)
    assert high - low == pytest.approx(2 * reach * drawn.std() * (blocks / (blocks - 1)) ** 0.5)
    tracemalloc.start()
    comparing.interval(np.random.default_rng(0).normal(0, 1, 20_000))
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()


# ---- the page ----------------------------------------------------------------------------------------------------
def test_texts_of_a_run_are_data(tmp_path):
    run = write_run(tmp_path / "run", answer=SCRIPT, changes={"model": {"model_name_or_path": SCRIPT}}, hosts=[SCRIPT])
    text = page.html(read(run))
    assert SCRIPT not in text and text.count("&lt;script&gt;window.hacked") >= 3


def test_answers_of_empty_lines_take_no_room(tmp_path):
    (one, *_) = facts.answers(*read(write_run(tmp_path / "run", answer="x\n\n \n\n\n  y\nz\n\n")))
    assert one["answers"][0][1].endswith("x\n\n  y\nz")


def test_a_page_is_written_over_and_no_other_file(run, mistake, tmp_path):
    for _ in range(2):
        page.write(read(run), tmp_path / "page.html")
    mine = tmp_path / "thesis.html"
    mine.write_text("<p>years of work")
    assert "this file is no page of a run" in mistake(page.write, read(run), mine)
    assert "cannot be written" in mistake(page.write, read(run), tmp_path / "no/such/folder.html")
    mistake(page.write_files, read(run), run / "run.yaml")


def test_the_commands_that_repeat_a_run_are_ones_that_exist(run):
    (record,) = read(run)
    checkout, start = facts.repeat(record)
    assert checkout == "git checkout 0123456789ab"
    command = f"train.py --recipe {run}/run.yaml --output_dir {run}-again"
    assert start == f"torchrun --master_port 29500 --nproc_per_node 2 {command}"
    record.run["hosts"] = ["node1", "node2"]
    _, hosts, start = facts.repeat(record)
    assert hosts == r"printf '%s\n' 'node1 slots=1' 'node2 slots=1' > hostfile"
    assert start.startswith(f"python -m brigade launch {run}/run.yaml --hostfile hostfile --output_dir ")
    record.run["ranks"] = 3
    _, hosts, start = facts.repeat(record)
    assert (
        hosts == "# write hostfile: node1 node2 had 3 slots in all, not as many each" and "--hostfile hostfile" in start
    )
    record.run.update(ranks=2, replicas=2)  # of two ranks each
    assert r"printf '%s\n' 'node1 slots=2' 'node2 slots=2' > hostfile" in facts.repeat(record)
    assert facts.summary(record)["ranks"].startswith("4 on node1, node2")
    assert ["ranks", "4"] in facts.surroundings(record)[1]


def test_names_tell_runs_apart_by_as_little_as_needed(tmp_path):
    one, two = write_run(tmp_path / "a/run", steps=1), write_run(tmp_path / "b/run", steps=1)
    assert [record.name for record in read(one, two)] == ["a/run", "b/run"]
    assert [record.name for record in read(one, one)] == ["run (1)", "run (2)"]


def test_a_missing_library_names_the_command(monkeypatch, mistake):
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    assert "pip install vl-convert-python" in mistake(page.library.javascript)


@pytest.mark.parametrize(
    "seconds, words", [(0.5, "0.5 s"), (125, "2 min 5 s"), (3 * 3600 + 60, "3 h 1 min"), (90_000, "1 d 1 h")]
)
def test_durations_in_words(seconds, words):
    assert facts.duration(seconds) == words


def test_a_page_reads_when_its_turn_has_come(run, monkeypatch):
    """Else one that was begun earlier, and has to wait for processors, is there in the end."""
    fail = partial(events.add, run, "failed", text="rank 1 on node2: it broke")
    monkeypatch.setattr(fcntl, "flock", lambda *_: fail())
    assert main(["report", str(run), "--page_only"]) == 0
    assert "rank 1 on node2: it broke" in (run / "report.html").read_text()


def test_only_the_page_s_own_time_delays_the_next_one(tmp_path, monkeypatch):
    spin = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"]
    monkeypatch.setattr(run_page, "_start", lambda _: subprocess.Popen(["true"]))
    pages = run_page.Pages()
    pages.renew(tmp_path)
    subprocess.run(spin, check=True)  # a reader of data that ends meanwhile
    os.waitid(os.P_PID, pages.process.pid, os.WEXITED | os.WNOWAIT)
    before = time.monotonic()
    pages.renew(tmp_path)
    assert pages.process is None and 0 < pages.next - before < 0.4 / run_page.SHARE / os.cpu_count()


def test_an_evaluation_after_training_is_an_event_too(tmp_path):
    (tmp_path / "run.yaml").write_text("run: {hosts: [node1]}\n")
    training, strategy = SimpleNamespace(report_page=False), Strategy("ddp", "ddp", "flag")
    settings = SimpleNamespace(recipe=SimpleNamespace(training=training))
    told = ReportEvents(
        SimpleNamespace(directory=tmp_path, strategy=strategy, world=SimpleNamespace(size=1), settings=settings)
    )
    state = SimpleNamespace(global_step=6, max_steps=6)
    told.on_train_begin(None, state, None)
    told.on_train_end(None, state, None)
    found = {"eval_loss": 2.5, "eval_rewards/accuracies": 0.75, "eval_samples": 8}
    told.on_evaluate(
        None, state, None, metrics=found | {"eval_runtime": 1.0, "eval_answers_runtime": 0.5, "epoch": 1.0}
    )
    started, evaluation = events.read(tmp_path)
    assert (started["event"], evaluation["event"], evaluation["seconds"]) == ("started", "evaluation", 1.5)
    # Also before the first checkpoint, with which Trainer's log comes.
    assert {f"eval_{key}": value for key, value in evaluation.items()}.items() >= found.items()
    assert not {"runtime", "answers_runtime", "epoch"} & evaluation.keys()
