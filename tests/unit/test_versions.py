"""The gate before train.py and the verbs: a Python, an environment or packages that no run begins with, told in milliseconds."""

import ast
import os
import subprocess
import sys
from functools import partial

import pytest
import yaml

from brigade.errors import versions
from brigade.train.host.cluster import World
from brigade.train.strategy import axis_rules
from brigade.train.strategy.axes import Axes
from testing.ranks import REPOSITORY as ROOT

PINNED = {name: versions.pins()[name] for name in versions.supported() if name != "python"}
refusal = partial(versions.refusal, "python train.py", needed=("all", "run"))


def told(*command, **variables):
    """(exit code, stderr) of a command in the clone."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOCAL_RANK")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=clean | variables)
    assert not done.stdout
    return done.returncode, done.stderr


@pytest.fixture
def old(tmp_path):
    """A folder for PYTHONPATH in which Transformers says that it is 5.17.0; whoever imports it fails."""
    folder = tmp_path / "transformers-5.17.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n")
    for package in ("torch", "transformers"):
        (tmp_path / f"{package}.py").write_text("raise AssertionError('imported')\n")
    return str(tmp_path)


@pytest.mark.parametrize("command", [["train.py"], ["-m", "brigade", "plan"], ["-m", "brigade", "status"]])
def test_a_python_without_the_packages_names_the_environment(command):
    """-S: without site-packages, as a system's Python."""
    code, said = told(sys.executable, "-S", *command)
    assert code == 2 and "Traceback" not in said
    lacking = said.partition(" lacks ")[2].partition("\n")[0].split(", ")
    assert "PyYAML" in lacking and ("torch" in lacking) == (command == ["train.py"])
    assert f".venv/bin/python {' '.join(command)}" in said or "-r requirements.txt" in said


def test_where_there_is_no_environment_yet_make_setup_is_the_cure(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "REPOSITORY", tmp_path)
    said = refusal(PINNED | {"torch": None})
    assert "make setup` makes an environment" in said and "then `.venv/bin/python train.py`" in said
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert "make setup" not in refusal(PINNED | {"torch": None})
    assert "source .venv/bin/activate" in refusal(PINNED | {"torch": None})
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert ".venv/bin/python -m pip install -r requirements.txt" in refusal(PINNED | {"torch": None})


def test_an_old_python_is_told_by_one_that_reads_no_newer_syntax():
    """What stands before that sentence is parsed and imported by Python 3.6."""
    for file in ("train.py", "brigade/__init__.py", "brigade/__main__.py", "brigade/gate.py"):
        text = (ROOT / file).read_text()
        ast.parse(text, feature_version=(3, 6))
        assert "from __future__ import annotations" not in text  # 3.7
    script = "import runpy, sys; sys.version_info = (3, 6, 8); runpy.run_path('train.py')"
    code, said = told(sys.executable, "-c", script)
    assert code == 2 and "Brigade needs 3.11 or newer" in said and "cure: `make setup PYTHON=python3.11`" in said


def test_an_old_version_is_refused_with_a_table_before_anything_is_imported(old):
    code, said = told(sys.executable, "train.py", PYTHONPATH=old)
    assert code == 2 and "imported" not in said
    row = f"transformers  5.17.0     {PINNED['transformers']}  {versions.supported()['transformers']['from']} and later"
    assert row in said and f"transformers=={PINNED['transformers']}" in said
    assert told(sys.executable, "train.py", PYTHONPATH=old, LOCAL_RANK="1") == (2, "")  # the first rank has said it
    code, said = told(sys.executable, "-m", "brigade", "lint", PYTHONPATH=old)
    assert code == 2 and row in said


def test_verbs_that_only_look_do_so_with_any_versions(old, tmp_path):
    command = [sys.executable, "-m", "brigade", "status", str(tmp_path / "none")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": old})
    assert "no run is supported" not in done.stderr


@pytest.mark.parametrize("package, version, good", [
    ("torch", "2.12.1", False),
    ("torch", "2.13.0+cu130", True),
    ("torch", "2.13.0a0+b5d4.nv26.07", True),
    ("torch", "2.100", True),
    ("transformers", "5.20.2", False),
    ("transformers", "5.21.0", True),
    ("transformers", "5.24.0.dev0", True),
    ("accelerate", "1.14.9", False),
    ("accelerate", "1.15.1", True),
    ("peft", "0.20.0", False),
    ("deepspeed", "0.19.9", False),
    ("deepspeed", PINNED["deepspeed"], True),
])  # fmt: skip
def test_a_version_is_judged_by_its_release(package, version, good):
    assert bool(refusal(PINNED | {package: version})) is not good


def test_a_known_bad_version_is_refused_with_its_reason(monkeypatch):
    row = versions.supported()["peft"] | {"bad": {"0.21.9": "it forgets adapters"}}
    monkeypatch.setitem(versions.supported(), "peft", row)
    assert "not 0.21.9: it forgets adapters" in refusal(PINNED | {"peft": "0.21.9"})
    assert not refusal(PINNED | {"peft": "0.21.8"})


@pytest.mark.parametrize("flags", [[], ["--rehearse"]])
def test_a_version_that_lacks_an_axis_refuses_runs_with_it_alone(flags, load, mistake, monkeypatch):
    """Not the rehearsal either, which takes what sizes its ranks allow."""
    since = versions.supported()["transformers"]["axes"]["experts"]
    assert not refusal(PINNED | {"transformers": "5.21.1"})
    monkeypatch.setattr(versions, "installed", {"transformers": "5.21.1"}.get)
    world = World(0, 0, 2, 2, "here", "torchrun")
    said = mistake(axis_rules.check, Axes(experts=2), "ds_config", load(*flags), world)
    assert "transformers 5.21.1 cannot divide experts" in said and f"install transformers {since} or later" in said
    axis_rules.check(Axes(tensor=2), "ds_config", load(*flags), world)
    monkeypatch.setattr(versions, "installed", {"transformers": f"{since}.0"}.get)
    axis_rules.check(Axes(experts=2), "ds_config", load(*flags), world)


def test_what_no_run_needs_may_be_missing():
    assert refusal(PINNED | {"peft": None, "deepspeed": None}) == ""


def test_who_insists_trains_with_an_old_version_and_the_table_says_so(monkeypatch):
    old = PINNED | {"transformers": "5.17.0"}
    monkeypatch.setenv(versions.ANYWAY, "1")
    assert refusal(old) == ""
    pin = PINNED["transformers"]
    assert versions.not_pinned(old) == f"transformers 5.17.0, which is not supported (pinned {pin})"


def test_the_line_of_a_run_names_what_is_not_pinned_and_what_is_newer_than_anything_tried():
    assert versions.not_pinned(PINNED | {"torch": f"{PINNED['torch']}+cpu"}) == ""
    tried = versions.supported()["transformers"]["tried"]
    assert versions.not_pinned(PINNED | {"transformers": f"{tried}.7"}) == (
        f"transformers {tried}.7 (pinned {PINNED['transformers']})"
    )
    assert f"newer than {tried}, the newest that was tried" in versions.not_pinned(PINNED | {"transformers": "5.99"})


def test_the_table_is_yaml_and_each_package_in_it_is_pinned_to_a_version_that_it_supports():
    text = (ROOT / "brigade/errors/versions.yaml").read_text()
    assert yaml.safe_load(text) == versions.supported()
    assert not refusal(PINNED) and not versions.not_pinned(PINNED)


@pytest.mark.parametrize("page", ["docs/troubleshooting.md", "docs/zh/troubleshooting.md"])
def test_the_page_says_what_is_supported(page):
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (ROOT / page).read_text().splitlines()]
    row_of = {row[0].lower(): row for row in cells if len(row) == 4}
    for name, row in versions.supported().items():
        if "from" in row or row.get("exact"):
            _, pinned, supported, tried = row_of[name]
            assert pinned == PINNED.get(name, "")
            assert supported.split()[0] == row.get("from", pinned) and row.get("tried", "") in tried
