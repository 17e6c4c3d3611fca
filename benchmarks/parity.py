"""Every strategy gives the losses and gradient norms of a single process.

    python -m benchmarks.parity                     # all strategies x world sizes x accumulation -> docs/parity.md

Each case is one train.py run of 14 steps on 67 chats with unevenly masked answers: fp32, SGD at a rate that moves the
loss by more than 20 %, global batch 16, so that an epoch ends in the middle of a batch. Cases of one world size share
one process group. The reference is one process without any engine.
"""

import argparse
import contextlib
import gc
import io
import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.torchrun import REPOSITORY, torchrun

TOLERANCE = 1e-5  # relative
WORLD_SIZES = (1, 2, 4)
ACCUMULATIONS = (1, 2, 4)
GLOBAL_BATCH = 16
STEPS = 14  # five make an epoch of 67 chats
LONGEST_ANSWER = 4  # tokens; else generating them would be most of a case's time under ZeRO-3

DDP = ["--ds_config", "none"]
STRATEGIES: dict[str, list[str]] = {
    "ddp": DDP,
    **{
        name: ["--ds_config", f"ds_configs/{name}.json"]
        for name in ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_offload_param", "zero3_hpz",
                     "zero3_nvme")
    },
    "fsdp2": ["--accelerate_config", "accelerate_configs/fsdp2_1x2.yaml"],
    "hsdp": ["--accelerate_config", "accelerate_configs/hsdp_1x4.yaml"],
}  # fmt: skip
# Optimizers that need whole parameters, under the strategies that keep them whole.
WHOLE_PARAMETER = {
    f"{kind}+{optim}": [*STRATEGIES[kind], "--optim", optim]
    for kind, optim in itertools.product(("ddp", "fsdp2"), ("lamb", "lars"))
}
# Other architectures, tiny and random, under one strategy of each kind: a mixture of experts that keeps buffers in its state
# dict, and a model of images and texts that is given texts alone.
MODELS = ("deepseek_v3", "gemma3")
OTHER_MODELS = {f"{kind}+{model}": STRATEGIES[kind] for kind in ("ddp", "zero3", "fsdp2") for model in MODELS}
LEARNING_RATE = {"sgd": "0.6", "lamb": "0.02", "lars": "7"} | dict.fromkeys(MODELS, "0.1")


def cases(world_size: int, accumulations: tuple[int, ...] = ACCUMULATIONS) -> list[dict[str, Any]]:
    """The cases of one world size: {"name", "strategy", "accumulation", "model", "flags"}."""
    found = []
    every = STRATEGIES | WHOLE_PARAMETER | (OTHER_MODELS if world_size == 2 else {})
    for (strategy, flags), accumulation in itertools.product(every.items(), accumulations):
        if strategy == "hsdp" and world_size != 4:
            continue  # two groups of two: accelerate refuses groups of one
        if "+" in strategy and accumulation != accumulations[0]:
            continue
        optim, model = _optimizer_and_model(strategy)
        micro = GLOBAL_BATCH // world_size // accumulation
        flags = [
            "--optim",
            optim,
            "--learning_rate",
            LEARNING_RATE[model or optim],
            *flags,
            "--per_device_train_batch_size",
            str(micro),
            "--per_device_eval_batch_size",
            str(1 + world_size),
        ]
        found.append(
            {
                "name": f"{strategy}-w{world_size}-k{accumulation}",
                "strategy": strategy,
                "accumulation": accumulation,
                "model": model,
                "flags": flags,
            }
        )
    return found


def _optimizer_and_model(strategy: str) -> tuple[str, str | None]:
    """What stands behind a strategy's `+`: an optimizer or one of MODELS."""
    of = strategy.partition("+")[2]
    return ("sgd", of) if of in MODELS else (of or "sgd", None)


def references() -> list[dict[str, Any]]:
    """One process without any engine, once per optimizer and once per model."""
    found = []
    for name in (f"single+{of}" for of in LEARNING_RATE):
        optim, model = _optimizer_and_model(name)
        flags = [
            "--optim",
            optim,
            "--learning_rate",
            LEARNING_RATE[model or optim],
            "--per_device_train_batch_size",
            "16",
        ]
        found.append({"name": name, "strategy": "single", "accumulation": 1, "model": model, "flags": flags})
    return found


def write_inputs(folder: Path) -> list[str]:
    """A tiny model's config, 67 chats to train on and 13 held out; returns the flags that all cases share."""
    from brigade.data import builtin, cache

    built = builtin.ensure(cache.cache_directory())
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = json.loads((REPOSITORY / "recipes/tiny/config.json").read_text())
    config |= {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    (model / "config.json").write_text(json.dumps(config))
    for name, source, count in (("train", built.train, 67), ("heldout", built.heldout, 13)):
        short = (line for line in source.read_text().splitlines() if len(line) < 220)
        (folder / f"{name}.jsonl").write_text("\n".join(itertools.islice(short, count)) + "\n")
    recipe = {
        "model": {"model_name_or_path": str(model), "from_scratch": True, "tokenizer_name_or_path": "python-docs"},
        "data": {
            "train_file": str(folder / "train.jsonl"),
            "validation_file": str(folder / "heldout.jsonl"),
            "chat_template": "chatml",
            "max_length": 64,
        },
        "training": {
            "global_batch_size": GLOBAL_BATCH,
            "per_device_train_batch_size": 8,
            "max_steps": STEPS,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0,
            "eval_steps": STEPS // 2,
            "save_steps": None,
            "report_to": [],
        },
    }
    (folder / "full.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return ["--recipe", str(folder / "full.yaml")]


def write_model(folder: Path, name: str) -> Path:
    """A tiny model of MODELS with random weights, the same each time, and buffers that are not the ones of a new model."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from brigade.data import builtin, cache
    from brigade.model.tiny import shrink

    if not (folder / "config.json").exists():
        config = CONFIG_MAPPING[name].from_dict(shrink(CONFIG_MAPPING[name]().to_dict()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for tensor_name in set(model.state_dict()) - set(dict(model.named_parameters())):
                with contextlib.suppress(AttributeError):  # a tied parameter's second name
                    model.get_buffer(tensor_name).uniform_()
        shutil.copytree(builtin.ensure(cache.cache_directory()).tokenizer, folder, dirs_exist_ok=True)
        model.save_pretrained(folder)
    return folder


def run_cases(world_size: int, wanted: list[dict[str, Any]], folder: Path, timeout: float = 1800) -> dict[str, Any]:
    """Run cases in one process group of `world_size` ranks; name -> {"loss", "grad_norm", "eval_loss", "error"}."""
    shared = write_inputs(folder)
    for case in wanted:
        if model := case.get("model"):
            named = str(write_model(folder / model, model))
            case["flags"] = [*case["flags"], "--model_name_or_path", named, "--from_scratch", "false"]
    job = folder / f"job-{world_size}.json"
    job.write_text(json.dumps({"shared": shared, "cases": wanted, "folder": str(folder)}))
    done = torchrun("benchmarks.parity", "--job", str(job), ranks=world_size, timeout=timeout)
    results = {}
    for case in wanted:
        result = folder / f"{case['name']}.json"
        if not result.exists():
            raise RuntimeError(
                f"case {case['name']} left no result (exit code {done.returncode}):\n"
                f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        results[case["name"]] = json.loads(result.read_text())
    return results


def _work(job: Path) -> None:
    """One rank: run every case, in order, through train.py itself."""
    sys.path.insert(0, str(REPOSITORY))
    import train
    from brigade.cluster import world_from_environment
    from brigade.training import sample_answers

    sample_answers.LONGEST = LONGEST_ANSWER
    todo = json.loads(job.read_text())
    world = world_from_environment()
    for case in todo["cases"]:
        output = Path(todo["folder"]) / "outputs" / case["name"]
        undo = _damage_gradients(case, world.rank)
        said = io.StringIO()
        with contextlib.redirect_stdout(said if world.size > 1 or world.rank else sys.stdout):
            trainer = train.main([*todo["shared"], *case["flags"], "--output_dir", str(output)])
        undo()
        if world.speaks:
            history = trainer.state.log_history
            result = {
                key: [entry[key] for entry in history if key in entry] for key in ("loss", "grad_norm", "eval_loss")
            }
            temporary = Path(todo["folder"]) / f".{case['name']}.json"
            temporary.write_text(json.dumps(result))
            temporary.rename(Path(todo["folder"]) / f"{case['name']}.json")
        forget(trainer)


def forget(trainer: Any) -> None:
    """Release a run's engine, so that the next run of this process starts clean."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        trainer.deepspeed.destroy()
    del trainer
    gc.collect()


def _damage_gradients(case: dict[str, Any], rank: int) -> Any:
    """For the case that has to be caught: one rank's gradients are 1 % too large. Returns what undoes it."""
    if not case.get("damage") or rank != 1:
        return lambda: None
    from brigade.model import load as models

    load = models.load_model

    def damaged(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 1.01)
        return model

    models.load_model = damaged
    return lambda: setattr(models, "load_model", load)


def worst(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Largest relative difference to the reference, for losses, gradient norms and evaluation losses."""
    differences = {}
    for key in ("loss", "grad_norm", "eval_loss"):
        ours, theirs = result[key], reference[key]
        if len(ours) != len(theirs) or not ours:
            raise ValueError(f"{len(ours)} values of {key}, but the reference has {len(theirs)}")
        differences[key] = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return differences


def reference_of(strategy: str) -> str:
    return f"single+{strategy.partition('+')[2] or 'sgd'}"


def table(results: dict[int, dict[str, Any]], reference: dict[str, Any], accumulations: tuple[int, ...]) -> str:
    """The markdown table of docs/parity.md."""
    lines = [
        "| strategy | world size | accumulation | loss | gradient norm | held-out loss |",
        "|---|---|---|---|---|---|",
    ]
    for world_size, found in results.items():
        for case in cases(world_size, accumulations):
            difference = worst(found[case["name"]], reference[reference_of(case["strategy"])])
            figures = " | ".join(f"{difference[key]:.1e}" for key in ("loss", "grad_norm", "eval_loss"))
            lines.append(f"| {case['strategy']} | {world_size} | {case['accumulation']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "parity.md")
    options = parser.parse_args()
    if options.job:
        from brigade.distributed import ranks

        ranks.run_to_the_end(lambda: _work(options.job))
    with tempfile.TemporaryDirectory() as folder:
        reference = run_cases(1, references(), Path(folder) / "reference")
        results = {size: run_cases(size, cases(size), Path(folder) / str(size)) for size in WORLD_SIZES}
    first, last = reference["single+sgd"]["loss"][0], reference["single+sgd"]["loss"][-1]
    from brigade.run.directory import versions

    text = (
        Path(__file__)
        .with_name("parity_page.md")
        .read_text()
        .replace("{table}", table(results, reference, ACCUMULATIONS))
        .replace("{steps}", str(STEPS))
        .replace("{first}", f"{first:.3f}")
        .replace("{last}", f"{last:.3f}")
        .replace("{versions}", ", ".join(f"{name} {number}" for name, number in versions().items()))
    )
    options.out.write_text(text)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
