"""Whether all hosts have the same: code, variables, paths."""

import re
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ..errors.tables import table
from ..errors.versions import FILES, pins
from ..hosts.job import Job
from ..train.host.urls import is_remote
from ..train.recipe.files import REPOSITORY
from ..train.recipe.objectives import named_models
from ..train.recipe.program import function_files
from .checks import LEVELS, Facts, Hosts, Level, Result, check, most_common, sound
from .findings import fault

VARIABLES = table(Path(__file__).with_name("variables.yaml"))
_KEY = secrets.token_hex(16)  # of the hashes of secrets: of no use to anybody after this process
SHOWN = 60  # characters of a variable's value
MADE = "output"  # the run makes it
FILES_SHOWN = 4  # files that a sentence names
Files = Mapping[str, str | None]  # path -> hash, None of what cannot be read


async def look(hosts: Hosts) -> dict[str, Facts]:
    """Ask what every check of this module and of packages reads: one question, one process on each host."""
    compared = [*VARIABLES["red"], *VARIABLES["yellow"]]
    secret = {"secret": VARIABLES["secret"], "salt": _KEY}
    names, paths, own = list(pins()), paths_of(hosts.wanted.job), own_files(hosts.wanted.job)
    return await hosts.ask(
        "sameness.look", 20, names=names, patterns=compared, left_out=VARIABLES["own"], paths=paths, own=own, **secret
    )


def paths_of(job: Job | None) -> dict[str, str]:
    """Return what for -> path, of all that a run needs at the same place on each host. A ~ stays: each rank has its own
    user's."""
    path_of = {"code": str(REPOSITORY), "environment": sys.prefix}
    if job is None:
        return path_of
    recipe = job.settings.recipe
    for source in recipe.data.sources:
        folder = source.dataset_name if _is_folder(source.dataset_name or "?") else None
        for name in (source.train_file, source.validation_file, source.image_folder, folder):
            if name and not is_remote(name):
                # Of a pattern the directory.
                path_of[f"data {name}"] = _as_ranks(re.split(r"[^/]*[*?\[]", name)[0] or ".")
    for key, name in named_models(recipe).items():
        if _is_folder(name):
            path_of[key.partition("_")[0]] = _as_ranks(name)
    return path_of | {"recipe": str(job.settings.recipe_path.absolute()), "output": str(job.output_dir.absolute())}


def _as_ranks(name: str) -> str:
    """The path that ranks find: they start where the user is, and look in the clone for what is not there (recipe/files.py)."""
    if name.startswith("~"):
        return name
    return str(Path(name).absolute() if Path(name).exists() else REPOSITORY / name)


def _is_folder(name: str) -> bool:
    return name.startswith("~") or any(path.is_dir() for path in (Path(name), REPOSITORY / name))


def own_files(job: Job | None) -> list[str]:
    """The files that this run's ranks read besides code and data: its recipe, its strategy's, a chat template and
    functions of the user's."""
    if job is None:
        return []
    cluster, named = job.settings.recipe.cluster, [*function_files(job.settings).values()]
    for source in (cluster.ds_config, cluster.accelerate_config, job.settings.recipe.data.chat_template):
        if isinstance(source, str) and Path(source).suffix in (".json", ".yaml", ".yml", ".jinja"):
            named.append(source)
    return [str(job.settings.recipe_path.absolute()), *map(_as_ranks, named)]


@check("system", seconds=30)
async def system(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads kernel, glibc and processor. Threshold: the processor's kind is everywhere the same (red); another glibc, or another
    major or minor version of the kernel, is a warning: kernels that one host compiled into a shared cache do not load with an
    older glibc. Hosts whose kernels differ only in their patch level are sound."""
    answers = {
        host: {"processor": facts["machine"], "kernel": _minor(facts["kernel"]), "glibc": facts["glibc"]}
        for host, facts in (await look(hosts)).items()
    }
    for result in alike("other-system", answers, {"processor": "red"}):
        yield result


def _minor(kernel: str) -> str:
    return ".".join(re.split(r"[.-]", kernel)[:2])


@check("code", seconds=30)
async def code(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the commit and the changed files by git, and a hash of train.py, brigade/, recipes and configs. Threshold: none
    differs from what most hosts have; red are files that this run reads: train.py, brigade/, its own recipe and configs, its chat
    template and the user's functions. Others, those that `make setup` reads, and another commit with the same files, are a
    warning."""
    looked = await look(hosts)
    own = {host: {short_path(path): found for path, found in facts["own"].items()} for host, facts in looked.items()}
    clones = {
        host: (hosts.hello[host].get("project"), _key(facts["git"]), str(own[host])) for host, facts in looked.items()
    }
    usual = most_common(clones) if clones else None
    first = next((host for host in clones if clones[host] == usual), "")
    odd = [host for host in clones if clones[host] != usual]
    files = await hosts.ask("sameness.files", 20, per_host={host: {} for host in (first, *odd) if odd})
    for host in clones:
        if host in odd and (host not in files or first not in files):
            continue
        git, names = looked[host]["git"], []
        if host in odd:
            names = differing(files[host]["files"] | own[host], files[first]["files"] | own[first])
        result = judged_clone(host, git, names, looked[first]["git"], first, own[host].keys())
        yield replace(result, detail=tuple(git["changed"]) if git else ())


def _key(git: Facts | None) -> str:
    return f"{git['commit']} {sorted(git['changed'])}" if git else ""


@check("variables", seconds=30)
async def variables(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads the variables of variables.yaml as the ranks will have them. Threshold: none differs from what most hosts have, each
    with the level that the table gives it; of secrets only whether they are set, and the same."""
    answers = {host: facts["variables"] for host, facts in (await look(hosts)).items()}
    names = sorted({name for values in answers.values() for name in values})
    usual = {
        name: most_common({host: _hashable(values.get(name)) for host, values in answers.items()}) for name in names
    }
    for host, values in answers.items():
        detail = tuple(f"{name}={one['is']}" if "is" in one else f"{name} is set" for name, one in values.items())
        odd = [name for name in names if _hashable(values.get(name)) != usual[name]]
        for name in odd:
            level, why = _of_table(name)
            differs = _words(values.get(name), usual[name])
            yield fault("other-variable", host, level, detail=detail, name=name, differs=differs, why=why)
        if not odd:
            yield sound(host, f"{len(names)} alike" if names else "none set", detail=detail)


def _hashable(value: Facts | None) -> tuple[str, str] | None:
    return next(iter(value.items())) if value else None


def _of_table(name: str) -> tuple[Level, str]:
    for level in ("red", "yellow"):
        for pattern, why in VARIABLES[level].items():
            if fnmatchcase(name, pattern):
                return level, why  # type: ignore[return-value]
    return "yellow", "the run is another one there"


def _words(value: Facts | None, usual: tuple[str, str] | None) -> str:
    """Say how a value differs; of a secret, only whether it is set."""
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
    places_of = {host: facts["paths"] for host, facts in (await look(hosts)).items()}
    asked = paths_of(hosts.wanted.job)
    usual = {
        what: most_common({host: places[what]["real"] for host, places in places_of.items()})
        for what in asked
        if places_of
    }
    for host, places in places_of.items():
        detail = tuple(f"{what}: {place['real']}" for what, place in places.items())
        missing = [what for what, place in places.items() if not place["there"] and what != MADE]
        elsewhere = {w: usual[w] for w, place in places.items() if w not in missing and place["real"] != usual[w]}
        if missing:
            words = ", ".join(f"{asked[what]} ({what.partition(' ')[0]})" for what in missing)
            yield fault("missing-path", host, detail=detail, what=missing[0], missing=words, path=asked[missing[0]])
        if elsewhere:
            what = next(iter(elsewhere))
            words = "; ".join(
                f"{asked[what]} leads to {places[what]['real']}, elsewhere {to}" for what, to in elsewhere.items()
            )
            yield fault("path-leads-elsewhere", host, detail=detail, what=what, elsewhere=words, path=asked[what])
        if not missing and not elsewhere:
            yield sound(host, f"{len(places)} alike", detail=detail)


def alike(finding: str, values_of: Mapping[str, Mapping[str, str | None]], levels: Mapping[str, Level]) -> list[Result]:
    """A result for each host: sound, or what of it differs from what most hosts have.

    values_of: host -> name -> value, None where it is not there; levels: of a name that differs, else yellow
    """
    names = list(dict.fromkeys(name for values in values_of.values() for name in values))
    usual = {name: most_common({host: values.get(name) for host, values in values_of.items()}) for name in names}
    results = []
    for host, values in values_of.items():
        odd = [name for name in names if values.get(name) != usual[name]]
        shown = ", ".join(f"{name} {values[name]}" for name in odd or names if values.get(name)) or "none"
        if not odd:
            results.append(sound(host, shown))
            continue
        grave: list[Level] = [levels.get(name, "yellow") for name in odd]
        pairs = (f"{name} {values.get(name) or 'is missing'}, elsewhere {usual[name] or 'none'}" for name in odd)
        results.append(fault(finding, host, max(grave, key=LEVELS.index), value=shown, differs="; ".join(pairs)))
    return results


def differing(files: Files, reference: Files) -> list[str]:
    """The paths that two clones do not have in common, missing ones included."""
    return sorted(path for path in files.keys() | reference.keys() if files.get(path) != reference.get(path))


def short_path(path: str) -> str:
    """Return the path in the clone of a file that lies there, else the path as it is."""
    with suppress(ValueError):
        return Path(path).relative_to(REPOSITORY).as_posix()
    return path


def is_read(path: str, own: Collection[str]) -> bool:
    """Tell whether ranks read it. own: see own_files()"""
    return path == "train.py" or path.startswith("brigade/") or path in own


def value(git: Facts | None) -> str:
    """A clone's commit and number of changed files, for the table."""
    if not git:
        return "no git, same files"
    changed = len(git["changed"])
    return git["commit"][:9] + (f" + {changed} changed" if changed else "")


def judged_clone(
    host: str,
    git: Facts | None,
    odd: list[str],
    reference: Facts | None,
    reference_host: str,
    own: Collection[str] = (),
) -> Result:
    """git: of this host; odd: files that differ from the reference host's, whose git is `reference`; own: see is_read()"""
    odd = sorted(odd, key=lambda path: not is_read(path, own))
    other = git is not None and reference is not None and git["commit"] != reference["commit"]
    if not odd and not other:
        return sound(host, value(git))
    names = f"{', '.join(odd[:FILES_SHOWN])}{f' and {len(odd) - FILES_SHOWN} more' if len(odd) > FILES_SHOWN else ''}"
    differ = f"{names} {'differs' if len(odd) == 1 else 'differ'} from {reference_host}'s"
    commits = f"another commit ({git['commit'][:9]}) than {reference_host} ({reference['commit'][:9]})" if other else ""  # type: ignore[index]
    differs = "; ".join(filter(None, [commits, differ if odd else ""]))
    if any(is_read(path, own) for path in odd):
        finding = "other-code"
    elif set(odd) - set(FILES):
        finding = "other-files-of-other-runs"
    else:
        finding = "other-pins" if odd else "other-commit-same-files"
    cure, fix = _cure(host, git, odd, reference, reference_host)
    shown = value(git) if other or not odd else f"{odd[0]} differs"
    return fault(finding, host, fix=fix, value=shown, differs=differs, cure=cure)


def _cure(host: str, git: Facts | None, odd: list[str], reference: Facts | None, first: str) -> tuple[str, str]:
    """Words, and the line for --fix: only where no file is changed, for a changed file is somebody's work."""
    where = shlex.quote(str(REPOSITORY))
    if odd and all(path.startswith(("/", "~")) for path in odd):
        return f"copy {', '.join(odd[:FILES_SHOWN])} from {first} to {host}, or put it where all hosts see it", ""
    if git is None or reference is None:
        return f"copy the clone of {first} to {host}: rsync -a {first}:{where}/ {where}/", ""
    commit = reference["commit"]
    if reference["changed"]:
        names = ", ".join(reference["changed"][:FILES_SHOWN])
        return f"commit on {first} what was changed there ({names}), and check that commit out on {host}", ""
    if git["changed"]:
        names = ", ".join(git["changed"][:FILES_SHOWN])
        look = f"ssh {host} git -C {where} diff"
        cure = f"look at what was changed there ({names}): `{look}`; commit or stash it, then check out {commit[:9]}"
        return cure, ""
    if git["commit"] == commit:
        return f"copy {', '.join(odd[:FILES_SHOWN])} from {first}: git does not follow it", ""
    fetch = f"(git cat-file -e {commit}^{{commit}} 2>/dev/null || git fetch --quiet --all)"
    fix = f'cd {where} && test -z "$(git status --porcelain -uno)" && {fetch} && git checkout --quiet --detach {commit}'
    return f"ssh {host} git -C {where} checkout {commit[:9]}, or --fix --yes", fix
