"""The far end: an agent takes orders, and leaves nothing behind when its channel closes. What hosts say is printed, kept and
not believed blindly."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore

from brigade.hosts.connection import Channel
from brigade.hosts.held_port import HeldPort
from brigade.launch.status_and_logs import Output
from brigade.train.distributed import process_group
from brigade.train.host import cpu_threads
from testing.launches import CACHE, REPOSITORY, talk


def order_of(*command, **more):
    """The order to start a launcher of two ranks."""
    order = {"do": "start", "run": f"test-{time.monotonic_ns()}", "command": [*command], "cwd": str(REPOSITORY)}
    return order | {"environment": {}, "files": {}, "ranks": 2} | more


def test_an_agent_whose_channel_closes_stops_everything_even_what_ignores_sigterm(monkeypatch):
    """And its ranks share the host's cores, unless the user says otherwise, and read the files that came with the order."""
    monkeypatch.delenv(cpu_threads.VARIABLE, raising=False)
    stubborn = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('up ' + os.environ['OMP_NUM_THREADS'] + ' ' + open(os.environ['READ']).read(), flush=True)\ntime.sleep(600)"
    )
    files = {"environment": {"READ": "{launched.json}"}, "files": {"launched.json": "texts"}}
    order = order_of(sys.executable, "-c", stubborn, **files)
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
        listen = {"do": "listen", "id": 1, "port": port, "nonce": ""}
        lines, _ = talk(listen, {"do": "files", "id": 2, "paths": ["/", "/nowhere"]}, seconds=1)
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
    order = order_of("bash", "-c", "trap '' TERM; echo up; sleep 1")
    with (tmp_path / "errors").open("w+") as errors:
        lines, _ = talk(order, signal.SIGTERM, *[{"do": "beat", "patience": 60}] * 3, seconds=0.2, stderr=errors)
        errors.seek(0)
        assert errors.read() == ""
    assert {"is": "leaving", "why": "its agent got SIGTERM"} in lines and {"is": "stopped"} in lines


# ---- what hosts say --------------------------------------------------------------------------------------------------
def test_of_many_hosts_a_summary_is_printed_and_logs_are_the_users_alone(launch_there, tmp_path):
    done = launch_there(40, open_files=300)  # fewer than three pipes and a log for each
    assert done.returncode == 0, done.stderr
    assert "40 hosts: " in done.stderr and done.stderr.count("\n") < 20
    output = REPOSITORY / "outputs" / "tiny-full-ddp" / "success.json"  # whatever its ranks say
    assert f"succeeded: {output}; logs" in done.stderr
    logs = sorted((tmp_path / "logs").iterdir())
    assert len(logs) == 40 and logs[0].read_text().startswith("ready\n")
    assert {oct(path.stat().st_mode & 0o777) for path in logs} == {"0o600"}
    assert oct((tmp_path / "logs").stat().st_mode & 0o777) == "0o700"


def test_a_launch_goes_on_without_its_terminal_and_is_followed(launch_there, tmp_path):
    done = launch_there(2, "--detach", "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 0 and f"attach {tmp_path / 'run'}" in done.stdout and "kill " in done.stdout, done.stderr
    for named in ("run", "logs"):
        follow = [sys.executable, "-m", "brigade", "attach", str(tmp_path / named)]
        env = {"BRIGADE_CACHE": CACHE.name}
        said = subprocess.run(follow, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)
        assert said.returncode == 0 and "\ntrained\n" in said.stdout and "succeeded: " in said.stdout, said
    assert oct((tmp_path / "logs/launch.log").stat().st_mode & 0o777) == "0o600"
    follow[-1] = str(tmp_path)
    said = subprocess.run(follow, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2 and "no launch of it is known here" in said.stderr


def test_of_a_long_log_the_beginning_and_the_end_are_kept(tmp_path):
    with Output(["node1"], tmp_path / "logs", limit=0.001) as output:  # about 1,000 bytes
        for number in range(200):
            output.keep("rank-0-node1", f"line {number:03d} of a rank that talks")
    logs = {path.name: path.read_text().splitlines() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["rank-0-node1.before.log", "rank-0-node1.first.log", "rank-0-node1.log"]
    assert logs["rank-0-node1.first.log"][0].startswith("line 000")
    assert (logs["rank-0-node1.before.log"] + logs["rank-0-node1.log"])[-1].startswith("line 199")
    assert sum(map(len, logs.values())) < 200


def test_more_hosts_than_open_files_are_refused(launch_there):
    done = launch_there(40, open_files=200)
    assert (done.returncode, done.stderr.count("\n")) == (2, 3)
    assert "40 hosts" in done.stderr and "200, is enough for 18" in done.stderr and "nofile" in done.stderr


NONSENSE = {
    '{"is": "stop"}': "no kind of message: 'stop'",
    '{"is": "lost", "why": "x"}': "no kind of message: 'lost'",
    '{"is": ["rank"]}': "no kind of message",
    "[]": "no kind of message",
    "[" * 100_000: "nobody understands",
    '{"is": "ended", "code": "0"}': "code: Input should be a valid integer",
    '{"is": "rank", "out": "x"}': "rank: Field required",
    '{"is": "rank", "rank": 0, "marker": true}': "rank 0 is not on this host",
    '{"is": "rank", "rank": -1, "exit": 1}': "rank -1 is not on this host",
    '{"is": "rank", "rank": 1, "exit": -1000}': "exit: Input should be greater",
}


@pytest.mark.parametrize("message", NONSENSE)
def test_a_host_that_says_nonsense_is_lost(message):
    hello = {"is": "hello", "host": "", "machine": "", "versions": {}, "project": "", "gpus": 0, "addresses": {}}
    says = f"print('brigade> {json.dumps(hello)}\\nbrigade>', {message!r}, flush=True); input()"
    agent = [sys.executable, "-c", says]

    async def hear():
        channel = Channel("node2", range(1, 2), agent, asyncio.Queue())
        await channel.connect()
        return await asyncio.wait_for(channel.events.get(), 10)

    _, kind, fields = asyncio.run(hear())
    assert kind == "lost" and "it said what nobody understands" in fields["why"] and NONSENSE[message] in fields["why"]


def test_nothing_that_one_host_says_of_anothers_rank_is_believed(launch_there):
    done = launch_there(2, STAND_IN_NODE2_SAYS='{"is": "rank", "rank": 0, "marker": true}')
    assert done.returncode == 1 and "rank 0 is not on this host" in done.stderr, done.stderr
    assert "error: node2 failed first: the host was lost: it said what nobody understands" in done.stderr
    assert "succeeded" not in done.stderr and "Traceback" not in done.stderr


def test_only_rank_0_says_that_the_run_reached_its_end(launch_there):
    done = launch_there(2, STAND_IN_NODE2_SAYS='{"is": "rank", "rank": 1, "marker": true}')
    assert done.returncode == 1 and "no success.json" in done.stderr and "succeeded" not in done.stderr


def test_no_terminal_obeys_what_a_rank_prints(launch_there, tmp_path):
    said = "\033]0;title\a\033[2Jlast \033[31mwords\033[0m\x9b5m\b\b\r\n\tat line 1"
    done = launch_there(2, STAND_IN_NODE2_SAYS=json.dumps({"is": "rank", "rank": 1, "out": said, "exit": 3}))
    assert "  | last words\n  | \tat line 1" in done.stderr, done.stderr
    text = done.stdout + done.stderr + (tmp_path / "logs" / "rank-1-node2.log").read_text()
    assert not [character for character in text if not character.isprintable() and character not in "\n\t"]


@pytest.mark.parametrize("shell, said", [
    ("echo This account is currently not available.; exit 1", "This account is currently not available. (sh ended with 1)"),
    ("echo Welcome; echo broken >&2; exit 1", "broken (sh ended with 1)"),
    ("echo \"Warning: Permanently added 'node1' to the list of known hosts.\" >&2", "its channel closed (sh ended with 0)"),
])  # fmt: skip
def test_a_shell_that_runs_nothing_is_quoted(shell, said, user_error):
    channel = Channel("node1", range(1), ["sh", "-c", shell], asyncio.Queue())
    assert user_error(asyncio.run, channel.connect(20)).problem == said
