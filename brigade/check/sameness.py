"""Whether all hosts have the same: versions, code, variables, paths."""

import re
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors.console import counted
from ..errors.tables import table
from ..hosts.job import Job
from ..train.recipe.files import REPOSITORY
from ..train.recipe.schema import Source
from . import clone, pins
from .hosts import Facts, Hosts
from .registry import check
from .results import LEVELS, Level, NotHere, Result, most_common, sound

VARIABLES = table(Path(__file__).with_name("variables.yaml"))
_KEY = secrets.token_hex(16)  # of the hashes of secrets: of no use to anybody after this process
SHOWN = 60  # characters of a variable's value
MADE = "output"  # the run makes it


async def _look(hosts: Hosts) -> dict[str, Facts]:
    """What every check of this module reads: one question, one process on each host."""
    compared = [*VARIABLES["red"], *VARIABLES["yellow"]]
    secret = {"secret": VARIABLES["secret"], "salt": _KEY}
    names, paths, own = list(pins.pins()), paths_of(hosts.wanted.job), own_files(hosts.wanted.job)
    return await hosts.ask(
        "sameness.look", 20, names=names, patterns=compared, left_out=VARIABLES["own"], paths=paths, own=own, **secret
    )


def paths_of(job: Job | None) -> dict[str, str]:
    """What for -> path, of all that a run needs at the same place on each host. A ~ stays: each rank has its own user's."""
    found = {"code": str(REPOSITORY), "environment": sys.prefix}
    if job is None:
        return found
    data, model = job.settings.recipe.data, job.settings.recipe.model
    sources: Sequence[Source] = data.datasets or [data]
    for source in sources:
        for name in filter(None, (source.train_file, source.validation_file)):
            found[f"data {name}"] = _as_ranks(re.split(r"[^/]*[*?\[]", name)[0] or ".")  # of a pattern the directory
    if _is_folder(model.model_name_or_path):
        found["model"] = _as_ranks(model.model_name_or_path)
    return found | {"recipe": str(job.settings.recipe_path.absolute()), "output": str(job.output_dir.absolute())}


def _as_ranks(name: str) -> str:
    """The path that ranks find: they start where the user is, and look in the clone for what is not there (recipe/files.py)."""
    if name.startswith("~"):
        return name
    return str(Path(name).absolute() if Path(name).exists() else REPOSITORY / name)


def _is_folder(name: str) -> bool:
    return name.startswith("~") or any(path.is_dir() for path in (Path(name), REPOSITORY / name))


def own_files(job: Job | None) -> list[str]:
    """The files that this run's ranks read besides code and data: its recipe, and what of a strategy it names."""
    if job is None:
        return []
    found, cluster = [str(job.settings.recipe_path.absolute())], job.settings.recipe.cluster
    for source in (cluster.ds_config, cluster.accelerate_config):
        if isinstance(source, str) and source != "none" and Path(source).suffix in (".json", ".yaml", ".yml"):
            found.append(_as_ranks(source))
    return found


@check("python", seconds=30)
async def python(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the interpreter's version. Threshold: none differs from what most hosts have; objects that DeepSpeed and torch pickle
    from rank to rank are read by the same version alone, and `launch` refuses other ones."""
    found = {host: facts["python"] for host, facts in (await _look(hosts)).items()}
    why = "ranks exchange pickled objects, and packages are installed for one version of Python"
    usual = most_common(found) if found else ""
    for host, version in found.items():
        if version == usual:
            yield sound(host, version)
            continue
        cure = f"install {usual} on {host}, then `make clean setup PYTHON=...` with it in {REPOSITORY}"
        yield Result(host, "red", version, None, f"{version}, elsewhere {usual}", why, cure)


@check("packages", seconds=30)
async def packages(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the version of every package that requirements.txt or constraints.txt pins, and whether the modules at its top are
    there, of which its RECORD speaks. Threshold: none is missing; the pin, and of builds of one version (2.13.0+cpu,
    2.13.0+cu128) the one that most hosts have. Red where hosts differ in torch, DeepSpeed, Accelerate, Transformers, Datasets
    or PEFT, which exchange objects between ranks in the layout of one version; else a warning."""
    looked = await _look(hosts)
    found = {host: facts["packages"] for host, facts in looked.items()}
    for host, facts in looked.items():
        if lost := facts["lost"]:
            yield pins.incomplete(host, lost, facts["packages"])
    for host, differs in pins.differences(found, pins.pins()).items():
        for result in pins.judge(host, found[host], differs):
            yield result


@check("imports", size="usual", seconds=120)
async def imports(hosts: Hosts) -> AsyncIterator[Result]:
    """Imports torch and Transformers, and DeepSpeed and PEFT where the recipe uses them. Threshold: it goes well. A package may
    be there with the right version, and not load for a library of the system or a file that it lacks."""
    job, modules = hosts.wanted.job, ["torch", "transformers"]
    if job:
        modules += ["deepspeed"] * job.strategy.is_deepspeed + ["peft"] * job.settings.recipe.model.use_peft
    for host, facts in (await hosts.ask("sameness.imports", 110, modules=modules)).items():
        if not (failed := facts["failed"]):
            yield sound(host, counted(len(modules), "package"))
            continue
        name, said = next(iter(failed.items()))
        cure = (
            f"`ssh {host} {sys.executable} -c 'import {name}'` repeats it; `make clean setup` there installs all anew"
        )
        why = "every rank of this host would end as it starts"
        yield Result(host, "red", f"{name} fails", None, f"{name} cannot be imported: {said}", why, cure)


@check("CUDA libraries", seconds=30)
async def cuda(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the CUDA version in torch/version.py, the versions of NVIDIA's cuDNN and NCCL wheels, and the driver's in /sys.
    Threshold: none differs from what most hosts have; NCCL refuses or hangs between two of its own versions (red), another
    driver or cuDNN is a warning."""
    found = {host: {**facts["torch"], "driver": facts["driver"]} for host, facts in (await _look(hosts)).items()}
    if not any(any(versions.values()) for versions in found.values()):
        raise NotHere
    why = "two versions of NCCL or CUDA hang in the first collective; other drivers and kernels round in another way"
    cure = f"`make setup` in {REPOSITORY} there; a driver is the administrator's"
    for result in alike(found, {"cuda": "red", "nccl": "red"}, why, cure):
        yield result


@check("CUDA libraries as loaded", size="usual", seconds=90)
async def loaded(hosts: Hosts) -> AsyncIterator[Result]:
    """Imports torch where it was built for CUDA, and asks it for the versions of CUDA, cuDNN and NCCL that it loads: a
    LD_LIBRARY_PATH may put others before its own. Threshold: none differs from what most hosts have."""
    wanted = {host: Facts() for host, facts in (await _look(hosts)).items() if facts["torch"]["cuda"]}
    if not wanted:
        raise NotHere
    found = await hosts.ask("sameness.loaded", 60, each=wanted)
    why = "NCCL hangs or fails between two of its own versions"
    cure = "look for another NCCL or cuDNN in LD_LIBRARY_PATH there"
    for result in alike(found, {"cuda": "red", "nccl": "red"}, why, cure):
        yield result


@check("system", seconds=30)
async def system(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads kernel, glibc and processor. Threshold: the processor's kind is everywhere the same (red); another glibc, or another
    major or minor version of the kernel, is a warning: kernels that one host compiled into a shared cache do not load with an
    older glibc. Other patches of one kernel are usual, and sound."""
    found = {
        host: {"processor": facts["machine"], "kernel": _minor(facts["kernel"]), "glibc": facts["glibc"]}
        for host, facts in (await _look(hosts)).items()
    }
    why = "what one host compiles, in a cache that all share, may not load on the other"
    cure = "boot the same image everywhere; or give each host its own TORCH_EXTENSIONS_DIR and TRITON_CACHE_DIR"
    for result in alike(found, {"processor": "red"}, why, cure):
        yield result


def _minor(kernel: str) -> str:
    return ".".join(re.split(r"[.-]", kernel)[:2])


@check("code", seconds=30)
async def code(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the commit and the changed files by git, and a hash of train.py, brigade/, recipes and configs. Threshold: none
    differs from what most hosts have; red are files that this run reads: train.py, brigade/, its own recipe and configs. Others,
    those that `make setup` reads, and another commit with the same files, are a warning."""
    looked = await _look(hosts)
    own = {host: {clone.short(path): found for path, found in facts["own"].items()} for host, facts in looked.items()}
    clones = {
        host: (hosts.hello[host].get("project"), _key(facts["git"]), str(own[host])) for host, facts in looked.items()
    }
    usual = most_common(clones) if clones else None
    first = next((host for host in clones if clones[host] == usual), "")
    odd = [host for host in clones if clones[host] != usual]
    files = await hosts.ask("sameness.files", 20, each={host: {} for host in (first, *odd)}) if odd else {}
    for host in clones:
        if host in odd and (host not in files or first not in files):
            continue
        git, names = looked[host]["git"], []
        if host in odd:
            names = clone.differing(files[host]["files"] | own[host], files[first]["files"] | own[first])
        result = clone.judge(host, git, names, looked[first]["git"], first, own[host].keys())
        yield replace(result, detail=tuple(git["changed"]) if git else ())


def _key(git: Facts | None) -> str:
    return f"{git['commit']} {sorted(git['changed'])}" if git else ""


@check("variables", seconds=30)
async def variables(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the variables of variables.yaml as the ranks will have them. Threshold: none differs from what most hosts have, each
    with the level that the table gives it; of secrets only whether they are set, and the same."""
    found = {host: facts["variables"] for host, facts in (await _look(hosts)).items()}
    names = sorted({name for values in found.values() for name in values})
    usual = {name: most_common({host: _hashable(values.get(name)) for host, values in found.items()}) for name in names}
    for host, values in found.items():
        detail = tuple(f"{name}={one['is']}" if "is" in one else f"{name} is set" for name, one in values.items())
        odd = [name for name in names if _hashable(values.get(name)) != usual[name]]
        for name in odd:
            level, why = _of_table(name)
            problem = f"{name} {_words(values.get(name), usual[name])}"
            here = f"`grep {name} ~/.bashrc ~/.profile /etc/environment` on {host}"
            cure = f"export {name} where `launch` starts, and all hosts get it; or look where it is set: {here}"
            yield Result(host, level, f"{name} differs", None, problem, why, cure, detail=detail)
        if not odd:
            yield sound(host, f"{len(names)} alike" if names else "none set", detail=detail)


def _hashable(value: Facts | None) -> tuple[str, str] | None:
    return next(iter(value.items())) if value else None


def _of_table(name: str) -> tuple[Level, str]:
    from fnmatch import fnmatchcase

    for level in ("red", "yellow"):
        for pattern, why in VARIABLES[level].items():
            if fnmatchcase(name, pattern):
                return level, why  # type: ignore[return-value]
    return "yellow", "the run is another one there"


def _words(value: Facts | None, usual: tuple[str, str] | None) -> str:
    """What differs; of a secret nothing but whether it is set."""
    if value is None:
        return f"is not set; elsewhere it is{'' if usual is None or usual[0] == 'hash' else f' {_short(usual[1])}'}"
    if "hash" in value:
        return "is set; elsewhere it is not" if usual is None else "has another value than elsewhere"
    elsewhere = "it is not set" if usual is None else _short(usual[1]) if usual[0] == "is" else "another value"
    return f"is {_short(value['is'])}; elsewhere {elsewhere}"


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


@check("paths", seconds=30)
async def paths(hosts: Hosts) -> AsyncIterator[Result]:
    """Looks for code, environment, data, model, recipe and output at the launching host's paths. Threshold: what a run
    reads is there on each host (red); where most hosts' paths lead through links to one place, another place is a warning."""
    found = {host: facts["paths"] for host, facts in (await _look(hosts)).items()}
    asked = paths_of(hosts.wanted.job)
    usual = {
        what: most_common({host: places[what]["real"] for host, places in found.items()}) for what in asked if found
    }
    for host, places in found.items():
        detail = tuple(f"{what}: {place['real']}" for what, place in places.items())
        missing = [what for what, place in places.items() if not place["there"] and what != MADE]
        elsewhere = {w: usual[w] for w, place in places.items() if w not in missing and place["real"] != usual[w]}
        if missing:
            problem = "there is no " + ", ".join(f"{asked[what]} ({what.partition(' ')[0]})" for what in missing)
            why = "each rank opens the same path, and the run ends where it is not"
            cure = f"mount the file system on {host} too, or copy it: rsync -a {asked[missing[0]]} {host}:..."
            yield Result(host, "red", f"no {missing[0]}", None, problem, why, cure, detail=detail)
        if elsewhere:
            words = (f"{asked[what]} leads to {places[what]['real']}, elsewhere {to}" for what, to in elsewhere.items())
            why = "two copies drift apart: one host's ranks may read other data or other code"
            cure = f"`readlink -f {asked[next(iter(elsewhere))]}` on {host}; let it lead to the same place"
            value = f"{next(iter(elsewhere))} elsewhere"
            yield Result(host, "yellow", value, None, "; ".join(words), why, cure, detail=detail)
        if not missing and not elsewhere:
            yield sound(host, f"{len(places)} alike", detail=detail)


def alike(found: Mapping[str, Mapping[str, Any]], levels: Mapping[str, Level], why: str, cure: str) -> list[Result]:
    """A result for each host: sound, or what of it differs from what most hosts have.

    found: host -> name -> value, None where it is not there; levels: of a name that differs, else yellow
    """
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    usual = {name: most_common({host: values.get(name) for host, values in found.items()}) for name in names}
    results = []
    for host, values in found.items():
        odd = [name for name in names if values.get(name) != usual[name]]
        shown = ", ".join(f"{name} {values[name]}" for name in odd or names if values.get(name)) or "none"
        if not odd:
            results.append(sound(host, shown))
            continue
        level = max((levels.get(name, "yellow") for name in odd), key=LEVELS.index)
        pairs = (f"{name} {values.get(name) or 'is missing'}, elsewhere {usual[name] or 'none'}" for name in odd)
        results.append(Result(host, level, shown, None, "; ".join(pairs), why, cure))  # type: ignore[arg-type]
    return results
