"""What a trainer did, beside the oracle: equal, other by definition, wrong, refused, or failed."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from benchmarks import pages

from . import plain
from .jobs import Result
from .plain import Run, Sample, Step
from .questions import Question

EQUAL, OTHER, WRONG, REFUSED, FAILED = "equal", "other", "wrong", "refused", "failed"
MEANS = ("tokens", "micro-batches", "samples")
DROPPED = {"micro-batches": "a mean of the micro-batches' means", "samples": "a mean of the samples' means"}


class Verdict(NamedTuple):
    """kind: of the names above; said: what differs, in words; differences: relative, by loss, grad_norm and weights"""

    kind: str
    said: str = ""
    differences: dict[str, float] = {}


def judge(question: Question, job: Result, results: list[Result]) -> Verdict:
    """Compare what a trainer's ranks wrote with the oracle."""
    for result in results:
        if "failed" in result:
            return Verdict(FAILED, result["failed"].strip())
    path, rows = Path(job["model_path"]), pages.read(Path(job["file"]))
    if question.kind in ("dpo", "kto", "orpo"):
        return _of_run(question, results[0], lambda _: plain.prefer(question, path, rows), ("tokens",))
    steps = steps_of(question, results)
    if question.kind == "image":
        folder = Path(job["file"]).parent
        read = reading(question, plain.seen(path, rows, folder), steps, path)
        trained = _of_run(question, results[0], lambda _: plain.see(question, path, rows, folder), ("tokens",))
        return trained if read.kind == EQUAL else read._replace(differences=trained.differences)

    read = reading(question, plain.samples(question, rows, path), steps, path)
    adapters = torch.load(results[0]["records"][0]["adapters"]) if question.lora else None
    trained = _of_run(question, results[0], lambda means: plain.train(question, path, steps, means, adapters))
    if question.keeps and (gone := _gone(path, Path(str(results[0]["saved"])))):
        trained = Verdict(WRONG, f"what is saved has no {gone}", trained.differences)
    kinds = [kind for kind in (WRONG, OTHER) if kind in (read.kind, trained.kind)]
    said = "; ".join(filter(None, (read.said, trained.said)))
    return Verdict((kinds or [EQUAL])[0], said, trained.differences)


def whole_log(records: list[Result]) -> list[Result]:
    """Return what a run logged of each step; where it was continued, the last one's word for each."""
    by_step = {entry["step"]: entry for record in records for entry in record["log"]}
    return [by_step[step] for step in sorted(by_step)]


def steps_of(question: Question, results: list[Result]) -> list[Step]:
    """Return the micro-batches of each step, of all ranks."""
    ranks = [_continued([record["steps"] for record in result["records"]], question) for result in results]
    return [
        [[Sample(tuple(one["ids"]), tuple(one["labels"])) for one in batch] for of_rank in step for batch in of_rank]
        for step in zip(*ranks, strict=True)
    ]


def _continued(parts: list[list[Any]], question: Question) -> list[Any]:
    """Return the steps of a run that died and of the one that continued it, which may do some of them anew."""
    *before, last = parts
    return [step for part in before for step in part][: question.steps - len(last)] + last


# ---- what is read ------------------------------------------------------------------------------------------------------
def reading(question: Question, expected: list[Sample], steps: list[Step], path: Path) -> Verdict:
    """Compare the samples of the first epoch with the rows."""
    in_step = len(expected) if question.packing else question.micro * question.accumulation * question.ranks
    epoch = steps[: math.ceil(len(expected) / in_step)]
    seen = [sample for step in epoch for batch in step for sample in batch]
    missing, added = Counter(expected) - Counter(seen), Counter(seen) - Counter(expected)
    if not missing and not added:
        return Verdict(EQUAL)
    if not missing and set(added) <= set(expected):
        return Verdict(WRONG, f"{sum(added.values())} of {len(expected)} rows is trained on twice in an epoch")
    if not added:
        return Verdict(WRONG, f"{sum(missing.values())} of {len(expected)} rows are not trained on in an epoch")
    tokenizer = AutoTokenizer.from_pretrained(path)
    counts = "" if len(seen) == len(expected) else f"; an epoch has {len(seen)} rows, not {len(expected)}"
    return Verdict(OTHER, _how_other(expected, seen, tokenizer) + counts)


def _how_other(expected: list[Sample], seen: list[Sample], tokenizer: Any) -> str:
    ends = [next((len(one.ids) for one in seen if row.ids[: len(one.ids)] == one.ids), 0) for row in expected]
    left = [row.ids[end:] for row, end in zip(expected, ends, strict=True) if row.ids[end:]]
    if left and all(ends):
        cut = [Sample(row.ids[:end], row.labels[:end]) for row, end in zip(expected, ends, strict=True)]
        said = f"leaves out {tokenizer.decode(left[0])!r} at the end of rows"
        return "; ".join(filter(None, (said, _how_other(cut, seen, tokenizer))))
    by_ids = {sample.ids: sample for sample in seen}
    same = [sample for sample in expected if sample.ids in by_ids]
    if len(same) < len(expected):
        row = next(sample for sample in expected if sample.ids not in by_ids)
        nearest = max(seen, key=lambda sample: _common(sample.ids, row.ids))
        at = _common(nearest.ids, row.ids)
        ours, theirs = (tokenizer.decode(ids[at : at + 6]) for ids in (row.ids, nearest.ids))
        return (
            f"{len(expected) - len(same)} of {len(expected)} rows are other tokens: first {theirs!r} for {ours!r} at token {at}; "
            f"learned are {sum(s.learned for s in seen)} tokens, not {sum(s.learned for s in expected)}"
        )
    more, fewer = Counter[str](), Counter[str]()
    for sample in expected:
        for token, ours, theirs in zip(sample.ids, sample.labels, by_ids[sample.ids].labels, strict=True):
            (more if ours == -100 else fewer)[tokenizer.decode([token])] += ours != theirs
    parts = [
        f"learns {sum(counts.values())} tokens {word} ({', '.join(repr(text) for text, count in counts.most_common(3) if count)})"
        for word, counts in (("more", more), ("fewer", fewer))
        if sum(counts.values())
    ]
    return ", ".join(parts)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


# ---- what is computed --------------------------------------------------------------------------------------------------
def _of_run(question: Question, result: Result, run: Callable[[str], Run], means: tuple[str, ...] = MEANS) -> Verdict:
    """Compare a run with the oracle's, whichever of the means it takes."""
    found: list[Verdict] = []
    for each in means:
        differences, problem = compare(question, whole_log(result["records"]), result.get("saved"), run(each))
        within = all(value <= question.tolerance * (1 if key == "loss" else 10) for key, value in differences.items())
        if within and not problem:
            return Verdict(EQUAL if each == "tokens" else OTHER, DROPPED.get(each, ""), differences)
        found.append(Verdict(WRONG, problem or in_words(differences), differences))
    return found[0]


def in_words(differences: dict[str, float]) -> str:
    names = {"loss": "loss", "grad_norm": "gradient norm", "weights": "weights (of how far they moved)"}
    return ", ".join(f"{names[key]} {value:.1e}" for key, value in differences.items())


def compare(question: Question, log: list[Result], saved: str | None, run: Run) -> tuple[dict[str, float], str]:
    """Return the largest relative differences, and what is wrong beside numbers."""
    differences = {"loss": _largest(log, "loss", run.losses), "grad_norm": _largest(log, "grad_norm", run.norms)}
    if saved is None:
        return differences, "nothing is saved"
    try:
        theirs = _loaded(question, Path(saved))
    except Exception as error:  # whatever a file that cannot be loaded raises
        return differences, f"what is saved cannot be loaded: {type(error).__name__}: {error}"
    odd = [name for name in run.weights if name not in theirs or theirs[name].shape != run.weights[name].shape]
    if odd:
        said = "tensors are missing in what is saved, or have other shapes"
        return differences, f"{len(odd)} of {len(run.weights)} {said}: {odd[0]}"
    moved = max(float((weights - run.before[name]).abs().max()) for name, weights in run.weights.items())
    apart = max(float((theirs[name].float() - weights).abs().max()) for name, weights in run.weights.items())
    differences["weights"] = apart / moved
    return differences, ""


def _largest(log: list[Result], key: str, ours: list[float]) -> float:
    theirs = [float(entry[key]) for entry in log if key in entry]
    if len(theirs) != len(ours):
        return math.nan
    rounded = key == "loss" and all(round(value, 4) == value for value in theirs)
    pairs = zip(theirs, ours, strict=True)
    return max((0.0 if rounded and abs(a - b) < 6e-5 else abs(a - b) / abs(b)) for a, b in pairs)


def _loaded(question: Question, saved: Path) -> dict[str, torch.Tensor]:
    if question.lora:
        return load_file(saved / "adapter_model.safetensors")
    kind = AutoModelForImageTextToText if question.kind == "image" else AutoModelForCausalLM
    return kind.from_pretrained(saved, dtype=torch.float32).state_dict()


def _gone(model: Path, saved: Path) -> str:
    """Return a tensor's name of a model's files that is not in what is saved, or ""."""
    kept = {name for file in saved.glob("*.safetensors") for name in load_file(file)}
    return min(
        (name for file in model.glob("*.safetensors") for name in load_file(file) if name not in kept), default=""
    )
