"""Whether GPUs are sound, and what the slots need."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

from ..errors.console import counted
from ..hosts.rendezvous import usable_gpus
from . import gpus as of_gpus
from .checks import CannotKnow, Facts, Hosts, NotHere, Result, check, sound, unknown
from .findings import fault


async def _gpus(hosts: Hosts) -> dict[str, Facts]:
    """Return host -> what NVML says, for the hosts that have GPUs and whose NVML answers. Raises NotHere without any."""
    asked = {host: Facts() for host, hello in hosts.hello.items() if hello.get("gpus")}
    if not asked:
        raise NotHere
    answers = await hosts.ask("gpus.look", 20, per_host=asked)
    if not any("gpus" in facts for facts in answers.values()):
        raise NotHere
    return _with_use(hosts, answers)


def _with_use(hosts: Hosts, answers: Mapping[str, Facts]) -> dict[str, Facts]:
    wanted = hosts.wanted
    return {host: of_gpus.with_use(facts, wanted.environment, wanted.slots[host]) for host, facts in answers.items()}


async def _judged(hosts: Hosts, judges: Iterable[of_gpus.Judge], value: str) -> list[Result]:
    """Each GPU of each host, judged; one that no rank gets is a warning at most. Hosts without GPUs or NVML are unknown.
    value: of the sound ones."""
    answers = await _gpus(hosts)
    kinds, results = of_gpus.usual(answers), []
    for host in hosts.hello:
        if "gpus" in answers.get(host, {}):
            results += of_gpus.judged(host, answers[host]["gpus"], kinds, judges, value)
        elif host not in hosts.failed:
            results.append(unknown(host, "NVML says nothing there; see the row gpus"))
    return results


@check("gpus", seconds=40)
async def gpus(hosts: Hosts) -> AsyncIterator[Result]:
    """Counts GPUs by the driver and compares them with the slots; reads their kind, their memory and who holds it by NVML.
    Threshold: as many as slots (fewer: red, more: a warning), of one kind (else CUDA's order of them is another one than NVML's),
    none divided (MIG), and gpu_memory_free of thresholds.yaml."""
    visible = hosts.wanted.environment.get("CUDA_VISIBLE_DEVICES")
    counts = {host: hello.get("gpus", 0) for host, hello in hosts.hello.items()}
    if not any(counts[host] is None or counts[host] for host in counts):
        raise CannotKnow("no driver counts a GPU: ranks compute on the CPU, and no other row says anything of GPUs")
    asked = {host: Facts() for host, count in counts.items() if count}
    answers = _with_use(hosts, await hosts.ask("gpus.look", 20, per_host=asked))
    kinds = {host: _kinds(facts["gpus"]) for host, facts in answers.items() if "gpus" in facts}
    usual = Counter(name for kind in kinds.values() for name in kind).most_common(1)
    for host, count in counts.items():
        slots, facts, own = hosts.wanted.slots[host], answers.get(host, {}), kinds.get(host, Counter())
        results = [*_count_wrong(host, count, usable_gpus(count, visible), slots)]
        results += [fault("other-kind", host, value=name, usual=usual[0][0]) for name in own if name != usual[0][0]]
        results += _in_another_order(host, len(own), own.total(), slots, hosts.wanted.environment)
        judges = (of_gpus.lost, of_gpus.divided, of_gpus.free_memory)
        results += [r for r in of_gpus.judged(host, facts.get("gpus", []), {}, judges, "") if r.level != "green"]
        if "problem" in facts:
            results.append(fault("nvml-fails", host, said=facts["problem"]))
        if "absent" in facts and not results:
            results.append(unknown(host, f"{counted(count or 0, 'GPU')}, and nothing more: {facts['absent']}"))
        for result in results:
            yield result
        if not results and (host in kinds or not count):
            yield sound(host, ", ".join(f"{number} x {name}" for name, number in own.items()) or "none")


def _kinds(gpus: list[Facts]) -> Counter[str]:
    """How many GPUs of each name there are, without those that are lost."""
    return Counter(gpu.get("name", "GPU") for gpu in gpus if not gpu.get("lost"))


def _count_wrong(host: str, count: int | None, seen: int, slots: int) -> Iterator[Result]:
    """A result where the number of GPUs is wrong. count: None where nvidia-smi fails; seen: after CUDA_VISIBLE_DEVICES"""
    if count is None:
        yield fault("no-answer-of-nvidia-smi", host)
    elif seen < slots:
        yield fault("few-gpus" if seen else "no-gpu", host, slots=slots, seen=seen, value=counted(seen, "GPU"))
    elif seen > slots:
        yield fault("many-gpus", host, slots=slots, seen=seen, value=counted(seen, "GPU"), idle=seen - slots)


def _in_another_order(host: str, kinds: int, gpus: int, slots: int, environment: Mapping[str, str]) -> Iterator[Result]:
    """A warning where ranks get some of several kinds of GPUs: CUDA numbers the fastest first (CUDA programming guide,
    CUDA_DEVICE_ORDER), NVML and nvidia-smi by bus address."""
    if kinds > 1 and gpus > slots and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield fault("another-order", host, ranks=counted(slots, "rank"), kinds=kinds)


@check("gpu memory errors", seconds=40)
async def gpu_errors(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads ECC mode, uncorrected errors since the last reset, and remapped rows by NVML. Threshold: no failed row and no Xid 48
    or 95 right now (red); no uncorrected error, no row that waits for a reset, ECC as on others of the kind; NVIDIA's "GPU Memory
    Error Management"."""
    for result in await _judged(hosts, (of_gpus.errors,), "no errors"):
        yield result


@check("gpu clocks", seconds=40)
async def gpu_clocks(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads NVML's reasons for lower clocks, the power limit and the temperature. Threshold: none of the slowdowns of gpus.yaml,
    gpu_power and gpu_temperature of thresholds.yaml; Azure's node health checks look at the same codes."""
    for result in await _judged(hosts, (of_gpus.clocks,), "not throttled"):
        yield result


@check("gpu links", seconds=40)
async def gpu_links(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads width and speed of PCIe, state of each NVLink, the NVLink fabric and peer access by NVML. Threshold: gpu_pcie of
    thresholds.yaml; all NVLinks of the kind (gpus.yaml, else as most have) where ranks use two GPUs of the host; fabric joined;
    peers as on most hosts of the kind."""
    answers = {host: facts for host, facts in (await _gpus(hosts)).items() if "gpus" in facts}
    for result in await _judged(hosts, (of_gpus.pcie, of_gpus.nvlink), "full width"):
        yield result
    peers = {
        host: (
            tuple(sorted(_kinds([gpu for gpu in facts["gpus"] if gpu["used"]]).items())),
            of_gpus.reached(facts),
        )
        for host, facts in answers.items()
    }
    for host, (kind, (reached, pairs)) in peers.items():
        most = max(others[0] for other, others in peers.values() if other == kind)
        linked = any(of_gpus.expected_links(name) for name, _ in kind)
        if reached < (pairs if linked else most):
            yield fault("no-peer-access", host, "red" if linked else "yellow", reached=reached, pairs=pairs)
        facts = answers[host]
        if facts.get("nvswitches") and not facts["fabric_manager"] and not any("fabric" in g for g in facts["gpus"]):
            unseen = "NVSwitch without a fabric manager that can be seen from here"
            yield unknown(host, f"{unseen}: it may run outside of the container")


@check("gpu Xid errors", seconds=40)
async def gpu_xids(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads NVIDIA's Xid errors: live ones by NVML for a tenth of a second, past ones of these GPUs from the kernel's log where
    this user may read it. Threshold: none whose action in xids.yaml is red that comes now or that NVML confirms (it wants a
    reset, or a row of memory waits for it); none of the last day (a warning); NVIDIA's Xid catalog, grouped as AWS does."""
    answers = await _gpus(hosts)
    logs = await hosts.ask("gpus.kernel_log", 15, per_host={host: Facts() for host in answers})
    for host, facts in answers.items():
        if "gpus" not in facts:
            yield unknown(host, "NVML says nothing there; see the row gpus")
            continue
        log = logs.get(host, {})
        results = of_gpus.judged(
            host, of_gpus.with_log(facts["gpus"], log.get("xids", [])), {}, (of_gpus.xids,), "none"
        )
        if results[0].level == "green" and "unreadable" in log:
            yield unknown(host, f"past ones: {log['unreadable']}; `ssh {host} sudo dmesg | grep Xid` shows them")
        elif results[0].level != "green" or log:
            for result in results:
                yield result
