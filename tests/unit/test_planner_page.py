"""The planner's fitted constants and the page of its errors are what the tables of published runs give."""

import re

import pytest
import yaml

from benchmarks import planner
from brigade.plan import hardware


@pytest.mark.slow
def test_constants_and_page_are_what_the_tables_give(capsys):
    """Whoever changes a formula writes them anew with python -m benchmarks.planner."""
    assert planner.main(["--check"]) == 0, capsys.readouterr().out


def test_a_fitted_share_is_written_where_it_stands(monkeypatch, tmp_path):
    before = yaml.safe_load(hardware.CATALOGUE.read_text())["gpus"]
    after = yaml.safe_load(planner.catalogue({"A100": 0.5, "RTX 4090": 1.25}))["gpus"]
    new = {"A100 40GB": 0.5, "A100 80GB": 0.5, "RTX 4090": 1.25}
    assert after == {kind: entry | ({"sustained": new[kind]} if kind in new else {}) for kind, entry in before.items()}
    (tmp_path / "none.yaml").write_text(re.sub(r"sustained: [\d.]+, ", "", hardware.CATALOGUE.read_text()))
    monkeypatch.setattr(hardware, "CATALOGUE", tmp_path / "none.yaml")
    with pytest.raises(SystemExit, match="RTX 4090 has no `sustained`"):
        planner.catalogue({"RTX 4090": 1.25})
