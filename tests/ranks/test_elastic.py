"""`launch --elastic` on this host: two replicas, of which one is killed and comes back, while the coordinator dies as well."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brigade.train.run import events

pytestmark = pytest.mark.matrix  # a minute and a half; tests/cluster/test_elastic.py has it on real hosts

STEPS, EVERY = 800, 10  # idle, who was killed is back after about 300
FLAGS = (
    f"--sync_every {EVERY} --max_steps {STEPS} --max_length 64 --global_batch_size 4 --per_device_train_batch_size 2"
)
FLAGS += " --eval_answers 0 --max_eval_samples 16 --eval_steps 200 --save_steps 200 --logging_steps 10"
FLAGS += " --warmup_steps 5 --lr_scheduler_type linear"
COORDINATOR, RANK = "brigade.train.local.coordinator", "train.py"


def processes(run, words):
    """Return the processes of this launch, found by their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (entry / "environ").read_bytes().decode(errors="replace")
        except (OSError, ValueError):
            continue
        if words in line and str(run) in line + environment:
            found.append(int(entry.name))
    return sorted(found)


def last_step(output):
    return max((event["step"] for event in events.read(output, "step") if event["event"] == "step"), default=0)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Exit code, output, and the directory of a run whose second replica and coordinator were killed."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "hostfile").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    output, logs = folder / "run", folder / "logs"
    where = f"--hostfile {folder / 'hostfile'} --launcher torchrun --no_check --output_dir {output} --log_dir {logs}"
    command = f"-m brigade launch recipes/tiny/full.yaml --elastic --restart_pause 1 {where} {FLAGS}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "BRIGADE_TEST_RUN": str(folder)}
    with (folder / "said").open("w") as said:
        launch = subprocess.Popen([sys.executable, *command.split()], env=environment, stdout=said, stderr=said)
    try:
        for step, strike in (
            (30, lambda: processes(output / "replica-1", RANK)),
            (60, lambda: processes(folder, COORDINATOR)),
        ):
            deadline = time.monotonic() + 300
            while last_step(output) < step:
                assert launch.poll() is None and time.monotonic() < deadline, (folder / "said").read_text()[-3000:]
                time.sleep(0.1)
            os.kill(strike()[-1], signal.SIGKILL)
        code = launch.wait(600)
    finally:
        launch.kill()
    return code, (folder / "said").read_text(), output, folder


def further_steps(output):
    """In which both train on what one has missed."""
    return events.read(output, "replica_joins")[0]["missed"] // 4


def test_the_run_goes_on_and_ends_when_it_has_trained_on_all_samples(ran):
    code, said, output, _ = ran
    assert code == 0, said[-3000:]
    state = json.loads((output / "trainer_state.json").read_text())
    assert state["global_step"] == STEPS + further_steps(output) and (output / "model.safetensors").is_file()
    losses = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert losses[-1] < 0.8 * losses[0]


def test_what_was_lost_is_counted_and_who_comes_back_joins(ran):
    _, said, output, _ = ran
    lost, joined = (events.read(output, f"replica_{what}") for what in ("lost", "joins"))
    assert [e["replica"] for e in lost] == [1] and [e["replica"] for e in joined] == [1]
    away = joined[0]["step"] - lost[0]["step"] + EVERY
    assert lost[0]["step"] % EVERY == joined[0]["step"] % EVERY == 0
    missed = away * 4 // 2  # its half of each step's four samples
    assert joined[0]["missed"] == missed and f"{missed:,} of {4 * STEPS:,} samples were missed" in said
    assert f"the run has {missed // 4} further steps" in said and "still to be trained" not in said


def test_the_schedule_waits_for_what_was_missed(ran):
    """The rate reaches 0 at the last step, not when the undisturbed run would have ended."""
    *_, output, _ = ran
    rates = {e["step"]: e["learning_rate"] for e in events.read(output, "step") if "learning_rate" in e}
    back = events.read(output, "replica_joins")[0]["step"]
    slope, last = rates[EVERY] / (STEPS - EVERY + 1), STEPS + further_steps(output)  # of the step's own rate
    assert max(rates) >= STEPS
    for step, rate in rates.items():
        if step > back:
            assert rate == pytest.approx((last - step + 1) * slope, abs=slope / 10), step


def test_a_coordinator_that_dies_is_replaced_and_nobody_is_lost_by_it(ran):
    _, said, _, _ = ran
    told = re.findall(r"\d\d:\d\d:\d\d  the coordinator ended \(-9\) and is started again", said)
    assert len(set(told)) == 1


def test_both_have_the_same_model_at_the_end(ran):
    *_, output, _ = ran
    first, second = (
        folder / f"checkpoint-{STEPS + further_steps(output)}" / "model.safetensors"
        for folder in (output, output / "replica-1")
    )
    assert first.read_bytes() == second.read_bytes()


def test_no_process_is_left(ran):
    *_, folder = ran
    deadline = time.monotonic() + 10
    while left := [*processes(folder, RANK), *processes(folder, COORDINATOR)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
