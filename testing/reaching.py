"""Hosts for tests of check: what four of them answer of their names, cards and ports."""

from typing import Any

from brigade.check.checks import Facts, Function, Wanted
from testing.recorded_hosts import Recorded, results_of

NODES = [f"node{number}" for number in range(1, 5)]
CARD = {"name": "eth0", "kind": "mlx5_core", "mtu": 1500}
LOOPBACK = {"name": "lo", "kind": "loopback", "mtu": 65536, "addresses": []}


def address(host: str) -> str:
    return f"10.0.0.{host[-1]}"


def look(host: str, **more: Any) -> Facts:
    """What a sound host sees."""
    card = CARD | {"addresses": [address(host)]}
    return {
        "resolved": {other: [address(other)] for other in NODES}, "unresolved": {}, "interfaces": [LOOPBACK, card],
        "leads": "eth0", "variables": {}, "hostname": host, "own": [address(host)],
    } | more  # fmt: skip


def listening(host: str) -> Facts:
    more = {"master": 29500} if host == "node1" else {}
    return {"range": [32768, 60999], "ports": [32768, 40000], "datagrams": 5, "long": 7, "control": 6} | more


def judged(
    check: Function,
    answers: dict[str, Any],
    hosts: list[str] = NODES,
    environment: dict[str, str] | None = None,
    gpus: int = 0,
    **own: Facts,
) -> dict[str, tuple[str, str]]:
    """host -> (level, problem); own: host -> what differs of its look()"""
    answers = {"names.look": {host: look(host, **own.get(host, {})) for host in hosts}} | answers
    hello: dict[str, Facts] = {
        host: {"addresses": {address(host): "eth0"}, "gpus": gpus, "machine": host} for host in hosts
    }
    wanted = Wanted(dict.fromkeys(hosts, 1), environment=environment or {})
    results = results_of(check, Recorded(wanted, answers, hello))
    assert all(bool(result.why and result.cure) == (result.level in ("yellow", "red")) for result in results)
    return {result.host: (result.level, result.problem) for result in results}
