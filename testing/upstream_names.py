"""Every module and name of the packages under Brigade that its code imports or reaches through an imported module: which of them
the installed versions lack.

    python -m testing.upstream_names    # one line each, exit code 1; takes the seconds of importing them all
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "bitsandbytes")


def files() -> list[Path]:
    """What runs with these packages: train.py, brigade/ and testing/."""
    return [ROOT / "train.py", *sorted(file for room in ("brigade", "testing") for file in (ROOT / room).rglob("*.py"))]


def used(tree: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(line, module, names below it) of each import in a file, also within functions, and of each attribute of what it binds.

    What stands in a `try` whose ImportError is caught may be missing, and is left out.
    """
    optional = {node for each in ast.walk(tree) if _may_fail(each) for part in each.body for node in ast.walk(part)}
    bound: dict[str, tuple[str, tuple[str, ...]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _ours(alias.name):
                    kept = alias.name if alias.asname else alias.name.partition(".")[0]
                    bound[alias.asname or kept] = (kept, ())
                    if node not in optional:
                        yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom) and not node.level and _ours(node.module or ""):
            for alias in node.names:
                bound[alias.asname or alias.name] = (node.module or "", (alias.name,))
                if node not in optional:
                    yield node.lineno, node.module or "", (alias.name,)
    others = {
        node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)
    }  # an argument of the same name is no module
    others |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        chain = _chain(node)
        if chain and chain[0] in bound.keys() - others and node not in optional:
            module, names = bound[chain[0]]
            yield node.lineno, module, (*names, *chain[1:])


def _ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _may_fail(node: ast.AST) -> bool:
    """Whether it is a `try`, or a `with suppress(...)`, that lets an import fail."""
    if isinstance(node, ast.Try):
        caught = {name for handler in node.handlers for name in _names(handler.type)}
    elif isinstance(node, ast.With):
        caught = {name for item in node.items for name in _names(item.context_expr)} - {"suppress"}
    else:
        return False
    return bool(caught & {"ImportError", "ModuleNotFoundError", "Exception", "AttributeError"})


def _names(node: ast.AST | None) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node else set()


def _chain(node: ast.AST) -> tuple[str, ...]:
    """("torch", "distributed", "barrier") of an attribute that is read, () of another node."""
    names: list[str] = []
    if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
        return ()
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def lacks(module: str, names: tuple[str, ...]) -> str:
    """The first part that is not there, "" where all is. Nobody looks below a module's own names, at an object's attributes."""
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever it is that an import of theirs raises
        return f"{module} ({type(error).__name__}: {error})"
    path = module
    for name in names:
        if not isinstance(found, ModuleType):
            return ""
        path = f"{path}.{name}"
        if not hasattr(found, name):
            try:
                importlib.import_module(path)
            except Exception:
                return path
        found = getattr(found, name, None)
    return ""


def missing(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what the installed versions lack) of a file."""
    found = ((line, lacks(module, names)) for line, module, names in used(tree))
    return [(line, what) for line, what in dict.fromkeys(found) if what]


def main() -> int:
    """Print what is missing. Returns the exit code."""
    lines = []
    with redirect_stdout(sys.stderr):  # DeepSpeed logs there when it is imported
        for file in files():
            found = missing(ast.parse(file.read_text()))
            lines += [f"{file.relative_to(ROOT)}:{line}: {what}" for line, what in found]
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
