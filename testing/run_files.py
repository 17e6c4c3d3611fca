"""What a run has logged and saved: read from its output directory, and compared with another run's."""

import json
from pathlib import Path
from typing import Any

FIGURES = ("loss", "grad_norm", "eval_loss")


def history(output: Path) -> list[dict[str, Any]]:
    """Return what a run has logged, by what it has saved."""
    return json.loads((output / "trainer_state.json").read_text())["log_history"]


def losses(log: list[dict[str, Any]]) -> list[float]:
    """Return the losses of the steps that a run has logged."""
    return [entry["loss"] for entry in log if "loss" in entry]


def losses_of(output: Path) -> list[float]:
    """Return the losses of the steps of the run in a directory."""
    return losses(history(output))


def figures(log: list[dict[str, Any]], *keys: str) -> dict[str, list[Any]]:
    """Return key -> its values, in the order in which a run has logged them. keys: default: what comparisons are made of"""
    return {key: [entry[key] for entry in log if key in entry] for key in keys or FIGURES}


def answers(output: Path) -> list[dict[str, Any]]:
    """Return what a run has answered to held-out questions."""
    return [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]


def models(folder: Path, *names: str) -> list[Path]:
    """Return the one file of weights that each of these runs has saved."""
    found = []
    for name in names:
        (file,) = (folder / "outputs" / name).glob("*model.safetensors")
        found.append(file)
    return found


def assert_same_models(folder: Path, *names: str) -> None:
    """Raise AssertionError where these runs have not saved the same bytes."""
    first, *others = models(folder, *names)
    assert all(other.name == first.name and other.read_bytes() == first.read_bytes() for other in others), names


def assert_close_models(folder: Path, *names: str) -> None:
    """Raise AssertionError where two runs have not saved the same tensors, but for rounding."""
    import torch
    from safetensors.torch import load_file

    ours, theirs = map(load_file, models(folder, *names))
    assert {key: (value.shape, value.dtype) for key, value in ours.items()} == {
        key: (value.shape, value.dtype) for key, value in theirs.items()
    }
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-5)
