"""The house stands: the hall needs no other room, nothing imports in a circle, and house and hall have few floors."""

import ast
import re
import subprocess
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from testing.shipped import FOLDERS as SHARED_WITH_USERS
from testing.shipped import NAMES

ROOT = Path(__file__).parents[2]
FOLDERS = ("brigade", "benchmarks", "testing", "testbed")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [ROOT / "train.py", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
}


@cache
def parsed(path):
    return ast.parse(path.read_text())


@cache
def imported(name, path):
    """{(module, whether only annotations need it)} of each import, wherever in a module's text."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def below(node, for_types):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            names = [f"{source}.{alias.name}" for alias in node.names]
            yield from ((each if each in MODULES else source, for_types) for each in names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, for_types) for alias in node.names)
        elif not isinstance(node, ast.expr):  # in which nothing is imported
            for_types |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for child in ast.iter_child_nodes(node):
                yield from below(child, for_types)

    return frozenset(below(parsed(path), False))


# What imports what, found where a test asks for it: it takes seconds, and each worker of pytest reads this file.
@cache
def from_anywhere():
    return {name: imported(name, path) for name, path in MODULES.items()}


@cache
def every():
    return {
        name: {(other, types) for other, types in others if other in MODULES and other != name}
        for name, others in from_anywhere().items()
    }


@cache
def imports():
    return {name: {other for other, _ in others} for name, others in every().items()}


@cache
def at_run_time():
    """Without the types of annotations."""
    return {name: {other for other, for_types in others if not for_types} for name, others in every().items()}


def room(module):
    """brigade/plan for brigade.plan.costs, brigade/train/data for brigade.train.data.encode: the hall's rooms are rooms, too.
    Single files, and benchmarks, testing and testbed, are a room each."""
    parts = module.split(".")
    return "/".join(parts[: 3 if parts[:2] == ["brigade", "train"] else 2]) if parts[0] == "brigade" else parts[0]


def between(part):
    """What the modules of each part of the house import of other parts. part: module -> its part"""
    found = {part(module): set() for module in MODULES}
    for module, others in imports().items():
        found[part(module)] |= {part(other) for other in others} - {part(module)}
    return found


@cache
def rooms():
    return between(room)


ABOVE_FOLDERS = {path.parent.parent for path in MODULES.values()}


def package(module):
    """The innermost folder of a module, as brigade.plan.costs; a module beside folders is one by itself."""
    folder = MODULES[module].parent
    return module if folder in ABOVE_FOLDERS else ".".join(folder.relative_to(ROOT).parts)


@cache
def packages():
    return between(package)


def circle(nodes):
    """Each arrow of a circle on a line; an arrow between rooms with the imports that make it."""
    lines = ["these import each other in a circle:"]
    for one, other in pairwise(nodes):
        found = [
            f"{a} imports {b}" for a in imports() for b in sorted(imports()[a]) if (room(a), room(b)) == (one, other)
        ]
        lines += [f"  {one} -> {other}", *(f"      {text}" for text in found)]
    return "\n".join(lines)


def floors(graph):
    """The longest way down from each node; a circle has none."""
    above = []

    @cache
    def floor(node):
        if node in above:
            pytest.fail(circle([*above[above.index(node) :], node]), pytrace=False)
        above.append(node)
        found = 1 + max((floor(other) for other in graph[node]), default=0)
        above.pop()
        return found

    return {node: floor(node) for node in sorted(graph)}


@pytest.mark.parametrize("graph", [imports, packages, rooms], ids=["modules", "packages", "rooms"])
def test_nothing_imports_in_a_circle(graph):
    """Nor by types, which only annotations need."""
    floors(graph())


# What a host starts that only trains: a run, the commands around it, and the proof of its GPUs, with what that starts by name.
STARTED = [
    name
    for name in MODULES
    if name.startswith(("train", "brigade", "benchmarks.gpu_proof")) or name in ("benchmarks.gpu", "testing.runs")
]


def test_nothing_that_a_gpu_host_runs_imports_a_package_that_only_tests_install():
    text = "".join((ROOT / name).read_text() for name in ("requirements-dev.txt", "tests/browser/requirements.txt"))
    tools = {name.lower().replace("-", "_") for name in re.findall(r"^([\w-]+)==", text, re.MULTILINE)}
    assert {"pytest", "selenium", "kubeflow_trainer_api"} <= tools
    reached, ahead = set(), list(STARTED)
    while ahead:
        if (name := ahead.pop()) not in reached:
            reached.add(name)
            ahead += at_run_time()[name]
    found = {name: {other.partition(".")[0] for other, _ in from_anywhere()[name]} & tools for name in reached}
    assert not {name: names for name, names in found.items() if names}


def in_house(name):
    """A room of the house, in which the hall is one."""
    return "brigade/train" if name.startswith("brigade/train/") else name


def hall():
    return {
        name: {other for other in others if in_house(other) != other}
        for name, others in rooms().items()
        if in_house(name) != name
    }


def house():
    return between(lambda module: in_house(room(module)))


@pytest.mark.parametrize("graph, most", [(house, 7), (hall, 8)], ids=["house", "hall"])
def test_there_are_few_floors(graph, most):
    """Printed with `pytest -s`: the floors from the roof down, and what each room imports."""
    graph = graph()
    of_room = floors(graph)
    for name in sorted(of_room, key=lambda name: (-of_room[name], name)):
        print(of_room[name], name, "->", *sorted(graph[name]))
    print(len(graph), "rooms,", max(of_room.values()), "floors,", sum(map(len, graph.values())), "arrows")
    assert max(of_room.values()) <= most


def test_the_hall_needs_no_other_room():
    """brigade/train holds all that a run needs; what other rooms offer to a run, brigade/offers.py hands in."""
    beyond = [
        f"{name} imports {other}"
        for name in imports()
        if name.startswith("brigade.train")
        for other in sorted(imports()[name])
        if other != "brigade" and not other.startswith(("brigade.train", "brigade.errors"))
    ]
    assert not beyond, "\n".join(beyond)


CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "remove", "setdefault",
           "sort", "update"}  # fmt: skip


def changed(function):
    """(name, line) of each object that a function changes, and does not make itself: by a method, an item, next() or `global`."""
    nodes = [*ast.walk(function)]
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Global):
            yield from ((name, node.lineno) for name in node.names)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield from named(node.value, own)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            yield from named(node.func.value, own)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "next":
            yield from named(node.args[0], own)


def named(node, own):
    if isinstance(node, ast.Name) and node.id not in own:
        yield node.id, node.lineno


def test_modules_keep_no_state():
    """What changes is an object's; brigade/train/distributed/process.py has the one of the process. What a function returned
    before, functools.cache may remember."""
    kept = set()
    for name, path in MODULES.items():
        if name.startswith("brigade"):
            module = parsed(path)
            assert "contextvars" not in path.read_text(), name
            names = {
                node.id
                for statement in module.body
                if isinstance(statement, ast.Assign | ast.AnnAssign)
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            found = {each for function in functions for each in changed(function)}
            kept |= {f"{name}, line {line}: {each}" for each, line in found if each in names}
    assert not kept


def test_the_package_needs_neither_tests_nor_benchmarks():
    around = {"benchmarks", "testing", "testbed", "train"}
    assert not [name for name in rooms() if name.startswith("brigade") and rooms()[name] & around]


def test_tests_share_through_testing():
    """No test imports another one, or a conftest: what several need stands in testing/."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    shared = {
        f"{path.relative_to(ROOT)} imports {other}"
        for path in tests
        for other, _ in imported(".".join(path.relative_to(ROOT).with_suffix("").parts), path)
        if other.partition(".")[0] == "tests"
    }
    assert not shared, "\n".join(sorted(shared))


def test_what_is_imported_is_there():
    """Also what is imported late, in a function that no quick test calls. A folder without __init__.py is one, too."""
    folders = {name.rpartition(".")[0] for name in MODULES}
    wanted = {(name, other) for name, path in MODULES.items() for other, _ in imported(name, path)}
    ours = {(name, other) for name, other in wanted if other.partition(".")[0] in FOLDERS}
    assert [each for each in sorted(ours) if each[1] not in MODULES and each[1] not in folders] == []


def test_tests_know_the_shipped_files_from_those_of_users():
    """After `plan --write recipes/my-model/` all tests pass as before. A new file of ours is a line of testing/shipped.txt."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", *SHARED_WITH_USERS], cwd=ROOT, capture_output=True, text=True)
        assert set(NAMES) == set(listed.stdout.split())
    assert [name for name in NAMES if not (ROOT / name).is_file()] == []
    folders = "|".join(SHARED_WITH_USERS)
    looks = re.compile(rf"({folders})\b[^\n]*\b(r?glob|iterdir|listdir)\(|glob\(.({folders})/")
    files = (path for folder in ("tests", "testing", "testbed") for path in (ROOT / folder).rglob("*.py"))
    assert [str(path) for path in files if looks.search(path.read_text()) and path != Path(__file__)] == []


def test_no_two_test_files_that_run_together_have_one_name():
    """pytest imports each by its name alone: the second would not be collected (cluster's run apart)."""
    names = [path.name for room in ("ranks", "serving", "unit") for path in (ROOT / "tests" / room).rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
