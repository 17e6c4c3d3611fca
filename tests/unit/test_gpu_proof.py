"""`make test-gpu` without a GPU: its report, its archive and the comparison, and versions that differ."""

import json
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_proof import __main__ as command
from benchmarks.gpu_proof import archive, disk, environment, parts, shapes
from testing.gpu_proof_row import ROW

MACHINE = {"gpus": 1, "devices": ["NVIDIA H100 80GB HBM3"], "memory_gib": [79.6]}


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


@pytest.mark.parametrize("card, options", [
    (15.6, {"0.6b": "- least", "1.7b": "- least", "8b": "- -"}),  # RTX 5060 Ti, T4
    (23.5, {"0.6b": "least least", "1.7b": "- least", "8b": "- -"}),  # RTX 4090
    (31.3, {"0.6b": "least least", "1.7b": "- least", "8b": "- least"}),  # RTX 5090
    (79.2, {"0.6b": "base base", "1.7b": "base base", "8b": "- base"}),  # H100
    (139.8, {"0.6b": "base base", "1.7b": "base base", "8b": "base base"}),  # H200
])  # fmt: skip
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


@pytest.mark.parametrize("gpus, words, code, tried", [
    ({"gpus": 0, "devices": []}, [], 2, ["machine"]),
    ({}, ["--only", "waits"], 0, ["machine", "waits"]),
])  # fmt: skip
def test_without_a_gpu_nothing_else_is_tried_and_else_what_is_asked_for(
    tmp_path, monkeypatch, gpus, words, code, tried
):
    found, report = prove(tmp_path, monkeypatch, machine(**gpus), *words)
    assert found == code and list(report["parts"]) == tried


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
    other = {"torch": "2.11.0+cu128", "transformers": "5.17.0"}
    assert found["other"] == {name: [pins[name], version] for name, version in other.items()}
    assert "torch 2.11.0+cu128 instead of" in found["proves"] and "Left out:" in found["proves"]
    assert "older than anything" not in found["proves"]
    assert "torch, transformers: a run is refused with this version" in found["proves"]
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
