"""Pairs of hosts: who tries whom, and whose fault it is where some do not reach each other."""

import random
from collections.abc import Collection, Iterable, Mapping

ALL_PAIRS = 64  # hosts, up to which each one tries every other; beyond, a sample, so that no host is asked for more
SAMPLE = 16

Pair = tuple[str, str]  # from, to


def partners(hosts: Iterable[str]) -> dict[str, list[str]]:
    """host -> those that it tries: all others; of more than ALL_PAIRS hosts its neighbours in the list, by which each one is
    tried at least twice, and others that are drawn by its name."""
    names = list(hosts)
    if len(names) <= ALL_PAIRS:
        return {host: [other for other in names if other != host] for host in names}
    found = {}
    for number, host in enumerate(names):
        steps = [-1, 1, *random.Random(host).sample(range(2, len(names) - 1), SAMPLE - 2)]
        found[host] = [names[(number + step) % len(names)] for step in steps]
    return found


def blame(
    tried: Mapping[str, Collection[str]], failed: Collection[Pair]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """(host -> from whom nothing comes in there, host -> to whom nothing goes out from there), of the pairs that failed.

    Whom nobody reaches has closed its own door. Who reaches nobody, while others reach the same hosts, cannot get out of its own.
    Else it is the one that should have been reached: firewalls that drop what comes in are more common.
    """
    failed = set(failed)
    sources: dict[str, list[str]] = {}
    for source, targets in tried.items():
        for target in targets:
            sources.setdefault(target, []).append(source)
    closed = {target for target, its in sources.items() if all((source, target) in failed for source in its)}
    silent = {source for source, its in tried.items() if its and all((source, target) in failed for target in its)}
    incoming: dict[str, list[str]] = {}
    outgoing: dict[str, list[str]] = {}
    place = {host: number for number, host in enumerate(tried)}
    for source, target in sorted(failed, key=lambda pair: (place[pair[0]], pair[1])):
        if source in silent and target not in closed:
            outgoing.setdefault(source, []).append(target)
        else:
            incoming.setdefault(target, []).append(source)
    return incoming, outgoing


def one_way(failed: Collection[Pair], heard: Mapping[str, Collection[str]]) -> set[Pair]:
    """The pairs that failed without those that failed only since no answer comes back: a connection needs both directions.

    heard: host -> from whom datagrams came in, which need one direction
    """
    failed = set(failed)
    innocent = {(a, b) for a, b in failed if (b, a) in failed and a in heard.get(b, ()) and b not in heard.get(a, ())}
    return failed - innocent
