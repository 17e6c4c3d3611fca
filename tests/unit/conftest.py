"""What the unit tests share: a minimal recipe with changes over it, its settings, and how an error must read."""

import copy
import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, settings

from brigade.__main__ import main
from brigade.errors import UserError
from brigade.lint.linter import lint
from brigade.train.data import builtin
from brigade.train.recipe import flags
from brigade.train.strategy import Strategy, choose
from testing.ranks import REPOSITORY
from testing.strategies import world

# The same examples everywhere: a test that passed fails for what has changed since, not by its luck. New ones are looked for with
# HYPOTHESIS_PROFILE=search.
shared = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("unit", max_examples=25, derandomize=True, **shared)
settings.register_profile("search", max_examples=600, **shared)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "unit"))

MINIMAL = {
    "model": {"model_name_or_path": "recipes/tiny", "tokenizer_name_or_path": "python-docs"},
    "data": {"dataset_name": "python-docs", "chat_template": "chatml"},
    "training": {"global_batch_size": 32},
}


@pytest.fixture
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def digests(tmp_path, monkeypatch):
    """A cache of the test's own; returns where the digests of models' code lie in it."""
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path))
    return tmp_path / "digests"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of the test's own, beside its other files."""
    monkeypatch.setenv("BRIGADE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    """The built-in one."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(builtin.TOKENIZER)


@pytest.fixture(scope="module")
def tokenizers():
    """Return what each family has, as its models have it."""
    from testing.dialogues import tokenizers_of_families

    return tokenizers_of_families()


@pytest.fixture(scope="module")
def cache_of_the_file(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRIGADE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def prints(capsys):
    """prints(0, "lint", "--rules"): what the command writes, on stderr where it ends with 2. It must end with this code."""

    def call(code, *words) -> str:
        assert main([*map(str, words)]) == code
        out, err = capsys.readouterr()
        return err if code == 2 else out

    return call


@pytest.fixture
def plan(capsys, in_the_repository):
    """plan("qwen3-8b", "--gpu", "H100"): the command's exit code, and all that it says."""

    def call(*words) -> tuple[int, str]:
        code = main(["plan", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out + err

    return call


@pytest.fixture
def write_recipe(tmp_path):
    """write_recipe(training={"bf16": True}, ...): a file with the minimal recipe and these keys over it, or a text."""

    def write(text: str | None = None, **sections) -> Path:
        document = copy.deepcopy(MINIMAL)
        for section, values in sections.items():
            document.setdefault(section, {}).update(values)
        path = tmp_path / "recipe" / "full.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(document) if text is None else text)
        return path

    return write


@pytest.fixture
def load(write_recipe):
    """load("--bf16", training={...}): the settings of that recipe with these flags over it."""
    return lambda *argv, **sections: flags.load(["--recipe", str(write_recipe(**sections)), *argv])


@pytest.fixture
def saved(tmp_path):
    """saved(train=rows, ...): a directory of save_to_disk, which has no splits where `train` is the only one."""
    from datasets import Dataset, DatasetDict

    def save(**splits):
        parts = {split: Dataset.from_list(rows) for split, rows in splits.items()}
        whole = parts["train"] if list(parts) == ["train"] else DatasetDict(parts)
        whole.save_to_disk(str(tmp_path / "saved"))
        return str(tmp_path / "saved")

    return save


@pytest.fixture
def write_json(tmp_path):
    def write(content, name: str = "ds.json") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def pick(load):
    """pick("--ds_config", ...): the strategy of such a command on `size` ranks, started with environment `env`."""

    def call(*argv, size=2, env=None, **sections) -> Strategy:
        return choose(load(*argv, **sections), world(size), env or {})

    return call


@pytest.fixture
def pick_config(pick, write_json):
    """pick_config({...}): the strategy of a ds_config file with that content."""
    return lambda config, flags=(), **sections: pick("--ds_config", write_json(config), *flags, **sections)


@pytest.fixture
def user_error():
    """user_error(function, *arguments): the UserError that the call must raise, held to its form."""

    def call(function, *arguments, **named) -> UserError:
        with pytest.raises(UserError) as caught:
            function(*arguments, **named)
        message = str(caught.value)
        lines = message.splitlines()
        assert len(lines) <= 4 and lines[0].startswith("error: ") and lines[-1].startswith("  cure: "), message
        assert all(line.partition(": ")[2] if ": " in line else line.strip() for line in lines), message
        assert all(len(line) < 1000 for line in lines), message
        return caught.value

    return call


@pytest.fixture
def mistake(user_error):
    """mistake(function, *arguments): the message of the UserError that the call must raise."""
    return lambda function, *arguments, **named: str(user_error(function, *arguments, **named))


@pytest.fixture
def check(tmp_path, monkeypatch):
    """check({"name": text or document}): lint's report on these files, named together, from their own directory."""
    monkeypatch.chdir(tmp_path)

    def call(files, named=None):
        for name, content in files.items():
            if isinstance(content, dict):
                content = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
            Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return lint(list(files) if named is None else named)

    return call
