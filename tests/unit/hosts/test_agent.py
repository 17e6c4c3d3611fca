"""The far end: an agent takes orders, and leaves nothing behind when its channel closes."""

import signal
import socket
import sys
import time

import pytest
from torch.distributed import TCPStore

from brigade.hosts.held_port import HeldPort
from brigade.train.distributed import process_group
from brigade.train.host import cpu_threads
from testing.launches import REPOSITORY, talk


def test_an_agent_whose_channel_closes_stops_everything_even_what_ignores_sigterm(monkeypatch):
    """And its ranks share the host's cores, unless the user says otherwise, and read the files that came with the order."""
    monkeypatch.delenv(cpu_threads.VARIABLE, raising=False)
    stubborn = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('up ' + os.environ['OMP_NUM_THREADS'] + ' ' + open(os.environ['READ']).read(), flush=True)\ntime.sleep(600)"
    )
    order = {
        "do": "start",
        "run": f"test-{time.monotonic_ns()}",
        "command": [sys.executable, "-c", stubborn],
        "cwd": str(REPOSITORY),
        "environment": {"READ": "{launched.json}"},
        "files": {"launched.json": "texts"},
        "ranks": 2,
    }
    lines, seconds = talk(order, seconds=1.5)
    kinds = [line["is"] for line in lines]
    assert kinds[0] == "hello" and "stopped" in kinds
    assert {"is": "launcher", "out": f"up {cpu_threads.share(2)} texts"} in lines
    assert seconds < 15
    from brigade.hosts.host_facts import processes

    assert processes(order["run"]) == []


def test_an_agent_answers_orders_and_names_who_holds_a_port():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        lines, _ = talk(
            {"do": "listen", "id": 1, "port": port, "nonce": ""},
            {"do": "files", "id": 2, "paths": ["/", "/nowhere"]},
            seconds=1,
        )
    answers = {line["id"]: line for line in lines if line["is"] == "answer"}
    assert "process" in answers[1]["taken"] and answers[2]["missing"] == ["/nowhere"]
    hello = lines[0]
    assert hello["versions"]["torch"].startswith("2.") and len(hello["project"]) == 12


def test_a_port_that_one_launch_has_chosen_is_no_other_launchs_until_its_rank_0_waits_there():
    first = HeldPort(0)
    for released in (False, True):
        if released:
            first.release()
        with pytest.raises(OSError, match="another launch, which has chosen it" if released else "in use"):
            HeldPort(first.number)
        with pytest.raises(OSError), socket.socket() as program:  # without SO_REUSEADDR
            program.bind(("", first.number))
    with socket.create_server(("", first.number)) as rank_0:
        assert rank_0.getsockname()[1] == first.number


def test_ranks_join_no_rank_0_of_another_launch(monkeypatch):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("brigade/run", "first")
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("BRIGADE_RUN", "second")
    with pytest.raises(RuntimeError, match=r"belongs to another launch \(first, and this is second\)"):
        process_group._of_this_launch()
    monkeypatch.setenv("BRIGADE_RUN", "first")
    assert process_group._of_this_launch()["rank"] == 1


def test_an_agent_that_leaves_hears_nothing_more_and_says_why(tmp_path):
    """srun sends its step a signal while launch still gives orders: asyncio answered `assert not self._eof`."""
    order = {
        "do": "start",
        "run": f"test-{time.monotonic_ns()}",
        "cwd": str(REPOSITORY),
        "environment": {},
        "files": {},
        "ranks": 2,
    }
    order["command"] = ["bash", "-c", "trap '' TERM; echo up; sleep 1"]
    with (tmp_path / "errors").open("w+") as errors:
        lines, _ = talk(order, signal.SIGTERM, *[{"do": "beat", "patience": 60}] * 3, seconds=0.2, stderr=errors)
        errors.seek(0)
        assert errors.read() == ""
    assert {"is": "leaving", "why": "its agent got SIGTERM"} in lines and {"is": "stopped"} in lines
