"""Every strategy and method on this host's GPUs: losses of each against one process, in each precision.

All cases of a number of ranks run in one group, which starts once (testing/runs.py). A case that fails or hangs ends its group;
the cases behind it run in another.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from brigade.train.strategy.axes import Axes
from testing import axes, parity, runs

from .parts import end, last_line, start
from .subject import Subject

# Largest relative difference of a loss, over 14 steps of SGD that lower it by 20 %. fp32: on CPUs 1e-5 holds
# (docs/evidence/parity.md), and other kernels sum in another order. Half precision: engines round at different places, and each
# step carries on what the last one rounded. No GPU has confirmed these yet.
BOUNDS = {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.02}
FLAGS = {"fp32": [], "bf16": ["--bf16", "true"], "fp16": ["--fp16", "true"]}
START, PATIENCE = 90.0, 60.0  # seconds for a group to start, and for a case
FEWEST = 20  # seconds for which a group is worth a start
STEPS = {"full": ["--max_steps", "14", "--eval_steps", "7"], "small": ["--max_steps", "3", "--eval_steps", "3"]}
LORA = ["--use_peft", "true", "--learning_rate", "2"]


def cases_of(ranks: int, small: bool) -> list[dict[str, Any]]:
    """Return the cases of so many ranks, in the order of their worth, as testing/runs.py takes them.

    Beside "name", "flags" and "model": "precision", and "reference": the name of the case of one process to compare with
    """
    plain = {
        name: parity.STRATEGIES[name]
        for name in ("ddp", "zero3", "fsdp2", "zero2", "zero1", "zero3_offload", "zero2_offload", "zero3_hpz", "hsdp")
        if (name != "hsdp" or ranks == 4) and (name != "ddp" or ranks > 1)
    }
    several: dict[str, tuple[Axes, str]] = {}
    if ranks > 1:
        several = {
            "zero3 x tensor": (Axes(tensor=2), "zero3"),
            "pipeline": (Axes(stages=2), "ddp"),
            "fsdp2 x sequence": (Axes(sequence=2), "fsdp2"),
        }
    if ranks > 3:
        several |= {
            "fsdp2 x tensor": (Axes(tensor=2), "fsdp2"),
            "zero1 x tensor x pipeline": (Axes(tensor=2, stages=2), "zero1"),
        }
    found = [case(name, flags, ranks, "fp32") for name, flags in plain.items()]
    found += [case(f"{name} {precision}", plain[name], ranks, precision)
              for precision in ("bf16", "fp16") for name in ("ddp", "zero3", "fsdp2") if name in plain]  # fmt: skip
    found += [
        case(name, axes.flags(sizes, kind), ranks, "fp32", data=ranks // sizes.model)
        for name, (sizes, kind) in several.items()
    ]
    found += [case(f"{name} lora", [*plain[name], *LORA], ranks, "fp32", "lora") for name in ("zero3", "fsdp2")]
    found += [case("zero3 resumed", plain["zero3"], ranks, "fp32") | {"stops": (2 if small else 6,)}]
    if ranks > 1:
        experts = axes.flags(Axes(experts=2), "fsdp2")
        found.append(case("fsdp2 x experts", experts, ranks, "fp32", "moe") | {"model": "qwen3_moe"})
    if small:
        kept = ("zero3", "fsdp2 bf16", "zero3 resumed")
        found = [each for each in found if each["name"] in kept]
    return found


def references(small: bool) -> list[dict[str, Any]]:
    """Return the cases of one process without any engine that cases_of() are compared with."""
    found = [case(name, [], 1, name) for name in FLAGS if not small or name != "fp16"]
    if not small:
        found += [case("lora", LORA, 1, "fp32", "lora"), case("moe", [], 1, "fp32", "moe") | {"model": "qwen3_moe"}]
    return found


def case(
    name: str, flags: list[str], ranks: int, precision: str, reference: str = "", data: int | None = None
) -> dict[str, Any]:
    """Return one case. data: data-parallel ranks, where other axes divide some of them"""
    rate = [] if "--learning_rate" in flags else ["--learning_rate", "0.1" if reference == "moe" else "0.6"]
    micro = ["--per_device_train_batch_size", str(runs.GLOBAL_BATCH // (data or ranks))]
    words = ["--optim", "sgd", *rate, *micro, *FLAGS[precision], *flags]
    return {"name": name, "flags": words, "precision": precision, "reference": reference or precision, "model": None}


def group(
    ranks: int, cases: list[dict[str, Any]], folder: Path, subject: Subject, **variables: str
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Run cases on the inputs of `folder`. Yields each as it ends with its log, or why it has none."""
    left = list(cases)
    while left:
        if subject.left < FEWEST:
            yield from ((each, "not begun: the part's time was over") for each in left)
            return
        ended = ""
        for each, log in once(ranks, left, folder, subject.left - 5, **variables):
            if each:
                left.remove(each)
                yield each, log
            else:
                ended = log
        if left:
            yield left.pop(0), ended or "it left no result"


def once(
    ranks: int, cases: list[dict[str, Any]], folder: Path, seconds: float, **variables: str
) -> Iterator[tuple[dict[str, Any] | None, Any]]:
    """Run one group. Yields each case that ends with its log, and at last None with "" or why the group ended early."""
    job, log = folder / f"job-{ranks}.json", folder / f"group-{ranks}.log"
    job.write_text(json.dumps({"folder": str(folder), "longest_answer": None, "cases": cases}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    began = progress = time.monotonic()
    left, ended = list(cases), ""
    with log.open("w") as out:
        process, mark = start([*command, "-m", "testing.runs", str(job)], out, **variables)
        try:
            while not ended:
                code = process.poll()  # before the results are looked for: what is there now is all
                for each in [each for each in left if result(folder, each["name"]) is not None]:
                    left.remove(each)
                    progress = time.monotonic()
                    yield each, result(folder, each["name"])
                now = time.monotonic()
                if code is not None:
                    ended = f"exit code {code}: {last_line(log)}" if code else " "
                elif now - began > seconds:
                    ended = f"stopped: the part's time was over; its last line: {last_line(log)}"
                elif now - progress > PATIENCE + (START if len(left) == len(cases) else 0):
                    ended = f"no result in {now - progress:.0f} seconds; its last line: {last_line(log)}"
                else:
                    time.sleep(0.2)
        finally:
            end(mark)
    yield None, ended.strip()


def result(folder: Path, name: str) -> list[dict[str, Any]] | None:
    file = folder / f"{name}.result.json"
    return json.loads(file.read_text())["log"] if file.exists() else None


def prepared(cases: list[dict[str, Any]], folder: Path, small: bool) -> list[dict[str, Any]]:
    """Return cases with all their flags: the inputs of `folder`, the steps, an output directory."""
    shared = [*runs.write_inputs(folder), *STEPS["small" if small else "full"], "--logging_steps", "1"]
    found = []
    for each in cases:
        flags = list(each["flags"])
        if each["model"]:
            model = runs.write_model(folder / each["model"], each["model"])
            flags += ["--model_name_or_path", str(model), "--from_scratch", "false"]
        output = folder / "outputs" / each["name"].replace(" ", "-")
        found.append(each | {"flags": [*shared, *flags, "--output_dir", str(output)]})
    return found


def difference(log: list[dict[str, Any]], reference: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of a loss, held-out ones too. Raises ValueError for another number of them."""
    worst = 0.0
    for key in ("loss", "eval_loss"):
        ours, theirs = ([entry[key] for entry in entries if key in entry] for entries in (log, reference))
        if len(ours) != len(theirs) or not ours:
            raise ValueError(f"{len(ours)} values of {key}, but one process has {len(theirs)}")
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)))
    return worst


def judge(subject: Subject, each: dict[str, Any], what: str, log: Any, reference: Any, ranks: int) -> None:
    """Leave the row of a case."""
    words = [*each["flags"], "--fresh"]
    command = f"torchrun --nproc_per_node {ranks} train.py {shlex.join(words)}"
    figures: dict[str, Any] = {"ranks": ranks, "precision": each["precision"]}
    if isinstance(log, str):
        subject.row(what, figures, log, command)
        return
    figures["last_loss"] = [entry["loss"] for entry in log if "loss" in entry][-1]
    if not isinstance(reference, list):
        subject.row(what, figures, f"nothing to compare with: {reference}", command)
        return
    try:
        worst, bound = difference(log, reference), BOUNDS[each["precision"]]
    except ValueError as error:
        subject.row(what, figures, str(error), command)
        return
    figures |= {"difference": worst, "bound": bound}
    too_far = "" if worst <= bound else f"a loss differs from one process's by {worst:.1e}, and {bound:.1e} is allowed"
    subject.row(what, figures, too_far, command)


def main() -> None:
    subject = Subject(__doc__)
    small, work, ranks = subject.small, subject.work, max(size for size in (1, 2, 4) if size <= max(1, subject.gpus))
    single, cpu = references(small), [each for each in references(small) if each["name"] == "fp32"]
    hidden = group(1, prepared(cpu, work / "cpu", small), work / "cpu", subject, CUDA_VISIBLE_DEVICES="")
    of_cpu = {each["name"]: log for each, log in hidden}
    one_gpu = {}
    visible = {"CUDA_VISIBLE_DEVICES": first_gpu()}
    for each, log in group(1, prepared(single, work / "single", small), work / "single", subject, **visible):
        one_gpu[each["name"]] = log
        other = (
            of_cpu["fp32"] if each["reference"] in FLAGS else log
        )  # the same model on a CPU; others only have to train
        judge(subject, each, f"one GPU, {each['name']}", log, other, 1)
    cases = prepared(cases_of(ranks, small), work / "ranks", small)
    for each, log in group(ranks, cases, work / "ranks", subject):
        judge(subject, each, f"{each['name']}, {ranks} GPUs", log, one_gpu.get(each["reference"]), ranks)


def first_gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"


if __name__ == "__main__":
    main()
