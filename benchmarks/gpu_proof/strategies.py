"""Every strategy and method on this host's GPUs: losses of each against one process, in each precision.

The cases are those of the GPU lane (testing/gpu_lane.py). All that may share their ranks run in one group, which starts once
(testing/runs.py). A case that fails or hangs ends its group; the cases behind it run in another.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testing import gpu_lane, runs

from .parts import NOT_BEGUN, end, last_line, start, why_it_ended
from .subject import Subject, command, torchrun

# Largest relative difference of a loss, over 14 steps of SGD that lower it by 20 %. fp32: on CPUs 1e-5 holds
# (docs/evidence/parity.md), and other kernels sum in another order. Half precision: engines round at different places, and each
# step carries on what the last one rounded. No GPU has confirmed these yet.
BOUNDS = {"fp32": 1e-4, "bf16": 0.03, "fp16": 0.02}
START, PATIENCE = 90.0, 60.0  # seconds for a group to start, and for a case
CUT_OFF = "cut off: the part's time was over"
STEPS = {"full": ["--max_steps", "14", "--eval_steps", "7"], "small": ["--max_steps", "3", "--eval_steps", "3"]}
RESUMED, STOP = "zero3", {"full": 6, "small": 2}
SMALL = ("fsdp2 bf16", "zero3 resumed", "fp32", "bf16")


def cases_of(ranks: int, small: bool) -> list[dict[str, Any]]:
    """Return those of the GPU lane (testing/gpu_lane.py) that so many ranks can be divided into, in the order of their worth.

    Each as testing/runs.py takes it, beside "precision", "alone": whether others share its ranks, and "reference": the name of
    the case of one process to compare with
    """
    fitting = [
        name for name, each in gpu_lane.CASES.items() if ranks % each.unit == 0 and (ranks > 1 or not is_ddp(name))
    ]
    found = [case(name, ranks) for name in sorted(fitting, key=lambda name: name not in gpu_lane.QUICK)]
    found.append(case(RESUMED, ranks) | {"name": f"{RESUMED} resumed", "stops": (STOP[size(small)],)})
    return [each for each in found if not small or each["name"] in SMALL]


def references(small: bool) -> list[dict[str, Any]]:
    """Return the cases of one process without any engine that cases_of() are compared with."""
    found = {reference_of(name): name for name in gpu_lane.CASES}
    return [described(name, of) | {"flags": [*gpu_lane.reference_flags(of, gpu_lane.CASES[of].precision), *attention_of(name)]}
            for name, of in found.items() if not small or name in SMALL]  # fmt: skip


def case(name: str, ranks: int) -> dict[str, Any]:
    return described(name, name) | {
        "flags": [*gpu_lane.flags_of(name, ranks), *attention_of(name)],
        "alone": gpu_lane.is_alone(name),
    }


def described(name: str, of: str) -> dict[str, Any]:
    """Return what a case called `name` has of the lane's case `of`."""
    lane = gpu_lane.CASES[of]
    return {
        "name": name,
        "precision": lane.precision,
        "reference": reference_of(of),
        "alone": False,
    } | gpu_lane.inputs_of(lane)


def attention_of(name: str) -> list[str]:
    """Name one: `auto` would prove every kernel for each shape. Divided sequences have no mask of a whole one for SDPA."""
    return ["--attn_implementation", "varlen" if "sequence" in name else "sdpa"]


def reference_of(name: str) -> str:
    """Return a precision, or a method or model that one process trains too, with its precision where that is not fp32."""
    lane = gpu_lane.CASES[name]
    if lane.method == "full" and not lane.model:
        return lane.precision
    return " ".join([lane.model or lane.method, *([] if lane.precision == "fp32" else [lane.precision])])


def is_ddp(name: str) -> bool:
    return name.partition(" ")[0] == "ddp"


def size(small: bool) -> str:
    return "small" if small else "full"


def all_of(
    ranks: int, cases: list[dict[str, Any]], folder: Path, subject: Subject, **variables: str
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Run cases on the inputs of `folder`. Yields each as it ends with its log, or why it has none."""
    ready, bf16 = prepared(cases, folder, subject), subject.no_bf16
    yield from ((each, bf16) for each in ready if bf16 and each["precision"] == "bf16")
    ready = [each for each in ready if not (bf16 and each["precision"] == "bf16")]
    yield from group(ranks, [each for each in ready if not each["alone"]], folder, subject, **variables)
    for each in ready:
        if each["alone"]:
            yield from group(ranks, [each], folder, subject, **variables)


def group(
    ranks: int, cases: list[dict[str, Any]], folder: Path, subject: Subject, **variables: str
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Run cases that share their ranks, as all_of() does."""
    left = list(cases)
    while left:
        if subject.no_time:
            yield from ((each, NOT_BEGUN) for each in left)
            return
        ended = ""
        for each, log in once(ranks, left, folder, subject, **variables):
            if each:
                left.remove(each)
                yield each, log
            else:
                ended = log
        if left:
            yield left.pop(0), ended or "it left no result"


def once(
    ranks: int, cases: list[dict[str, Any]], folder: Path, subject: Subject, **variables: str
) -> Iterator[tuple[dict[str, Any] | None, Any]]:
    """Run one group. Yields each case that ends with its log, and at last None with "" or why the group ended early."""
    job, log = folder / "job.json", folder / f"from-{file_name(cases[0])}.log"
    job.write_text(json.dumps({"folder": str(folder), "longest_answer": None, "cases": cases}))
    words = [sys.executable, *torchrun(ranks, "-m", "testing.runs", str(job))]
    progress = time.monotonic()
    left, ended = list(cases), ""
    with log.open("w") as out:
        process, mark = start(words, out, **variables)
        try:
            while not ended:
                code = process.poll()  # before the results are looked for: what is there now is all
                for each in [each for each in left if result(folder, each["name"]) is not None]:
                    left.remove(each)
                    progress = time.monotonic()
                    yield each, result(folder, each["name"])
                now = time.monotonic()
                if code is not None:
                    ended = f"exit code {code}: {why_it_ended(log)}" if code else " "
                elif subject.left <= 0:
                    ended = CUT_OFF
                elif now - progress > subject.longer * (PATIENCE + (START if len(left) == len(cases) else 0)):
                    ended = f"no result in {now - progress:.0f} seconds; its last line: {last_line(log)}"
                else:
                    time.sleep(0.2)
        finally:
            end(mark)
    yield None, ended.strip()


def result(folder: Path, name: str) -> list[dict[str, Any]] | None:
    file = folder / f"{name}.result.json"
    return json.loads(file.read_text())["log"] if file.exists() else None


def prepared(cases: list[dict[str, Any]], folder: Path, subject: Subject) -> list[dict[str, Any]]:
    """Return cases with all their flags: the inputs of `folder`, the steps, an output directory."""
    shared = [*runs.write_inputs(folder), *STEPS[size(subject.small)], "--logging_steps", "1"]
    found = []
    for each in cases:
        flags = [*each["flags"], *runs.model_flags(each, folder)]
        output = folder / "outputs" / file_name(each)
        found.append(each | {"flags": [*shared, *flags, "--output_dir", str(output)]})
    return found


def file_name(case: dict[str, Any]) -> str:
    return str(case["name"]).replace(" ", "-")


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
    whole = command(torchrun(ranks, "train.py", *each["flags"], "--fresh"))
    again = "" if "stops" in each else whole  # no flag stops a run and goes on with it
    figures: dict[str, Any] = {"ranks": ranks, "precision": each["precision"]}
    left_out = (NOT_BEGUN, CUT_OFF, subject.no_bf16)
    if log in left_out:
        subject.row(what, figures, command=again, left_out=log)
        return
    if isinstance(log, str):
        subject.row(what, figures, log, again)
        return
    figures["last_loss"] = [entry["loss"] for entry in log if "loss" in entry][-1]
    if not isinstance(reference, list):
        why = f"nothing to compare with: {reference}"
        late = reference in left_out
        subject.row(what, figures, "" if late else why, again, left_out=why if late else "")
        return
    try:
        worst, bound = difference(log, reference), BOUNDS[each["precision"]]
    except ValueError as error:
        subject.row(what, figures, str(error), again)
        return
    figures |= {"difference": worst, "bound": bound}
    too_far = "" if worst <= bound else f"a loss differs from one process's by {worst:.1e}, and {bound:.1e} is allowed"
    subject.row(what, figures, too_far, again)


def main() -> None:
    subject = Subject(__doc__)
    small, work, ranks = subject.small, subject.work, subject.ranks
    single, several = references(small), cases_of(ranks, small)
    cpu = [each for each in single if each["name"] == "fp32"]
    of_cpu = {each["name"]: log for each, log in all_of(1, cpu, work / "cpu", subject, CUDA_VISIBLE_DEVICES="")}
    one_gpu: dict[str, Any] = {}

    def judge_case(each: dict[str, Any], log: Any) -> None:
        judge(subject, each, f"{each['name']}, {subject.on}", log, one_gpu.get(each["reference"]), ranks)

    names = {each["name"] for each in single}
    together = [*single, *several] if ranks == 1 else single  # one start is enough
    for each, log in all_of(1, together, work / "single", subject, CUDA_VISIBLE_DEVICES=first_gpu()):
        if each["name"] in names:
            one_gpu[each["name"]] = log
            # The same model on a CPU; others only have to train.
            other = of_cpu["fp32"] if each["name"] in BOUNDS else log
            judge(subject, each, f"one GPU, {each['name']}", log, other, 1)
        else:
            judge_case(each, log)
    if ranks > 1:
        for each, log in all_of(ranks, several, work / "ranks", subject):
            judge_case(each, log)


def first_gpu() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"


if __name__ == "__main__":
    main()
