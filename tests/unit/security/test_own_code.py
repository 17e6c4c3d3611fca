"""Python that a recipe names runs where the command line names it too, or permits its content, and Python files that come
with a model where the flag permits them; both nowhere else."""

import ast
import hashlib
import importlib.util
import json
import os
import py_compile
import shutil

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import dynamic_module_utils

from brigade.__main__ import main
from brigade.hosts.job import make
from brigade.train.loss import supervised_loss
from brigade.train.loss.objective.load import loss_of
from brigade.train.model.load_trained import loading_from_run
from brigade.train.model.location import load_config
from brigade.train.model.tokenizer import load_tokenizer
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
    assert cure in mistake(make, path, [], None, {"a": 1}) and not marker.exists()


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


def test_lint_warns_and_names_the_file(recipe, file, marker, prints):
    for keys in ({"token_loss": f"{file}:loss"}, {"objective": f"{file}:loss"}, {"eval_tasks": ["./task.yaml"]}):
        said = prints(0, "lint", recipe(**keys))
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


# ---- files that come with a model ------------------------------------------------------------------------------------
FLAG = "--trust_remote_code"
CONFIG = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()

class Config(LlamaConfig):
    model_type = "stranger"
"""
TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({marker!r}).touch()

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def stranger(tmp_path, marker, monkeypatch):
    """A run's directory whose config and tokenizer have code of their own, which would leave the marker; and nobody answers."""

    def ask(question):
        raise AssertionError(f"asked on the terminal: {question}")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "own_config.py").write_text(CONFIG.format(marker=str(marker)))
    (folder / "own_tokenizer.py").write_text(TOKENIZER.format(marker=str(marker)))
    config = {"model_type": "stranger", "auto_map": {"AutoConfig": "own_config.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "own_tokenizer.Tokenizer"]}, "tokenizer_class": "Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "success.json").write_text(json.dumps({"held_out_loss_before": 2, "held_out_loss": 1, "steps": 1}))
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def asking(stranger):
    """recipe(True): the stranger's run.yaml, whose trust_remote_code is this."""

    def write(asks: bool) -> str:
        document = {
            "model": {"model_name_or_path": str(stranger), "trust_remote_code": asks},
            "data": {"dataset_name": "python-docs", "chat_template": "chatml"},
            "training": {"global_batch_size": 8},
        }
        (stranger / "run.yaml").write_text(yaml.safe_dump(document))
        return str(stranger / "run.yaml")

    return write


@pytest.mark.parametrize("verb", ["eval", "export", "prepare", "launch"])
@pytest.mark.parametrize("asks", [True, False], ids=["asked for", "not asked for"])
def test_a_strangers_file_runs_no_code(verb, asks, stranger, asking, marker, tmp_path, capsys):
    if verb == "launch" and not asks:
        return  # it loads no model
    words = {
        "eval": ["eval", str(stranger)],
        "export": ["export", str(stranger), str(tmp_path / "to")],
        "prepare": ["prepare", asking(asks)],
        "launch": ["launch", asking(asks), "--hostfile", str(REPOSITORY / "hostfiles/2x8"), "--dry-run"],
    }
    asking(asks)
    assert main(words[verb]) == 2
    said = capsys.readouterr().err
    assert "own_" in said and str(stranger) in said and FLAG in said, said
    assert not marker.exists()


def test_a_run_that_asks_for_code_names_every_file(asking, stranger, mistake):
    (stranger / "custom_generate").mkdir()
    (stranger / "custom_generate/generate.py").write_text("")
    said = mistake(flags.load, ["--recipe", asking(True)])
    for file in ("own_config.py", "own_tokenizer.py", "custom_generate/generate.py"):
        assert f"{stranger}/{file}" in said
    assert "model.trust_remote_code" in said


def test_the_flag_alone_permits_it(asking, marker):
    assert not flags.load(["--recipe", asking(True)], loads_model=False).recipe.model.trust_remote_code
    assert not flags.load(["--recipe", asking(True), FLAG, "false"]).recipe.model.trust_remote_code
    settings = flags.load(["--recipe", asking(False), FLAG])
    load_config(settings)
    assert marker.exists()


def test_the_tokenizers_code_is_refused_without_a_question(asking, marker, mistake):
    said = mistake(load_tokenizer, flags.load(["--recipe", asking(False)]), 512)
    assert "own_tokenizer.py" in said and FLAG in said
    assert not marker.exists()


def test_what_a_run_saved_is_refused_by_name(stranger, mistake):
    def load():
        with loading_from_run(stranger):
            raise ValueError("Please pass the argument `trust_remote_code=True` to allow custom code to be run.")

    assert "own_config.py" in mistake(load)


def test_code_of_another_repository_is_named(stranger, asking, mistake):
    config = {"model_type": "stranger", "auto_map": {"AutoConfig": "somebody/else--their_config.Config"}}
    (stranger / "config.json").write_text(json.dumps(config))
    assert "somebody/else/their_config.py" in mistake(flags.load, ["--recipe", asking(True)])


HUB = "somebody/attention"
KERNELS = {"attn_implementation": HUB, "_attn_implementation": HUB}


@pytest.mark.parametrize("kernels", [*({key: HUB} for key in KERNELS), *({key: {"": HUB}} for key in KERNELS)])
def test_a_config_that_names_kernels_of_the_hub_is_refused(kernels, load, tmp_path, mistake):
    config = json.loads((REPOSITORY / "recipes/tiny/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | kernels))
    settings = load("--model_name_or_path", str(tmp_path))
    assert HUB in mistake(load_config, settings)
    load_config(load("--model_name_or_path", str(tmp_path), "--max_length", "64", FLAG))


def test_lint_warns_and_names_the_files(asking, stranger, prints):
    said = prints(0, "lint", asking(True))
    assert "recipe-code" in said and "warning" in said and f"{stranger}/own_config.py" in said
    assert "recipe-code" not in prints(0, "lint", asking(False))


def test_launch_hands_the_flag_on(asking):
    job = make(asking(True), [FLAG], None, {"a": 1})
    assert FLAG in job.train_arguments


def test_every_load_says_whether_code_may_run():
    """Left out, Transformers asks on the terminal for 15 s (dynamic_module_utils.py: resolve_trust_remote_code)."""
    silent = []
    for path in (REPOSITORY / "brigade").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Auto" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                automatic = "Auto" in ast.unparse(node.func.value)
                loads = node.func.attr in ("from_pretrained", "from_config") and automatic
                named = {keyword.arg for keyword in node.keywords}
                if loads and not named & {"trust_remote_code", None}:
                    silent.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert silent == []
