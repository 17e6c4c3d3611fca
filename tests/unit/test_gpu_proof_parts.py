"""The parts of `make test-gpu` without a GPU: those that crash, hang, are cut off or say nothing, and what they try."""

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_proof import __main__ as command
from benchmarks.gpu_proof import environment, kernels, parts, shapes, strategies, subject
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
from brigade.train.watch import slow_ranks
from testing import gpu_lane, runs
from testing.gpu_proof_row import ROW


def python(tmp_path, body):
    """A program in Python's place: it gets the words of a part's process."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\nimport os, subprocess, sys, time\nrows = sys.argv[sys.argv.index('--rows') + 1]\n{body}\n"
    )
    path.chmod(0o755)
    return str(path)


def run(tmp_path, body, limit=50.0):
    return parts.run_part(parts.Part("kernels", "", limit), python(tmp_path, body), tmp_path, limit, False, 1)


WRITE = f"open(rows, 'a').write({json.dumps(json.dumps(ROW) + chr(10))})\n"


def test_what_a_part_has_proven_before_it_crashes_stays(tmp_path):
    found = run(tmp_path, WRITE + "sys.stderr.write('RuntimeError: NCCL went away\\nbye\\n')\nos._exit(7)")
    assert found["rows"] == [ROW]
    assert found["fell_short"] == "ended with exit code 7: RuntimeError: NCCL went away"


def test_a_part_ends_by_itself_before_it_is_stopped_however_long_its_imports_take(tmp_path):
    """Its time began when it had imported torch: what was cut off counted as a part that had to be stopped, which fell short."""
    told = "until = float(sys.argv[sys.argv.index('--until') + 1])\nprint(until - time.monotonic())\n"
    seconds = float(run(tmp_path, told)["fell_short"].removeprefix("left no result: "))
    assert 0 < seconds < 50 - parts.ENDING and parts.ENDING > 2 * parts.GRACE


@pytest.mark.parametrize("names, minutes, limits", [
    ([], 20, [90, 330, 240, 420, 180, 150]),
    ([], 80, [306, 1123, 817, 1430, 613, 511]),
    (["strategies"], 20, [257, 943]),  # which 330 s cut off
    (["strategies"], 5, [90, 330]),  # until the five minutes are over
])  # fmt: skip
def test_a_part_that_is_run_again_by_itself_has_the_time_of_those_that_are_not_run(names, minutes, limits):
    chosen = [part for part in parts.PARTS if not names or part.name in ("machine", *names)]
    assert [round(each) for each in parts.seconds_of(chosen, minutes * 60).values()] == limits


@pytest.mark.parametrize("passed, ended, told", [
    (0, "stopped after 100 seconds", ("stopped after 100 seconds", "")),
    (60, "stopped after 40 seconds", ("", "cut off: stopped after 40 seconds")),
    (60, "exit code 1: bad", ("exit code 1: bad", "")),
    (0, "", ("", "")),
])  # fmt: skip
def test_a_run_that_the_end_of_its_part_cuts_off_is_no_failure(passed, ended, told, tmp_path, monkeypatch):
    """One that had most of the part's time takes too long."""
    monkeypatch.setattr(subject, "run", lambda *_: ended)
    part = subject_of(tmp_path, monkeypatch)
    monkeypatch.setattr(subject.time, "monotonic", lambda: 1000.0 + passed)
    assert part.run(["x"], "name") == told


def started(monkeypatch, tmp_path, until):
    """The words of a part's process."""
    words = ["x", "--rows", str(tmp_path / "rows"), "--work", str(tmp_path), "--until", str(until)]
    monkeypatch.setattr(sys, "argv", words)


def subject_of(tmp_path, monkeypatch):
    """A part that has 100 seconds."""
    monkeypatch.setattr(subject.time, "monotonic", lambda: 1000.0)
    started(monkeypatch, tmp_path, 1100)
    return subject.Subject("")


def test_what_a_gpu_is_too_slow_for_does_not_begin(tmp_path, monkeypatch):
    """A run without half of the part's time left was cut off, one with more of it fell short, both at the part's end."""
    part = subject_of(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(slow_ranks, "seconds_of_a_product", lambda: 2 * slow_ranks.GPU[1] ** 3 / 1e12)
    monkeypatch.setattr(subject.subprocess, "run", in_this_process)
    assert part.speed == pytest.approx(1e12)
    assert part.too_slow(99e12) == ""
    assert part.too_slow(4e15) == "too slow: its products alone take 1 h 6 min, and 1 min 40 s are left"
    monkeypatch.setattr(slow_ranks, "seconds_of_a_product", lambda: 0.0)
    unknown = subject_of(tmp_path, monkeypatch)
    assert unknown.speed == 0 and unknown.too_slow(4e15) == ""


def in_this_process(command, **_):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(command[-1], {})
    return subprocess.CompletedProcess(command, 0, said.getvalue())


@pytest.mark.parametrize(("model", "method", "operations"), [("0.6b", "full", 1.7e15), ("8b", "lora", 1.5e16)])
def test_the_operations_of_a_shape_are_those_of_its_tokens(model, method, operations):
    assert shapes.operations(f"qwen3-{model}", method, "base") == pytest.approx(operations, rel=0.05)


def test_a_model_is_removed_when_its_last_run_is_over_or_left_out(tmp_path, monkeypatch):
    """One whose last run was left out took the room of the next model."""
    part, models = subject_of(tmp_path / "shapes", monkeypatch), tmp_path / "models"
    part.rows = tmp_path / "rows"
    for name in ("qwen3-1.7b", "run", "data"):
        (models / name).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(shapes, "Subject", lambda _: part)
    monkeypatch.setattr(shapes, "SHAPES", [("qwen3-1.7b", "lora")])
    monkeypatch.setattr(shapes, "option_of", lambda *_: ("base", {}, "does not fit, by plan"))
    shapes.main()
    assert [each.name for each in models.iterdir()] == ["data"]
    (row,) = parts.read_rows(part.rows)
    assert row["left_out"] == "does not fit, by plan"


def test_on_a_gpu_without_bf16_what_needs_it_is_left_out_and_all_else_runs_in_fp32(tmp_path, monkeypatch):
    """train.py refuses bf16 there, so that each of these runs fell short on a T4 or a V100."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    part = subject_of(tmp_path, monkeypatch)
    flags = part.flags("zero3", tmp_path)
    assert flags[flags.index("--bf16") + 1] == "false" and part.speed == 0
    begun = []
    monkeypatch.setattr(strategies, "prepared", lambda cases, *_: cases)
    monkeypatch.setattr(strategies, "group", lambda ranks, cases, *_, **__: begun.extend(cases) or iter(()))
    cases = strategies.cases_of(2, small=False)
    left_out = {each["name"]: log for each, log in strategies.all_of(2, cases, tmp_path, part)}
    assert set(left_out) == {each["name"] for each in cases if each["precision"] == "bf16"} != set()
    assert {each["precision"] for each in begun} == {"fp32", "fp16"} and len(begun) + len(left_out) == len(cases)
    for each in cases:
        if each["name"] in left_out:
            strategies.judge(part, each, each["name"], left_out[each["name"]], None, 2)
    told = {(row["fell_short"], row["left_out"]) for row in parts.read_rows(part.rows)}
    assert told == {("", "Tesla T4 has no bf16")}


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LEAST", 0)
    monkeypatch.setattr(parts, "GRACE", 0.3)
    ignores = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid()"
    ignores += "; print('OSError: of long ago'); print('hanging in', flush=True); time.sleep(60)"
    hangs = f"child = subprocess.Popen([sys.executable, '-c', {ignores!r}])\nopen('child', 'w').write(str(child.pid))\n"
    began = time.monotonic()
    found = run(tmp_path, f"os.chdir({str(tmp_path)!r})\n{WRITE}{hangs}time.sleep(60)", limit=3.0)
    assert time.monotonic() - began < 30 and found["rows"] == [ROW]
    assert found["fell_short"] == "stopped after 3 seconds; its last line: hanging in"
    pid, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 5
    with contextlib.suppress(FileNotFoundError):  # gone, or nobody has asked for its end yet
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, "the child still runs"


def test_a_part_without_a_result_fell_short_and_one_without_time_is_not_begun(tmp_path):
    assert run(tmp_path, "print('nothing to say')")["fell_short"] == "left no result: nothing to say"
    part = parts.Part("kernels", "", 20.0)
    late = parts.run_part(part, "/no/such/python", tmp_path, 3.0, True, 1)
    assert late["left_out"].startswith("not begun") and not late["fell_short"], "no time is no failure"


def test_what_an_earlier_proof_has_left_is_no_result_of_this_one_and_a_users_folder_stays(tmp_path):
    earlier, own = tmp_path / parts.WORK / "kernels" / "zero3.result.json", tmp_path / "kernels" / "own.txt"
    for file in (earlier, own):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    run(tmp_path, WRITE)
    assert not earlier.exists() and own.exists()


def test_a_command_to_repeat_names_no_folder_of_this_host(monkeypatch):
    words = ["-m", "brigade", "kernels", f"{parts.REPOSITORY}/recipes/tiny/full.yaml"]
    names = {f"{parts.REPOSITORY}/.venv/bin/python": ".venv/bin/python", "/opt/other/bin/python": "python3"}
    for python, named in names.items():
        monkeypatch.setattr(sys, "executable", python)
        assert subject.command(words) == f"{named} -m brigade kernels recipes/tiny/full.yaml"


def test_kernels_that_are_not_reached_in_time_leave_rows_beside_those_that_are_proven(tmp_path, monkeypatch):
    late = {"status": "failed", "why": "not reached within 144 s"}
    proof = {"paths": {"sdpa": {"status": "proven", "ms": 1.5}, "flex_attention": late}}
    asked = []

    def proved(command, timeout, **_):
        asked.append((float(command[command.index("--seconds") + 1]), timeout))
        return subprocess.CompletedProcess(command, 1, f"{json.dumps(proof)}\n")

    monkeypatch.setattr(kernels.subprocess, "run", proved)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    started(monkeypatch, tmp_path, time.monotonic() + 240)
    kernels.main()
    ((seconds, until),) = asked
    assert 0 < seconds < until - 60 and until < 240, "before it is ended, its imports included"
    found = parts.read_rows(tmp_path / "rows")
    assert [(row["fell_short"], row["left_out"]) for row in found] == [("", ""), ("", parts.NOT_BEGUN)]


def test_kernels_are_proven_with_the_config_beside_the_recipe():
    """On a fresh host the Hub's cache is empty, and parts do not ask the Hub."""
    settings = flags.load(["--recipe", *kernels.RECIPE])
    assert Path(settings.recipe.model.model_name_or_path).parts[-2:] == settings.recipe_path.parts[-3:-1]
    config = load_config(settings)
    assert (config.model_type, config.num_hidden_layers) == ("qwen3", 28)


def test_why_kernels_came_to_nothing_is_the_last_word_of_their_process(tmp_path, monkeypatch):
    def died(command, stderr, **_):
        stderr.write("loading\nerror in recipe:\n  no such file\n  cure: name another\n")
        return subprocess.CompletedProcess(command, 2, "")

    monkeypatch.setattr(kernels.subprocess, "run", died)
    started(monkeypatch, tmp_path, time.monotonic() + 240)
    with pytest.raises(RuntimeError, match="exit code 2: error in recipe: no such file cure: name another"):
        kernels.main()


def test_a_row_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "rows").write_text(json.dumps(ROW) + '\n{"what": "ze')
    assert parts.read_rows(tmp_path / "rows") == [ROW]


# ---- subjects --------------------------------------------------------------------------------------------------------
def test_a_difference_counts_held_out_losses_and_needs_as_many():
    log = [{"loss": 2.0}, {"eval_loss": 4.0}]
    assert strategies.difference([{"loss": 2.0}, {"eval_loss": 4.1}], log) == pytest.approx(0.025)
    with pytest.raises(ValueError, match="0 values of eval_loss"):
        strategies.difference(log[:1], log)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_case_has_a_reference_one_name_and_the_global_batch(ranks):
    cases = strategies.cases_of(ranks, small=False)
    names = {each["name"] for each in strategies.references(small=False)}
    assert {each["reference"] for each in cases} <= names
    assert not names & {each["name"] for each in cases}
    assert len({each["name"] for each in cases}) == len(cases)
    for each in cases:
        lane = gpu_lane.CASES[each["name"].removesuffix(" resumed")]
        micro = int(each["flags"][each["flags"].index("--per_device_train_batch_size") + 1])
        assert runs.GLOBAL_BATCH % (micro * ranks // lane.divided) == 0
        assert each["flags"].count("--attn_implementation") == 1, "with `auto` each run would prove all kernels first"


def test_the_command_needs_the_standard_library_only():
    """It has to say what is missing where nothing is installed."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import sys; import benchmarks.gpu_proof.__main__; print('numpy' in sys.modules)"],
        cwd=environment.REPOSITORY, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "False\n", done.stderr


def test_the_cases_are_those_of_the_gpu_lane_that_these_ranks_can_be_divided_into():
    names = {ranks: [each["name"] for each in strategies.cases_of(ranks, small=False)] for ranks in (1, 2, 4)}
    assert set(names[4]) == {*gpu_lane.CASES, "zero3 resumed"}
    assert "zero1 tensor" in names[2] and not {"3D", "hsdp", "fsdp2 tensor"} & set(names[2])
    assert {"zero3", "fsdp2", "zero3 lora"} < set(names[1]) < set(names[2])
    assert not [name for name in names[1] if name.startswith("ddp") or "tensor" in name or "pipeline" in name]


@pytest.mark.parametrize("log, why", [
    (
        "Traceback\nModuleNotFoundError: No module named 'httpx'\nE1126 torch/distributed/elastic/api.py:9] failed\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n",
        "ModuleNotFoundError: No module named 'httpx'",
    ),
    (
        "error in recipe.yaml\n  training.bf16: no\n  cure: yes\nE1126 torch/distributed/elastic/api.py:9] failed\n",
        "error in recipe.yaml training.bf16: no cure: yes",
    ),
    ("loading\nat step 3\n", "at step 3"),
    ("", "it wrote nothing"),
])  # fmt: skip
def test_why_a_process_ended_is_its_own_word_and_not_that_of_torchrun(tmp_path, log, why):
    (tmp_path / "log").write_text(log)
    assert parts.why_it_ended(tmp_path / "log") == why


def test_versions_that_cannot_be_imported_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "installed", lambda _: environment.pinned() | {"transformers": "5.17.0"})
    monkeypatch.setattr(environment, "IMPORTED", ("json", "no_such_module"))
    assert command.main(["--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "with transformers 5.17.0 a run cannot begin: ModuleNotFoundError: No module named 'no_such_module'" in said
    assert "cure: install what that version requires" in said
