"""What the tests of ranks share: groups that run the cases which the selected tests ask for, and no others."""

import gc
import json
import sys

import pytest

from testing.ranks import REPOSITORY
from testing.train_command import HOST, MESSAGE_LINES, broken, chats


@pytest.fixture(scope="module")
def asked_for(request):
    """asked_for("name"): all values of this parameter among the selected tests of this file, and in their `cases` marks.

    So `make test`, `make test-all` and `-k` each start one group of ranks per file, and nothing runs that nobody looks at.
    """
    items = [item for item in request.session.items if item.path == request.node.path]

    def call(argument: str) -> set[str]:
        found = {
            item.callspec.params[argument] for item in items if argument in getattr(item, "callspec", NO_CASE).params
        }
        return found | {
            m.kwargs[argument] for item in items for m in item.iter_markers("cases") if argument in m.kwargs
        }

    return call


class NO_CASE:
    params = ()


@pytest.fixture(scope="session", autouse=True)
def imports_are_collected_once():
    """Engines collect garbage at each start and end; what torch and Transformers have imported is none."""
    import train  # noqa: F401

    gc.collect()
    gc.freeze()


# ---- train.main in this process: importing the stack once ----------------------------------------------------------
@pytest.fixture
def place(tmp_path):
    """A directory with chats, the same with a broken third line, and a ds_config that contradicts the recipe."""
    chats(tmp_path / "good.jsonl")
    broken(tmp_path / "broken.jsonl")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "bert"}')
    config = json.loads((REPOSITORY / "ds_configs/zero2.json").read_text())
    (tmp_path / "clip.json").write_text(json.dumps(config | {"gradient_clipping": 0.5}))
    return tmp_path


@pytest.fixture
def no_launcher(monkeypatch):
    """What train.main sets for a group of one rank, as ZeRO needs it, is not left to later tests: they would start one too."""
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(key, "")  # so that it is restored whatever train.main sets
        monkeypatch.delenv(key)


def _raise(error, *_):
    raise error


@pytest.fixture
def raises(monkeypatch):
    """What a run ends with is raised; else it would end this process."""
    from brigade.train.distributed import ranks

    monkeypatch.setattr(ranks, "fail", _raise)


@pytest.fixture
def main(place, no_launcher, monkeypatch):
    """train.main in `place` on a host without a GPU; an error after the model was begun fails the test."""
    import torch

    import train
    from brigade.train.distributed import ranks

    def too_late(error, *_):
        raise AssertionError(f"told only after the model was begun: {error!r}") from error

    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(ranks, "fail", too_late)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return train.main


@pytest.fixture
def told(main, capfd):
    """told(*flags): what train.main says of a mistake with these flags; it must leave before the model is built."""

    def call(*flags: str) -> str:
        flags = flags if "--output_dir" in flags else (*flags, "--output_dir", "run")
        with pytest.raises(SystemExit) as left:
            main([*flags])
        said = capfd.readouterr()
        # torch's build for CUDA warns of a CUDA toolkit without a GPU
        lines = [line for line in said.err.splitlines() if "No CUDA runtime is found" not in line]
        assert left.value.code == 2, said.err
        assert len(lines) <= MESSAGE_LINES and lines[0].startswith(f"error on {HOST}, rank 0 of 1: "), said.err
        assert lines[-1].startswith("  cure: ") and said.err.count("error on") == 1, said.err
        assert not said.out
        return said.err

    return call
