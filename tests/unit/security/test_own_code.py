"""Python that a recipe names runs where the command line names it too, or permits its content, and nowhere else."""

import hashlib
import importlib.util
import os
import py_compile
import shutil

import pytest
import yaml

from brigade.__main__ import main
from brigade.hosts.job import make
from brigade.train.loss import supervised_loss
from brigade.train.loss.objective.load import loss_of
from brigade.train.recipe import flags, program
from brigade.train.recipe.schema import SECTIONS
from testing.ranks import REPOSITORY

RUNS = "from pathlib import Path\nPath({marker!r}).touch()\ndef loss(losses, targets):\n    return losses\n"


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "it-ran"


@pytest.fixture
def file(tmp_path, marker):
    path = tmp_path / "loss.py"
    path.write_text(RUNS.format(marker=str(marker)))
    return path


@pytest.fixture
def recipe(tmp_path):
    """recipe(token_loss=...): a recipe of somebody else's with these keys of `training`."""

    def write(name="theirs.yaml", **keys):
        document = yaml.safe_load((REPOSITORY / "recipes/tiny/full.yaml").read_text())
        document["training"] |= keys
        (tmp_path / name).write_text(yaml.safe_dump(document))
        return str(tmp_path / name)

    return write


def allow(file):
    return ["--allow_code", f"{file.name}={hashlib.sha256(file.read_bytes()).hexdigest()}"]


def imports(settings):
    """What a run does with the functions that its recipe names."""
    if settings.recipe.training.token_loss:
        return supervised_loss.Terms.of(settings)
    return loss_of(settings)


@pytest.mark.parametrize("key", ["token_loss", "objective"])
@pytest.mark.parametrize("name", ["theirs.yaml", "run.yaml"])
def test_a_strangers_recipe_runs_no_python(key, name, recipe, file, marker, mistake):
    path = recipe(name, **{key: f"{file}:loss"})
    settings = flags.load(["--recipe", path])
    cure = f"--allow_code {file}={hashlib.sha256(file.read_bytes()).hexdigest()}"
    for asked in (imports, program.check_code, program.check_functions, program.permission):
        said = mistake(asked, settings)
        assert f"{path}: training.{key}" in said and str(file) in said and cure in said
    launched = mistake(make, path, [], None, {"a": 1})
    assert cure in launched and not marker.exists()


@pytest.mark.parametrize("verb", ["named", "digest"])
def test_the_command_line_permits_it(verb, recipe, file, marker, capsys):
    words = allow(file) if verb == "digest" else ["--token_loss", f"{file}:loss"]
    path = recipe(token_loss=f"{file}:loss")
    settings = flags.load(["--recipe", path, *words])
    program.check_code(settings)
    assert make(path, words, None, {"a": 1}).train_arguments[2:] == words  # hosts and restarts get the same
    again = flags.load(["--recipe", path, *program.permission(settings)])  # a rehearsal's recipe
    assert not marker.exists()
    assert callable(imports(again).own) and marker.exists()


def test_what_was_permitted_is_a_content_and_not_a_name(recipe, file, marker, mistake):
    words = ["--recipe", recipe(token_loss=f"{file}:loss"), *allow(file)]
    file.write_text(file.read_text() + "# more\n")
    said = mistake(imports, flags.load(words))
    assert "whose content --allow_code does not permit" in said and not marker.exists()


def test_a_compiled_file_beside_it_does_not_run(recipe, file, marker):
    """Python takes __pycache__'s for the source's where size and time agree: whoever sends a folder can forge both."""
    source, stat = file.read_text(), file.stat()
    compiled = importlib.util.cache_from_source(str(file))
    py_compile.compile(str(file), cfile=compiled)
    file.write_text("def loss(losses, targets): return losses".ljust(len(source) - 1) + "\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    settings = flags.load(["--recipe", recipe(token_loss=f"{file}:loss"), *allow(file)])
    assert callable(imports(settings).own) and not marker.exists()


@pytest.mark.parametrize("given", ["loss.py", "=" + "0" * 64, "loss.py=" + "0" * 63, "loss.py=" + "G" * 64])
def test_a_digest_of_another_form_is_refused(given, mistake):
    assert "flag --allow_code" in mistake(flags.load, ["--allow_code", given])


def test_a_file_that_cannot_be_had_is_named(recipe, tmp_path, mistake):
    settings = flags.load(["--recipe", recipe(token_loss="nowhere.py:loss")])
    program.check_code(settings)  # on the launching machine
    assert "there is no file nowhere.py" in mistake(imports, settings)


def test_lint_warns_and_names_the_file(recipe, file, marker, capsys):
    for keys in ({"token_loss": f"{file}:loss"}, {"objective": f"{file}:loss"}, {"eval_tasks": ["./task.yaml"]}):
        assert main(["lint", recipe(**keys)]) == 0
        said = capsys.readouterr().out
        assert "recipe-code" in said and "warning" in said and ("loss.py" in said or "task.yaml" in said), said
    assert not marker.exists()


def test_what_runs_nothing_of_it_goes_on(recipe, file, marker, capsys):
    path = recipe(token_loss=f"{file}:loss", max_steps=1)
    flags.load(["--recipe", path], loads_model=False)
    assert main(["prepare", path, "--max_train_samples", "8", "--max_length", "64"]) == 0, capsys.readouterr().err
    assert not marker.exists()


def test_the_table_has_every_key_that_takes_a_python_file():
    """The schema's keys that say so in their help, and nothing in Brigade that runs a file elsewhere."""
    said = {
        key
        for section in SECTIONS.values()
        for key, info in section.model_fields.items()
        if any(word in (info.description or "") for word in (".py", "Python", "YAML"))
    }
    assert said - {"trust_remote_code"} == program.NAMES_CODE.keys()
    loaders = (" exec(", "exec_module", "runpy", "spec_from_file_location")
    files = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "brigade").rglob("*.py")}
    runs = {name for name in files if any(word in (REPOSITORY / name).read_text() for word in loaders)}
    assert runs - {"brigade/train/__init__.py", "brigade/train/__main__.py"} == {"brigade/train/recipe/program.py"}


def test_an_earlier_run_of_ones_own_is_evaluated_with_the_flag(recipe, file, tmp_path, mistake):
    path = recipe("run.yaml", objective=f"{file}:loss")
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(path, folder)
    program.check_functions(flags.of_run(folder, False, [allow(file)[1]]))
    assert "--allow_code" in mistake(program.check_functions, flags.of_run(folder, False))
