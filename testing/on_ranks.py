"""A function on each rank of a group: it gets and returns what JSON can hold."""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .ranks import run_ranks


def on_ranks(function: Callable[..., object], *given: Any, ranks: int, timeout: float = 900, gpus: bool = False) -> Any:
    """Return what function(*given) returns, or told, of each rank. Raises RuntimeError with the ranks' output where one fails.

    function: of a module; gpus: on a fake GPU for each rank
    """
    spec = sys.modules[function.__module__].__spec__  # which has the name of what was started by `python -m`, too
    assert spec
    module = spec.name
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps([module, function.__name__, given]))
        done = run_ranks("testing.on_ranks", folder, ranks=ranks, timeout=timeout, gpus=gpus)
        answers = [Path(folder) / str(rank) for rank in range(ranks)]
        if done.returncode or not all(answer.exists() for answer in answers):
            said = f"exit code {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            # The case is mostly named last, by its output directory.
            raise RuntimeError(f"{function.__name__} of ...{json.dumps(given)[-300:]} on {ranks} ranks: {said}")
        return [json.loads(answer.read_text()) for answer in answers]


def tell(found: object) -> None:
    """Give this rank's answer, of a function that does not return."""
    Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(found))


def _work() -> None:
    module, name, given = json.loads(Path(sys.argv[1], "job.json").read_text())
    tell(getattr(importlib.import_module(module), name)(*given))


if __name__ == "__main__":
    from brigade.train.distributed.ranks import run_to_the_end

    run_to_the_end(_work)
