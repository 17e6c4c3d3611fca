"""Runs that distil a teacher, and a plain loop over two models of Transformers that they are compared with.

The loop shares no code with brigade. Each sample is tokenised and read by itself, without padding, in fp32 and without dropout;
divergences are torch.distributions'. A step's loss is the mean over its supervised tokens.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributions import Categorical, kl_divergence
from transformers import PreTrainedTokenizerFast

from . import plain_preferences, preferences, runs
from .plain_preferences import Tokens, tokens_of

STEPS, BATCH, MAX_LENGTH = 4, 8, 44
MODEL, MIXTURE, TEACHER = (
    "llama",
    "qwen3_moe",
    "teacher",
)  # directories; the teacher is a wider llama with unused rows at its end
UNUSED = 5
WEIGHTS = 1.0, 0.25, 2.0, 0.5, 3.0  # of the rows that are trained on, in turn, in a column that only "weighed" reads
FIGURES = ("loss", "grad_norm", "divergence", "cross_entropy")
# Name -> keys of a recipe, and a rate at which the loss moves.
FORMS: dict[str, dict[str, Any]] = {
    "forward": {"learning_rate": 0.3},
    "reverse": {"loss_type": "reverse_kl", "learning_rate": 0.3},
    "jsd": {"loss_type": "jsd", "beta": 0.3, "learning_rate": 0.5},
    "warm": {"kd_temperature": 2.0, "kd_ratio": 1.0, "learning_rate": 0.1},
    "few": {"learning_rate": 0.3, "teacher_top_k": 8},
    "few reverse": {"loss_type": "reverse_kl", "learning_rate": 0.3, "teacher_top_k": 8},
    "few jsd": {"loss_type": "jsd", "beta": 0.3, "learning_rate": 0.5, "teacher_top_k": 8},
    "half": {"learning_rate": 0.3, "bf16": True},
    "weighed": {"learning_rate": 0.3, "columns": {"weight": "times"}},
}
SINGLY = ["--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1"]
VARIANTS: dict[str, list[str]] = {
    "": [],
    "packed": ["--packing", "true", "--global_batch_size", "32"],
    "padded": ["--padding_free", "false"],
    "tiles": ["--tiled_loss", "7"],
    "LoRA": ["--use_peft", "true"],
    "recomputed": ["--activation_checkpointing", "true"],
    "singly": SINGLY,
    "all kept": [*SINGLY, "--teacher_top_k", "99999"],  # more words than there are
    "4 bits": ["--teacher_load_in_4bit", "true"],
}


class Case(NamedTuple):
    """One run. form: of FORMS; strategy: of preferences.STRATEGIES; variant: of VARIANTS"""

    form: str
    strategy: str = "single"
    ranks: int = 1
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.form}, {self.strategy} on {self.ranks}" + (f", {self.variant}" if self.variant else "")

    @property
    def model(self) -> str:
        return MIXTURE if self.strategy == "fsdp2_ep2" else MODEL

    def run(self, folder: Path) -> dict[str, Any]:
        """Return this case for testing.runs."""
        keys = FORMS[self.form] | {"model_name_or_path": str(folder / self.model), "teacher": str(folder / TEACHER)}
        variant = [*VARIANTS[self.variant], "--output_dir", str(folder / "outputs" / str(self))]
        flags = preferences.flags_of(folder, "distill.yaml", keys, self.ranks, self.strategy, variant)
        return {"name": str(self), "ranks": self.ranks, "group": "", "flags": flags}


def rows_of() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows that are trained on, and those held out."""
    return tuple(  # type: ignore[return-value]
        [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
        for rows in preferences.rows_of("sigmoid")
    )


def write_inputs(folder: Path) -> Path:
    """Write the models, rows and the recipe that all cases share. Returns the folder."""
    from transformers import AutoModelForCausalLM

    if (folder / TEACHER).exists():
        return folder
    for name in (MODEL, MIXTURE, TEACHER):
        runs.write_model(folder / name, "llama-wide" if name == TEACHER else name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        teacher = AutoModelForCausalLM.from_pretrained(folder / TEACHER, dtype=torch.float32)
        teacher.resize_token_embeddings(teacher.config.vocab_size + UNUSED, mean_resizing=False)
        for parameter in teacher.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    teacher.save_pretrained(folder / TEACHER)
    trained, held_out = rows_of()
    weighed = [row | {"times": weight} for row, weight in zip(trained, itertools.cycle(WEIGHTS))]
    for name, rows in (("train", weighed), ("heldout", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "data": {
            "chat_template": "none", "max_length": MAX_LENGTH, "train_file": str(folder / "train.jsonl"),
            "validation_file": str(folder / "heldout.jsonl"),
        },
        "training": runs.PLAIN | {
            "objective": "distill", "global_batch_size": BATCH, "max_steps": STEPS, "eval_steps": STEPS,
        },
    }  # fmt: skip
    (folder / "distill.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder


def run_cases(folder: Path, cases: list[Case]) -> dict[Case, list[dict[str, Any]]]:
    """Return what each case logged. Raises RuntimeError where one fails."""
    write_inputs(folder)
    return preferences.run_groups(folder, {case: case.run(folder) for case in cases})


# ---- the plain loop --------------------------------------------------------------------------------------------------
def plain(
    folder: Path, form: str, model: str = MODEL, batch: int = BATCH
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return what a plain loop says of each step, before its update, and of the held-out rows at its end."""
    keys = {"kd_ratio": 0.5, "kd_temperature": 1.0, "loss_type": "forward_kl", "beta": 0.5} | FORMS[form]
    student, teacher = (plain_preferences.load(folder / name, "sft") for name in (model, TEACHER))
    words = PreTrainedTokenizerFast.from_pretrained(folder / model)
    trained, held_out = (
        [tokens_of(words, row["prompt"], row["completion"], MAX_LENGTH) for row in rows] for rows in rows_of()
    )
    weights = list(itertools.islice(itertools.cycle(WEIGHTS if "columns" in keys else (1.0,)), len(trained)))
    optimizer = torch.optim.SGD(student.parameters(), keys["learning_rate"])
    history = []
    order = plain_preferences.Keys(global_batch_size=batch, max_steps=STEPS)
    for items in plain_preferences.steps(len(trained), order):
        said = _means(student, teacher, [(trained[item], weights[item]) for item in items], keys)
        norm = plain_preferences.norm_of(student)
        optimizer.step()
        optimizer.zero_grad()
        history.append(said | {"grad_norm": float(norm)})
    with torch.no_grad():
        said = _means(student, teacher, [(sample, 1.0) for sample in held_out], keys)
    return history, {"loss": said["cross_entropy"], "divergence": said["divergence"]}


def _means(student: Any, teacher: Any, samples: list[tuple[Tokens, float]], keys: dict[str, Any]) -> dict[str, float]:
    """Return means over the supervised tokens of samples, each times its sample's weight. Where gradients are on, the loss's are
    added to the student's."""
    count, ratio = sum(weight * (sample.end - sample.first) for sample, weight in samples), keys["kd_ratio"]
    figures = []
    for sample, weight in samples:
        ids = torch.tensor([sample.ids])
        at = slice(sample.first - 1, sample.end - 1)
        own = student(input_ids=ids, use_cache=False).logits[0, at].double()
        with torch.no_grad():
            other = teacher(input_ids=ids, use_cache=False).logits[0, at, : own.shape[-1]].double()
        crossed = weight * torch.nn.functional.cross_entropy(own, ids[0, sample.first : sample.end], reduction="sum")
        warm = keys["kd_temperature"]
        known, said = (Categorical(logits=each / warm) for each in (other, own))
        if "teacher_top_k" in keys:
            known, said = _with_rest(known, said, keys["teacher_top_k"])
        apart = weight * warm**2 * _divergence(known, said, keys).sum()
        loss = ((1 - ratio) * crossed + ratio * apart) / count
        if loss.requires_grad:
            loss.backward()
        figures.append([float(loss.detach()), float(apart.detach()) / count, float(crossed.detach()) / count])
    return dict(zip(("loss", "divergence", "cross_entropy"), map(math.fsum, zip(*figures, strict=True)), strict=True))


def _with_rest(teacher: Categorical, student: Categorical, k: int) -> list[Categorical]:
    """Return both over the k most likely words of the teacher and one that stands for all others."""
    likely = teacher.probs.argsort(-1, descending=True)
    kept, others = likely[:, :k], likely[:, k:]
    parts = [(each.probs.gather(-1, kept), each.probs.gather(-1, others)) for each in (teacher, student)]
    return [Categorical(probs=torch.cat([own, rest.sum(-1, keepdim=True)], -1)) for own, rest in parts]


def _divergence(teacher: Categorical, student: Categorical, keys: dict[str, Any]) -> torch.Tensor:
    if keys["loss_type"] == "forward_kl":
        return kl_divergence(teacher, student)
    if keys["loss_type"] == "reverse_kl":
        return kl_divergence(student, teacher)
    share = keys["beta"]
    mixture = Categorical(probs=share * teacher.probs + (1 - share) * student.probs)
    return share * kl_divergence(teacher, mixture) + (1 - share) * kl_divergence(student, mixture)


def worst(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest relative difference of each of FIGURES over all steps. Raises ValueError for another number of steps."""
    if len(own) != len(other):
        raise ValueError(f"{len(own)} steps, where {len(other)} were expected")
    return {key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(own, other, strict=True)) for key in FIGURES}
