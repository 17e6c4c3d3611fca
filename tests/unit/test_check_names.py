"""What check says of names and interfaces, from recorded facts."""

from types import SimpleNamespace

import pytest

from brigade.check import names
from brigade.check.checks import NotHere, Wanted
from brigade.check.names import SAMPLE
from brigade.check.probes import names as probe
from brigade.hosts import rendezvous
from testing.reaching import CARD, LOOPBACK, NODES, address, judged, look
from testing.recorded_hosts import Recorded, results_of


# ---- names ---------------------------------------------------------------------------------------------------------
def test_names_that_lead_elsewhere_are_warnings_on_the_host_that_sees_them():
    good = look("node2")["resolved"]
    found = judged(
        names.names, {}, node2={"resolved": good | {"node1": ["127.0.0.1"]}},
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
    first, second = results_of(names.names, Recorded(Wanted(dict.fromkeys(hosts, 1)), {"names.look": looks}, hello))
    assert (first.host, first.level, second.level) == ("localhost", "yellow", "green")
    assert "network name" in first.cure
    assert "/etc/hosts" not in first.cure


def test_a_hostfile_that_names_users_is_named_and_no_hosts_file():
    """ssh takes it, no other program does: node1's names were called wrong, with a cure of /etc/hosts."""
    hosts = ["alice@node1", "node2"]
    resolved = {"resolved": {"alice@node1": [], "node2": ["10.0.0.2"]}, "unresolved": {"alice@node1": "not known"}}
    hello = {host: {"machine": host, "addresses": {f"10.0.0.{number}": "eth0"}} for number, host in enumerate(hosts, 1)}
    recorded = Recorded(
        Wanted(dict.fromkeys(hosts, 1)), {"names.look": dict.fromkeys(hosts, look("node2") | resolved)}, hello
    )
    first, second = results_of("names", recorded)
    assert (first.level, first.value, second.level) == ("yellow", "names a user", "green")
    assert "`Host node1` with `User alice`" in first.cure
    assert rendezvous.candidates("alice@node1", {"10.0.0.1": "eth0"}) == ["node1", "10.0.0.1"]
    assert rendezvous.candidates("alice@localhost", {"10.0.0.1": "eth0"}) == ["10.0.0.1"]


class Asked(Recorded):
    """Keeps what each host was asked."""

    async def ask(self, probe, seconds=10, per_host=None, **arguments):
        self.questions = {host: arguments | own for host, own in per_host.items()}
        return await super().ask(probe, seconds, per_host, **arguments)


def test_of_many_hosts_each_one_looks_up_a_sample_of_names():
    hosts = [f"n{number}" for number in range(1000)]
    addresses = {host: {f"10.1.{n // 250}.{n % 250}": "eth0"} for n, host in enumerate(hosts)}
    hello = {host: {"machine": host, "addresses": own} for host, own in addresses.items()}
    looks = {host: look("node1") | {"resolved": {}} for host in hosts}
    recorded = Asked(Wanted(dict.fromkeys(hosts, 1)), {"names.look": looks}, hello)
    assert {result.level for result in results_of(names.names, recorded)} == {"green"}
    assert {len(own["names"]) for own in recorded.questions.values()} == {SAMPLE + 1}
    assert recorded.questions["n5"]["towards"] == ["10.1.0.0"]
    assert recorded.questions["n0"]["towards"] == ["10.1.0.1"], "the first one's way leads to another host too"


def test_two_names_of_one_machine_are_no_two_hosts():
    hello = {host: {"machine": "the same", "addresses": {}} for host in NODES[:2]}
    recorded = Recorded(Wanted(dict.fromkeys(hello, 1)), {"names.look": {host: look(host) for host in hello}}, hello)
    second = results_of(names.names, recorded)[1]
    assert (second.level, second.problem) == ("red", "it is the same machine as node1")


# ---- interfaces ----------------------------------------------------------------------------------------------------
def bridge(name):
    return {"name": name, "kind": "bridge", "mtu": 1500, "addresses": ["172.17.0.1"]}


def test_what_nccl_and_gloo_take_without_launch():
    found = look("node1")
    docker = found | {"interfaces": [LOOPBACK, bridge("docker0"), *found["interfaces"][1:]]}
    compose = found | {"interfaces": [bridge("br-1a2b"), *found["interfaces"]]}
    assert names.of_nccl(docker, {}) == ["eth0"]
    assert names.of_nccl(compose, {}) == ["br-1a2b", "eth0"], "NCCL leaves out docker0, and not what compose makes"
    assert names.of_nccl(found, {"NCCL_SOCKET_IFNAME": "^eth"}) == ["lo"]
    assert names.of_gloo(found, {}) == ["eth0"]
    assert names.of_gloo(found | {"own": ["127.0.1.1"]}, {}) == ["lo"]
    assert names.of_gloo(found | {"own": []}, {}) == ["lo"], "gloo falls back to it"


@pytest.mark.parametrize("pattern, takes", [
    ("eth0", True),
    ("eth", True),
    ("=eth", False),
    ("=eth0", True),
    ("^docker,lo", True),
    ("^eth", False),
    ("ib", False),
])  # fmt: skip
def test_nccls_patterns(pattern, takes):
    assert names.takes(pattern, "eth0") is takes


def test_a_bridge_matters_where_nccl_is_used():
    interfaces = [bridge("br-1a2b"), *look("node2")["interfaces"]]
    assert judged(names.interface, {}, node2={"interfaces": interfaces})["node2"][0] == "green"
    level, problem = judged(names.interface, {}, gpus=8, node2={"interfaces": interfaces})["node2"]
    assert (level, problem) == (
        "yellow", "without NCCL_SOCKET_IFNAME the bridge br-1a2b is taken, the way to the others is eth0",
    )  # fmt: skip


def test_a_bridge_that_leads_to_the_others_is_a_card_like_any():
    interfaces = [LOOPBACK, bridge("br0") | {"addresses": [address("node2")]}]
    assert judged(names.interface, {}, gpus=8, node2={"interfaces": interfaces, "leads": "br0"})["node2"][0] == "green"


def test_a_variable_that_every_rank_gets_must_suit_every_host():
    other = [LOOPBACK, CARD | {"name": "ens5", "addresses": [address("node3")]}]
    found = judged(
        names.interface, {}, environment={"NCCL_SOCKET_IFNAME": "eth0"}, node3={"interfaces": other, "leads": "ens5"}
    )
    assert {host: level for host, (level, _) in found.items()} == dict.fromkeys(NODES, "green") | {"node3": "red"}
    assert "NCCL_SOCKET_IFNAME=eth0: no such interface" in found["node3"][1]
    found = judged(names.interface, {}, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert {level for level, _ in found.values()} == {"red"}
    found = judged(names.interface, {}, environment={"GLOO_SOCKET_IFNAME": "eth"})  # gloo takes whole names
    assert {level for level, _ in found.values()} == {"red"}


def test_a_bridge_behind_the_card_is_no_fault():
    """The usual ^docker0,lo, on hosts with bridges of other names."""
    card = look("node2")["interfaces"][1]
    usual = {"environment": {"NCCL_SOCKET_IFNAME": "^docker0,lo"}}
    for name in ("virbr0", "br-1a2b", "cni0", "flannel.1"):
        found = judged(names.interface, {}, node2={"interfaces": [LOOPBACK, card, bridge(name)]}, **usual)
        assert found.pop("node2")[0] == "yellow"
        assert set(found.values()) == {("green", "")}
    found = judged(names.interface, {}, node2={"interfaces": [LOOPBACK, bridge("br-1a2b"), card]}, **usual)
    assert found["node2"][0] == "yellow", "the first, but it may lead to the others all the same"
    assert judged(names.interface, {}, environment={"NCCL_SOCKET_IFNAME": "^docker"})["node2"][0] == "red"


def test_a_bridge_of_the_same_address_on_two_hosts_leads_to_nobody():
    found = look("node2") | {"interfaces": [LOOPBACK, bridge("docker0"), look("node2")["interfaces"][1]]}
    assert names.named_wrongly("NCCL_SOCKET_IFNAME", "docker0", found, {"172.17.0.1"})[0] == "red"
    assert names.named_wrongly("NCCL_SOCKET_IFNAME", "docker0", found, set())[0] == "yellow"
    assert names.named_wrongly("NCCL_SOCKET_IFNAME", "eth0", found, {"172.17.0.1"}) == ("", "")
    hello = {host: {"machine": host, "addresses": {"172.17.0.1": "docker0", address(host): "eth0"}} for host in NODES}
    assert names._shared(Recorded(Wanted(dict.fromkeys(NODES, 1)), {}, hello)) == {"172.17.0.1"}


def test_a_cure_names_no_interface_that_nobody_knows():
    def cures(**own):
        looks = {host: look(host, variables={}, **own.get(host, {})) for host in NODES}
        hello = {host: {"addresses": {}, "machine": host} for host in NODES}
        wanted = Wanted(dict.fromkeys(NODES, 1), environment={"GLOO_SOCKET_IFNAME": "lo"})
        return {one.cure for one in results_of(names.interface, Recorded(wanted, {"names.look": looks}, hello))}

    known, unknown = cures(), cures(**{host: {"leads": ""} for host in NODES})
    assert len(known) == len(unknown) == 1
    assert "export GLOO_SOCKET_IFNAME=eth0" in known.pop()
    assert unknown.pop().startswith("unset GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("check", [names.names, names.interface])
def test_one_host_has_nobody_to_find(check):
    with pytest.raises(NotHere):
        judged(check, {}, NODES[:1])


# ---- addresses ---------------------------------------------------------------------------------------------------
NUMBERS = {"node1": 1, "node2": 2, "node3": 3}


def neighbours(hosts=NUMBERS, **odd):
    """host -> (level, problem) where each host's ARP entries are right, but for these: node1={"node3": card}"""
    hello = {
        host: {"machine": host, "addresses": {f"10.0.0.{n}": "eth0", "172.17.0.1": "docker0"}}
        for host, n in hosts.items()
    }
    facts = {}
    for host, number in hosts.items():
        arp = {
            f"10.0.0.{n}": odd.get(host, {}).get(other, f"02:00:00:00:00:0{n}")
            for other, n in hosts.items()
            if other != host
        }
        facts[host] = {"cards": ["00:00:00:00:00:00", f"02:00:00:00:00:0{number}"], "arp": arp}
    recorded = Recorded(Wanted(dict.fromkeys(hosts, 1)), {"names.neighbours": facts}, hello)
    return {result.host: (result.level, result.problem) for result in results_of(names.addresses, recorded)}


def test_one_wrong_entry_is_its_hosts_own():
    assert set(neighbours().values()) == {("green", "")}
    found = neighbours(node2={"node3": "02:00:00:00:00:99"})
    assert [found[host][0] for host in NUMBERS] == ["green", "red", "green"]
    assert found["node2"][1] == "it finds card 02:00:00:00:00:99 at node3's address 10.0.0.3, and not node3's own"


def test_an_address_that_another_machine_took_is_named_at_its_owner():
    found = neighbours(node1={"node3": "02:00:00:00:00:99"}, node2={"node3": "02:00:00:00:00:99"})
    assert [found[host][0] for host in NUMBERS] == ["green", "green", "red"]
    assert found["node3"][1].startswith("node1, node2 find card 02:00:00:00:00:99 at its address 10.0.0.3")
    found = neighbours(node1={"node3": "02:00:00:00:00:02"})
    assert "card 02:00:00:00:00:02 of node2 at node3's address" in found["node1"][1]


@pytest.mark.parametrize("answered", [
    NUMBERS,  # Azure's network answers with one card for every address; behind a router there are no entries at all
    ("node1", "node2"),  # beside a VXLAN of Kubernetes: the entries of one are right, those of the other never
], ids=["all", "several"])  # fmt: skip
def test_where_something_answers_for_others_nobody_is_blamed(answered):
    found = neighbours(**{host: dict.fromkeys(answered, "12:34:56:78:9a:bc") for host in NUMBERS})
    assert set(found.values()) == {("green", "")}


def test_entries_of_other_networks_than_ethernet_are_not_compared(monkeypatch):
    """The address of an IPoIB card has 20 bytes, of which Linux shows here 9, and an ioctl tells 6."""
    head = "IP address       HW type     Flags       HW address            Mask     Device\n"
    lines = [
        "10.0.0.2         0x1         0x2         02:00:00:00:00:02     *        eth0",
        "10.1.0.2         0x20        0x2         80:00:00:48:fe:80:00:00:00     *        ib0",
        "10.0.0.3         0x1         0x0         00:00:00:00:00:00     *        eth0",
    ]
    monkeypatch.setattr(probe, "Path", lambda _: SimpleNamespace(read_text=lambda: head + "\n".join(lines)))
    assert probe._arp(["10.0.0.2", "10.1.0.2", "10.0.0.3"]) == {"10.0.0.2": "02:00:00:00:00:02"}


def test_the_probe_knows_this_hosts_cards():
    found = probe.neighbours(["127.0.0.1"])
    assert "00:00:00:00:00:00" in found["cards"] and found["arp"] == {}
