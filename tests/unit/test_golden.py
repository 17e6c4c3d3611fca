"""The runs by which two versions of a package are compared: what parts them is told, and the environment is left as it is."""

import importlib.metadata
import subprocess
import sys
import zipfile

import pytest

from benchmarks import golden as command
from testing import golden

RUN = {
    "loss": [2.0, 1.5],
    "saved_norm": [3.0],
    "saved": "2 tensors of 9 parameters",
    "data": "ab",
    "logged": "epoch loss",
}


@pytest.mark.parametrize("changed, said", [
    ({}, ""),
    ({"loss": [2.0, 1.5 * (1 + 5e-7)]}, ""),
    ({"loss": [2.0, 1.5 * (1 + 5e-6)]}, "loss by 5.0e-06"),
    ({"loss": [2.0, float("nan")]}, "loss by nan"),
    ({"loss": [2.0]}, "loss 1 values instead of 2 values"),
    ({"loss": None}, "loss None instead of 2 values"),
    ({"expert_balance": [1.0]}, "expert_balance 1 values instead of None"),
    ({"saved": "1 tensors of 8 parameters"}, "saved 1 tensors of 8 parameters instead of 2 tensors of 9 parameters"),
    ({"data": "cd"}, "data cd instead of ab"),
    ({"logged": "epoch expert_balance"}, "a new figure expert_balance, no figure loss"),
])  # fmt: skip
def test_what_parts_two_runs_is_told(changed, said):
    assert golden.difference(RUN | changed, RUN) == said


def test_a_run_that_failed_or_is_missing_counts_as_changed(capsys):
    now = {"same": RUN, "new": RUN}, {"broken": "Traceback\nValueError: no"}
    assert command.compared(now, {"same": RUN, "broken": RUN, "gone": RUN}) == ["broken", "gone", "new"]
    said = capsys.readouterr().out
    assert "broken: failed\n    Traceback\n    ValueError: no" in said and "gone: only in the table" in said
    assert "1 of 3 runs are the same to 1e-06, 1 of them to the last bit" in said


def test_a_version_comes_before_that_of_the_environment_which_stays_as_it_is(tmp_path):
    """A wheel of PyYAML, by hand: pip has nothing to ask an index for."""
    wheel, folder = tmp_path / "pyyaml-999.0-py3-none-any.whl", tmp_path / "over"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("yaml.py", "there = True")
        info = "pyyaml-999.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: PyYAML\nVersion: 999.0\n")
        wheel_file = "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", wheel_file)
        archive.writestr(f"{info}/RECORD", "")
    before = importlib.metadata.version("PyYAML")
    assert command.overlay([str(wheel)], folder) == ["PyYAML==999.0"]
    code = "import yaml, importlib.metadata as m; print(yaml.there, m.version('PyYAML'))"
    for environment, said in ((command.over(folder), "True 999.0"), (command.over(None), "")):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == said
    assert importlib.metadata.version("PyYAML") == before
    assert command.overlay([f"PyYAML=={before}"], tmp_path / "none") == []


def test_kernels_of_another_torch_are_compiled_beside_it(tmp_path):
    assert "TORCH_EXTENSIONS_DIR" not in {*command.over(tmp_path)} - {*command.over(None)}
    (tmp_path / "torch").mkdir()
    assert command.over(tmp_path)["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")
