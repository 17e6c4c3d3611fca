"""Runs whose figures tell whether another version of a package, or another revision of this repository, computes something else:
every strategy on one and two processes, every axis, method and kind of objective once, and three models of images.

benchmarks/golden.py keeps what they gave with the pinned versions, benchmarks/parity.py compares two revisions by them.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from brigade.train.strategy.axes import Axes

from . import axes, axes_experts, axes_pipeline, axes_sequence, image_runs, methods, parity, preferences, runs

STEPS = 6  # five make an epoch, which ends in the middle of a batch; of preferences three do
LISTS = ("loss", "grad_norm", "eval_loss", "expert_balance")
TOLERANCE = 1e-6  # relative
Figures = dict[str, Any]


def cases(folder: Path) -> list[dict[str, Any]]:
    """Return the runs, which testing.runs.run_all() takes, in groups of one number of ranks and one "group". folder: for their
    inputs, which are written there."""
    preferences.write_inputs(folder)
    own = [*parity.references(), *parity.cases(2, (1, 2)), *_axes(folder), *_methods()]
    shared = runs.write_inputs(folder, STEPS)  # after _axes(), which writes longer ones
    length = ["--max_steps", str(STEPS), "--eval_steps", str(STEPS // 2)]
    found = [{"group": ""} | runs.prepared(case, folder, shared) for case in own]
    return [*found, *(case.run(folder, *length, name=str(case)) for case in _preferences()), *_images(folder)]


def _axes(folder: Path) -> list[dict[str, Any]]:
    """Two ranks divide what is not the batch. DeepSpeed keeps a tensor group for whoever comes next in its process."""
    zbv = axes_pipeline.zero1(folder, 2, **axes_pipeline.SCHEDULES["zbv"])
    experts: list[tuple[str, str, int, axes_experts.Strategy, int]] = [
        ("qwen3_moe", "full", 2, 2, 2),
        ("qwen3_moe", "router loss", 2, "ddp", 2),
        ("minimax_m2", "router bias", 2, 2, 2),
    ]
    return [
        axes.case("ddp_tp2", 2, 2),
        axes.case("fsdp2_tp2", 2, 2, "lora"),
        axes.case("zero3_tp2", 2, 2) | {"group": "zero3_tp2"},
        axes_sequence.case("fsdp2", 2, 2, 1, "packed"),
        axes_sequence.case("zero3", 2, 2, 2),
        axes_pipeline.case("pipeline-ddp", "packed", axes_pipeline.ddp(folder, 2), 1, 4, folder, ranks=2),
        axes_pipeline.case("pipeline-zero1-zbv", "deep", zbv, 1, 4, folder, ranks=2),
        *[axes_experts.case(*case) for case in experts],
        axes_experts.case("qwen3_moe", "full", 2, (Axes(sequence=2, experts=2), "fsdp2"), 2),
    ]  # fmt: skip


def _methods() -> list[dict[str, Any]]:
    """Adapters of each kind, in one process and where weights are sharded."""
    of = {
        "lora": [(1, "single"), (2, "zero3"), (2, "fsdp2")], "dora": [(1, "single"), (2, "zero2")],
        "qlora": [(1, "single"), (2, "fsdp2")], "tokens": [(1, "single")], "patterns": [(1, "single")],
    }  # fmt: skip
    batch = ["--optim", "sgd", "--per_device_train_batch_size", "8"]
    return [
        {"name": f"{method}-{strategy}", "ranks": ranks, "flags": [*batch, *preferences.STRATEGIES[strategy], *flags]}
        for method, places in of.items()
        for ranks, strategy in places
        for flags in [methods.METHODS[method]]
    ]


def _preferences() -> list[preferences.Case]:
    one = [preferences.Case(form) for form in ("sigmoid", "orpo", "kto", "reward")]
    two = [
        preferences.Case("sigmoid", kind, 2, variant)
        for kind, variant in (("zero3", ""), ("fsdp2", preferences.ADAPTERS))
    ]
    return one + two  # fmt: skip


def _images(folder: Path) -> list[dict[str, Any]]:
    """Models of images and texts in one process, whose forward passes differ more between releases than those of texts."""
    models, inputs, found = ("gemma3", "qwen3_vl", "llama4"), folder / "images", []
    inputs.mkdir()
    image_runs.write_inputs(inputs, set(models))
    for model in models:
        run = image_runs.Case(model).run(inputs, name=f"images, {model}")
        output = {str(inputs / "outputs" / run["name"]): str(folder / "outputs" / run["name"])}
        found.append(run | {"flags": [output.get(word, word) for word in run["flags"]]})
    return found


def measured(folder: Path, *names: str) -> tuple[dict[str, Figures], dict[str, str]]:
    """Run the cases, or those of these names. Return name -> figures(), and name -> the end of what one that failed has said."""
    groups = defaultdict[tuple[int, str], list[dict[str, Any]]](list)
    for case in cases(folder):
        if not names or case["name"] in names:
            groups[case["ranks"], case["group"]].append(case)
    found: dict[str, Figures] = {}
    failed: dict[str, str] = {}
    for (ranks, _), todo in sorted(groups.items()):
        while todo:
            done, ended = runs.run_all(ranks, todo, folder, 900)
            found |= {name: figures(folder / "outputs" / name, result["log"]) for name, result in done.items()}
            left = [case for case in todo if case["name"] not in done]
            for case in left[:1]:  # the cases run in order: those behind it have not begun
                failed[case["name"]] = ended.stderr[-2000:] or f"exit code {ended.returncode}"
                print(f"{case['name']} failed", file=sys.stderr)
            todo = left[1:]
    return found, failed


def figures(output: Path, log: list[dict[str, Any]]) -> Figures:
    """Return what a run has computed: its LISTS, the norm of what it saved, how many tensors and parameters these are, the
    fingerprint of its data, whether Transformers loads its adapters, and the names of all figures that it logged. Prepared images
    belong to the version of Transformers that has prepared them, and their fingerprint says so."""
    import torch
    import yaml
    from safetensors.torch import load_file

    settings = yaml.safe_load((output / "run.yaml").read_text())
    files = json.loads((output / "success.json").read_text())["model"]
    tensors = {name: tensor for file in files for name, tensor in load_file(output / file).items()}
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors.values()]
    return {
        **{key: values for key in LISTS if (values := [entry[key] for entry in log if key in entry])},
        "saved_norm": [float(torch.stack(norms).norm())] if norms else [],
        "saved": f"{len(tensors)} tensors of {sum(tensor.numel() for tensor in tensors.values())} parameters",
        **({"loads": _loads(output)} if "adapter_model.safetensors" in files else {}),
        **({} if settings["data"].get("images") else {"data": settings["run"]["data"]}),
        "logged": " ".join(sorted({key for entry in log for key in entry})),
    }


def _loads(output: Path) -> str:
    """Return whether Transformers loads saved adapters, or what it says: it wants a version of PEFT of its own."""
    from transformers import AutoModelForCausalLM

    try:
        AutoModelForCausalLM.from_pretrained(output)
    except Exception as error:  # whatever it is, it is told
        return f"{type(error).__name__}: {error}".replace(str(output.parents[1]), "")
    return "yes"


def difference(now: Figures, then: Figures, tolerance: float = TOLERANCE) -> str:
    """Return in words what parts two runs' figures, "" where nothing does: a value by more than the tolerance, anything else
    that is not the same."""
    words = []
    for key in dict.fromkeys([*then, *now]):
        ours, theirs = now.get(key), then.get(key)
        if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            worst = max(map(_relative, ours, theirs), key=lambda each: (each != each, each))  # NaN is the worst
            if not worst <= tolerance:
                words.append(f"{key} by {worst:.1e}")
        elif key == "logged" and ours and theirs:
            changed = sorted(set(ours.split()) ^ set(theirs.split()))
            words += [f"{'no ' if name in theirs.split() else 'a new '}figure {name}" for name in changed]
        elif ours != theirs:
            words.append(f"{key} {_short(ours)} instead of {_short(theirs)}")
    return ", ".join(words)


def _relative(ours: float, theirs: float) -> float:
    return 0.0 if ours == theirs else abs(ours - theirs) / (abs(theirs) or 1.0)


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, list) else str(value)
