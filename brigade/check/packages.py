"""Whether hosts have the same packages, and those that requirements.txt and constraints.txt pin."""

import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from ..errors.console import counted
from ..errors.versions import Versions, meets, pins, unsupported
from ..hosts.host_facts import PACKAGES
from ..hosts.rendezvous import usable_gpus
from ..train.distributed import devices, torch_build
from ..train.recipe.files import REPOSITORY
from .checks import Facts, Hosts, Level, NotHere, Result, check, most_common, sound
from .findings import fault
from .sameness import alike, look

SHOWN = 4  # packages that a sentence names
PIP = f"cd {shlex.quote(str(REPOSITORY))} && {shlex.quote(sys.executable)} -m pip install --disable-pip-version-check --quiet"


@check("python", seconds=30)
async def python(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the interpreter's version. Threshold: none differs from what most hosts have; objects that DeepSpeed and torch pickle
    from rank to rank are read only by the same version, and `launch` refuses other ones."""
    answers = {host: facts["python"] for host, facts in (await look(hosts)).items()}
    usual = most_common(answers) if answers else ""
    for host, version in answers.items():
        yield sound(host, version) if version == usual else fault("other-python", host, value=version, usual=usual)


@check("packages", seconds=30)
async def packages(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the version of every package that requirements.txt or constraints.txt pins, and whether the modules at its top are
    there, of which its RECORD speaks. Threshold: none is missing; the pin, and of builds of one version (2.13.0+cpu,
    2.13.0+cu128) the one that most hosts have. Red where hosts differ in torch, DeepSpeed, Accelerate, Transformers, Datasets
    or PEFT, which exchange objects between ranks in the layout of one version, and where all have one that no run is supported
    with (brigade/errors/versions.yaml); else a warning."""
    looked = await look(hosts)
    versions = {host: facts["packages"] for host, facts in looked.items()}
    for host, facts in looked.items():
        if facts["lost"]:
            yield incomplete(host, facts["lost"], facts["packages"])
    for host, differs in differences(versions, pins()).items():
        for result in judged_packages(host, versions[host], differs):
            yield result


@check("imports", size="usual", seconds=120)
async def imports(hosts: Hosts) -> AsyncIterator[Result]:
    """Imports torch and Transformers, and DeepSpeed and PEFT where the recipe uses them. Threshold: it goes well. A package may
    be there with the right version, and not load for a library of the system or a file that it lacks."""
    job, modules = hosts.wanted.job, ["torch", "transformers"]
    if job:
        modules += ["deepspeed"] * job.strategy.is_deepspeed + ["peft"] * job.settings.recipe.model.use_peft
    for host, facts in (await hosts.ask("sameness.imports", 110, modules=modules)).items():
        if facts["failed"]:
            name, said = next(iter(facts["failed"].items()))
            yield fault("does-not-import", host, name=name, said=said)
        else:
            yield sound(host, counted(len(modules), "package"))


@check("CUDA libraries", seconds=30)
async def cuda(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the CUDA version in torch/version.py, the versions of NVIDIA's cuDNN and NCCL wheels, and the driver's in /sys.
    Threshold: none differs from what most hosts have; NCCL refuses or hangs between two of its own versions (red), another
    driver or cuDNN is a warning."""
    answers = {host: {**facts["torch"], "driver": facts["driver"]} for host, facts in (await look(hosts)).items()}
    if not any(any(versions.values()) for versions in answers.values()):
        raise NotHere
    for result in alike("other-cuda-libraries", answers, {"cuda": "red", "nccl": "red"}):
        yield result


@check("driver", seconds=90)
async def driver(hosts: Hosts) -> AsyncIterator[Result]:
    """Compares the driver's version with the CUDA version that torch is built for, where a run would use GPUs. Threshold: the
    first driver for all minor versions of that CUDA (NVIDIA's "CUDA Compatibility"); torch has to be a build for CUDA, and for
    ROCm where the GPUs are AMD's. A host that is below it is asked whether torch sees its GPUs, as with a forward compatibility
    package: then all is well."""
    if devices.wants_cpu(hosts.wanted.environment):
        raise NotHere
    visible = hosts.wanted.environment.get("CUDA_VISIBLE_DEVICES")
    using = [host for host, hello in hosts.hello.items() if usable_gpus(hello.get("gpus"), visible)]
    looked = await look(hosts) if using else {}
    using = [host for host in using if host in looked and (looked[host]["driver"] or looked[host].get("amd"))]
    if not using:
        raise NotHere
    unfit = {host: why for host, why in ((host, _unfit(looked[host])) for host in using) if why}
    seen = await hosts.ask("sameness.sees_gpus", 60, per_host={host: Facts() for host in unfit})
    for host in using:
        version, built = looked[host]["driver"] or "AMD's", looked[host]["torch"]
        platform = f"ROCm {built['hip']}" if built.get("hip") else f"CUDA {built['cuda']}"
        if host not in unfit:
            yield sound(host, f"{version} for {platform}")
        elif seen.get(host, {}).get("sees"):
            yield sound(host, f"{version} for {platform}, compatible")
        else:  # what torch does not say is not certain
            said, cure = unfit[host]
            level: Level = "red" if host in seen else "yellow"
            yield fault("driver-does-not-fit", host, level, value=version, said=said, cure=cure)


def _unfit(looked: Facts) -> tuple[str, str] | None:
    """Why torch would see none of a host's GPUs, by its versions, and the cure; None where they fit."""
    if not looked["driver"]:
        version, built = looked["packages"]["torch"], looked["torch"]
        return None if built.get("hip") else torch_build.not_for_amd(looked["amd"], version, built["cuda"])
    if looked["torch"]["cuda"]:
        return torch_build.too_old(looked["driver"], looked["torch"]["cuda"])
    index = torch_build.suitable(looked["driver"], None)
    cure = torch_build.from_index(index) if index else "a newer driver, and a build for it"
    return "torch is a build without CUDA", f"install {cure}"


@check("CUDA libraries as loaded", size="usual", seconds=90)
async def loaded(hosts: Hosts) -> AsyncIterator[Result]:
    """Imports torch where it was built for CUDA, and asks it for the versions of CUDA, cuDNN and NCCL that it loads: a
    LD_LIBRARY_PATH may put others before its own. Asks it too whether it has code for the GPUs that ranks get
    (`torch.cuda.get_arch_list()`). Threshold: no version differs from what most hosts have, and no GPU is without code (red)."""
    wanted = {host: Facts() for host, facts in (await look(hosts)).items() if facts["torch"]["cuda"]}
    if not wanted:
        raise NotHere
    answers = await hosts.ask("sameness.loaded", 60, per_host=wanted)
    libraries = ("cuda", "cudnn", "nccl")
    versions = {host: {name: facts.get(name) for name in libraries} for host, facts in answers.items()}
    for result in alike("loads-other-cuda-libraries", versions, {"cuda": "red", "nccl": "red"}):
        host, results = result.host, [result] if result.level != "green" else []
        for gpu, (said, cure) in answers[host].get("without_code", {}).items():
            if int(gpu) < hosts.wanted.slots[host]:
                results.append(fault("no-code-for-a-gpu", host, gpu=gpu, said=said, cure=cure))
        for one in results or [result]:
            yield one


@dataclass
class Differences:
    """What of one host's packages differs. wanted: package -> the version to install, of all that differ"""

    red: list[str] = field(default_factory=list)
    yellow: list[str] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    wanted: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, version: str | None, wanted: str, grave: bool, reference: str) -> None:
        self.wanted[name] = wanted
        words = f"{name} {version or 'is missing'}, {reference}"
        if version and (range_of_it := unsupported(name, version)):
            self.unsupported.append(f"{words}, supported {range_of_it}")
        else:
            (self.red if grave else self.yellow).append(words)


def differences(hosts: Mapping[str, Versions], pinned: Mapping[str, str]) -> dict[str, Differences]:
    """Return host -> what differs there.

    Red are the packages that ranks exchange things with (host_facts.PACKAGES) where hosts disagree. A package that all hosts lack
    was left out on purpose. All hosts with the same other version agree, but no test has seen it. One that is not supported is
    red wherever it is, for a run refuses it.
    """
    differences_of = {host: Differences() for host in hosts}
    for name, pin in pinned.items():
        versions = {host: packages.get(name) for host, packages in hosts.items()}
        agree, exchanged = len(set(versions.values())) == 1, name in PACKAGES
        right = {host: version for host, version in versions.items() if meets(version, pin)}
        usual = most_common(right) if right else None
        for host, version in versions.items():
            if host not in right and not (agree and version is None and not exchanged):
                differences_of[host].add(name, version, usual or pin, exchanged and not agree, f"pinned {pin}")
            elif host in right and usual and version != usual:
                differences_of[host].add(name, version, usual, exchanged, f"elsewhere {usual}")
    return differences_of


def judged_packages(host: str, versions: Versions, differs: Differences) -> list[Result]:
    """One result, or one for each level."""
    detail = tuple(f"{name} {version}" for name, version in versions.items() if version is not None)
    if not differs.wanted:
        missing = sum(version is None for version in versions.values())
        without = f", {missing} not installed" if missing else ""
        return [sound(host, f"torch {versions.get('torch')}, {counted(len(versions), 'pin')}{without}", detail=detail)]
    fix, builds = _install(versions, differs.wanted)
    cure = f"`make setup` in {REPOSITORY} on {host}{', or --fix --yes' if fix else ''}"
    if builds:
        cure = f"install {', '.join(builds)} from the index that the other hosts' came from, for PyPI has no such build"
        cure += "; the rest: --fix --yes" if fix else ""
    rows = {
        "unsupported-packages": differs.unsupported,
        "other-packages-that-exchange": differs.red,
        "other-packages": differs.yellow,
    }
    return [
        fault(name, host, fix=fix, detail=detail, value=words[0], packages=_shown(words), cure=cure)
        for name, words in rows.items()
        if words
    ]


def _shown(words: list[str]) -> str:
    more = f", and {counted(len(words) - SHOWN, 'more package')}" if len(words) > SHOWN else ""
    return "; ".join(words[:SHOWN]) + more


def incomplete(host: str, lost: Mapping[str, str], versions: Versions) -> Result:
    """A fault for packages whose metadata are there, and whose files are not. lost: package -> which file it lacks"""
    words = [f"{name} is installed, but {what}" for name, what in lost.items()]
    again = [f"{name}=={versions[name]}" for name in lost if versions.get(name)]
    public = all("+" not in name for name in again)
    fix = f"{PIP} --force-reinstall --no-deps {shlex.join(again)}" if public else ""
    return fault("files-are-lost", host, fix=fix, lost=_shown(words), or_fix=", or --fix --yes" if public else "")


def _install(versions: Versions, wanted: Mapping[str, str]) -> tuple[str, list[str]]:
    """A shell line, "" where none helps, and the builds (2.13.0+cu128) that PyPI cannot serve. For those the line asks
    only for the version; where that is there already, pip would do nothing."""
    builds = [f"{name}=={version}" for name, version in wanted.items() if "+" in version]
    public = {name: version.partition("+")[0] for name, version in wanted.items()}
    install = [f"{name}=={version}" for name, version in public.items() if not meets(versions.get(name), version)]
    return f"{PIP} {shlex.join(install)}" if install else "", builds
