"""The processes that tokenise: in order, not far ahead, and gone with whoever asked, however that ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from brigade.train.data import builtin, encode, tokenise, workers
from brigade.train.data.chat_template import ChatTemplates
from brigade.train.data.rows import Where
from brigade.train.host import control_groups
from brigade.train.recipe.files import REPOSITORY
from testing import marks
from testing.patience import in_time


@pytest.fixture(scope="module")
def encoder():
    tokenizer = builtin.TOKENIZER / "tokenizer.json"
    return encode.LoadedEncoder(encode.Encoder(tokenizer.read_text(), ChatTemplates(""), {}, 2, 64, True))


@pytest.fixture(autouse=True)
def serial(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as train.py does: this process may have tokenised before


WHERE = Where("chunks", 1, of_lines=False)


@dataclass(frozen=True)
class Text:
    """A chunk of one text; kills: the signal that ends the process that reads it."""

    number: int
    kills: int = 0
    size: int = 1
    after: None = None
    where: Where = WHERE

    def rows(self):
        if self.kills:
            os.kill(os.getpid(), self.kills)
        time.sleep(0.002 * (self.number % 3))
        yield 0, {"text": f"text {self.number}"}


def jobs(*chunks):
    return ((chunk, {}) for chunk in chunks)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children():
    return {child.pid for child in multiprocessing.active_children()}


def test_in_order_and_only_a_few_chunks_are_read_ahead(encoder):
    taken = []

    def watched():
        for number in range(200):
            taken.append(number)
            yield Text(number), {}

    done = 0
    for number, part in enumerate(workers.encoded(watched(), encoder, 2, "here")):
        assert part.rows == 1 and part.samples["length"][0] == len(part.tokens)
        done = number + 1
        assert len(taken) <= done + 2 * workers.AHEAD
    assert done == 200


@pytest.mark.parametrize("at", [0, 5, 30])
def test_a_killed_process_ends_the_run_with_the_cause_and_the_cure(encoder, mistake, at):
    chunks = [Text(number, signal.SIGKILL if number == at else 0) for number in range(31)]
    before = children()
    with in_time(20):
        message = mistake(lambda: list(workers.encoded(jobs(*chunks), encoder, 3, "a.jsonl")))
    assert "a.jsonl" in message and "killed" in message and "memory" in message
    assert "dataset_num_proc" in message.splitlines()[-1]
    assert children() <= before


@pytest.mark.parametrize("cores, chunks, asked, expected", [
    (2.0, 100, None, 2),  # what a control group leaves of a host's cores
    (1.5, 100, None, 0),  # none to spare
    (0.5, 100, None, 0),
    (500.0, 100, None, tokenise.MOST),
    (500.0, 100, 7, 7),  # as dataset_num_proc says
    (500.0, 3, None, 3),  # no more than have something to do
    (500.0, 1, None, 0),  # starting a process takes longer than a chunk
    (1.0, 100, 7, 7),
])  # fmt: skip
def test_as_many_processes_as_there_are_cores_to_spare_and_chunks(monkeypatch, encoder, cores, chunks, asked, expected):
    def counted(jobs, loaded, processes, place):
        started.append(processes)
        return (loaded.encode(*job) for job in jobs)

    started: list[int] = []
    rows = SimpleNamespace(size=chunks, place="here", chunks=lambda: map(Text, range(chunks)))
    monkeypatch.setattr(control_groups, "cores", lambda: cores)
    monkeypatch.setattr(workers, "encoded", counted)
    parts = list(tokenise.encoded(rows, {}, encoder.encoder, asked))
    assert len(parts) == chunks
    assert started == ([expected] if expected else [])


def test_who_stops_reading_leaves_no_process(encoder):
    before = children()
    found = workers.encoded(jobs(*map(Text, range(500))), encoder, 2, "here")
    next(found)
    assert len(children() - before) == 2
    found.close()
    assert children() <= before


# A run that prints its workers' process ids, and is in the middle of its chunks then.
RUN = """
import multiprocessing, sys
from tests.unit import test_workers as here
from brigade.train.data import encode, workers
from brigade.train.data.chat_template import ChatTemplates
tokenizer = open(sys.argv[1]).read()
encoder = encode.LoadedEncoder(encode.Encoder(tokenizer, ChatTemplates(""), {}, 2, 64, True))
for number, _ in enumerate(workers.encoded(here.jobs(*map(here.Text, range(10**6))), encoder, 2, "here")):
    if number == 20:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
"""


@pytest.mark.parametrize("sent, whole_group", marks.cases(
    *((signal.SIGINT, True), (signal.SIGKILL, False)), slow=[(signal.SIGINT, False), (signal.SIGTERM, False)]
))  # fmt: skip
def test_no_process_outlives_the_run(sent, whole_group):
    """Ctrl-C reaches the whole group of a terminal; a scheduler's or the OOM killer's signal the run alone."""
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(builtin.TOKENIZER / "tokenizer.json")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **pipes)
    try:
        pids = [int(word) for word in run.stdout.readline().split()]
        assert len(pids) == 2
        (os.killpg if whole_group else os.kill)(run.pid, sent)
        error = run.communicate(timeout=20)[1]  # ends when all that hold the pipe have ended
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == -sent
    assert error.count("Traceback") == (sent == signal.SIGINT), "the workers say nothing of their own"
    deadline = time.monotonic() + 10
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
