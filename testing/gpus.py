"""GPUs for tests of check: what NVML says of them, by answers that were written or recorded (tests/data/nvml/)."""

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from brigade.check.checks import Facts, Result, Wanted
from brigade.check.probes import gpus as nvml
from brigade.train.recipe.files import REPOSITORY
from testing.recorded_hosts import Recorded, grouped, results_of

FOLDER = REPOSITORY / "tests/data/nvml"
KINDS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}
ROWS = ("gpus", "gpu memory errors", "gpu clocks", "gpu links", "gpu Xid errors")
STAND_IN = REPOSITORY / "testbed" / "stand_in" / "nvml"


def facts(kind: str, own: Facts | None = None) -> Facts:
    """What probes/gpus.py answers of a host. own: figures of GPU 1 that differ"""
    said = KINDS[kind]
    gpus = [{"index": n, **copy.deepcopy(said["gpu"])} for n in range(said["count"])]
    for number, gpu in enumerate(gpus):
        gpu["bus"] = f"0000{gpu['bus'].format(number)}"
    gpus[1] |= own or {}
    peers = [[a, b, said["peers"]] for a, b in combinations(range(said["count"]), 2)]
    return {"gpus": gpus, "peers": peers, "xids": [], **{key: said[key] for key in ("nvswitches", "fabric_manager")}}


def judged(
    name: str,
    answers: dict[str, Facts],
    slots: int = 8,
    count: dict[str, int | None] | None = None,
    environment: dict[str, str] | None = None,
    log: dict[str, Facts] | None = None,
) -> dict[str, list[Result]]:
    """host -> results of one check. answers: host -> what NVML says; count: host -> what nvidia-smi lists"""
    hello: dict[str, Facts] = {host: {"gpus": len(said.get("gpus", [])) or slots} for host, said in answers.items()}
    for host, number in (count or {}).items():
        hello[host]["gpus"] = number
    logs = {host: {"xids": []} for host in answers} | (log or {})
    wanted = Wanted(dict.fromkeys(answers, slots), environment=environment or {})
    hosts = Recorded(wanted, {"gpus.look": answers, "gpus.kernel_log": logs}, hello)
    return grouped(results_of(name, hosts))


def sees(monkeypatch: pytest.MonkeyPatch, name: str, gib: float, integrated: bool = False) -> None:
    """Let torch of this process see one GPU of that name and memory; none where the name is `cpu`."""
    import torch  # which takes seconds, and the tests of check do without it

    found = {
        "name": name,
        "total_memory": int(gib * 2**30),
        "is_integrated": int(integrated),
        "multi_processor_count": 60,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name != "cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**found))


def levels(found: dict[str, list[Result]]) -> dict[str, set[str]]:
    return {host: {result.level for result in results} for host, results in found.items()}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Any], Facts]]:
    """NVML as a file says it."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def answer(said: Any) -> Facts:
        (tmp_path / "said.yaml").write_text(yaml.safe_dump(said))
        monkeypatch.setenv("STAND_IN_NVML", str(tmp_path / "said.yaml"))
        return nvml.look()

    yield answer
    sys.modules.pop("pynvml", None)
