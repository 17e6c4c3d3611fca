"""The rows of brigade/check/findings/: what a check can say is a row there, and each check has a fault and a row in the docs."""

import ast
import string

import pytest

from brigade.check.checks import checks, thresholds
from brigade.check.findings import compared, fault, findings
from brigade.check.resources import LIMITS
from testbed.preflight import INJECTED
from testing.ranks import REPOSITORY

CHECK = REPOSITORY / "brigade/check"
ALWAYS = {"host", "gpu", "project", "python"}  # of the values of a finding's words: the ones that no call gives
# Functions that take the name of a row first, and the values of its words by name.
MAKERS = ("fault", "compared", "_finding", "_compared")
LEVEL = {"fault": 3, "_finding": 2}  # how many arguments by place there are where the call says how grave it is
# Checks whose fault three hosts of the testbed cannot have (GPUs, another processor, another user), by the test that has it.
NOT_IN_TESTBED = {
    "unit/security/test_store.py": ("other users",),
    "unit/test_check_same.py": ("imports", "CUDA libraries", "driver", "CUDA libraries as loaded", "system"),
    "unit/test_check_gpus.py": ("gpu memory errors", "gpu clocks", "gpu Xid errors"),
    "unit/test_check_resources.py": ("cores", "memory", "locked memory", "kernels", "all kernels"),
    "unit/test_check_storage.py": ("write and read",),
    "unit/test_check_network.py": ("every pair", "pairs by NCCL"),
    "unit/test_check_bandwidth.py": ("collectives", "GPUs of a host", "waiting"),
    "cluster/test_preflight.py": ("dress rehearsal",),
}
AS_ANOTHER = {"every pair": "pairs", "pairs by NCCL": "pairs", "all kernels": "kernels"}  # whose rows it has


def calls():
    """(file:line, the maker's call) of brigade/check."""
    for file in sorted(CHECK.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                yield f"{file.name}:{node.lineno}", node


def test_every_row_is_found_by_a_check_and_no_check_names_another():
    """A name stands in the code as a whole string; those of a kind (ulimit-f) are put together there."""
    strings = {
        node.value
        for file in CHECK.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    put_together = {f"ulimit-{letter}" for letter in LIMITS}
    assert set(findings()) <= strings | put_together, set(findings()) - strings - put_together
    for place, call in calls():
        if isinstance(call.args[0], ast.Constant):
            assert call.args[0].value in findings(), place


def test_each_call_gives_the_values_that_its_row_has_in_its_words():
    tried = set()
    for place, call in calls():
        if not isinstance(call.args[0], ast.Constant) or any(keyword.arg is None for keyword in call.keywords):
            continue
        row = findings()[call.args[0].value]
        given = ALWAYS | {keyword.arg for keyword in call.keywords}
        given |= {"value"} if call.func.id == "compared" else set()
        words = "".join((row.value, row.problem, row.why, row.cure))
        names = {name for _, name, _, _ in string.Formatter().parse(words) if name}
        assert names <= given, f"{place}: nothing gives {names - given}"
        if call.func.id in ("compared", "_compared"):
            assert row.threshold, f"{place}: no threshold judges the figure"
        elif len(call.args) < LEVEL[call.func.id]:
            assert row.level != "grey", f"{place}: nothing says how grave it is"
        assert given - ALWAYS <= names | {"fix", "detail", "value"}, f"{place}: no words need {given - ALWAYS - names}"
        tried.add(call.args[0].value)
    assert len(tried) > 60


def test_a_row_says_what_is_wrong_why_and_what_cures_it():
    names = {check.name for check in checks()}
    for name, row in findings().items():
        assert row.check == "login" or row.check in names, name
        assert all((row.value, row.problem, row.why, row.cure)), name
        assert row.level in ("red", "yellow", "grey"), name  # grey: it is not said
        assert not row.threshold or row.threshold in thresholds(), name


def test_a_figure_is_judged_by_its_rows_threshold():
    assert compared("slow-core", "node1", 0.9, "0.90", 0.9).level == "green"
    slow = compared("slow-core", "node1", 0.7, "0.70 of the median", 0.7, speed=0.7, cause="it computes slowly")
    assert (slow.level, slow.value, slow.amount) == ("yellow", "0.70 of the median", 0.7)
    assert slow.problem == "one core does 70% of what the median host's does"
    assert slow.cure.startswith("it computes slowly: `ssh node1 top`")
    with pytest.raises(AssertionError, match="how grave"):
        fault("slow-core", "node1", speed=0.7, cause="", value="")


@pytest.mark.parametrize("check", checks(), ids=lambda check: check.name)
def test_a_check_has_rows_a_fault_and_its_line_in_the_docs(check):
    """Who adds one writes its rows, brings its fault about in testbed/ (or says why not, above), and draws the page anew."""
    name = AS_ANOTHER.get(check.name, check.name)
    assert name in {row.check for row in findings().values()}
    tests = [file for file, names in NOT_IN_TESTBED.items() if check.name in names]
    assert bool(tests) != (check.name in {fault.check for fault in INJECTED}), "testbed/ has no fault that it finds"
    for file in tests:
        text = (REPOSITORY / "tests" / file).read_text()
        assert f'"{name}"' in text or f".{check.function.__name__}" in text
    page = (REPOSITORY / "docs/evidence/preflight.md").read_text()
    assert f"| {check.group} | {check.name} |" in page, "python -m benchmarks.pages preflight"
