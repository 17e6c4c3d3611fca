"""Many runs of train.py in one group of ranks: what each logged and printed. And a tiny model with a few chats for them.

run_ranks("testing.runs", JOB, ...) is its worker, with {"folder", "shared", "longest_answer", "cases"} in JOB.
"""

import contextlib
import gc
import io
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import run_files, waits
from .ranks import REPOSITORY, run_ranks

GLOBAL_BATCH = 16
STEPS = 8  # five make an epoch of 67 chats, and the fifth ends it in the middle of a batch
LONG = 14  # of those whose figures docs/evidence/ shows, and where a recipe is used by itself


# Of a run of whose steps alone somebody asks. Answers are a third of a case's time, a page half a second of each:
# tests/ranks/test_answers.py and test_report_run.py ask for them.
BARE: dict[str, Any] = {"lr_scheduler_type": "constant", "max_grad_norm": 0, "eval_answers": 0, "save_steps": None,
                        "report_to": [], "report_page": False}  # fmt: skip
PLAIN = BARE | {"optim": "sgd", "seed": 0, "per_device_eval_batch_size": 2}  # compared with a plain loop


def write_inputs(folder: Path, steps: int = LONG) -> list[str]:
    """A tiny model's config, 67 chats to train on and 13 held out; returns the flags that all cases share.

    steps: of a run, which is evaluated before them, after half of them and after the last
    """
    from brigade.train.data import builtin

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
    for name, source, count in (("train", builtin.TRAIN, 67), ("heldout", builtin.HELDOUT, 13)):
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
        "training": BARE
        | {
            "global_batch_size": GLOBAL_BATCH,
            "per_device_train_batch_size": 8,
            "max_steps": steps,
            "eval_steps": steps // 2,
        },
    }
    (folder / "full.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return ["--recipe", str(folder / "full.yaml")]


def write_saving_inputs(folder: Path) -> list[str]:
    """Do what write_inputs() does, for six steps with a checkpoint after every second, of which the newest two are kept."""
    few = ["--max_steps", "6", "--save_steps", "2", "--save_total_limit", "2", "--eval_answers", "0"]
    return [*write_inputs(folder), *few, "--eval_steps", "6"]


CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 16},  # shorter than the samples
    "phi-norms": {"qk_layernorm": True},
    "gpt_neox-tied": {"tie_word_embeddings": True},  # whose vocabulary AutoTP divides by Transformers' plan
    # Routers' scores differ as much as their biases, so that no expert gets all tokens, or none.
    **{name: {"initializer_range": 0.1} for name in ("deepseek_v3-spread", "ernie4_5_moe", "laguna")},
    "minimax_m2": {"initializer_range": 0.1, "num_key_value_heads": 2},
    **{name: {"head_dim": 32} for name in ("llama-wide", "qwen3_moe-wide")},
    **{
        name: {"num_key_value_heads": 2} for name in ("qwen3_moe", "mixtral", "glm4", "qwen3_5_text")
    },  # which a tensor group can divide
}


def write_model(folder: Path, name: str, config: dict[str, Any] | None = None, divisor: int = 1) -> Path:
    """A tiny model with random weights, the same each time, and buffers that are not the ones of a new model.

    name: its type, and behind it "-4" for four layers, "-mtp" for tensors that no module takes, or what CHANGES has
    config: default: Transformers' of that type
    divisor: of its key-value heads, as shrink() has it
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from brigade.train.data import builtin
    from brigade.train.model.tiny import shrink

    if not (folder / "config.json").exists():
        kind, _, layers = name.partition("-")
        tiny = shrink(config or CONFIG_MAPPING[kind]().to_dict(), divisor, int(layers) if layers.isdigit() else 2)
        tiny_config = CONFIG_MAPPING[kind].from_dict(tiny | CHANGES.get(kind, {}) | CHANGES.get(name, {}))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(tiny_config, dtype=torch.float32)
            for tensor_name in sorted(set(model.state_dict()) - set(dict(model.named_parameters()))):
                with contextlib.suppress(AttributeError):  # a tied parameter's second name
                    if (buffer := model.get_buffer(tensor_name)).is_floating_point():
                        buffer.uniform_()
        shutil.copytree(builtin.TOKENIZER, folder, dirs_exist_ok=True)
        model.save_pretrained(folder)
        if layers == "mtp":
            _add_prediction(folder / "model.safetensors")
    return folder


def swap_tokens(folder: Path, one: str, other: str) -> None:
    """Give two tokens of a model's tokenizer each other's number."""
    file = folder / "tokenizer.json"
    document = json.loads(file.read_text())
    words = document["model"]["vocab"]
    words[one], words[other] = words[other], words[one]
    file.write_text(json.dumps(document))


def _add_prediction(file: Path) -> None:
    """Add tensors of a layer for multi-token prediction, where DeepSeek-V3 has it."""
    import torch
    from safetensors.torch import load_file, save_file

    names = ("eh_proj", "enorm", "shared_head.head")
    further = {f"model.layers.61.{name}.weight": torch.randn(4, 6).bfloat16() for name in names}
    save_file(load_file(file) | further, file, {"format": "pt"})


def run_cases(
    ranks: int,
    cases: list[dict[str, Any]],
    folder: Path,
    timeout: float = 1800,
    steps: int = STEPS,
    gpus: bool = False,
) -> dict[str, Any]:
    """Run cases on the inputs of `folder`; returns name -> {"loss", "grad_norm", "eval_loss"}, a list each; of a mixture
    of experts "expert_balance", too; of a "group" with liger "fused": how often rank 0 has called each kernel; of compiled
    layers "programs": how many graphs rank 0 has compiled after each step; on GPUs "growing": of each rank, whether its allocator
    takes memory in segments that grow.

    Each case writes its run to folder/outputs/NAME. A case with "model" trains such a model of write_model, one with "images"
    such a model of write_vision_model on rows with images; one with "damage" has gradients on rank 1 that are 1 % too large; of
    one with "stop" (rank, step) that rank is asked to stop in that step; one with "stops" dies after each of these steps, with a
    checkpoint, and goes on; one with "dies", too, does not go on after the last; one with "fails" (rank, step) raises there; one
    with "saves_to" calls the Trainer's save_model with this directory at the end; one with "per_host" believes that so many of
    the ranks share a host; of one with "waits" each rank counts from this step on where the host waits for its device, for
    "waits" of the result (testing/waits.py: read); one with "asks" reads the loss in each micro-step on the last rank.
    gpus: as run_ranks has it
    Raises RuntimeError when a case fails.
    """
    shared = write_inputs(folder, steps)
    found = run_well(ranks, [prepared(case, folder, shared) for case in cases], folder, timeout, gpus=gpus)
    keys = ("loss", "grad_norm", "eval_loss", "expert_balance")
    counted = [case["name"] for case in cases if "waits" in case]
    return {
        name: run_files.figures(result["log"], *keys)
        | ({"growing": result["growing"]} if gpus else {})
        | {key: result[key] for key in ("fused", "programs") if result[key]}
        | ({"waits": waits.read(folder / waits_of(name), ranks)} if name in counted else {})
        for name, result in found.items()
    }


def run_each(cases: Iterable[dict[str, Any]], folder: Path, **options: Any) -> dict[str, Any]:
    """Run each case on as many "ranks" as it names: those of one number, and of one "group" where they name any, in one group of
    ranks. Of cases of one name the first is run. Returns what run_cases() does, which takes the options."""
    groups = defaultdict[tuple[int, str], dict[str, dict[str, Any]]](dict)
    for case in cases:
        groups[case["ranks"], case.get("group", "")].setdefault(case["name"], case)
    found: dict[str, Any] = {}
    for (ranks, _), of_group in sorted(groups.items()):
        found |= run_cases(ranks, list(of_group.values()), folder, **options)
    return found


def prepared(case: dict[str, Any], folder: Path, shared: list[str]) -> dict[str, Any]:
    """Return a case with all its flags: those that cases share, its own, its model's, and its output directory."""
    named = [*model_flags(case, folder), "--output_dir", str(folder / "outputs" / case["name"])]
    return case | {"flags": [*shared, *case["flags"], *named]}


def model_flags(case: dict[str, Any], folder: Path) -> list[str]:
    """Write the model that a case of run_cases() names below `folder`, and return the flags by which it is trained."""
    if model := case.get("images"):
        from . import image_rows

        return image_rows.flags_of(folder / "images", model)
    if model := case.get("model"):
        return ["--model_name_or_path", str(write_model(folder / model, model)), "--from_scratch", "false"]
    return []


def waits_of(name: str) -> str:
    """Return the folder in which the ranks of a case leave how often they waited."""
    return f"{name}.waits"


def run_all(
    ranks: int,
    cases: list[dict[str, Any]],
    folder: Path,
    timeout: float = 300,
    longest_answer: int | None = None,
    gpus: bool = False,
) -> Any:
    """Run train.main with the "flags" of each case in the directory `folder`, all in one group of ranks.

    One with "cache" keeps derived files in this directory, as do those after it; these have its environment "variables", too.
    longest_answer: tokens, where a case asks for answers
    Returns name -> {"said": what rank 0 printed, "log": its log_history} of the cases that went well, and how the group ended.
    """
    job = folder / f"job-{ranks}.json"
    job.write_text(json.dumps({"folder": str(folder), "longest_answer": longest_answer, "cases": cases}))
    done = run_ranks("testing.runs", str(job), ranks=ranks, timeout=timeout, gpus=gpus)
    files = {case["name"]: folder / f"{case['name']}.result.json" for case in cases}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}, done


def run_well(ranks: int, cases: list[dict[str, Any]], folder: Path, *args: Any, **options: Any) -> Any:
    """Return name -> what run_all() does of a case. Raises RuntimeError when one fails."""
    found, done = run_all(ranks, cases, folder, *args, **options)
    for case in cases:
        if case["name"] not in found:
            said = f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            raise RuntimeError(f"case {case['name']} left no result (exit code {done.returncode}):\n{said}")
    return found


def forget(trainer: Any) -> None:
    """Release a run's engine, so that the next run of this process starts clean. Raises RuntimeError where it left processes."""
    for child in multiprocessing.active_children():
        child.join(60)  # it was told to end, and a busy machine may be long about it
    if left := multiprocessing.active_children():
        raise RuntimeError(f"a run has ended, and its processes have not: {left}")
    if getattr(trainer, "is_deepspeed_enabled", False):
        trainer.deepspeed.destroy()
    del trainer
    gc.collect()  # a ZeRO-3 configuration that is still alive would shard the next case's model


def _work(job: Path) -> None:
    """One rank: run every case, in order, through train.py itself."""
    import torch

    import train
    from brigade.kernels import prove
    from brigade.train.distributed import ranks
    from brigade.train.host.cluster import world_from_environment
    from brigade.train.step import sample_answers
    from brigade.train.upstream import memory_snapshots

    from . import disturbances, pretended_liger

    prove.QUICK.update(seconds=900.0, path=300.0)  # a fake device has no speed
    todo = json.loads(job.read_text())
    sample_answers.LONGEST = todo["longest_answer"] or sample_answers.LONGEST
    os.chdir(todo["folder"])
    rank = int(os.environ["RANK"])
    if any("per_host" in case for case in todo["cases"]):  # before they take their ranks to be of several hosts
        ranks.start(world_from_environment())
    for case in todo["cases"]:
        said, counted, programs = io.StringIO(), waits.Waits(), list[int]()
        per_host = case.get("per_host", int(os.environ["WORLD_SIZE"]))
        os.environ.update(LOCAL_WORLD_SIZE=str(per_host), LOCAL_RANK=str(rank % per_host))
        if "liger" in case.get("group", ""):
            pretended_liger.install()
        pretended_liger.CALLS.clear()
        if "cache" in case:
            os.environ["BRIGADE_CACHE"] = case["cache"]
        os.environ.update(case.get("variables", {}))
        for step in case.get("stops", ()):
            disturbances.interrupted(case["flags"], step)
        with contextlib.redirect_stdout(said), disturbances.damaged_gradients(case.get("damage") and rank == 1):
            callbacks = disturbances.stops(case["stop"], rank) if "stop" in case else ()
            callbacks += disturbances.fails(case["fails"], rank) if "fails" in case else ()
            callbacks += (counted.callback(case["waits"]),) if "waits" in case else ()
            callbacks += disturbances.counts_programs(programs) if "--torch_compile" in case["flags"] else ()
            callbacks += disturbances.asks() if case.get("asks") and rank == int(os.environ["WORLD_SIZE"]) - 1 else ()
            trainer = None if case.get("dies") else train.main(case["flags"], callbacks=callbacks)
            if trainer and "saves_to" in case:
                trainer.save_model(case["saves_to"])
        growing = ranks.gather_all(torch.cuda.is_available() and memory_snapshots.has_expandable_segments())
        if "waits" in case:
            counted.write(Path(waits_of(case["name"])), rank)
        if rank == 0:
            result = {"said": said.getvalue(), "log": trainer.state.log_history if trainer else []}
            result |= {"growing": growing, "fused": dict(pretended_liger.CALLS), "programs": programs}
            temporary = Path(f".{case['name']}.json")
            temporary.write_text(json.dumps(result))
            temporary.rename(f"{case['name']}.result.json")
        forget(trainer)
        del trainer
        ranks.whole_again()


if __name__ == "__main__":
    from brigade.train.distributed.ranks import run_to_the_end

    run_to_the_end(lambda: _work(Path(sys.argv[1])))
