"""Python files that come with a model run where the flag permits it, and nowhere else."""

import ast
import json

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import dynamic_module_utils

from brigade.__main__ import main
from brigade.hosts.job import make
from brigade.train.model.load_trained import loading_from_run
from brigade.train.model.location import load_config
from brigade.train.model.tokenizer import load_tokenizer
from brigade.train.recipe import flags
from testing.ranks import REPOSITORY

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
def marker(tmp_path):
    return tmp_path / "it-ran"


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
def recipe(stranger):
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
def test_a_strangers_file_runs_no_code(verb, asks, stranger, recipe, marker, tmp_path, capsys):
    if verb == "launch" and not asks:
        return  # it loads no model
    words = {
        "eval": ["eval", str(stranger)],
        "export": ["export", str(stranger), str(tmp_path / "to")],
        "prepare": ["prepare", recipe(asks)],
        "launch": ["launch", recipe(asks), "--hostfile", str(REPOSITORY / "hostfiles/2x8"), "--dry-run"],
    }
    recipe(asks)
    assert main(words[verb]) == 2
    said = capsys.readouterr().err
    assert "own_" in said and str(stranger) in said and FLAG in said, said
    assert not marker.exists()


def test_a_run_that_asks_for_code_names_every_file(recipe, stranger, mistake):
    (stranger / "custom_generate").mkdir()
    (stranger / "custom_generate/generate.py").write_text("")
    said = mistake(flags.load, ["--recipe", recipe(True)])
    for file in ("own_config.py", "own_tokenizer.py", "custom_generate/generate.py"):
        assert f"{stranger}/{file}" in said
    assert "model.trust_remote_code" in said


def test_the_flag_alone_permits_it(recipe, marker):
    assert not flags.load(["--recipe", recipe(True)], loads_model=False).recipe.model.trust_remote_code
    assert not flags.load(["--recipe", recipe(True), FLAG, "false"]).recipe.model.trust_remote_code
    settings = flags.load(["--recipe", recipe(False), FLAG])
    load_config(settings)
    assert marker.exists()


def test_the_tokenizers_code_is_refused_without_a_question(recipe, marker, mistake):
    said = mistake(load_tokenizer, flags.load(["--recipe", recipe(False)]), 512)
    assert "own_tokenizer.py" in said and FLAG in said
    assert not marker.exists()


def test_what_a_run_saved_is_refused_by_name(stranger, mistake):
    def load():
        with loading_from_run(stranger):
            raise ValueError("Please pass the argument `trust_remote_code=True` to allow custom code to be run.")

    assert "own_config.py" in mistake(load)


def test_code_of_another_repository_is_named(stranger, recipe, mistake):
    config = {"model_type": "stranger", "auto_map": {"AutoConfig": "somebody/else--their_config.Config"}}
    (stranger / "config.json").write_text(json.dumps(config))
    assert "somebody/else/their_config.py" in mistake(flags.load, ["--recipe", recipe(True)])


HUB = "somebody/attention"
KERNELS = {"attn_implementation": HUB, "_attn_implementation": HUB}


@pytest.mark.parametrize("kernels", [*({key: HUB} for key in KERNELS), *({key: {"": HUB}} for key in KERNELS)])
def test_a_config_that_names_kernels_of_the_hub_is_refused(kernels, load, tmp_path, mistake):
    config = json.loads((REPOSITORY / "recipes/tiny/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | kernels))
    settings = load("--model_name_or_path", str(tmp_path))
    assert HUB in mistake(load_config, settings)
    load_config(load("--model_name_or_path", str(tmp_path), "--max_length", "64", FLAG))


def test_lint_warns_and_names_the_files(recipe, stranger, capsys):
    assert main(["lint", recipe(True)]) == 0
    said = capsys.readouterr().out
    assert "recipe-code" in said and "warning" in said and f"{stranger}/own_config.py" in said
    assert main(["lint", recipe(False)]) == 0
    assert "recipe-code" not in capsys.readouterr().out


def test_launch_hands_the_flag_on(recipe):
    job = make(recipe(True), [FLAG], None, {"a": 1})
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
