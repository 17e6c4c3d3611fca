"""From how long a silence on a rank is judged to hang, and what its watch does then."""

import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from brigade.train.distributed import heartbeat
from brigade.train.distributed import observer as observers
from brigade.train.distributed import ranks as all_ranks
from brigade.train.distributed.observer import Observer, limit, stopped_by
from brigade.train.distributed.process import this_process
from brigade.train.host.cluster import World
from brigade.train.recipe.training_section import TrainingSection
from brigade.train.strategy import Strategy
from brigade.train.watch import watch_thread


@pytest.fixture
def clock(monkeypatch):
    """A clock of the heartbeat and of who looks at it, that the test moves; a run that has trained two steps of a second."""
    now = [1000.0]
    for module in (heartbeat, observers):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    this_process.heartbeat.begin("auto")
    for step in (1, 2):
        for phase in (heartbeat.DATA, heartbeat.FORWARD, heartbeat.BACKWARD, heartbeat.OPTIMIZER):
            this_process.heartbeat.enter(phase, step if phase == heartbeat.DATA else None)
            now[0] += 1
    this_process.heartbeat.enter(heartbeat.DATA, 3)
    yield now
    this_process.heartbeat.end()


@pytest.fixture
def observer():
    return Observer(os.getpid())


@pytest.fixture
def sleepers():
    """sleepers(n): so many processes, which end with the test also where they were stopped."""
    started = []

    def start(number):
        started.extend(subprocess.Popen(["sleep", "60"]) for _ in range(number))
        return started[-number:]

    yield start
    for process in started:
        process.kill()
        process.wait()


def silent_after(observer, clock, seconds):
    """Whether the rank is judged silent after so many seconds of looking."""
    for _ in range(int(seconds)):
        clock[0] += 1
        found = observer.look()
    return found


def test_how_long_silence_may_last_is_learnt_from_the_runs_own_steps(clock, observer):
    observer.look()
    assert not silent_after(observer, clock, 58) and silent_after(observer, clock, 4)
    assert observer.seen() | {"seconds": 0} == {"phase": "data", "step": 3, "seconds": 0, "stopped": False}
    this_process.heartbeat.enter(heartbeat.FORWARD)  # so this run's data may take a minute
    assert not silent_after(observer, clock, 2)
    this_process.heartbeat.enter(heartbeat.DATA, 4)
    assert not silent_after(observer, clock, 900)
    with this_process.heartbeat.within(heartbeat.CHECKPOINT):  # the first one has no limit of its own yet
        assert not silent_after(observer, clock, 3000)
    assert not silent_after(observer, clock, 2)


@pytest.mark.parametrize("step, waits, patience", [(0.5, False, 60), (0.5, True, 300), (9.0, False, 270)])
def test_a_silence_of_thirty_times_the_longest_step_is_enough_and_at_least_a_minute(clock, step, waits, patience):
    this_process.heartbeat.begin("auto", waits)
    for number in range(1, 4):
        for phase in (heartbeat.DATA, heartbeat.FORWARD, heartbeat.BACKWARD, heartbeat.OPTIMIZER):
            this_process.heartbeat.enter(phase, number if phase == heartbeat.DATA else None)
            clock[0] += step if phase == heartbeat.OPTIMIZER else 0.01  # a GPU: the host waits at the end
    this_process.heartbeat.enter(heartbeat.FORWARD)
    assert limit(heartbeat.FORWARD) == pytest.approx(patience)


@pytest.mark.parametrize(
    "trackers, elsewhere", [([], False), (["tensorboard"], False), (["tensorboard", "mlflow"], True)]
)
def test_a_step_may_wait_for_a_trackers_server(trackers, elsewhere):
    """MLflow's client tries for 120 s before it gives a request up, and the whole run waits for rank 0."""
    assert TrainingSection.model_construct(report_to=trackers).reports_elsewhere == elsewhere


@pytest.mark.parametrize("size, phase, seconds", [
    (16 * 50e6, heartbeat.CHECKPOINT, 300),  # a small model
    (16 * 50e6, heartbeat.EVALUATION, 900),  # the untrained model's: the first pass of all, which compiles
    (16 * 8e9, heartbeat.CHECKPOINT, 2560),
    (16 * 8e9, heartbeat.EVALUATION, 900),
    (4 * 405e9, heartbeat.CHECKPOINT, 3600),
    (4 * 405e9, heartbeat.EVALUATION, 3240),
])  # fmt: skip
def test_how_long_the_first_checkpoint_and_evaluation_may_stand_still_follows_from_the_models_size(
    clock, size, phase, seconds
):
    this_process.heartbeat.page[heartbeat.BYTES] = size
    assert limit(phase) == seconds
    this_process.heartbeat.page[heartbeat.LONGEST + phase] = 1.0
    assert limit(phase) == (300 if phase == heartbeat.EVALUATION and seconds == 900 else seconds), "later on"


def test_a_save_that_moves_is_no_hang_however_long_it_takes(clock, monkeypatch, observer):
    """The last model of 405 billion parameters, written by one rank: 810 GB are one visit of a phase."""
    written = [0]
    monkeypatch.setattr(observers, "bytes_moved", lambda pid: written[0])
    this_process.heartbeat.page[heartbeat.BYTES] = 1
    with this_process.heartbeat.within(heartbeat.CHECKPOINT):
        for _ in range(2000):
            written[0] += observers.MOVED
            assert not silent_after(observer, clock, 1)
        assert silent_after(observer, clock, 302)


def test_bytes_that_a_process_writes_are_seen(tmp_path):
    before = observers.bytes_moved(os.getpid())
    (tmp_path / "file").write_bytes(bytes(observers.MOVED))
    assert observers.bytes_moved(os.getpid()) - before >= observers.MOVED


def test_a_device_that_is_slow_in_our_own_measurement_does_not_hang(clock, observer):
    """Its steps take seconds, whatever a product of ours takes it; only one that never ends is a hang."""
    with this_process.heartbeat.within(heartbeat.MEASURING):
        observer.look()
        assert not silent_after(observer, clock, 890)
        assert silent_after(observer, clock, 20)
    assert limit(heartbeat.OPTIMIZER) < 890, "it explains no silence of a step"


def test_replicas_over_a_slow_network_do_not_hang(clock, observer):
    """The first synchronisation may take as long as its connections wait; later ones as its own time explains."""
    for patience in (3000, 890):
        with this_process.heartbeat.within(heartbeat.SYNCHRONISING):
            observer.look()
            assert not silent_after(observer, clock, patience)
    this_process.heartbeat.page[heartbeat.LONGEST + heartbeat.SYNCHRONISING] = 1.0
    with this_process.heartbeat.within(heartbeat.SYNCHRONISING):
        observer.look()
        assert silent_after(observer, clock, 910)


def test_a_limit_that_was_given_holds_for_steps_and_none_for_ever(clock, observer):
    for timeout, patience, late in ((7.0, 6, True), (0.0, 6, False)):
        this_process.heartbeat.page[heartbeat.TIMEOUT] = timeout
        this_process.heartbeat.enter(heartbeat.FORWARD)
        observer.look()
        assert not silent_after(observer, clock, patience)
        assert silent_after(observer, clock, 10_000) == late


def test_who_was_suspended_has_not_seen_the_time_go_by(clock, observer):
    """A laptop that slept, a launch after Ctrl-Z: an hour passed between two looks."""
    observer.look()
    clock[0] += 3600
    assert not observer.look() and observer.silent < 3


def test_a_process_that_is_stopped_is_silent_for_too_long_also_where_others_may_take_hours(clock, sleepers):
    this_process.heartbeat.enter(heartbeat.STARTING)
    (process,) = sleepers(1)
    observer = Observer(process.pid)
    observer.look()
    assert not silent_after(observer, clock, 10_000)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert not silent_after(observer, clock, 4) and silent_after(observer, clock, 2) and observer.seen()["stopped"]
    this_process.heartbeat.enter(heartbeat.DATA, 9)
    assert not silent_after(observer, clock, 5) and silent_after(observer, clock, 2), "in mid-run: within seconds"
    process.kill()
    process.wait()
    assert not stopped_by(process.pid)


@pytest.mark.parametrize("state, held, late", [("t", 1, False), ("t", 179, False), ("t", 182, True), ("T", 3, False)])
def test_a_process_that_is_stopped_for_a_moment_in_a_long_phase_is_no_hang(
    clock, monkeypatch, state, held, late, observer
):
    """py-spy and gdb stop a process while they read its stacks, and are most wanted where it has been silent for long."""
    now = [""]
    monkeypatch.setattr(observers, "stopped_by", lambda pid: now[0])
    with this_process.heartbeat.within(heartbeat.LOADING):
        observer.look()
        assert not silent_after(observer, clock, 1000)
        now[0] = state
        assert silent_after(observer, clock, held) == late
        now[0] = ""
        assert not silent_after(observer, clock, 1000)
    this_process.heartbeat.enter(heartbeat.DATA, 9)
    observer.look()
    now[0] = "t"
    assert not silent_after(observer, clock, 100)
    now[0] = ""
    assert not silent_after(observer, clock, 50), "what it was kept from doing begins anew"
    assert silent_after(observer, clock, 12)


def test_a_verdict_ends_the_run_though_its_page_fails(tmp_path, monkeypatch):
    def broken(reason):
        raise RuntimeError

    watch = watching(tmp_path, World(0, 0, 1, 1, "node1", "torchrun"), monkeypatch)
    watch.watched.note_failure = broken
    watch.judge()
    assert watch.left[0].startswith("error: ")


def test_a_hang_is_found_also_where_the_flight_recorder_fails(tmp_path, monkeypatch):
    """What torch writes there is no documented format; a failure of it kept every later look from judging."""

    def broken():
        raise KeyError("record_id")

    monkeypatch.setattr(watch_thread.flight_records, "records", broken)
    watch = watching(tmp_path, World(0, 0, 1, 1, "node1", "torchrun"), monkeypatch)
    monkeypatch.setattr(watch.observer, "look", lambda: True)
    watch.look()
    assert watch.left[0].startswith("error: rank 0 on node1")
    kept = json.loads((tmp_path / "heartbeats" / "rank-0.collectives").read_text())
    assert kept == {"error": "KeyError: 'record_id'"}


def test_the_watch_looks_from_its_ranks_own_device(tmp_path, monkeypatch):
    """NCCL's records ask a device, and a thread begins with the first one: there each rank would take memory."""
    taken, cuda = [], watch_thread.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "current_device", lambda: 3)
    monkeypatch.setattr(cuda, "set_device", lambda device: taken.append((device, threading.current_thread().name)))
    # Its replica has ranks 2 and 3 of the host: there it is number 1.
    watch = watching(tmp_path, World(3, 3, 4, 4, "node1", "torchrun").part(2), monkeypatch)
    watch.start()
    watch.end()
    assert taken == [(3, "watch")]


def watching(directory, world, monkeypatch):
    """The thread of a rank, not started; `left` has the words with which it would end the process."""
    strategy = Strategy("single", "single", "flag")
    watch = watch_thread.Watch(SimpleNamespace(world=world, strategy=strategy, directory=directory))
    watch.left = []
    monkeypatch.setattr(watch, "leave", watch.left.append)
    return watch


def test_without_launch_the_lowest_rank_of_the_host_that_runs_names_one_that_is_stopped_within_seconds(
    tmp_path, monkeypatch, sleepers
):
    this_process.heartbeat.begin("auto")
    stopped, running = sleepers(2)
    lowest, second = (watching(tmp_path, World(rank, rank, 3, 3, "node1", "torchrun"), monkeypatch) for rank in (0, 1))
    for watch in (lowest, second):
        watch.beside = {0: os.getpid(), 1: running.pid, 2: stopped.pid}
    says = {"rank": 2, "host": "node1", "pid": stopped.pid, "writings": 1, "phase": "forward", "step": 41}
    lowest.write()
    (tmp_path / "heartbeats" / "rank-2.json").write_text(json.dumps(says | {"seconds": 0.0, "waits": None}))
    for watch in (lowest, second):
        watch.look()
    assert not lowest.left
    stopped.send_signal(signal.SIGSTOP)
    os.waitpid(stopped.pid, os.WUNTRACED)
    for _ in range(6):
        lowest.look()
        second.look()
    assert not second.left and lowest.left[0].startswith(
        "error: rank 2 on node1 has been stopped (SIGSTOP, or a debugger) since step 41; ranks 0-1 wait for it in"
    )


def test_a_peer_that_is_stopped_for_a_moment_is_not_gone(tmp_path, monkeypatch):
    """Rank 0 writes the whole model for an hour, the others wait for it, and somebody looks at rank 0 with py-spy."""
    this_process.heartbeat.begin("auto")
    now = [0.0]
    monkeypatch.setattr(watch_thread.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch_thread, "stopped_by", lambda pid: "t")
    file, peer = tmp_path / "rank-0.json", watch_thread.Peer("node1", 1000.0)
    file.write_text(json.dumps({"host": "node1", "pid": os.getpid(), "writings": 1}))
    for seconds, gone in ((1, False), (100, False), (100, True)):
        for _ in range(seconds):
            now[0] += 1
            peer.read(file)
        assert peer.gone == gone


def test_a_save_that_takes_its_time_says_once_how_long_it_may_stand_still(tmp_path, monkeypatch, capsys):
    watch = watching(tmp_path, World(0, 0, 1, 1, "node1", "torchrun"), monkeypatch)
    this_process.heartbeat.begin("auto")
    this_process.heartbeat.page[heartbeat.BYTES] = 16 * 8e9
    with this_process.heartbeat.within(heartbeat.CHECKPOINT):
        this_process.heartbeat.page[heartbeat.TIMEOUT] = 0  # no limit: nothing to say
        watch.observer.silent = 5.0
        watch.say_limit(heartbeat.CHECKPOINT)
        this_process.heartbeat.page[heartbeat.TIMEOUT] = heartbeat.AUTO
        watch.observer.silent = 0.0
        watch.look()
        assert not capsys.readouterr().out
        for _ in range(2):
            watch.observer.silent = 5.0
            watch.look()
    assert capsys.readouterr().out == (
        "this save counts as a hang once no byte is read or written for 2,560 s (--hang_timeout)\n"
    )


def test_sys_exit_with_0_in_mid_run_is_an_error_that_says_where(monkeypatch, capsys):
    def library():
        sys.exit(0)

    monkeypatch.setattr(this_process.signals, "leaving", threading.RLock())
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(Left(code)))
    try:
        library()
    except SystemExit as error:
        with pytest.raises(Left) as left:
            all_ranks.fail(error, World(0, 0, 1, 1, "node1", "python"))
    assert left.value.args == (1,)
    told = capsys.readouterr().err
    assert "RuntimeError: sys.exit(0) was called in mid-run" in told and "in library" in told
    with pytest.raises(SystemExit):
        all_ranks.fail(SystemExit(2), World(0, 0, 1, 1, "node1", "python"))


class Left(BaseException):
    """Instead of the end of the process."""
