"""Docstrings say what a thing is or does: all that is public has one, and none begins with "Of"."""

import ast
import re

from testing.ranks import REPOSITORY as ROOT

FILES = sorted((ROOT / "brigade").rglob("*.py"))
OTHERS = [
    path for folder in ("tests", "testing", "testbed", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
]
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def place(path, node):
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}"


def test_no_docstring_begins_with_of():
    begins = re.compile(r'^\s*"""Of .*', re.M)
    found = [(str(path), line) for path in FILES + OTHERS for line in begins.findall(path.read_text())]
    assert not found, "begin with a verb or a noun: 'Return the ranks ...', 'The rows of a step'"


def test_modules_and_their_public_functions_and_classes_have_docstrings():
    found = []
    for path in FILES:
        module = ast.parse(path.read_text())
        public = [n for n in module.body if isinstance(n, DEFINITIONS) and not n.name.startswith("_")]
        found += [place(path, node) for node in (module, *public) if not ast.get_docstring(node)]
    assert not found
