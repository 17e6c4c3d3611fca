"""What the default run has imported of ours when its first step begins."""

import pytest

from benchmarks import loaded


@pytest.mark.parametrize(
    ("flags", "limit"),
    [([], loaded.LIMIT), pytest.param(["--ds_config", "ds_configs/zero3.json"], 6_900, marks=pytest.mark.slow)],
    ids=["one process", "ZeRO-3"],
)
def test_a_run_loads_what_it_uses_and_no_more(flags, limit):
    found = loaded.loaded(*flags, limit=limit)
    unused = (
        "brigade.planner",
        "brigade.lint",
        "brigade.launch",
        "brigade.commands",
        "brigade.hostfile",
        "brigade.model.adapters",
        "brigade.training.rehearse",
        "brigade.training.gradient_compression",
        "brigade.upstream.nvme_resume",
    )
    assert not [name for name in found if name.startswith(unused)]
    assert sum(found.values()) <= limit, dict(sorted(found.items(), key=lambda entry: -entry[1])[:20])
