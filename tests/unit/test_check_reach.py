"""What check says of ports and packets, from recorded facts, and what the probes find on this machine."""

import contextlib
import socket
import threading

import pytest

from brigade.check import reach
from brigade.check.checks import NotHere, Wanted
from brigade.check.names import ALL_PAIRS, SAMPLE, partners
from brigade.check.probes import names as reach_probe
from brigade.check.probes import reach as ports_probe
from brigade.check.reach import blame, one_way
from testing.reaching import CARD, LOOPBACK, NODES, address, judged, listening, look
from testing.recorded_hosts import Recorded


# ---- pairs ---------------------------------------------------------------------------------------------------------
def test_all_pairs_are_tried_of_few_hosts_and_a_bounded_number_of_many():
    assert partners(NODES)["node2"] == ["node1", "node3", "node4"]
    many = [f"n{number}" for number in range(1000)]
    tried = partners(many)
    assert {len(others) for others in tried.values()} == {SAMPLE}
    assert all(host not in others and len(set(others)) == SAMPLE for host, others in tried.items())
    assert all(sum(host in tried[other] for other in many) >= 2 for host in many[:20])
    assert tried == partners(many), "the same sample each time"
    assert len(partners(many[:ALL_PAIRS])["n0"]) == ALL_PAIRS - 1


TRIED = partners(NODES)


@pytest.mark.parametrize("failed, incoming, outgoing", [
    ([(a, "node3") for a in TRIED["node3"]], {"node3": ["node1", "node2", "node4"]}, {}),
    ([("node3", b) for b in TRIED["node3"]], {}, {"node3": ["node1", "node2", "node4"]}),
    ([("node1", "node3")], {"node3": ["node1"]}, {}),
    ([(a, b) for a in NODES for b in TRIED[a]], {a: TRIED[a] for a in NODES}, {}),
], ids=["closed", "cannot get out", "one pair", "all closed"])  # fmt: skip
def test_whose_fault_it_is(failed, incoming, outgoing):
    assert blame(TRIED, failed) == (incoming, outgoing)


def test_of_two_hosts_the_one_that_should_have_been_reached_is_named():
    assert blame(partners(NODES[:2]), [("node1", "node2")]) == ({"node2": ["node1"]}, {})


def test_a_direction_in_which_datagrams_pass_is_innocent():
    failed = {("node2", "node3"), ("node3", "node2")}
    assert one_way(failed, {"node2": ["node3"], "node3": []}) == {("node2", "node3")}
    assert one_way(failed, {}) == failed, "nothing is known where UDP does not pass at all"
    assert one_way({("node2", "node3")}, {"node3": ["node2"]}) == {("node2", "node3")}


# ---- ports ---------------------------------------------------------------------------------------------------------
def ports(failed, heard=None, lost=None, **more):
    listen = {host: listening(host) | more.get(host, {}) for host in NODES}
    answers = {
        "reach.listen": listen, "reach.heard": {host: {"heard": names} for host, names in (heard or {"node1": []}).items()},
        "reach.connect": {host: {"failed": failed.get(host, {}), "lost": (lost or {}).get(host, {})} for host in NODES},
    }  # fmt: skip
    return judged(reach.ports, answers)


def test_a_firewall_that_opens_the_master_port_alone_is_found():
    closed = {"32768": "no answer within 5 s", "40000": "no answer within 5 s"}
    found = ports({host: {"node3": closed} for host in TRIED["node3"]})
    assert found.pop("node3") == (
        "red", "node1, node2, node4 cannot reach it on 2 of 2 ports tried of 32768-60999 (32768, 40000): no answer within 5 s",
    )  # fmt: skip
    assert {level for level, _ in found.values()} == {"green"}


def test_a_closed_master_port_and_one_that_is_taken():
    found = ports({host: {"node1": {"29500": "connection refused"}} for host in TRIED["node1"]})
    assert found["node1"] == ("red", "node2, node3, node4 cannot reach it on port 29500: connection refused")
    found = ports({}, node1={"taken": "process 7 (python3)"})
    assert found["node1"] == ("yellow", "port 29500 is in use by process 7 (python3)")


LATE = {"32768": "no answer within 5 s"}


@pytest.mark.parametrize("lost, failed, levels", [
    ({"node2": dict.fromkeys(TRIED["node2"], 0.4)}, {"node2": {"node1": LATE}, "node3": {"node2": LATE}}, {"node2": "red"}),
    ({a: {"node2": 0.3} for a in TRIED["node2"]}, {"node2": {"node1": LATE}}, {"node2": "red"}),
    ({"node2": dict.fromkeys(TRIED["node2"], 0.2)}, {}, {"node2": "yellow"}),
    ({"node1": {"node2": 0.2}}, {"node2": {"node1": LATE}}, {"node1": "red", "node2": "red"}),
    ({"node1": {"node2": 0.05}, "node2": {"node1": 0.025}}, {}, {}),
    ({"node2": {"node1": 0.2}}, {"node3": {"node4": LATE}}, {"node1": "yellow", "node2": "yellow", "node4": "red"}),
], ids=["its own way", "as others see it", "no port closed", "one pair", "few are lost", "beside a firewall"])  # fmt: skip
def test_where_packets_are_lost_no_firewall_is_blamed(lost, failed, levels):
    found = ports(failed, lost=lost)
    assert {host: level for host, (level, _) in found.items() if level != "green"} == levels
    lossy = {host for pair in lost.items() for host in (pair[0], *pair[1])}
    assert all(("of short packets between it and" in found[host][1]) == (host in lossy) for host in levels)


def test_where_one_direction_is_closed_the_end_that_hears_nothing_is_named():
    failed = {"node2": {"node3": LATE}, "node3": {"node2": LATE}}
    found = ports(failed, {"node2": ["node3"], "node3": [], "node1": []})
    assert [host for host, (level, _) in found.items() if level == "red"] == ["node3"]
    assert found["node3"][1].startswith("node2 cannot reach it")


def test_a_host_with_many_cards_is_tried_by_its_names_address_first():
    """Its own may be those of eight networks that lead elsewhere."""
    cards = {f"10.{number}.0.1": f"ib{number}" for number in range(8)} | {"172.17.0.1": "docker0"}
    hello = {host: {"addresses": cards} for host in NODES}
    looks, listen = {"node1": look("node1")}, {host: listening(host) for host in NODES}

    def addresses(**environment):
        recorded = Recorded(Wanted(dict.fromkeys(NODES, 1), environment=environment), {}, hello)
        return reach._targets(recorded, looks, listen, "token")[1]["node1"]["targets"]["node2"]["addresses"]

    assert addresses() == ["10.0.0.2", "10.0.0.1", "10.1.0.1", "10.2.0.1", "10.3.0.1"]
    assert addresses(NCCL_SOCKET_IFNAME="ib7") == ["10.7.0.1"]
    looks["node1"]["resolved"]["node2"] = ["127.0.0.1"]
    assert addresses()[0] == "10.0.0.1"


# ---- packets -------------------------------------------------------------------------------------------------------
def packets(arrived, **own):
    """arrived: (from, to) -> what, where it is not all"""
    sent = {a: {"sent": {b: {"size": 1500, "arrived": arrived.get((a, b), "all")} for b in TRIED[a]}} for a in NODES}
    listen = {host: listening(host) for host in NODES}
    return judged(reach.packets, {"reach.listen": listen, "reach.packets": sent}, **own)


def test_a_small_mtu_is_a_warning_and_a_path_that_loses_packets_is_not_sound():
    assert set(packets({}).values()) == {("green", "")}
    small = [LOOPBACK, CARD | {"mtu": 1400, "addresses": [address("node2")]}]
    found = packets({(a, "node2"): "lost" for a in TRIED["node2"]}, node2={"interfaces": small})
    assert found.pop("node2") == ("yellow", "eth0 has MTU 1400, elsewhere it is 1500, and full-size packets are lost")
    assert {level for level, _ in found.values()} == {"green"}
    found = packets({(a, "node2"): "hangs" for a in TRIED["node2"]})
    said = "packets of 1500 bytes from node1, node3, node4 are lost, short ones arrive, and 32 KiB by TCP do not"
    assert found["node2"] == ("red", said)
    nothing = dict.fromkeys(((a, b) for a in NODES for b in TRIED[a]), "none")
    assert {level for level, _ in packets(nothing).values()} == {"grey"}


@pytest.mark.parametrize("what, says", [
    ("told", "packets of 1500 bytes from node1, node3, node4 are too long for the way, and a router says so"),
    ("any", "packets of 1500 bytes from node1, node3, node4 are lost, and short ones now and then"),
    ("lost", "packets of 1500 bytes from node1, node3, node4 are lost, short ones arrive; TCP was not seen to hang"),
])  # fmt: skip
def test_a_way_on_which_tcp_works_is_a_warning(what, says):
    """Hosts with 9,000 bytes behind a router with 1,500, or a VPN: the MTU of the way is found, and nothing hangs."""
    found = packets({(a, "node2"): what for a in TRIED["node2"]})
    assert found.pop("node2") == ("yellow", says)
    assert {level for level, _ in found.values()} == {"green"}
    everywhere = packets({(a, b): what for a in NODES for b in TRIED[a]})
    assert {level for level, _ in everywhere.values()} == {"yellow"}


def test_one_host_has_nobody_to_reach():
    with pytest.raises(NotHere):
        judged(reach.packets, {}, NODES[:1])


def test_one_host_needs_the_master_port_alone():
    answers = {"reach.listen": {"node1": listening("node1") | {"ports": []}}, "reach.heard": {"node1": {"heard": []}}}
    assert judged(reach.ports, answers, NODES[:1]) == {"node1": ("green", "")}


# ---- what the probes find on this machine ----------------------------------------------------------------------------
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
