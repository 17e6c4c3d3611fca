"""What check says of names, interfaces, ports and packets, from recorded facts."""

import asyncio
import socket
import threading

import pytest

from brigade.check import interfaces as choice
from brigade.check import reach
from brigade.check.hosts import Recorded, Wanted
from brigade.check.pairs import ALL_PAIRS, SAMPLE, blame, one_way, partners
from brigade.check.probes import ports as ports_probe
from brigade.check.probes import reach as reach_probe
from brigade.check.results import NotHere

NODES = [f"node{number}" for number in range(1, 5)]
CARD = {"name": "eth0", "kind": "mlx5_core", "mtu": 1500}
LOOPBACK = {"name": "lo", "kind": "loopback", "mtu": 65536, "addresses": []}


def address(host):
    return f"10.0.0.{host[-1]}"


def look(host, **more):
    card = CARD | {"addresses": [address(host)]}
    return {
        "resolved": {other: [address(other)] for other in NODES}, "unresolved": {}, "interfaces": [LOOPBACK, card],
        "leads": "eth0", "variables": {}, "hostname": host, "own": [address(host)],
    } | more  # fmt: skip


def listening(host):
    more = {"master": 29500} if host == "node1" else {}
    return {"range": [32768, 60999], "ports": [32768, 40000], "datagrams": 5, "long": 7, "control": 6} | more


def judged(check, answers, hosts=NODES, environment=None, gpus=0, **own):
    """host -> (level, problem); own: host -> what differs of its look()"""
    answers = {"reach.look": {host: look(host, **own.get(host, {})) for host in hosts}} | answers
    hello = {host: {"addresses": {address(host): "eth0"}, "gpus": gpus, "machine": host} for host in hosts}
    wanted = Wanted(dict.fromkeys(hosts, 1), environment=environment or {})
    recorded = Recorded(wanted, answers, hello)

    async def run():
        return [result async for result in check(recorded)]

    results = asyncio.run(run())
    assert all(bool(result.why and result.cure) == (result.level in ("yellow", "red")) for result in results)
    return {result.host: (result.level, result.problem) for result in results}


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


@pytest.mark.parametrize(
    ("failed", "incoming", "outgoing"),
    [
        ([(a, "node3") for a in TRIED["node3"]], {"node3": ["node1", "node2", "node4"]}, {}),
        ([("node3", b) for b in TRIED["node3"]], {}, {"node3": ["node1", "node2", "node4"]}),
        ([("node1", "node3")], {"node3": ["node1"]}, {}),
        ([(a, b) for a in NODES for b in TRIED[a]], {a: TRIED[a] for a in NODES}, {}),
    ],
    ids=["closed", "cannot get out", "one pair", "all closed"],
)
def test_whose_fault_it_is(failed, incoming, outgoing):
    assert blame(TRIED, failed) == (incoming, outgoing)


def test_of_two_hosts_the_one_that_should_have_been_reached_is_named():
    assert blame(partners(NODES[:2]), [("node1", "node2")]) == ({"node2": ["node1"]}, {})


def test_a_direction_in_which_datagrams_pass_is_innocent():
    failed = {("node2", "node3"), ("node3", "node2")}
    assert one_way(failed, {"node2": ["node3"], "node3": []}) == {("node2", "node3")}
    assert one_way(failed, {}) == failed, "nothing is known where UDP does not pass at all"
    assert one_way({("node2", "node3")}, {"node3": ["node2"]}) == {("node2", "node3")}


# ---- names ---------------------------------------------------------------------------------------------------------
def test_names_that_lead_elsewhere_are_warnings_on_the_host_that_sees_them():
    good = look("node2")["resolved"]
    found = judged(
        reach.names, {}, node2={"resolved": good | {"node1": ["127.0.0.1"]}},
        node3={"resolved": good | {"node1": []}, "unresolved": {"node1": "Name or service not known"}},
        node4={"resolved": good | {"node1": ["192.168.7.7"]}},
    )  # fmt: skip
    assert found["node1"] == ("green", "")
    assert found["node2"] == ("yellow", "node1 is 127.0.0.1, the loopback, here")
    assert found["node3"] == ("yellow", "node1 has no address (Name or service not known) here")
    assert found["node4"] == ("yellow", "node1 is 192.168.7.7, which is not an address of node1, here")


def test_a_host_that_the_hostfile_calls_localhost_has_no_network_name():
    hosts = ["localhost", "node2"]
    looks = {host: look("node2") | {"resolved": {"localhost": ["127.0.0.1"], "node2": ["10.0.0.2"]}} for host in hosts}
    hello = {host: {"machine": host, "addresses": {f"10.0.0.{number}": "eth0"}} for number, host in enumerate(hosts, 1)}
    recorded = Recorded(Wanted(dict.fromkeys(hosts, 1)), {"reach.look": looks}, hello)

    async def run():
        return [result async for result in reach.names(recorded)]

    first, second = asyncio.run(run())
    assert (first.host, first.level, second.level) == ("localhost", "yellow", "green")
    assert "network name" in first.cure
    assert "/etc/hosts" not in first.cure


class Asked(Recorded):
    """Keeps what each host was asked."""

    async def ask(self, probe, seconds=10, each=None, **arguments):
        self.questions = {host: arguments | own for host, own in each.items()}
        return await super().ask(probe, seconds, each, **arguments)


def test_of_many_hosts_each_one_looks_up_a_sample_of_names():
    hosts = [f"n{number}" for number in range(1000)]
    hello = {
        host: {"machine": host, "addresses": {f"10.1.{n // 250}.{n % 250}": "eth0"}} for n, host in enumerate(hosts)
    }
    looks = {host: look("node1") | {"resolved": {}} for host in hosts}
    recorded = Asked(Wanted(dict.fromkeys(hosts, 1)), {"reach.look": looks}, hello)

    async def run():
        return [result.level async for result in reach.names(recorded)]

    assert set(asyncio.run(run())) == {"green"}
    assert {len(own["names"]) for own in recorded.questions.values()} == {SAMPLE + 1}
    assert recorded.questions["n5"]["towards"] == ["10.1.0.0"]
    assert recorded.questions["n0"]["towards"] == ["10.1.0.1"], "the first one's way leads to another host too"


def test_two_names_of_one_machine_are_no_two_hosts():
    hello = {host: {"machine": "the same", "addresses": {}} for host in NODES[:2]}
    recorded = Recorded(Wanted(dict.fromkeys(hello, 1)), {"reach.look": {host: look(host) for host in hello}}, hello)

    async def run():
        return [result async for result in reach.names(recorded)]

    assert [(r.level, r.problem) for r in asyncio.run(run())][1] == ("red", "it is the same machine as node1")


# ---- interfaces ----------------------------------------------------------------------------------------------------
def bridge(name):
    return {"name": name, "kind": "bridge", "mtu": 1500, "addresses": ["172.17.0.1"]}


def test_what_nccl_and_gloo_take_without_launch():
    found = look("node1")
    docker = found | {"interfaces": [LOOPBACK, bridge("docker0"), *found["interfaces"][1:]]}
    compose = found | {"interfaces": [bridge("br-1a2b"), *found["interfaces"]]}
    assert choice.of_nccl(docker, {}) == ["eth0"]
    assert choice.of_nccl(compose, {}) == ["br-1a2b", "eth0"], "NCCL leaves out docker0, and not what compose makes"
    assert choice.of_nccl(found, {"NCCL_SOCKET_IFNAME": "^eth"}) == ["lo"]
    assert choice.of_gloo(found, {}) == ["eth0"]
    assert choice.of_gloo(found | {"own": ["127.0.1.1"]}, {}) == ["lo"]
    assert choice.of_gloo(found | {"own": []}, {}) == ["lo"], "gloo falls back to it"


@pytest.mark.parametrize(
    ("pattern", "takes"),
    [
        ("eth0", True),
        ("eth", True),
        ("=eth", False),
        ("=eth0", True),
        ("^docker,lo", True),
        ("^eth", False),
        ("ib", False),
    ],
)
def test_nccls_patterns(pattern, takes):
    assert choice.takes(pattern, "eth0") is takes


def test_a_bridge_matters_where_nccl_is_used():
    interfaces = [bridge("br-1a2b"), *look("node2")["interfaces"]]
    assert judged(reach.interface, {}, node2={"interfaces": interfaces})["node2"][0] == "green"
    level, problem = judged(reach.interface, {}, gpus=8, node2={"interfaces": interfaces})["node2"]
    assert (level, problem) == (
        "yellow", "without NCCL_SOCKET_IFNAME the bridge br-1a2b is taken, the way to the others is eth0",
    )  # fmt: skip


def test_a_bridge_that_leads_to_the_others_is_a_card_like_any():
    interfaces = [LOOPBACK, bridge("br0") | {"addresses": [address("node2")]}]
    assert judged(reach.interface, {}, gpus=8, node2={"interfaces": interfaces, "leads": "br0"})["node2"][0] == "green"


def test_a_variable_that_every_rank_gets_must_suit_every_host():
    other = [LOOPBACK, CARD | {"name": "ens5", "addresses": [address("node3")]}]
    found = judged(
        reach.interface, {}, environment={"NCCL_SOCKET_IFNAME": "eth0"}, node3={"interfaces": other, "leads": "ens5"}
    )
    assert {host: level for host, (level, _) in found.items()} == dict.fromkeys(NODES, "green") | {"node3": "red"}
    assert "NCCL_SOCKET_IFNAME=eth0: no such interface" in found["node3"][1]
    found = judged(reach.interface, {}, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert {level for level, _ in found.values()} == {"red"}
    found = judged(reach.interface, {}, environment={"GLOO_SOCKET_IFNAME": "eth"})  # gloo takes whole names
    assert {level for level, _ in found.values()} == {"red"}


def test_a_bridge_behind_the_card_is_no_fault():
    """The usual ^docker0,lo, on hosts with bridges of other names."""
    card = look("node2")["interfaces"][1]
    usual = {"environment": {"NCCL_SOCKET_IFNAME": "^docker0,lo"}}
    for name in ("virbr0", "br-1a2b", "cni0", "flannel.1"):
        found = judged(reach.interface, {}, node2={"interfaces": [LOOPBACK, card, bridge(name)]}, **usual)
        assert found.pop("node2")[0] == "yellow"
        assert set(found.values()) == {("green", "")}
    found = judged(reach.interface, {}, node2={"interfaces": [LOOPBACK, bridge("br-1a2b"), card]}, **usual)
    assert found["node2"][0] == "yellow", "the first, but it may lead to the others all the same"
    assert judged(reach.interface, {}, environment={"NCCL_SOCKET_IFNAME": "^docker"})["node2"][0] == "red"


def test_a_bridge_of_the_same_address_on_two_hosts_leads_to_nobody():
    found = look("node2") | {"interfaces": [LOOPBACK, bridge("docker0"), look("node2")["interfaces"][1]]}
    assert choice.named_wrongly("NCCL_SOCKET_IFNAME", "docker0", found, {"172.17.0.1"})[0] == "red"
    assert choice.named_wrongly("NCCL_SOCKET_IFNAME", "docker0", found, set())[0] == "yellow"
    assert choice.named_wrongly("NCCL_SOCKET_IFNAME", "eth0", found, {"172.17.0.1"}) == ("", "")
    hello = {host: {"machine": host, "addresses": {"172.17.0.1": "docker0", address(host): "eth0"}} for host in NODES}
    assert reach._shared(Recorded(Wanted(dict.fromkeys(NODES, 1)), {}, hello)) == {"172.17.0.1"}


def test_a_cure_names_no_interface_that_nobody_knows():
    def cures(**own):
        looks = {host: look(host, variables={}, **own.get(host, {})) for host in NODES}
        hello = {host: {"addresses": {}, "machine": host} for host in NODES}
        wanted = Wanted(dict.fromkeys(NODES, 1), environment={"GLOO_SOCKET_IFNAME": "lo"})

        async def run():
            return {one.cure async for one in reach.interface(Recorded(wanted, {"reach.look": looks}, hello))}

        return asyncio.run(run())

    known, unknown = cures(), cures(**{host: {"leads": ""} for host in NODES})
    assert len(known) == len(unknown) == 1
    assert "export GLOO_SOCKET_IFNAME=eth0" in known.pop()
    assert unknown.pop().startswith("unset GLOO_SOCKET_IFNAME")


# ---- ports ---------------------------------------------------------------------------------------------------------
def ports(failed, heard=None, **more):
    listen = {host: listening(host) | more.get(host, {}) for host in NODES}
    answers = {
        "ports.listen": listen, "ports.heard": {host: {"heard": names} for host, names in (heard or {"node1": []}).items()},
        "ports.connect": {host: {"failed": failed.get(host, {})} for host in NODES},
    }  # fmt: skip
    return judged(reach.ports, answers)


def test_open_ports_are_sound():
    assert set(ports({}).values()) == {("green", "")}


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


def test_where_one_direction_is_closed_the_end_that_hears_nothing_is_named():
    closed = {"32768": "no answer within 5 s"}
    found = ports(
        {"node2": {"node3": closed}, "node3": {"node2": closed}}, {"node2": ["node3"], "node3": [], "node1": []}
    )
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
    return judged(
        reach.packets, {"ports.listen": {host: listening(host) for host in NODES}, "ports.packets": sent}, **own
    )


def test_a_small_mtu_is_a_warning_and_a_path_that_loses_packets_is_not_sound():
    assert set(packets({}).values()) == {("green", "")}
    small = [LOOPBACK, CARD | {"mtu": 1400, "addresses": [address("node2")]}]
    found = packets({(a, "node2"): "lost" for a in TRIED["node2"]}, node2={"interfaces": small})
    assert found.pop("node2") == ("yellow", "eth0 has MTU 1400, elsewhere it is 1500, and full-size packets are lost")
    assert {level for level, _ in found.values()} == {"green"}
    found = packets({(a, "node2"): "hangs" for a in TRIED["node2"]})
    said = "packets of 1500 bytes from node1, node3, node4 are lost, short ones arrive, and 100 KB by TCP do not"
    assert found["node2"] == ("red", said)
    nothing = dict.fromkeys(((a, b) for a in NODES for b in TRIED[a]), "none")
    assert {level for level, _ in packets(nothing).values()} == {"grey"}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("told", "packets of 1500 bytes from node1, node3, node4 are too long for the way, and a router says so"),
        (
            "lost",
            "packets of 1500 bytes from node1, node3, node4 are lost, short ones arrive; TCP was not seen to hang",
        ),
    ],
)
def test_a_way_on_which_tcp_works_is_a_warning(what, says):
    """Hosts with 9,000 bytes behind a router with 1,500, or a VPN: the MTU of the way is found, and nothing hangs."""
    found = packets({(a, "node2"): what for a in TRIED["node2"]})
    assert found.pop("node2") == ("yellow", says)
    assert {level for level, _ in found.values()} == {"green"}
    everywhere = packets({(a, b): what for a in NODES for b in TRIED[a]})
    assert {level for level, _ in everywhere.values()} == {"yellow"}


@pytest.mark.parametrize("check", [reach.names, reach.interface, reach.packets])
def test_one_host_has_nobody_to_reach(check):
    with pytest.raises(NotHere):
        judged(check, {}, NODES[:1])


def test_one_host_needs_the_master_port_alone():
    answers = {"ports.listen": {"node1": listening("node1") | {"ports": []}}, "ports.heard": {"node1": {"heard": []}}}
    assert judged(reach.ports, answers, NODES[:1]) == {"node1": ("green", "")}


# ---- probes, on this machine -----------------------------------------------------------------------------------------
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
            found = ports_probe.connect("me", "token", {"here": target})["failed"]
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


def test_long_messages_that_nobody_reads_hang(monkeypatch):
    """As on a way that drops long packets in silence: short ones open the connection."""
    monkeypatch.setattr(ports_probe, "LONGEST", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
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
