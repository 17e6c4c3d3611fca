"""What the commands' output is like where it is no terminal, and what ranks say of which only the first speaks."""

import io
import logging
import re
import subprocess
import sys
import warnings

import pytest
from rich.table import Table

from brigade.errors import console
from brigade.errors.console import folded, marking
from brigade.train.host.cluster import World
from brigade.train.step.environment import _silence
from testing.ranks import REPOSITORY as ROOT

PLAN = [sys.executable, "-m", "brigade", "plan", "recipes/qwen3-8b", "--hostfile", "hostfiles/2x8", "--gpu", "H100"]


def test_a_reader_that_has_read_enough_sees_no_traceback():
    """`... | head -1`: the pipe is closed before the command has printed all."""
    with subprocess.Popen(
        [*PLAN, "--strategy", "zero3"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        command.stdout.close()
        said = command.stderr.read().decode()
        assert command.wait() == 1 and said == ""


@pytest.mark.parametrize("reader", ["2>err | true", "2>err >/dev/full", "2>&1 | true; touch err", "2>err >&-"])
def test_a_rank_whose_output_nobody_reads_any_more_goes_on_and_says_so_where_it_can(tmp_path, reader):
    """`python train.py | head` ended the run at its next line."""
    code = (
        "import sys; from brigade.train.distributed import ranks\n"
        "def main():\n"
        "    sys.stdin.read()\n"  # until the reader has gone
        "    for step in range(3): print('step', step, flush=True); print('warning', file=sys.stderr)\n"
        "    open(sys.argv[1], 'w').write('trained')\n"
        "ranks.run_to_the_end(main)"
    )
    words = f'set -o pipefail; cd {tmp_path}; sleep 0.3 | PYTHONPATH={ROOT} {sys.executable} -c "$0" end {reader}'
    done = subprocess.run(["bash", "-c", words, code], capture_output=True, text=True, timeout=60)
    said = (tmp_path / "err").read_text()
    assert (tmp_path / "end").read_text() == "trained" and "Traceback" not in said and done.returncode == 0, said
    if said and reader != "2>err >&-":
        assert said.count("some output is lost from here on: [Errno") == 1 and said.count("warning") == 3


def test_a_pipe_gets_wide_tables():
    done = subprocess.run(PLAN, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "tokens/s/GPU" in done.stdout and "simpler" in done.stdout
    assert "…" not in done.stdout


@pytest.mark.parametrize("rank, mark", [(0, ""), (1, "rank 1: ")])
def test_a_rank_loses_no_word_and_says_whose_it_is(rank, mark, monkeypatch):
    """A print or a warning of a user's own code counts on every rank."""
    out, logged = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    factory, handler = logging.getLogRecordFactory(), logging.StreamHandler(logged)
    logging.getLogger("a_users_module").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as seen:
            for _ in range(2):  # as in a rehearsal: two runs in one process
                _silence(World(rank, 0, 2, 2, "host", "torchrun"))
            print("1 row\n\nof mine", end="")
            print(".")
            print("half a line", end="", flush=True)
            stopped = "None of the inputs have requires_grad=True. Gradients will be None"
            warnings.warn_explicit(stopped, UserWarning, "checkpoint.py", 88, module="torch.utils.checkpoint")
            warnings.warn_explicit("old name", FutureWarning, "library.py", 1)
            logging.getLogger("a_users_module").warning("careful with %s", "this")
    finally:
        logging.setLogRecordFactory(factory)
        logging.getLogger("a_users_module").removeHandler(handler)
    if rank:
        assert out.getvalue() == "rank 1: 1 row\nrank 1: of mine.\nrank 1: half a line\n"
    else:
        assert out.getvalue() == "1 row\n\nof mine.\nhalf a line"
    assert [str(one.message) for one in seen] == [stopped]
    assert logged.getvalue() == f"{mark}careful with this\n"
    assert warnings.formatwarning(stopped, UserWarning, "checkpoint.py", 88).startswith(f"{mark}checkpoint.py:88")


@pytest.mark.parametrize("terminal_there", [True, False])
def test_work_that_takes_long_is_a_bar_on_a_terminal_and_lines_elsewhere(terminal_there, monkeypatch):
    written = io.StringIO()
    written.isatty = lambda: terminal_there
    monkeypatch.setattr(sys, "stderr", written)
    for rows, seconds in ((None, 30), (100, 0), (None, 0)):  # the first is done before a line is due
        monkeypatch.setattr(console, "BAR_SECONDS", seconds)
        with console.bar(rows, "tokenising chats.jsonl", "rows") as bar:
            for _ in range(3):
                bar.update(25)
    said = written.getvalue()
    if terminal_there:
        assert said == ""  # nor is there a bar before a second has gone by
        return
    lines = [re.sub(r"[\d:]{5,}", "TIME", line) for line in said.splitlines()]
    known = [f"tokenising chats.jsonl: {n}.0 of 100 rows, {n}%, elapsed TIME, ETA TIME" for n in (25, 50, 75)]
    assert "\r" not in said and [line for line in lines if "of 100" in line][-3:] == known
    assert "tokenising chats.jsonl: 75.0 rows, elapsed TIME" in lines


def test_an_encoding_that_lacks_a_letter_ends_nothing(monkeypatch):
    """PYTHONIOENCODING=ascii: an answer in another script, a table's frame."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    console.guard_output()
    print("A: Grüße")
    console.console().print("┃ é", markup=False)
    sys.stdout.flush()
    assert written.getvalue() == b"A: Gr\\xfc\\xdfe\n\\u2503 \\xe9\n"


def test_a_table_in_a_log_is_narrow_and_no_line_of_it_ends_in_blanks(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    grid = Table.grid(padding=(0, 2))
    grid.add_row("model", "a b " * 40)
    grid.add_row("data", "none")
    console.console(columns=console.OF_LOGS).print(grid)
    lines = sys.stdout.getvalue().splitlines()
    assert max(map(len, lines)) <= console.OF_LOGS < 105
    assert not any(line.endswith(" ") for line in lines)
    assert len(lines) == 3


@pytest.mark.parametrize("options, said", [
    ({"force_terminal": True}, "green"), ({"force_terminal": True, "no_color": True}, "underlined"),
    ({"force_terminal": False}, "in [[ ]]"), ({"force_terminal": True, "color_system": None}, "in [[ ]]"),
])  # fmt: skip
def test_what_is_said_of_marked_words_is_how_they_are_shown(options, said, monkeypatch):
    """NO_COLOR leaves lines below words, TERM=dumb nothing."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = console.console(file=io.StringIO(), **options)
    assert marking(out) == said
    out.print("words", style="green underline")
    shown = out.file.getvalue()
    marks = {"green": (True, True), "underlined": (True, False)}
    assert ("[4" in shown, "32m" in shown) == marks.get(said, (False, False))


@pytest.mark.parametrize("width, lines", [
    (None, ["step 1/2  loss 8.3444  grad norm 3.959"]), (40, ["step 1/2  loss 8.3444  grad norm 3.959"]),
    (30, ["step 1/2  loss 8.3444", "    grad norm 3.959"]), (5, ["step 1/2", "    loss 8.3444", "    grad norm 3.959"]),
])  # fmt: skip
def test_a_line_of_figures_is_folded_between_them(width, lines):
    assert folded(["step 1/2", "loss 8.3444", "grad norm 3.959"], width).splitlines() == lines
