"""`make test-gpu` without a GPU: parts that crash, hang or say nothing, versions that differ, the page and the comparison."""

import json
import os
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_proof import __main__ as command
from benchmarks.gpu_proof import archive, disk, environment, kernels, parts, shapes, strategies, subject
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
from testing import gpu_lane, runs

MACHINE = {"gpus": 1, "devices": ["NVIDIA H100 80GB HBM3"], "memory_gib": [79.6]}
ROW = {
    "what": "zero3, 2 GPUs",
    "figures": {"difference": 1e-6, "tokens_per_second": 9000.0},
    "fell_short": "",
    "left_out": "",
    "command": "a",
}


def python(tmp_path, body):
    """A program in Python's place: it gets the words of a part's process."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\nimport os, subprocess, sys, time\nrows = sys.argv[sys.argv.index('--rows') + 1]\n{body}\n"
    )
    path.chmod(0o755)
    return str(path)


def run(tmp_path, body, limit=20.0):
    return parts.run_part(parts.Part("kernels", "", limit), python(tmp_path, body), tmp_path, 1000.0, False, 1)


WRITE = f"open(rows, 'a').write({json.dumps(json.dumps(ROW) + chr(10))})\n"


def test_what_a_part_has_proven_before_it_crashes_stays(tmp_path):
    found = run(tmp_path, WRITE + "sys.stderr.write('RuntimeError: NCCL went away\\nbye\\n')\nos._exit(7)")
    assert found["rows"] == [ROW]
    assert found["fell_short"] == "ended with exit code 7: RuntimeError: NCCL went away"


def test_a_part_that_hangs_is_stopped_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "LEAST", 0)
    monkeypatch.setattr(parts, "GRACE", 0.3)
    ignores = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.setsid()"
    ignores += "; print('hanging in', flush=True); time.sleep(60)"
    hangs = f"child = subprocess.Popen([sys.executable, '-c', {ignores!r}])\nopen('child', 'w').write(str(child.pid))\n"
    began = time.monotonic()
    found = run(tmp_path, f"os.chdir({str(tmp_path)!r})\n{WRITE}{hangs}time.sleep(60)", limit=3.0)
    assert time.monotonic() - began < 30 and found["rows"] == [ROW]
    assert found["fell_short"] == "stopped after 3 seconds; its last line: hanging in"
    pid, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 5
    with suppress(FileNotFoundError):  # gone, or nobody has asked for its end yet
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
    words = ["-m", "brigade.kernels", f"{parts.REPOSITORY}/recipes/tiny/full.yaml"]
    for python, named in (
        (f"{parts.REPOSITORY}/.venv/bin/python", ".venv/bin/python"),
        ("/opt/other/bin/python", "python3"),
    ):
        monkeypatch.setattr(sys, "executable", python)
        assert subject.command(words) == f"{named} -m brigade.kernels recipes/tiny/full.yaml"


def test_kernels_that_are_not_reached_in_time_leave_rows_beside_those_that_are_proven(tmp_path, monkeypatch):
    late = {"status": "failed", "why": "not reached within 144 s"}
    proof = {"paths": {"sdpa": {"status": "proven", "ms": 1.5}, "flex_attention": late}}
    asked = []

    def proved(command, timeout, **_):
        asked.append((float(command[command.index("--seconds") + 1]), timeout))
        return subprocess.CompletedProcess(command, 1, f"{json.dumps(proof)}\n")

    monkeypatch.setattr(kernels.subprocess, "run", proved)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = tmp_path / "rows"
    monkeypatch.setattr(sys, "argv", ["x", "--rows", str(rows), "--work", str(tmp_path), "--seconds", "240"])
    kernels.main()
    ((seconds, until),) = asked
    assert 0 < seconds < until - 60 and until < 240, "before it is ended, its imports included"
    assert [(row["fell_short"], row["left_out"]) for row in parts.read_rows(rows)] == [("", ""), ("", parts.NOT_BEGUN)]


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
    words = ["x", "--rows", str(tmp_path / "rows"), "--work", str(tmp_path), "--seconds", "240"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(RuntimeError, match="exit code 2: error in recipe: no such file cure: name another"):
        kernels.main()


def test_a_row_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "rows").write_text(json.dumps(ROW) + '\n{"what": "ze')
    assert parts.read_rows(tmp_path / "rows") == [ROW]


# ---- the whole command -----------------------------------------------------------------------------------------------
def prove(tmp_path, monkeypatch, results, *words):
    """The command's exit code and report, where the parts give these results."""

    def result(part, *_):
        rows, why = results.get(part.name, ([ROW], ""))
        (tmp_path / f"{part.name}.log").write_text(f"{part.name} said this\n")
        command = f"make test-gpu ONLY={part.name}"
        return {"rows": rows, "seconds": 1.0, "command": command, "fell_short": why, "left_out": ""}

    monkeypatch.setattr(command, "run_part", result)
    versions = environment.pinned()
    monkeypatch.setattr(environment, "choose", lambda *_: ("python", environment.compare(versions)))
    code = command.main(["--output", str(tmp_path), *words])
    return code, json.loads((tmp_path / "report.json").read_text())


def machine(**more):
    return {"machine": ([ROW | {"what": "machine", "figures": MACHINE | more, "command": ""}], "")}


def test_all_held(tmp_path, monkeypatch, capsys):
    code, report = prove(tmp_path, monkeypatch, machine())
    assert code == 0 and list(report["parts"]) == [part.name for part in parts.PARTS] and report["fell_short"] == []
    assert "NVIDIA H100 80GB HBM3: 6 rows hold, nothing fell short." in capsys.readouterr().out


def test_what_there_was_no_time_disk_or_memory_for_is_no_failure_and_is_told_by_its_reason(
    tmp_path, monkeypatch, capsys
):
    late = [ROW | {"what": name, "left_out": parts.NOT_BEGUN} for name in ("hsdp", "3D")]
    large = ROW | {"what": "qwen3-8b full", "left_out": "does not fit, by plan: 108 GiB, and the card has 80"}
    code, _ = prove(tmp_path, monkeypatch, machine() | {"strategies": ([ROW, *late], ""), "shapes": ([large], "")})
    out = capsys.readouterr().out
    assert code == 0 and "5 rows hold, nothing fell short, 3 left out, which is no failure" in out
    assert "- left out, strategies: not begun: the time was over (hsdp, 3D)" in out
    assert "- left out, shapes: does not fit, by plan: 108 GiB, and the card has 80 (qwen3-8b full)" in out
    assert "| qwen3-8b full | left out |" in (tmp_path / "report.md").read_text()


def test_one_file_to_send_has_all_logs_and_no_model_and_is_named_last(tmp_path, monkeypatch, capsys):
    work = tmp_path / parts.WORK
    models, run_of = work / "models" / "qwen3-8b", work / "checkpoints"
    for folder in (models, run_of):
        folder.mkdir(parents=True)
    (models / "config.json").write_text("{}")
    (run_of / "model.safetensors").write_bytes(b"weights")
    (run_of / "zero3.log").write_bytes(b"begin" + b"." * archive.LARGEST + b"end")
    prove(tmp_path, monkeypatch, machine())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("to send, with all logs: ") and not models.exists()
    path = Path(last.rpartition(": ")[2])
    assert path.parent == tmp_path and path.name.startswith("test-gpu-nvidia-h100-80gb-hbm3-")
    with tarfile.open(path) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        (long,) = (member for member in packed if member.name.endswith("zero3.log"))
        assert packed.extractfile(long).read()[-4:] == b".end" and long.size == archive.LARGEST
    logs = {f"{part.name}.log" for part in parts.PARTS} | {f"{parts.WORK}/checkpoints/zero3.log"}
    assert names == {"report.json", "report.md", *logs}


@pytest.mark.parametrize(
    ("card", "options"),
    [
        (15.6, {"0.6b": "- least", "1.7b": "- least", "8b": "- -"}),  # RTX 5060 Ti, T4
        (23.5, {"0.6b": "least least", "1.7b": "- least", "8b": "- -"}),  # RTX 4090
        (31.3, {"0.6b": "least least", "1.7b": "- least", "8b": "- least"}),  # RTX 5090
        (79.2, {"0.6b": "base base", "1.7b": "base base", "8b": "- base"}),  # H100
        (139.8, {"0.6b": "base base", "1.7b": "base base", "8b": "base base"}),  # H200
    ],
)
def test_a_shape_that_the_plan_has_no_room_for_on_this_card_is_not_run(monkeypatch, card, options):
    properties = SimpleNamespace(total_memory=card * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: properties)
    found = {}
    for model, method in shapes.SHAPES:
        option, figures, why = shapes.option_of(model, method, small=False)
        assert why.startswith("does not fit, by plan") == (figures["planned_on_the_card_gib"] > card)
        found.setdefault(model.removeprefix("qwen3-"), []).append("-" if why else option)
    assert {model: " ".join(each) for model, each in found.items()} == options


def test_the_disk_is_asked_before_anything_is_written(tmp_path, monkeypatch, capsys):
    usage = SimpleNamespace(free=20 * disk.GB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert "it writes 49 GB, and 20 GB are free" in disk.lacking(tmp_path, disk.of_shape("qwen3-8b", "full"))
    assert disk.lacking(tmp_path, disk.CHECKPOINTS) == "" == disk.lacking(tmp_path, disk.of_shape("qwen3-8b", "lora"))
    assert "what has no room is left out" in disk.in_words(tmp_path)
    usage.free = 200 * disk.GB
    assert "left out" not in disk.in_words(tmp_path)


def test_what_fell_short_is_named_with_its_command(tmp_path, monkeypatch, capsys):
    bad = ROW | {"what": "fsdp2", "fell_short": "a loss differs", "command": "torchrun train.py"}
    results = machine() | {"strategies": ([ROW, bad], ""), "kernels": ([], "stopped after 240 seconds")}
    code, report = prove(tmp_path, monkeypatch, results)
    assert code == 1 and [each["what"] for each in report["fell_short"]] == ["fsdp2", "kernels"]
    out = capsys.readouterr().out
    assert "- strategies, fsdp2: a loss differs\n      torchrun train.py\n" in out
    assert "- kernels, kernels: stopped after 240 seconds\n      make test-gpu ONLY=kernels" in out
    assert "| fsdp2 | fell short |" in (tmp_path / "report.md").read_text()


def test_without_a_gpu_nothing_else_is_tried(tmp_path, monkeypatch):
    code, report = prove(tmp_path, monkeypatch, machine(gpus=0, devices=[]))
    assert code == 2 and list(report["parts"]) == ["machine"]


def test_only_some_parts(tmp_path, monkeypatch):
    _, report = prove(tmp_path, monkeypatch, machine(), "--only", "waits")
    assert list(report["parts"]) == ["machine", "waits"]


def test_two_machines_side_by_side(tmp_path, monkeypatch):
    faster = ROW | {"figures": {"difference": 2e-6, "tokens_per_second": 18000.0}, "fell_short": "too far"}
    other = tmp_path / "other"
    prove(other, monkeypatch, machine(devices=["NVIDIA B200"]) | {"shapes": ([faster], "")})
    prove(tmp_path, monkeypatch, machine(), "--compare", str(other / "report.json"))
    text = (tmp_path / "report.md").read_text()
    assert "here: NVIDIA H100 80GB HBM3 | there: NVIDIA B200" in text
    assert "| shapes | zero3, 2 GPUs | tokens per second | 9,000 | 18,000 | 0.50 |" in text
    assert "| shapes | zero3, 2 GPUs |  | holds | fell short |  |" in text


@pytest.mark.parametrize("content", ["{}", "no JSON", '{"format": 1, "parts": {}}'])
def test_what_is_no_report_cannot_be_compared_with(tmp_path, content, capsys):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(SystemExit):
        command.main(["--compare", str(tmp_path / "other.json"), "--output", str(tmp_path)])
    assert "name a report.json that this command wrote" in capsys.readouterr().err


# ---- versions --------------------------------------------------------------------------------------------------------
def test_other_versions_say_what_the_run_proves_and_leaves_out():
    pins = environment.pinned()
    here = pins | {"torch": "2.11.0+cu128", "transformers": "5.17.0"}
    found = environment.compare(here)
    assert found["other"] == {
        "torch": [pins["torch"], "2.11.0+cu128"],
        "transformers": [pins["transformers"], "5.17.0"],
    }
    assert "torch 2.11.0+cu128 instead of" in found["proves"] and "Left out:" in found["proves"]
    assert "older than anything" not in found["proves"]
    assert "torch: older than anything" in environment.compare(here | {"torch": "2.4.1"})["proves"]
    assert "the pinned ones" in environment.compare(pins | {"torch": f"{pins['torch']}+cu130"})["proves"]


def test_what_is_missing_is_named_with_the_command_that_fetches_it(tmp_path, monkeypatch, capsys):
    versions = {name: version for name, version in environment.pinned().items() if name != "deepspeed"}
    monkeypatch.setattr(environment, "installed", lambda _: versions)
    assert command.main(["--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "lacks deepspeed" in said and f"deepspeed=={environment.pinned()['deepspeed']}" in said


def test_each_package_that_is_needed_is_pinned():
    assert (environment.NEEDED | environment.OPTIONAL).keys() <= environment.pinned().keys()


@pytest.mark.slow
def test_from_a_folder_of_wheels_only_what_is_missing_is_installed(tmp_path, monkeypatch):
    """Also where the Python that runs this is itself an environment; torch and the others that are there stay."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with pytest.raises(environment.Lacking, match="an empty one"):
        environment.from_wheels(tmp_path / "venv", wheels)
    (wheels / "about.txt").write_text("no wheel")
    from_here = environment.from_wheels(tmp_path / "venv", wheels)
    assert environment.installed(from_here) == environment.installed(sys.executable)
    monkeypatch.setitem(environment.NEEDED, "torchaudio", "torchaudio")
    pins = environment.pinned() | {"torchaudio": "2.11.0"}
    monkeypatch.setattr(environment, "pinned", lambda: pins)
    with pytest.raises(environment.Lacking, match=r"(?s)does not hold what is missing: ERROR: .*torchaudio"):
        environment.from_wheels(tmp_path / "venv", wheels)


# ---- subjects --------------------------------------------------------------------------------------------------------
def test_a_difference_counts_held_out_losses_and_needs_as_many():
    log = [{"loss": 2.0}, {"eval_loss": 4.0}]
    assert strategies.difference([{"loss": 2.0}, {"eval_loss": 4.1}], log) == pytest.approx(0.025)
    with pytest.raises(ValueError, match="0 values of eval_loss"):
        strategies.difference(log[:1], log)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_case_has_a_reference_and_one_name(ranks):
    cases, names = (
        strategies.cases_of(ranks, small=False),
        {each["name"] for each in strategies.references(small=False)},
    )
    assert {each["reference"] for each in cases} <= names
    assert not names & {each["name"] for each in cases}
    assert len({each["name"] for each in cases}) == len(cases)


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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_case_has_the_global_batch(ranks):
    for each in strategies.cases_of(ranks, small=False):
        lane = gpu_lane.CASES[each["name"].removesuffix(" resumed")]
        micro = int(each["flags"][each["flags"].index("--per_device_train_batch_size") + 1])
        assert runs.GLOBAL_BATCH % (micro * ranks // lane.divided) == 0
        assert each["flags"].count("--attn_implementation") == 1, "with `auto` each run would prove all kernels first"


@pytest.mark.parametrize(
    ("log", "why"),
    [
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
    ],
)
def test_why_a_process_ended_is_its_own_word_and_not_that_of_torchrun(tmp_path, log, why):
    (tmp_path / "log").write_text(log)
    assert parts.last_line(tmp_path / "log") == why


def test_versions_that_cannot_be_imported_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "installed", lambda _: environment.pinned() | {"transformers": "5.17.0"})
    monkeypatch.setattr(environment, "IMPORTED", ("json", "no_such_module"))
    assert command.main(["--output", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "with transformers 5.17.0 a run cannot begin: ModuleNotFoundError: No module named 'no_such_module'" in said
    assert "cure: install what that version requires" in said
