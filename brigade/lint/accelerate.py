"""The launcher's part of an accelerate config: keys, hosts, ranks. train/strategy/accelerate_config.py has the strategy's."""

import math
from collections.abc import Iterator

from ..errors import did_you_mean, shown
from ..errors.findings import Finding
from ..errors.tables import Document
from ..train.strategy.accelerate_config import KEYS, MESH, mesh_sizes, sections
from ..train.strategy.axis_keys import MESH_KEYS

DP_SIZES = ("dp_replicate_size", "dp_shard_size")
# Names that a host has for itself: on each host they mean another machine.
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


def number(document: Document, key: str) -> int | None:
    """The value of num_processes or a key like it: a whole number from 1, or None where the command line has to give it."""
    value = document.get(key)
    return value if type(value) is int and value > 0 else None


def mesh(document: Document) -> tuple[int, int] | None:
    """(replicas, shards) of HSDP, or None where the file has no mesh."""
    sizes = mesh_sizes(sections(document)[2]) if document.get("distributed_type") == "FSDP" else {}
    replicate, shard = (number(sizes, key) or 1 for key in DP_SIZES)
    return (replicate, shard) if replicate * shard > 1 else None


def findings(document: Document, name: str) -> Iterator[Finding]:
    """What is wrong with the launcher's part of the file `name`: unknown keys, hosts and ranks that contradict each other."""
    zero, fsdp, sizes = sections(document)
    yield from _unknown_keys(document, "top_level", name)
    yield from _unknown_keys({key: sizes[key] for key in sizes if f"{MESH}{key}" in KEYS[MESH[:-1]]}, MESH[:-1], name)
    for key in KEYS["own"]:
        if sizes.get(key) not in (None, 1):
            yield Finding.of("accelerate-own-key", name, f"parallelism_config.{key}", value=sizes[key])
    if document.get("distributed_type") == "FSDP":
        for key, instead in KEYS["fsdp1_only"].items():
            if key in fsdp:
                values = {"value": shown(fsdp[key]), "instead": instead}
                yield Finding.of("accelerate-fsdp1-option", name, f"fsdp_config.{key}", **values)
        if str(fsdp.get("fsdp_state_dict_type")).upper() == "FULL_STATE_DICT":
            yield Finding.of("accelerate-full-state-dict", name, "fsdp_config.fsdp_state_dict_type")
    yield from _no_counts(document, name)
    machines, processes = number(document, "num_machines") or 1, number(document, "num_processes")
    if machines > 1:
        rank = document.get("machine_rank", 0)
        if rank != 0:
            values = {"value": shown(rank), "machines": machines}
            yield Finding.of("accelerate-machine-rank", name, "machine_rank", **values)
        address = document.get("main_process_ip")
        if address in LOOPBACK:
            yield Finding.of("accelerate-loopback", name, "main_process_ip", value=address, machines=machines)
        launcher = zero.get("deepspeed_multinode_launcher") or "pdsh"
        if document.get("distributed_type") == "DEEPSPEED" and zero and launcher != "standard":
            at = "deepspeed_config.deepspeed_multinode_launcher"
            yield Finding.of("accelerate-environment-file", name, at, value=shown(launcher))
    if processes and processes % machines:
        each = processes // machines
        values = {"processes": processes, "machines": machines, "each": each}
        values |= {"fewer": each * machines or machines, "more": (each + 1) * machines}
        yield Finding.of("accelerate-processes", name, "num_processes", **values)
    kind = document.get("distributed_type") or "NO"  # YAML reads a bare NO as false
    if (processes or 1) > 1 and (kind == "NO" or (document.get("use_cpu") and kind != "MULTI_CPU")):
        problem = f"{processes}, and accelerate starts one process under {'NO' if kind == 'NO' else 'use_cpu: true'}"
        cure = "set distributed_type MULTI_GPU, FSDP or DEEPSPEED, without use_cpu; or num_processes 1"
        yield Finding("accelerate-processes", name, "num_processes", problem, cure)
    pair = mesh(document)
    used = dict(zip(DP_SIZES, pair, strict=True)) if pair else {}
    keys = (MESH_KEYS[axis] for axis in ("tensor", "sequence", "stages"))
    used |= {key: number(mesh_sizes(sizes), key) or 1 for key in keys}
    whole = math.prod(used.values())
    if processes and (processes != whole if pair else processes % whole):
        wrong, right = ("is not", "is") if pair else ("does not divide", "divides")
        product = " x ".join(f"{key} {size}" for key, size in used.items() if size > 1 or key in DP_SIZES)
        values = {"product": product, "processes": processes, "wrong": wrong, "right": right}
        yield Finding.of("accelerate-mesh", name, "parallelism_config", **values)


def _no_counts(document: Document, name: str) -> Iterator[Finding]:
    """Counts on which accelerate ends with a TypeError ("8"), or silently starts one process (0). It takes a num_processes of -1
    from its command line."""
    for key, least in (("num_machines", 1), ("num_processes", 1), ("machine_rank", 0)):
        value = document.get(key)
        if value is None or (type(value) is int and value >= least) or (key == "num_processes" and value == -1):
            continue
        if "$" not in str(value):  # a variable, which has a finding of its own
            problem = f"{shown(value)} is not a whole number from {least}"
            yield Finding("accelerate-not-a-number", name, key, problem, "write the number, without quotes")


def _unknown_keys(options: Document, section: str, name: str) -> Iterator[Finding]:
    """Keys at top level, or short names of a mesh. A run refuses other unknown keys of a section too."""
    known, at_top = KEYS[section], section == "top_level"
    for key, value in options.items():
        if key not in known:
            fate = "knows no such key" if at_top else "copies this key and nobody reads it"
            values = {"fate": fate, "value": shown(value), "instead": did_you_mean(str(key), known)}
            yield Finding.of("accelerate-unknown-key", name, str(key) if at_top else f"{section}.{key}", **values)


def against_hosts(document: Document, name: str, hosts: dict[str, int], hostfile: str) -> Iterator[Finding]:
    """Keys of an accelerate config that count other hosts or ranks than the hostfile that goes with it."""
    for key, count, things in (("num_machines", len(hosts), "hosts"), ("num_processes", sum(hosts.values()), "slots")):
        if number(document, key) not in (None, count):
            values = {"value": document[key], "hostfile": hostfile, "count": count, "what": things}
            yield Finding.of("accelerate-hosts", name, key, **values)
