"""The life of an output directory: a run that ends, is stopped, meets a full disk, or loses its launcher."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import TrainerCallback

from brigade.train.distributed.ranks import fail
from brigade.train.run import other_owner, owner
from testing.command_line import as_flags
from testing.patience import wait_until
from testing.ranks import REPOSITORY
from testing.train_command import (
    GOOD,
    HOST,
    Ended,
    assert_one_message,
    chats,
    launched,
    marked,
    nothing_left,
    ranks_part,
    train,
)

SHORT = [*GOOD, *as_flags(global_batch_size=2, eval_steps=None, report_to=[])]


def test_a_finished_run_says_so_and_a_directory_belongs_to_one_run(place, main, told, capfd):
    """The life of an output directory: a run, the same again, another one, --fresh, other data."""
    flags = [*SHORT, "--save_steps", "1"]
    run = place / "run"
    assert main([*flags, "--max_steps", "1", "--output_dir", str(run)]).state.global_step == 1
    assert (run / "success.json").exists()
    contents = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    again = train("python", place, *flags, "--max_steps", "1")
    assert again.code == 0 and not again.stderr, again.stderr
    assert again.stdout == f"This run is finished: {run} (--max_steps above 1 lengthens it, --fresh begins it anew).\n"

    other = train("python", place, *flags, "--max_steps", "1", "--learning_rate", "2e-3")
    assert_one_message(other, "python", 0, str(run), "training.learning_rate is 0.003 there and 0.002 here", "--fresh")

    assert main([*flags, "--max_steps", "2", "--output_dir", str(run), "--fresh"]).state.global_step == 2
    assert json.loads((run / "success.json").read_text())["steps"] == 2
    aside = place / "run.old-1"
    said = " ".join(capfd.readouterr().out.split())
    assert f"to {aside}" in said and "20 steps of warm-up" in said
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == contents

    (run / "success.json").unlink()
    (run / "stop").touch()
    capfd.readouterr()
    message = told(*flags, "--max_steps", "2")
    assert "run/stop\n" in message and "remove it, and start again" in message
    (run / "stop").unlink()

    letters = place / "letters"  # nobody's run
    letters.mkdir()
    (letters / "mine.txt").write_text("dear")
    message = told(*flags, "--max_steps", "2", "--output_dir", str(letters), "--fresh")
    assert "no run.yaml" in message and [path.name for path in letters.iterdir()] == ["mine.txt"]

    chats(place / "good.jsonl", count=41)
    capfd.readouterr()
    message = told(*flags, "--max_steps", "2")
    assert "run.yaml" in message and "data or the tokenizer changed" in message and "--fresh" in message


def stopped(launcher: str, number: int, place: Path, *flags: str) -> Ended:
    """How train.py ends on a signal after its third step: Ctrl-C reaches all processes of a terminal, SIGTERM the first."""
    out, err = place / "out.txt", place / "err.txt"
    command = [*launched(launcher), str(REPOSITORY / "train.py"), *flags]
    with nothing_left(patience=10) as mark, out.open("w") as stdout, err.open("w") as stderr:
        environment = os.environ | {"BRIGADE_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        deadline = time.monotonic() + 200
        while "\nstep 3/" not in out.read_text():
            assert time.monotonic() < deadline and process.poll() is None, err.read_text()
            time.sleep(0.1)
        for each in marked(mark) if number == signal.SIGINT else [process]:
            each.send_signal(number)
        code, at = process.wait(timeout=60), time.time()
    return Ended(code, out.read_bytes().decode(), err.read_bytes().decode(), ranks_part(err.read_text()), 0, at)


@pytest.mark.slow
@pytest.mark.parametrize("launcher, number", [("python", signal.SIGINT), ("torchrun", signal.SIGTERM)])
def test_a_run_that_is_stopped_says_where_it_stands_and_how_to_go_on(launcher, number, place):
    """And while it trains, its log is one of plain lines with the times that a terminal's bar would show."""
    often = as_flags(max_steps=100000, save_steps=2, logging_steps=1, dataloader_num_workers=2, output_dir="run")
    flags = [*SHORT, *often, "--fresh"]
    if launcher == "python":  # a stream has one more process that reads data
        flags += ["--streaming", "--validation_file", str(chats(place / "held_out.jsonl", 5))]
    ended = stopped(launcher, number, place, *flags)
    by = "Ctrl-C" if number == signal.SIGINT else r"SIGTERM to rank \d"
    said, _, launchers = ended.stderr.partition("Traceback")  # torchrun's own
    told = [line for line in said.splitlines() if line and not re.search(r"^[WE]\d{4} | is waiting for ", line)]
    assert len(told) == 1 + (launcher == "python") and (launcher != "python" or "once more ends the run" in told[0])
    assert not launchers or launcher == "torchrun"
    assert re.fullmatch(
        rf"Stopped by {by} at step (\d+) of 100000\. The same command without --fresh continues from run/checkpoint-\1\.",
        told[-1],
    ), ended.stderr
    stopped_at = json.loads((place / "run/stopped.json").read_text())["checkpoint"]
    assert stopped_at == told[-1].rpartition("/")[2].rstrip(".")
    assert ended.code == (-number if launcher == "python" else 1), ended.stderr
    assert ended.stderr.count("Stopped by") == ended.stderr.count("Traceback") + (launcher == "python") == 1
    assert "\r" not in ended.stdout + ended.stderr
    lines = [line for line in ended.stdout.splitlines() if re.match("step [1-9]", line)]
    assert len(lines) >= 3 and all(
        re.search(r"^step \d+/100000 .* s/step .*  elapsed [\d:]+  ETA [\d:]+$", line) for line in lines
    )


def test_a_disk_that_fills_while_a_checkpoint_is_saved_leaves_the_one_before(place, main, monkeypatch, capfd):
    """torch's own writer, on a full disk; its error says "unexpected pos" and nothing of disks."""
    import torch

    import brigade.train.distributed.ranks

    flags = [*SHORT, *as_flags(max_steps=3, save_steps=1, save_total_limit=1, output_dir=str(place / "run"))]
    save, optimizers = torch.save, itertools.count(1)

    def save_on_a_disk_that_fills(what, file, **how):
        second = str(file).endswith("optimizer.pt") and next(optimizers) == 2
        return save(what, "/dev/full" if second else file, **how)

    with monkeypatch.context() as full:
        full.setattr(torch, "save", save_on_a_disk_that_fills)
        full.setattr(brigade.train.distributed.ranks, "fail", fail)
        full.setattr(brigade.train.distributed.ranks.os, "_exit", sys.exit)
        with pytest.raises(SystemExit) as left:
            main(flags)
    told = capfd.readouterr().err.splitlines()[-3:]
    assert left.value.code == 2 and told[0].endswith(f": {place / 'run'}"), told
    assert "bytes are free there" in told[1] and told[2].startswith("  cure: ") and "--output_dir" in told[2], told
    assert sorted(path.name for path in (place / "run").glob("checkpoint-*")) == ["checkpoint-1"]

    trainer = main(flags)
    assert trainer.state.global_step == 3 and (place / "run" / "success.json").is_file()
    assert "checkpoint-1" in capfd.readouterr().out


class StopsAtOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = True


@pytest.mark.slow
def test_ranks_end_with_their_launcher_and_one_run_has_a_directory(place, main, told):
    """torchrun is killed: its ranks, of which it is not told, must not train on beside the rerun."""
    flags = [*SHORT, *as_flags(max_steps=100000, save_steps=10)]
    run = place / "run"
    command = [*launched("torchrun"), str(REPOSITORY / "train.py"), *flags, "--output_dir", str(run)]
    with nothing_left(patience=10) as mark:
        environment = os.environ | {"BRIGADE_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
        null = subprocess.DEVNULL
        launcher = subprocess.Popen(command, cwd=place, env=environment, stdout=null, stderr=null)
        deadline = time.monotonic() + 200
        while not (run / "checkpoint-10" / "brigade.json").exists() and not list(run.glob("checkpoint-??0")):
            assert time.monotonic() < deadline and launcher.poll() is None
            time.sleep(0.1)
        for words in ([], ["--fresh"]):
            message = told(*flags, *words)
            pid = message.partition("process ")[2].split()[0]
            assert int(pid) in {process.pid for process in marked(mark)}
            assert f"another run is using it: process {pid} on {HOST}" in message and "another --output_dir" in message
        launcher.kill()
        launcher.wait()
        # The system lets go of a lock a moment after the process that held it can no longer be listed.
        wait_until(lambda: other_owner.holder(run / owner.FILE) is None, seconds=10)
    trainer = main([*flags, "--output_dir", str(run)], callbacks=(StopsAtOnce(),))
    assert trainer.state.global_step > 10 and (run / "success.json").exists()
    assert not (run / ".owner").exists() and not (place / "run.old-1").exists()
