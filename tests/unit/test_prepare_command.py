"""`python -m brigade prepare RECIPE`: what it prints, when it reads its cache and when not, and how it fails."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from brigade import __main__ as program
from brigade.train.data import builtin, rows
from brigade.train.data.layout import TEMPLATES
from brigade.train.recipe.files import REPOSITORY
from testing.chats import chat
from testing.command_line import brigade


@pytest.fixture(scope="module")
def tokenizer():
    return builtin.TOKENIZER


@pytest.fixture
def home(tmp_path, own_cache, tokenizer):
    """A directory with 40 chats, four held out, a recipe, a tokenizer, and a cache of its own."""
    for name, count in (("train", 40), ("held", 4)):
        write(tmp_path / f"{name}.jsonl", count)
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    files = {"train_file": str(tmp_path / "train.jsonl"), "validation_file": str(tmp_path / "held.jsonl")}
    recipe = {
        "model": {"model_name_or_path": "recipes/tiny", "from_scratch": True, "tokenizer_name_or_path": str(tokenizer)},
        "data": files | {"chat_template": "chatml", "max_length": 64},
        "training": {"global_batch_size": 4, "learning_rate": 1e-3},
    }
    (tmp_path / "full.yaml").write_text(json.dumps(recipe))
    return tmp_path


def write(path, count):
    chats = (chat(f"What follows {n} in {path.stem}?", f"{n + 1} follows.") for n in range(count))
    path.write_text("".join(json.dumps(each) + "\n" for each in chats))


def caches(home):
    """Every file of every prepared data set, with its content's time of change."""
    return {path: path.stat().st_mtime_ns for path in (home / "cache" / "prepared").glob("*/*")}


@pytest.fixture
def prepare(home, capsys):
    """prepare(*flags): what the verb prints, in this process."""

    def call(*flags):
        assert program.main(["prepare", str(home / "full.yaml"), *flags]) == 0
        said = capsys.readouterr()
        assert not said.err, said.err
        return said.out

    return call


def command(home, *flags):
    words = [sys.executable, "-m", "brigade", "prepare", *flags]
    environment = os.environ | {"PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=REPOSITORY, env=environment, text=True, timeout=120, capture_output=True)


# A sitecustomize that lets one chunk of rows take longer than a bar needs to appear.
SLOW = """
import sys, time
from importlib import abc, util

class Slow(abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "brigade.train.data.encode":
            sys.meta_path.remove(self)
            spec = util.find_spec(name)
            load = spec.loader.exec_module

            def load_and_slow_down(module):
                load(module)
                whole = module.LoadedEncoder.encode

                def encode(self, chunk, *more):
                    time.sleep(1.2 if chunk.path.name == "train.jsonl" else 0)
                    return whole(self, chunk, *more)

                module.LoadedEncoder.encode = encode

            spec.loader.exec_module = load_and_slow_down
            return spec

sys.meta_path.insert(0, Slow())
"""


# ---- as a command ------------------------------------------------------------------------------------------------
def test_it_prints_figures_and_a_sample_but_no_bar_and_reads_its_cache_again(home, prepare):
    done = command(home, str(home / "full.yaml"))
    assert done.returncode == 0 and not done.stderr, done.stderr
    figures, *sample, where = done.stdout.splitlines()
    assert re.match(r"40 training and 4 held-out samples, [\d,]+ tokens, \d\d% supervised, 0% padding$", figures)
    assert "[[1 follows.<|im_end|>]]" in sample and "<|im_start|>user" in sample, done.stdout
    (folder,) = {path.parent for path in caches(home)}
    assert re.fullmatch(rf"{re.escape(str(folder))}: \d+\.\d MiB, made in \d+\.\d s", where)
    assert not list((home / "cache" / "prepared").glob(".*/")), "nothing half-made is left"

    before = caches(home)
    again = prepare()
    assert again.splitlines()[:-1] == done.stdout.splitlines()[:-1]
    assert f"{folder}: " in again and "was there, read in" in again.splitlines()[-1]
    assert caches(home) == before


def on_a_terminal(home, *flags):
    """The same command whose output is a terminal; returns (exit code, all that it showed)."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (30, 120))
    words = [sys.executable, "-m", "brigade", "prepare", *flags]
    environment = os.environ | {"PYTHONPATH": str(home), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=REPOSITORY, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    with suppress(OSError):  # the terminal's other end is closed
        while part := os.read(leader, 65536):
            shown += part
    os.close(leader)
    return process.wait(60), shown.decode()


@pytest.mark.slow
def test_on_a_terminal_there_is_a_progress_bar_and_colour(home):
    code, shown = on_a_terminal(home, str(home / "full.yaml"))
    assert code == 0, shown
    assert "tokenising train.jsonl: 100%" in shown and "B/s" in shown
    assert "\x1b[4;32m1 follows.<|im_end|>" in shown and "[[" not in shown


@pytest.mark.parametrize("flags, said", [
    (["FILE", "--max_lenght", "9"], ["flag --max_lenght", "max_length"]),
    (["nowhere.yaml"], ["'nowhere.yaml'", "spelling"]),
], ids=["flag", "recipe"])  # fmt: skip
def test_a_bad_command_line_ends_with_one_message(home, flags, said):
    done = brigade("prepare", *(flag.replace("FILE", str(home / "full.yaml")) for flag in flags))
    assert_one_message(done.returncode, done.stderr, said)
    assert not done.stdout


def assert_one_message(code, stderr, said):
    lines = stderr.splitlines()
    assert code == 2 and len(lines) <= 4 and lines[0].startswith("error: ") and lines[-1].startswith("  cure: "), stderr
    assert all(word in stderr for word in said), stderr


# ---- in this process ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change, said", [
    ({"training": {"lerning_rate": 1}}, ["full.yaml: training.lerning_rate", "learning_rate"]),
    ({"data": {"max_length": "long"}}, ["full.yaml: data.max_length", "'long'"]),
    ({"data": {"train_file": "no.jsonl"}}, ["full.yaml: data.train_file", "'no.jsonl'"]),
    ({"data": {"chat_template": "chatmi"}}, ["full.yaml: data.chat_template", "'chatmi'", "chatml"]),
    ({"model": {"model_name_or_path": "no/such/model"}}, ["full.yaml: model.model_name_or_path", "no usable config"]),
    ({"data": {"max_length": 4096}}, ["full.yaml: data.max_length", "positions for 1024"]),
], ids=str)  # fmt: skip
def test_a_bad_recipe_ends_with_one_message(home, capsys, monkeypatch, change, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = json.loads((home / "full.yaml").read_text())
    for section, values in change.items():
        recipe[section] |= values
    (home / "full.yaml").write_text(json.dumps(recipe))
    code = program.main(["prepare", str(home / "full.yaml")])
    told = capsys.readouterr()
    assert_one_message(code, told.err, said)
    assert not told.out and not caches(home)


def test_a_broken_row_is_named_and_nothing_is_left(home, capsys):
    lines = (home / "train.jsonl").read_text().splitlines()
    (home / "train.jsonl").write_text("\n".join([*lines[:6], '{"messages": [', *lines[7:]]))
    code = program.main(["prepare", str(home / "full.yaml")])
    assert_one_message(code, capsys.readouterr().err, ["train.jsonl, line 7", "not JSON"])
    assert not caches(home)


def test_a_template_that_stands_in_is_named(home, prepare, tokenizer):
    other = home / "other"
    shutil.copytree(tokenizer, other)
    unmarked = re.sub(r"\{%-? *(end)?generation *-?%\}", "", (TEMPLATES / "chatml.jinja").read_text())
    (other / "chat_template.jinja").write_text(unmarked)
    recipe = json.loads((home / "full.yaml").read_text())
    recipe["model"]["tokenizer_name_or_path"] = str(other)
    del recipe["data"]["chat_template"]
    (home / "full.yaml").write_text(json.dumps(recipe))
    assert "chat template: Brigade's chatml for the tokenizer's own" in prepare()
    assert "chat template: " not in prepare("--chat_template", "chatml")
    (other / "chat_template.jinja").write_text(unmarked.replace("'\\n'", "'\\n\\n'", 1))
    assert "chat template: the tokenizer's own, rendered turn by turn" in prepare()


def folder_of(said):
    return said.splitlines()[-1].partition(": ")[0]


def test_what_changes_the_samples_makes_a_cache_beside_the_old(home, prepare, tokenizer):
    other = home / "other"
    shutil.copytree(tokenizer, other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-500]
    (other / "tokenizer.json").write_text(json.dumps(content))
    (home / "own.jinja").write_text((TEMPLATES / "chatml.jinja").read_text().replace("<|im_start|>", "<|im_start|> "))
    (home / "more.jsonl").write_text((home / "train.jsonl").read_text() * 2)
    (home / "other.jsonl").write_text("\n" + (home / "train.jsonl").read_text())
    changes = {
        "nothing": [],
        "data": ["--train_file", str(home / "more.jsonl")],
        "held-out data": ["--validation_file", str(home / "other.jsonl")],
        "tokenizer": ["--tokenizer_name_or_path", str(other)],
        "template": ["--chat_template", str(home / "own.jinja")],
        "length": ["--max_length", "32"],
        "packing": ["--packing"],
    }
    said = {name: prepare(*flags) for name, flags in changes.items()}
    assert all("MiB, made in" in text for text in said.values())
    assert len(set(map(folder_of, said.values()))) == len(changes)
    assert "80 training" in said["data"] and "40 held-out" in said["held-out data"] and "packed into" in said["packing"]
    before = caches(home)
    for name, flags in changes.items():
        assert folder_of(again := prepare(*flags)) == folder_of(said[name]) and "was there, read" in again
    assert caches(home) == before


def test_what_does_not_change_them_reads_the_old_one(home, prepare):
    first = prepare()
    before = caches(home)
    os.utime(home / "train.jsonl", (1, 1))  # touched
    (home / "renamed.jsonl").write_text((home / "train.jsonl").read_text())
    changes = [f"--output_dir={home / 'elsewhere'}", "--learning_rate=5e-4", "--seed=7", "--global_batch_size=8"]
    changes += ["--dataset_num_proc=2", "--attn_implementation=eager", f"--train_file={home / 'renamed.jsonl'}"]
    for flags in ([], *([change] for change in changes)):
        said = prepare(*flags)
        assert folder_of(said) == folder_of(first) and "was there, read" in said, flags
    assert caches(home) == before
    assert not (home / "elsewhere").exists(), "a run's directory is the run's to make"


def test_several_processes_show_no_bar_where_nobody_looks(home, prepare, monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 500)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert "40 training" in prepare("--dataset_num_proc", "2")
