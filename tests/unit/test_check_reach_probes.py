"""What the probes of names, ports and packets find on this machine."""

import contextlib
import socket
import threading

import pytest

from brigade.check.probes import names as reach_probe
from brigade.check.probes import reach as ports_probe


def test_both_ends_of_ports_and_packets_on_this_machine():
    held = ports_probe.listen("here", "token", 3)
    facts = next(held)
    assert len(facts["ports"]) == 3
    assert all(facts["range"][0] <= port <= facts["range"][1] for port in facts["ports"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        stranger = other.getsockname()[1]
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            closed = nobody.getsockname()[1]
            target = {
                "addresses": ["127.0.0.1"],
                "ports": [*facts["ports"], stranger, closed],
                "datagrams": facts["datagrams"],
                "long": facts["long"],
            }
            found = ports_probe.connect("me", "token", {"here": target})
    assert found["lost"] == {"here": 0.0}
    found = found["failed"]
    assert found == {"here": {str(stranger): "another program answers there", str(closed): "connection refused"}}
    sent = ports_probe.packets("me", "token", {"here": target})["sent"]["here"]
    assert sent["arrived"] == "all"
    assert not ports_probe._hangs("127.0.0.1", facts["long"])
    assert ports_probe.heard(facts["control"]) == {"heard": ["me"]}
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", facts["ports"][0]), timeout=5)


def test_a_way_that_says_that_packets_are_too_long_is_told():
    """Longer than this host's loopback takes: the kernel answers as it does after ICMP "fragmentation needed"."""
    facts = next(held := ports_probe.listen("here", "token", 0))
    sender = ports_probe._sender("127.0.0.1", facts["datagrams"])
    assert ports_probe._answered(sender, b"token me".ljust(66_000, b"\0"), "token") == "told"
    sender.close()
    ports_probe.heard(facts["control"])
    held.close()


@pytest.mark.parametrize(("every", "short"), [(2, 0.5), (40, 0.0), (1, None)])
def test_datagrams_that_are_lost_are_counted(every, short, monkeypatch):
    """every: of which short ones one is lost; long ones are never answered"""
    monkeypatch.setattr(ports_probe, "PAUSE", 0.02)
    monkeypatch.setattr(ports_probe, "LAST", 0.1)
    with socket.socket(type=socket.SOCK_DGRAM) as other:
        other.bind(("127.0.0.1", 0))

        def serve():
            heard = 0
            with contextlib.suppress(OSError):
                while True:
                    data, sender = other.recvfrom(2**16)
                    heard += len(data) < 100
                    if len(data) < 100 and heard % every:
                        other.sendto(f"token {len(data)}".encode(), sender)

        threading.Thread(target=serve, daemon=True).start()
        target = {"addresses": ["127.0.0.1"], "ports": [], "datagrams": other.getsockname()[1], "long": 1}
        lost = ports_probe.connect("me", "token", {"here": target})["lost"]
        assert (short is None and not lost) or abs(lost["here"] - short) < 0.06
        arrived = ports_probe.packets("me", "token", {"here": target})["sent"]["here"]["arrived"]
        assert arrived == {2: "any", 40: "lost", 1: "none"}[every]
        other.close()


def test_long_messages_that_are_not_confirmed_hang(monkeypatch):
    """As on a way that drops long packets in silence: short ones open the connection. Here nobody reads, and little has room."""
    monkeypatch.setattr(ports_probe, "LONGEST", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert not ports_probe._hangs("127.0.0.1", deaf.getsockname()[1]), "its kernel confirms what it has room for"
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        assert ports_probe._hangs("127.0.0.1", deaf.getsockname()[1])
        closed = deaf.getsockname()[1]
    assert not ports_probe._hangs("127.0.0.1", closed), "a port that is closed is another fault"


def test_addresses_that_do_not_answer_are_tried_at_the_same_time(monkeypatch):
    monkeypatch.setattr(ports_probe, "PAUSE", 0.02)
    with socket.socket(type=socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        senders = {name: ports_probe._sender("127.0.0.1", silent.getsockname()[1]) for name in "abcde"}
        waited = []
        real = ports_probe.select.select
        monkeypatch.setattr(ports_probe.select, "select", lambda *words: waited.append(len(words[0])) or real(*words))
        assert ports_probe._first_that_answers(senders, b"token me", "token") is None
        assert set(waited) == {5}
    facts = next(held := ports_probe.listen("here", "token", 0))
    both = {"silent": senders["a"], "right": ports_probe._sender("127.0.0.1", facts["datagrams"])}
    assert ports_probe._first_that_answers(both, b"token me", "token") == "right"
    for sender in (*senders.values(), both["right"]):
        sender.close()
    ports_probe.heard(facts["control"])
    held.close()


def test_a_port_that_is_taken_names_its_holder():
    with socket.create_server(("", 0)) as mine:
        facts = next(ports_probe.listen("here", "token", 0, mine.getsockname()[1]))
        assert "process" in facts["taken"]
        assert "master" not in facts
        ports_probe.heard(facts["control"])


def test_a_host_looks_at_its_names_and_interfaces():
    found = reach_probe.look(["localhost", "no-such-host.invalid"], ["127.0.0.1"])
    assert "127.0.0.1" in found["resolved"]["localhost"]
    assert found["resolved"]["no-such-host.invalid"] == []
    assert found["unresolved"]["no-such-host.invalid"]
    assert "loopback" in {one["kind"] for one in found["interfaces"]}
    assert all(one["mtu"] >= 1280 for one in found["interfaces"])
