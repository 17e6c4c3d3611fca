"""Nothing that comes from a file, a model or another host controls the user's terminal, or a page, job file or recipe of ours."""

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from brigade.__main__ import main
from brigade.errors import UserError, console
from brigade.errors.console import one_line, printable
from brigade.hosts import ssh
from brigade.hosts.job import make
from brigade.launch import background
from brigade.launch.write import SUFFIXES, text, write
from brigade.report import facts, figures, page
from brigade.report.records import Record
from brigade.train.host import files
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run import on_disk
from brigade.train.run.status import ranks_of

TITLE = "\x1b]0;a title\x07"
CLIPBOARD = "\x1b]52;c;ZWNobyBoaQ==\x1b\\"
ERASE = "\x1b[2J\x1b[H"
OBEYED = [
    TITLE,
    CLIPBOARD,
    ERASE,
    "\x1b[8m",  # hides what follows
    "\x1b]8;;https://example.org\x1b\\",  # a link
    "\x1bP$qm\x1b\\",  # asks the terminal to type an answer
    "\x1bc",  # resets it
    "\x1b(0",  # another set of characters
    "\x9b2J",
    "\x9d0;a title\x9c",
    "\x07",
    "\x08",
    "\r",
    "\x0e",
    "\x7f",
    "\x85",
    "\u202e",
    "\u2066",
]


@pytest.mark.parametrize("obeyed", OBEYED, ids=ascii)
def test_what_a_terminal_would_obey_is_left_out(obeyed):
    left = printable(f"before{obeyed}after")
    assert not set(left) & set(map(chr, range(32))) and "\x1b" not in left
    assert left.startswith("before") and left.endswith("after") and len(left) <= len("before after")


def test_everything_else_stays():
    text = "línea 1\n\tline 2 你好 שלום \N{WINKING FACE} \\x1b[31m ~"
    assert printable(text) == text


def test_a_sequence_that_does_not_end_is_seen_as_text():
    assert printable("\x1b]0;title") == "]0;title"


def test_long_texts_take_no_time():
    begun = time.monotonic()
    for part in ("\x1b]", "\x1b[", "\x1b[1;", "\x9d", "\x1b(", "\x1b", "a"):
        printable(part * 20_000)
        printable("\x1b[" + "1" * 20_000)
    assert time.monotonic() - begun < 2


def test_a_mistake_is_told_without_escapes():
    said = str(UserError(f"a{TITLE}b.yaml", f"{ERASE}is wrong", f"do {CLIPBOARD}this\u202e"))
    assert said == "error: ab.yaml\n  is wrong\n  cure: do this"


@pytest.fixture
def said_by(monkeypatch):
    """Calls something, and returns what a terminal gets of what it prints."""

    def said(work):
        written = {name: io.BytesIO() for name in ("stdout", "stderr")}
        for name, stream in written.items():
            monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding="utf-8", write_through=True))
        console.guard_output()
        work()
        return b"".join(stream.getvalue() for stream in written.values()).decode()

    return said


ALL = "".join(OBEYED)


def test_prints_pass_through(said_by):
    def work():
        print(f"a{ALL}b", f"c{ALL}d")
        print(f"e{ALL}f", file=sys.stderr)
        sys.stdout.writelines([f"g{ALL}h\n"])

    text, left = said_by(work), printable(ALL)
    assert text == f"a{left}b c{left}d\ng{left}h\ne{left}f\n" and "\x1b" not in text


def test_only_a_librarys_bar_returns_to_its_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    drawn = console._Shown(Terminal(), bars=True)
    for written in ("\r 50%", "\n", "\x1b[A", f"a{TITLE}b", "\x1b[A\x1b[2Jx"):
        drawn.write(written)
    assert drawn.beneath.getvalue() == "\r 50%\n\x1b[Aabx"


def test_tables_pass_through_and_keep_their_own_colours(monkeypatch):
    from rich.table import Table
    from rich.text import Text

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = console.console(file=io.StringIO(), force_terminal=True, highlight=False)
    table = Table(f"head{ALL}", title=f"title{ALL}")
    table.add_row(f"cell{ALL}[/red][link=https://example.org]")
    table.add_row(Text(f"red{ALL}", "red"))
    out.print(table)
    out.print(f"line{ALL} :smile:", soft_wrap=True)
    text = out.file.getvalue()
    assert "\x1b[31m" in text and ":smile:" in text and "[/red][link=" in text
    assert set(re.findall(r"\x1b(?!\[[\d;]*m)|[\x00-\x09\x0b-\x1a\x7f-\x9f\u202e\u2066]", text)) == set()
    assert "\x1b[8m" not in text


def test_every_table_goes_by_the_one_console():
    """A Console of rich's own would show what it is given."""
    made = re.compile(r"\bConsole\(|\(Console\)")
    homes = {path.name for path in Path("brigade").rglob("*.py") if made.search(path.read_text())}
    assert homes == {"console.py"}


def _run(directory):
    """A run that another user wrote."""
    directory.mkdir(parents=True)
    words = ALL + "words"
    run = {"run": {"hosts": [words], "started": words, "strategy": {"name": words}, "ranks": 1}}
    (directory / "run.yaml").write_text(json.dumps(run))
    event = {"event": words, "time": words, "text": words, "step": words}
    (directory / "events.jsonl").write_text(f"{json.dumps(event)}\n")
    (directory / "stopped.json").write_text(json.dumps({"by": words, "time": words}))
    return directory


def is_harmless(text):
    return not set("\x1b\x07\x9b\x9d\r\u202e") & set(text)


@pytest.mark.parametrize("in_full", [True, False])
def test_status_of_a_strangers_run(in_full, tmp_path, said_by, monkeypatch):
    run = _run(tmp_path / "outputs" / f"run{TITLE.replace('/', '')}")
    monkeypatch.chdir(tmp_path)
    text = said_by(lambda: main(["status", *([str(run)] if in_full else [])]))
    assert "words" in text and is_harmless(text)


def test_attach_to_a_strangers_launch(tmp_path, said_by):
    (tmp_path / "launch.log").write_text(f"{ALL}loss\n")
    record = {"output": str(tmp_path), "logs": str(tmp_path), "host": "elsewhere", "pid": 1, "code": 0}
    text = said_by(lambda: background.follow(record))
    assert "loss" in text and is_harmless(text)


def test_lint_of_a_strangers_file(tmp_path, said_by):
    recipe = tmp_path / "recipe.yaml"
    key = json.dumps(f"{ALL}[red]")
    recipe.write_text(f"model:\n  model_name_or_path: {json.dumps(ALL)}\n  {key}: 1\ntraining: {{}}\n")
    text = said_by(lambda: main(["lint", str(recipe)]))
    assert "[red]" in text and is_harmless(text)


def test_an_answer_and_a_sample_of_a_strangers_model(said_by):
    from brigade.train.step.sample_answers import show

    entry = {"source": "a", "question": f"q{ALL}", "reference": f"r{ALL}", "answer": f"a{ALL} [bold]b"}
    text = said_by(lambda: show([entry]))
    assert "[bold]b" in text and is_harmless(text)


# ---- pages -----------------------------------------------------------------------------------------------------------
BREAKS = ["\n", "\r", "\x85", "\u2028", "\x0b"]


@pytest.mark.parametrize("kind", SUFFIXES)
def test_no_name_leaves_its_comment(kind):
    """Line by line a job file of an evil name has the same kinds of lines as one of a good name."""

    def written(word):
        flags = ["--output_dir", f"outputs/a{word}b", "--ds_config", "ds_configs/zero3.json"]
        job = make("recipes/qwen3-8b/full.yaml", flags, "hostfiles/2x8", None)
        return text(kind, job, file=f"a{word}b")

    for each in BREAKS:
        lines = written(f"{each}evil: true{each}#SBATCH --nodes=9{each}").splitlines()
        assert not [line for line in lines if line.startswith(("evil", "#SBATCH --nodes=9"))] or kind == "sbatch"
        if kind != "sbatch":
            assert "evil" not in yaml.safe_load("\n".join(lines))
        else:  # in bash's quotes a line may end, but no option of sbatch stands behind the first command
            head = lines[: next(n for n, line in enumerate(lines) if line and not line.startswith("#"))]
            assert "#SBATCH --nodes=9" not in head and not [line for line in head if line.startswith("evil")]


def test_a_comment_is_one_line():
    assert one_line("a\nb\u2028c\x1b[31md\u202ee é") == "a b c [31md e é"


def _record(tmp_path, **run):
    return Record(tmp_path / "it's $(touch marker) --x", "name", {"run": run})


@pytest.mark.parametrize("run", [
    {"commit": "$(touch marker)"}, {"commit": "--orphan"}, {"commit": "0123456; touch marker"},
    {"ranks": "2; touch marker"}, {"ranks": [1]}, {"ranks": 2, "replicas": "x"}, {"ranks": 2, "launcher": "`touch marker`"},
    {"ranks": 4, "hosts": ["a'; touch marker; '", "%n$(touch marker)"]}, {"ranks": 10**400},
], ids=str)  # fmt: skip
def test_the_commands_of_a_page_run_nothing_of_a_strangers(run, tmp_path):
    """They are given to a shell whose programs only say that they were called."""
    names = ["git", "python", "torchrun", "deepspeed", "accelerate"]
    lines = [f"{name}() {{ :; }}" for name in names] + facts.repeat(_record(tmp_path, **run))
    subprocess.run(["bash", "-c", "\n".join(lines)], cwd=tmp_path, timeout=20, check=True)
    assert not (tmp_path / "marker").exists() and "--orphan" not in "".join(lines)


def test_good_commits_are_checked_out(tmp_path):
    record = _record(tmp_path, commit="0123456789ab+", ranks=1)
    assert facts.repeat(record)[0].startswith("git checkout 0123456789ab   #")
    assert ranks_of({"ranks": 4, "replicas": 2}) == 8 and ranks_of({}) == 0


def test_no_cell_is_a_formula(tmp_path, monkeypatch):
    evil = ["=cmd|' /C calc'!A0", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\r=1", "\uff1d1"]
    monkeypatch.setattr(page.figures, "all_figures", lambda _: [figures.Figure("x", "title", "unit", "says")])
    monkeypatch.setattr(figures.Figure, "empty", False)
    monkeypatch.setattr(figures, "rows", lambda _: (evil, [evil, [-1.5, 2, None]]))
    monkeypatch.setattr(page.charts, "chart", lambda _: {})
    monkeypatch.setattr(page.library, "picture", lambda *_: b"")
    page.write_files([], tmp_path)
    with (tmp_path / "x.csv").open(newline="") as file:
        head, row, numbers = csv.reader(file)
    assert head == row == [f"'{one_line(cell)}" for cell in evil] and numbers[:2] == ["-1.5", "2"]


def test_no_host_gets_the_users_agent_or_display():
    words = shlex.join(ssh.options())
    assert {"-a", "-x"} <= set(ssh.options())
    assert "ForwardAgent=no" in words and "ForwardX11=no" in words and "ClearAllForwardings=yes" in words


def test_half_a_letter_is_shown_by_its_number(tmp_path):
    files.write(tmp_path / "table.csv", "loss of \ud800\n")
    assert (tmp_path / "table.csv").read_text() == "loss of \\ud800\n"


def test_a_name_that_is_not_utf_8_is_written_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--output_dir", os.fsdecode(b"outputs/\xff")]
    job = make(str(REPOSITORY / "recipes/tiny/full.yaml"), flags, str(REPOSITORY / "hostfiles/2x8"), None)
    for _ in range(2):  # the second time it is there, unchanged
        written = write(job, "sbatch", "job.sh")
    assert b"outputs/\xff" in written.read_bytes()


@pytest.mark.parametrize("digits", ["\u00b2", "9" * 5000])
def test_digits_that_are_no_number(digits, tmp_path, capsys):
    (tmp_path / "checkpoint-\u00b2").mkdir()
    assert on_disk.checkpoints(tmp_path) == []
    config = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": digits}}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    main(["lint", str(tmp_path / "accelerate.yaml")])
    assert "accelerate-fsdp2-value" in capsys.readouterr().out
