"""The far end: an agent takes orders, and leaves nothing behind when its channel closes."""

import sys
import time

from tests.unit.hosts.asking import REPOSITORY, talk


def test_an_agent_whose_channel_closes_stops_everything_even_what_ignores_sigterm():
    stubborn = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('up', flush=True)\ntime.sleep(600)"
    )
    order = {
        "do": "start",
        "run": f"test-{time.monotonic_ns()}",
        "command": [sys.executable, "-c", stubborn],
        "cwd": str(REPOSITORY),
        "environment": {},
        "files": {},
    }
    lines, seconds = talk(order, seconds=1.5)
    kinds = [line["is"] for line in lines]
    assert kinds[0] == "hello" and "stopped" in kinds
    assert {"is": "launcher", "out": "up"} in lines
    assert seconds < 15
    from brigade.launch.host_facts import processes

    assert processes(order["run"]) == []


def test_an_agent_answers_orders_and_names_who_holds_a_port():
    import socket

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
