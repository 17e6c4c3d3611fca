"""What we write for people to run or open holds a stranger's words as words: pages, job files, recipes, tables."""

import csv
import os
import shlex
import subprocess

import pytest
import yaml

from brigade.__main__ import main
from brigade.errors.console import one_line
from brigade.hosts import ssh
from brigade.hosts.job import make
from brigade.launch.write import SUFFIXES, text, write
from brigade.report import facts, figures, page
from brigade.report.records import Record
from brigade.train.host import files
from brigade.train.recipe.files import REPOSITORY
from brigade.train.run import on_disk
from brigade.train.run.status import ranks_of

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
    assert facts.repeat(_record(tmp_path, commit="0123456789ab+", ranks=1))[0].startswith(
        "git checkout 0123456789ab   #"
    )
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
