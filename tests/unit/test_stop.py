"""Signals to a process that trains, or does not yet; and what a job's starts are counted for. No torch."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from brigade.train.run import starts

TRAINS = """
import os, signal, sys, time
from brigade.train.distributed import stop
from brigade.train.distributed.process import this_process
signal.signal(signal.SIGHUP, signal.{hangs_up})
this_process.signals.listen(is_main_rank=True, launched={launched})
then = lambda: None
{prepare}
print("ready", flush=True)
{then}
while True:
    time.sleep(0.01)
    if this_process.signals.asked is not None:
        print("asked", flush=True)
        then()
        time.sleep(60)
"""
PATIENT, IMPATIENT = (
    f"this_process.signals.begin_training(lambda asked, number: asked + {seconds})" for seconds in (1000, 0.1)
)


@pytest.fixture
def run():
    started = []

    def start(prepare: str, then: str = "", launched: bool = False, hangs_up: str = "SIG_DFL") -> subprocess.Popen:
        code = TRAINS.format(prepare=prepare, then=then, launched=launched, hangs_up=hangs_up)
        command = [sys.executable, "-c", code]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, start_new_session=True, **pipes))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):  # a reader of data may be left, and hold the pipes
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process, number=signal.SIGTERM):
    """What it writes to stdout and stderr until it ends by this signal."""
    process.send_signal(number)
    return process.communicate(timeout=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_before_the_first_step_it_ends_at_once(run, number):
    process = run("")
    said, told = ended(process, number)
    assert process.returncode == -number and said == ""
    by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    assert told == f"Stopped by {by} before its first step; the same command begins again\n"


def test_under_nohup_a_terminal_may_close(run):
    process = run("", hangs_up="SIG_IGN")
    process.send_signal(signal.SIGHUP)
    _, told = ended(process)
    assert process.returncode == -signal.SIGTERM and told.startswith("Stopped by SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_while_it_trains_it_is_asked_and_a_second_signal_ends_it(run, number):
    process = run(PATIENT)
    process.send_signal(number)
    assert process.stdout.readline() == "asked\n" and process.poll() is None
    _, told = ended(process)
    assert process.returncode == -signal.SIGTERM and told.count("Stopped by SIGTERM") == 1


def test_one_that_never_comes_to_its_steps_end_is_ended(run):
    """Its peers are gone, and it waits for them in C."""
    process = run(IMPATIENT)
    assert "Stopped by SIGTERM" in ended(process)[1] and process.returncode == -signal.SIGTERM


def test_ctrl_c_is_told_how_long_the_step_may_take(run):
    process = run(PATIENT)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    _, told = ended(process, signal.SIGINT)
    assert "a checkpoint saved if it ends within 1000 s; once more ends the run at once." in told


def test_what_its_launcher_hands_on_is_the_same_wish(run):
    process = run(PATIENT + "; stop.AGAIN = 3600", launched=True)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)


def test_a_storm_of_signals_is_one_wish_and_one_after_a_pause_another(run):
    process = run(PATIENT + "; stop.AGAIN = 0.5", launched=True)
    for _ in range(10):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.poll() is None and process.stdout.readline() == "asked\n"
    time.sleep(0.7)
    _, told = ended(process)
    assert process.returncode == -signal.SIGTERM and "Stopped by SIGTERM (11 times) " in told


FORKS = """
ready, reads = os.pipe()
child = os.fork()
if not child:
    os.write(reads, b".")
    time.sleep(1000)
os.read(ready, 1)
print(child, flush=True)
def then():
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_a_data_reader_ends_when_its_parent_says_so_and_not_when_all_are_signalled(run):
    """Slurm signals every process of a job: the step that goes on still needs its data."""
    process = run(PATIENT, FORKS)
    child = int(process.stdout.readline())
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(child, number)
    time.sleep(0.3)
    assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    process.send_signal(signal.SIGTERM)
    assert [process.stdout.readline() for _ in range(2)] == ["asked\n", "0\n"]


READS = """
import atexit, multiprocessing
from brigade.train.distributed.process import this_process
def torch_handler(*_):
    raise RuntimeError("DataLoader worker is killed by signal: Killed.")
signal.signal(signal.SIGCHLD, torch_handler)
atexit.register(time.sleep, 0.5)  # which leaves the handler time to run
multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,)).start()
"""


def test_the_readers_that_it_ends_raise_nothing_in_a_thread_that_waits(run):
    """torch's DataLoader takes each end of a reader for an error. The main thread may be about to leave by another one."""
    process = run(READS)
    _, told = ended(process)
    assert process.returncode == -signal.SIGTERM and "RuntimeError" not in told


# ---- a job that comes back -----------------------------------------------------------------------------------------
def test_a_job_without_progress_comes_back_so_often_and_no_more(tmp_path, mistake):
    file = tmp_path / "run" / "starts"
    for _ in range(starts.MOST):
        starts.count(file, "slurm-7", 40)
    said = mistake(starts.count, file, "slurm-7", 40)
    assert "started 3 times from step 40" in said and "--save_steps" in said and str(tmp_path / "run") in said
    starts.count(file, "slurm-7", 80)  # it got further
    for _ in range(starts.MOST):
        starts.count(file, "slurm-8", 80)  # another job may try as often


def test_train_py_counts_what_a_job_file_starts_and_nothing_else(tmp_path, monkeypatch, mistake):
    from brigade.train.host.cluster import world_from_environment
    from brigade.train.recipe import flags
    from brigade.train.run import directory as runs
    from brigade.train.strategy import choose

    settings, world = flags.load(["--output_dir", str(tmp_path / "run")]), world_from_environment({})
    asked = (settings, choose(settings, world), world)
    monkeypatch.delenv(runs.JOB, raising=False)
    for _ in range(2 * starts.MOST):
        runs.open_directory(*asked)
    assert not list(tmp_path.iterdir())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    assert "run/stop\n  this file stops the run" in mistake(runs.open_directory, *asked)
    monkeypatch.setattr(runs.this_process.agent, "_notes", -1)
    runs.open_directory(*asked)  # launch has looked before: the file came since, and stops the run at its first step
    (tmp_path / "run" / "stop").unlink()
    (tmp_path / "run").rmdir()
    for name in ("tensorboard", "heartbeats"):  # a traceback of TensorBoard's, in the first step
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).touch()
        message = mistake(runs.open_directory, *asked)
        assert f"run/{name}\n  it is a file, and a run writes into a directory of that name" in message
        shutil.rmtree(tmp_path / "run")
    monkeypatch.setenv(runs.JOB, "slurm-7")
    for _ in range(starts.MOST):
        runs.open_directory(*asked)
    assert "started 3 times from step 0" in mistake(runs.open_directory, *asked)
