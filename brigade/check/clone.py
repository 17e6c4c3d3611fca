"""Whether all hosts run the same code: commit, changed files, and which files differ."""

import shlex
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from ..train.recipe.files import REPOSITORY
from .hosts import Facts
from .pins import FILES
from .results import Result, sound

SHOWN = 4  # files that a sentence names
WHY = "ranks of two versions of the code wait for each other, or train different things"
WHY_COMMIT = "no file differs that a run reads, but results can no longer be traced to one commit"
WHY_PINS = "whoever runs `make setup` there gets other versions"
WHY_OTHERS = "this run does not read them; a later one may"
Files = Mapping[str, str | None]  # path -> hash, None of what cannot be read


def differing(files: Files, reference: Files) -> list[str]:
    """Paths that two clones do not have in common, missing ones included."""
    return sorted(path for path in files.keys() | reference.keys() if files.get(path) != reference.get(path))


def short(path: str) -> str:
    """Of what lies in the clone, its path there."""
    with suppress(ValueError):
        return Path(path).relative_to(REPOSITORY).as_posix()
    return path


def read(path: str, own: Collection[str]) -> bool:
    """Whether ranks read it. own: the run's recipe and configs"""
    return path == "train.py" or path.startswith("brigade/") or path in own


def value(git: Facts | None) -> str:
    if not git:
        return "no git, same files"
    changed = len(git["changed"])
    return git["commit"][:9] + (f" + {changed} changed" if changed else "")


def judge(
    host: str,
    git: Facts | None,
    odd: list[str],
    reference: Facts | None,
    reference_host: str,
    own: Collection[str] = (),
) -> Result:
    """git: of this host; odd: files that differ from the reference host's, whose git is `reference`; own: see read()"""
    odd = sorted(odd, key=lambda path: not read(path, own))
    other = git is not None and reference is not None and git["commit"] != reference["commit"]
    if not odd and not other:
        return sound(host, value(git))
    names = f"{', '.join(odd[:SHOWN])}{f' and {len(odd) - SHOWN} more' if len(odd) > SHOWN else ''}"
    differ = f"{names} {'differs' if len(odd) == 1 else 'differ'} from {reference_host}'s"
    commits = f"another commit ({git['commit'][:9]}) than {reference_host} ({reference['commit'][:9]})" if other else ""  # type: ignore[index]
    problem = "; ".join(filter(None, [commits, differ if odd else ""]))
    grave, others = any(read(path, own) for path in odd), set(odd) - set(FILES)
    why = WHY if grave else WHY_OTHERS if others else WHY_PINS if odd else WHY_COMMIT
    level = "red" if grave else "yellow"
    cure, fix = _cure(host, git, odd, reference, reference_host)
    shown = value(git) if other or not odd else f"{odd[0]} differs"
    return Result(host, level, shown, None, problem, why, cure, fix)  # type: ignore[arg-type]


def _cure(host: str, git: Facts | None, odd: list[str], reference: Facts | None, first: str) -> tuple[str, str]:
    """Words, and the line for --fix: only where no file is changed, for a changed file is somebody's work."""
    where = shlex.quote(str(REPOSITORY))
    if odd and all(path.startswith(("/", "~")) for path in odd):
        return f"copy {', '.join(odd[:SHOWN])} from {first} to {host}, or put it where all hosts see it", ""
    if git is None or reference is None:
        return f"copy the clone of {first} to {host}: rsync -a {first}:{where}/ {where}/", ""
    commit = reference["commit"]
    if reference["changed"]:
        names = ", ".join(reference["changed"][:SHOWN])
        return f"commit on {first} what was changed there ({names}), and check that commit out on {host}", ""
    if git["changed"]:
        names = ", ".join(git["changed"][:SHOWN])
        look = f"ssh {host} git -C {where} diff"
        return (
            f"look at what was changed there ({names}): `{look}`; commit or stash it, then check out {commit[:9]}",
            "",
        )
    if git["commit"] == commit:
        return f"copy {', '.join(odd[:SHOWN])} from {first}: git does not follow it", ""
    fetch = f"(git cat-file -e {commit}^{{commit}} 2>/dev/null || git fetch --quiet --all)"
    fix = f'cd {where} && test -z "$(git status --porcelain -uno)" && {fetch} && git checkout --quiet --detach {commit}'
    return f"ssh {host} git -C {where} checkout {commit[:9]}, or --fix --yes", fix
