"""The launcher's part of an accelerate config: keys, hosts, ranks. The strategy's part: strategy/accelerate.py."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import did_you_mean
from ..errors.findings import Finding, shown, table

# How a host calls itself: for every host another machine.
LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


@functools.cache
def known_keys() -> dict[str, Any]:
    """accelerate_keys.yaml: the keys at top level and in each section, and FSDP1's own."""
    return table(Path(__file__).with_name("accelerate_keys.yaml"))


def findings(document: Mapping[str, Any], name: str) -> Iterator[Finding]:
    yield from _keys(document, name)
    yield from _machines(document, name)


def number(document: Mapping[str, Any], key: str) -> int | None:
    """num_processes and its like: a whole number from 1, or None where the file leaves it to the command line."""
    value = document.get(key)
    return value if type(value) is int and value > 0 else None


def mesh(document: Mapping[str, Any]) -> tuple[int, int] | None:
    """HSDP's replicas and shards, or None where the file has no mesh."""
    sizes = document.get("parallelism_config")
    if document.get("distributed_type") != "FSDP" or not isinstance(sizes, Mapping):
        return None
    replicate, shard = (number(sizes, f"parallelism_config_dp_{which}_size") or 1 for which in ("replicate", "shard"))
    return (replicate, shard) if replicate * shard > 1 else None


def _keys(document: Mapping[str, Any], name: str) -> Iterator[Finding]:
    known = known_keys()
    for key, value in document.items():
        if key not in known["top_level"]:
            problem = f"accelerate knows no such key (its value: {shown(value)})"
            yield Finding("accelerate-unknown-key", name, str(key), problem, did_you_mean(str(key), known["top_level"]))
    for section in ("deepspeed_config", "fsdp_config", "parallelism_config"):
        options = document.get(section)
        for key, value in options.items() if isinstance(options, Mapping) else ():
            if key not in known[section]:
                problem = f"accelerate copies this key and nobody reads it (its value: {shown(value)})"
                cure = did_you_mean(str(key), known[section])
                yield Finding("accelerate-unknown-key", name, f"{section}.{key}", problem, cure)
    fsdp = document.get("fsdp_config")
    if document.get("distributed_type") != "FSDP" or not isinstance(fsdp, Mapping):
        return
    for key, instead in known["fsdp1_only"].items():
        if key in fsdp:
            problem = f"{shown(fsdp[key])}: FSDP2 has no such option"
            yield Finding("accelerate-fsdp1-option", name, f"fsdp_config.{key}", problem, instead)
    if str(fsdp.get("fsdp_state_dict_type")).upper() == "FULL_STATE_DICT":
        yield Finding(
            "accelerate-full-state-dict",
            name,
            "fsdp_config.fsdp_state_dict_type",
            "FULL_STATE_DICT gathers the whole model on rank 0 at every save",
            "write SHARDED_STATE_DICT",
        )


def _machines(document: Mapping[str, Any], name: str) -> Iterator[Finding]:
    machines, processes = number(document, "num_machines") or 1, number(document, "num_processes")
    if machines > 1:
        rank, address = document.get("machine_rank", 0), document.get("main_process_ip")
        if rank != 0:
            problem = f"{shown(rank)} in a file for {machines} machines: each that takes it as it is gets this rank"
            cure = "write 0, and give --machine_rank on each host's command line"
            yield Finding("accelerate-machine-rank", name, "machine_rank", problem, cure)
        if address in LOOPBACK:
            problem = f"{address!r} with num_machines {machines}: each machine would wait for itself"
            cure = "write the first host's name or address, as the others reach it"
            yield Finding("accelerate-loopback", name, "main_process_ip", problem, cure)
        zero = document.get("deepspeed_config")
        launcher = zero.get("deepspeed_multinode_launcher") or "pdsh" if isinstance(zero, Mapping) else "standard"
        if document.get("distributed_type") == "DEEPSPEED" and launcher != "standard":
            problem = f"launcher {shown(launcher)}: every launch appends the whole environment to ./.deepspeed_env"
            cure = "keep tokens out of the environment, or use `python -m brigade launch`, or the standard launcher"
            at = "deepspeed_config.deepspeed_multinode_launcher"
            yield Finding("accelerate-environment-file", name, at, problem, cure)
    if processes and processes % machines:
        problem = f"num_processes {processes} over num_machines {machines}: {processes // machines} would start on each"
        near = processes // machines * machines
        yield Finding(
            "accelerate-processes",
            name,
            "num_processes",
            problem,
            f"set it to {near or machines} or {near + machines}: all ranks of all hosts",
        )
    sizes = mesh(document)
    if sizes and processes and sizes[0] * sizes[1] != processes:
        problem = f"dp_replicate_size {sizes[0]} x dp_shard_size {sizes[1]} is not num_processes {processes}"
        yield Finding(
            "accelerate-mesh", name, "parallelism_config", problem, f"set both so that the product is {processes}"
        )


def against_hosts(document: Mapping[str, Any], name: str, hosts: dict[str, int], hostfile: str) -> Iterator[Finding]:
    """Where an accelerate config counts other hosts or ranks than the hostfile that goes with it."""
    for key, found, what in (("num_machines", len(hosts), "hosts"), ("num_processes", sum(hosts.values()), "slots")):
        said = number(document, key)
        if said not in (None, found):
            problem = f"{said} here, but {hostfile} has {found} {what}"
            yield Finding("accelerate-hosts", name, key, problem, f"set it to {found}, or name the right hostfile")
