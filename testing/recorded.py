"""Directories as runs leave them behind, written in a moment: for tests and pictures of what reads them."""

import json
import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SAMPLES = "python-docs"


def write_run(
    directory: Path,
    steps: int = 200,
    *,
    lower: float = 0.0,
    noise: float = 0.05,
    seed: int = 0,
    evaluate: int = 0,
    ended: str = "success",
    changes: dict[str, Any] | None = None,
    answer: str = "Yes.",
    **of_run: Any,
) -> Path:
    """A run that logged every step. lower: nats below the usual curve; noise: of batches, which runs of one `seed` share, and
    a tenth of it that is the run's own; evaluate: steps between two evaluations (a tenth of all); ended: success, or ""
    changes: of run.yaml's sections; of_run: of its record
    """
    directory.mkdir(parents=True, exist_ok=True)
    shared, own = random.Random(seed), random.Random(f"{directory.name} {seed}")
    evaluate = evaluate or max(1, steps // 10)
    events: list[dict[str, Any]] = []

    def add(event: str, step: int, **fields: Any) -> None:
        time = (BEGAN + timedelta(seconds=0.4 * step + len(events) * 1e-3)).isoformat(timespec="milliseconds")
        events.append({"time": time, "event": event, "step": step, **fields})

    add("started", 0, steps=steps, ranks=2, hosts=["node1"], strategy="zero2")
    add("evaluation", 0, seconds=1.5, loss=8.4, perplexity=math.exp(8.4))
    phases = {
        "starting Python": 0.5,
        "imports": 3.0,
        "data": 0.02,
        "model": 4.0,
        "first evaluation": 1.5,
        "first step": 0.48,
    }
    began = [sum(list(phases.values())[:number]) for number in range(len(phases))]
    rows = [
        {"name": name, "began": at, "seconds": took} for at, (name, took) in zip(began, phases.items(), strict=True)
    ]
    add("first step", 1, seconds=9.5, phases=rows)
    answers = []
    for step in range(1, steps + 1):
        curve = 2.0 + 6.0 * math.exp(-12 * step / steps) - lower
        loss = curve + shared.gauss(0, noise) + own.gauss(0, noise / 10)
        speed = 1800 + own.gauss(0, 60)
        figures = {"loss": loss, "grad_norm": 1 + abs(own.gauss(0, 0.2)), "learning_rate": 3e-3 * (1 - step / steps)}
        figures |= {
            "tokens_per_second": 2 * speed,
            "tokens_per_second_per_gpu": speed,
            "step_time": 0.4,
            "tokens": 1440 * step,
        }
        figures |= {
            "tokens_per_second_least": 0.95 * speed,
            "tokens_per_second_most": 1.05 * speed,
            "peak_memory_gib": 1.5,
        }
        figures |= {"seconds_data": 0.01, "seconds_forward": 0.12, "seconds_backward": 0.22, "seconds_optimizer": 0.05}
        add("step", step, steps=steps, **{key: float(f"{value:.6g}") for key, value in figures.items()})
        if step % evaluate == 0:
            held_out = curve + 0.1 + own.gauss(0, noise / 10)
            add("evaluation", step, seconds=1.5, loss=held_out, perplexity=math.exp(held_out))
            add("checkpoint", step, seconds=2.0, blocked=0.3, bytes=3e7, through="memory")
            one = {"step": step, "source": SAMPLES, "question": "Is it so?", "reference": "It is.", "answer": answer}
            answers.append(one)
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (directory / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    (directory / "run.yaml").write_text(yaml.safe_dump(_document(seed, changes or {}, of_run), sort_keys=False))
    if ended == "success":
        figures = {"steps": steps, "held_out_loss_before": 8.4, "held_out_loss": held_out}
        (directory / "success.json").write_text(json.dumps(figures))
    return directory


def _document(seed: int, changes: dict[str, Any], of_run: dict[str, Any]) -> dict[str, Any]:
    parts = {"weights": 0.4, "gradients": 0.4, "optimizer": 0.8}
    record = {
        "identity": "0123456789abcdef",
        "data": "feedfacefeedface",
        "strategy": {"kind": "zero2", "name": "zero2", "from": "ds_configs/zero2.json"},
        "batch": "16 sequences = micro-batch 8 x accumulation 1 x 2 data-parallel ranks",
        "ranks": 2,
        "hosts": ["node1"],
        "launcher": "torchrun",
        "overridden": ["--learning_rate 0.003 (the recipe says 0.001)"],
        "command": "train.py --learning_rate 0.003",
        "versions": {"python": "3.11.2", "torch": "2.13.0"},
        "commit": "0123456789ab",
        "prediction": {
            "gpu": "H100 80GB",
            "predicted": {"allocated_gib": 1.7, "step_time": 0.35, "parts": parts | {"activations": 0.1}},
            "measured": {"steps": 10, "step_time": 0.4, "allocated_gib": 1.5, "parts": parts | {"peak": 1.75}},
        },
    }
    sections: dict[str, Any] = {
        "model": {"model_name_or_path": "recipes/tiny"},
        "data": {"dataset_name": SAMPLES},
        "training": {"learning_rate": 3e-3, "global_batch_size": 16, "seed": seed},
    }
    for section, values in changes.items():
        sections[section] |= values
    return {**sections, "run": record | of_run}


def append(directory: Path, **event: Any) -> None:
    """One more event, which may hold anything."""
    with (directory / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": BEGAN.isoformat(), **event}) + "\n")
