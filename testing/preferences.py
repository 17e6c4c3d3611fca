"""The cases of preference training: train.py against the plain loop of testing/plain_preferences.py, on equal rows.

Each case is a run of six steps in fp32, with SGD at a rate that moves the loss, on the rows of tests/data/preferences: answers
of uneven lengths, some of them cut. 21 rows and a global batch of 8 end each epoch in the middle of a batch. Every case has a
cache of its own, so that none reads what another one has computed of the reference.
"""

import copy
import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from brigade.train.recipe.objectives import JUDGED, OBJECTIVES
from brigade.train.strategy.axes import Axes

from . import axes, axes_sequence, parity, plain_preferences, runs
from .command_line import as_flags
from .ranks import REPOSITORY

TOLERANCE = 1e-5  # relative
NAN = math.nan
ACCURACIES = "rewards/accuracies"
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
FIGURES = ("loss", "grad_norm", *REWARDS, ACCURACIES, "logps/chosen", "logps/rejected", "kl")
# A log-ratio is the difference of two sums that are a hundred times as large, with as much of their rounding.
LOOSER = dict.fromkeys((*REWARDS, "kl"), 1e-4)
STEPS, BATCH, HELD_OUT, MAX_LENGTH = 6, 8, 3, 44
TRAINED = 21
DATA = REPOSITORY / "tests/data/preferences"
MODEL, REWARD, OTHER = (
    "llama",
    "reward",
    "other",
)  # directories: a model, the same with a head for scores, and other weights
MIXTURE = "qwen3_moe"
BEGUN, MERGED = "begun", "merged"  # adapters on OTHER, and the model that they make of it

# Name -> keys of a recipe, and a rate at which the loss moves and rounding does not show.
FORMS: dict[str, dict[str, Any]] = {
    "sigmoid": {"objective": "dpo", "beta": 0.1, "learning_rate": 0.3},
    "smoothed": {"objective": "dpo", "beta": 0.1, "label_smoothing": 0.1, "learning_rate": 0.3},
    "robust": {"objective": "dpo", "beta": 0.1, "loss_type": "robust", "label_smoothing": 0.1, "learning_rate": 0.3},
    "hinge": {"objective": "dpo", "beta": 0.1, "loss_type": "hinge", "learning_rate": 0.3},
    "apo_zero": {"objective": "dpo", "beta": 0.1, "loss_type": "apo_zero", "learning_rate": 0.3},
    "apo_down": {"objective": "dpo", "beta": 0.1, "loss_type": "apo_down", "learning_rate": 0.3},
    "ipo": {"objective": "ipo", "beta": 0.1, "learning_rate": 0.01},
    "simpo": {"objective": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "learning_rate": 0.1},
    "orpo": {"objective": "orpo", "beta": 0.1, "learning_rate": 0.3},
    "kto": {"objective": "kto", "beta": 0.1, "desirable_weight": 1.5, "learning_rate": 0.3},
    "apo_zero_unpaired": {"objective": "kto", "beta": 0.1, "loss_type": "apo_zero_unpaired", "learning_rate": 0.3},
    "reward": {"objective": "reward", "learning_rate": 0.02},
}


def rows_of(form: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows that are trained on, and those held out."""
    rows = [json.loads(line) for line in (DATA / f"{kind_of(form)}.jsonl").read_text().splitlines()]
    return rows[HELD_OUT:], rows[:HELD_OUT]


def kind_of(form: str) -> str:
    """Return which rows a form reads: pairs or judged."""
    return OBJECTIVES[FORMS[form]["objective"]].rows


def write_inputs(folder: Path) -> Path:
    """Write the models, rows and the recipe that all cases share. Returns the folder."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    model = runs.write_model(folder / MODEL, "llama")
    if (folder / OTHER).exists():
        return folder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for parameter in other.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        scoring = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        scoring.score.weight.data.normal_(std=0.2)
        adapted = peft.get_peft_model(
            copy.deepcopy(other), peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
        )
        for parameter in (each for each in adapted.parameters() if each.requires_grad):
            parameter.data += 0.05 * torch.randn_like(parameter)
        adapted.save_pretrained(str(folder / BEGUN))
        merged = adapted.merge_and_unload()
    for name, each in ((REWARD, scoring), (OTHER, other), (MERGED, merged)):
        runs.write_model(folder / name, "llama")  # for its tokenizer
        (folder / name / "model.safetensors").unlink()
        each.save_pretrained(folder / name)
    for form in ("sigmoid", "kto"):
        for name, rows in zip(("train", "heldout"), rows_of(form), strict=True):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{kind_of(form)}-{name}.jsonl").write_text(lines)
    recipe = {
        "data": {"chat_template": "none", "max_length": MAX_LENGTH},
        "training": runs.PLAIN | {"global_batch_size": BATCH, "max_steps": STEPS, "eval_steps": STEPS // 2},
    }  # fmt: skip
    (folder / "preferences.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder


# ---- cases -------------------------------------------------------------------------------------------------------------
STRATEGIES: dict[str, list[str]] = {
    "single": [],
    **parity.STRATEGIES,
    **axes.STRATEGIES,
    **{f"{kind}_pp2": axes.flags(Axes(stages=2), kind) for kind in ("ddp", "zero1")},
    **{f"{kind}_sp2": axes_sequence.strategy(kind, 2, 2) for kind in ("ddp", "zero3", "fsdp2")},
    "fsdp2_ep2": axes.flags(Axes(experts=2), "fsdp2"),
}  # fmt: skip
LORA = ["--use_peft", "true"]
# Of adapters, which begin at zero. A reward model's head is trained whole, and keeps the rate of its form: at this one the norm
# goes from 4 to 68 in one step, and the rounding of another micro-batch in one process becomes 3e-5 of the loss, 2e-7 at its own.
ADAPTERS_RATE = 0.5
IN_MEMORY = ["--precompute_ref_log_probs", "false"]
# Variant -> flags beside the strategy's. PACKED has all rows in one step: without packing a step has other rows.
# ONE: where sequences are divided, some ranks' parts then hold no target, or no answer's end.
PACKED, TILED, SECOND, NAMED, NAMED_SECOND = "packed", "tiled", "second model", "named", "named, in memory"
ONE = "one by one"
# Beside the attention of the others, which is told lengths: by masks, and with the prompt of a pair once for each answer.
SDPA, EAGER, APART = "sdpa", "eager", "prompts apart"
NAMES_ANOTHER = (NAMED, NAMED_SECOND)
ADAPTERS, ADAPTERS_FIRST, DORA, QLORA = "LoRA", "LoRA, computed first", "DoRA", "QLoRA"
CONTINUED, CONTINUED_SECOND, CONTINUED_NAMED = "continued", "continued, in memory", "continued, merged as reference"
GOES_ON = [*LORA, "--model_name_or_path", OTHER, "--adapter_name_or_path", BEGUN]
VARIANTS: dict[str, list[str]] = {
    "": [],
    PACKED: ["--packing", "true", "--global_batch_size", "32"],
    TILED: ["--tiled_loss", "24"],
    SDPA: ["--attn_implementation", "sdpa"],
    EAGER: ["--attn_implementation", "eager"],
    APART: ["--share_prompts", "false"],
    ONE: ["--per_device_train_batch_size", "1", "--per_device_eval_batch_size", "1"],
    "checkpointing": ["--activation_checkpointing", "true"],
    "bf16": ["--bf16", "true"],
    SECOND: IN_MEMORY,
    NAMED: ["--reference", OTHER],
    NAMED_SECOND: ["--reference", OTHER, *IN_MEMORY],
    ADAPTERS: LORA,
    ADAPTERS_FIRST: [*LORA, "--precompute_ref_log_probs", "true"],
    DORA: [*LORA, "--use_dora", "true"],
    QLORA: [*LORA, "--load_in_4bit", "true"],
    CONTINUED: GOES_ON,
    CONTINUED_SECOND: [*GOES_ON, *IN_MEMORY],
    CONTINUED_NAMED: [*GOES_ON, "--reference", MERGED],
}


def flags_of(
    folder: Path, recipe: str, keys: dict[str, Any], ranks: int, strategy: str, variant: list[str]
) -> list[str]:
    """Return the flags of a run of a recipe in `folder`. A step has two micro-batches or more of each rank, and filler in the
    last ones: 9 places or 12 for 8 rows."""
    flags = ["--recipe", str(folder / recipe), *as_flags(**keys)]
    flags += ["--per_device_train_batch_size", "3" if ranks < 3 else "2"]
    return [*flags, *STRATEGIES[strategy], *variant]


class Case(NamedTuple):
    """One run. form: of FORMS; strategy: of STRATEGIES; variant: of VARIANTS"""

    form: str
    strategy: str = "single"
    ranks: int = 1
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.form}, {self.strategy} on {self.ranks}" + (f", {self.variant}" if self.variant else "")

    @property
    def model(self) -> str:
        return REWARD if self.form == "reward" else MIXTURE if self.strategy == "fsdp2_ep2" else MODEL

    def run(self, folder: Path, *further: str, **more: Any) -> dict[str, Any]:
        """Return this case for testing.runs. further: flags behind all others; more: as there"""
        named = {"model_name_or_path": str(folder / self.model)}
        named |= {f"{of}_file": str(folder / f"{kind_of(self.form)}-{name}.jsonl") for of, name in FILES.items()}
        form = FORMS[self.form]
        if LORA[0] in VARIANTS[self.variant] and self.form != "reward":
            form = form | {"learning_rate": ADAPTERS_RATE}
        if kind_of(self.form) == "pairs" and not re.search("_[tpse]p2", self.strategy):  # else auto leaves it off
            named |= {"share_prompts": "true"}
        name = more.pop("name", str(self))
        flags = flags_of(
            folder, "preferences.yaml", named | form, self.ranks, self.strategy, self.variant_flags(folder)
        )
        flags += [*further, "--output_dir", str(folder / "outputs" / name)]
        # DeepSpeed keeps a tensor group for whoever comes next in its process.
        group = self.strategy if "_tp2" in self.strategy and "zero" in self.strategy else ""
        cache = str(folder / "caches" / name)
        return {"name": name, "ranks": self.ranks, "group": group, "cache": cache, "flags": flags, **more}

    def variant_flags(self, folder: Path) -> list[str]:
        named = (OTHER, BEGUN, MERGED)
        return [str(folder / word) if word in named else word for word in VARIANTS[self.variant]]


FILES = {"train": "train", "validation": "heldout"}


def run_cases(folder: Path, cases: list[Case]) -> dict[Case, list[dict[str, Any]]]:
    """Return what each case logged. Raises RuntimeError where one fails."""
    write_inputs(folder)
    if any(case.model == MIXTURE for case in cases):
        runs.write_model(folder / MIXTURE, MIXTURE)
    return run_groups(folder, {case: case.run(folder) for case in cases})


def run_groups(folder: Path, todo: dict[Any, dict[str, Any]]) -> dict[Any, list[dict[str, Any]]]:
    """Return what each of these runs logged; those of one number of ranks, and of one group, share a group of ranks."""
    groups = defaultdict[tuple[int, str], dict[Any, dict[str, Any]]](dict)
    for key, run in todo.items():
        groups[run["ranks"], run["group"]][key] = run
    found: dict[Any, list[dict[str, Any]]] = {}
    for (ranks, _), of_group in sorted(groups.items()):
        results = runs.run_well(ranks, list(of_group.values()), folder, 900)
        found |= {key: results[run["name"]]["log"] for key, run in of_group.items()}
    return found


# ---- comparing -----------------------------------------------------------------------------------------------------------
def plain(folder: Path, case: Case, **keys: Any) -> list[dict[str, float]]:
    """Return what the plain loop says of the steps of a case. keys: in place of the case's"""
    rows = keys.pop("rows", None) or rows_of(case.form)[0]
    given = _keys(case) | {"max_steps": STEPS, "optim": "sgd", "max_grad_norm": 0.0} | keys
    reference = folder / OTHER if case.variant in NAMES_ANOTHER else None
    steps = plain_preferences.train(rows, folder / case.model, folder / case.model, reference, **given)
    return [_logged(case, step) for step in steps]


def plain_held_out(folder: Path, case: Case) -> dict[str, float]:
    """Return what the plain loop says of the held-out rows, by the model or the adapters that a case has saved."""
    saved, base = folder / "outputs" / str(case), folder / case.model
    reference = folder / OTHER if case.variant in NAMES_ANOTHER else base
    return _logged(case, plain_preferences.held_out(rows_of(case.form)[1], saved, reference, base, **_keys(case)))


def _keys(case: Case) -> dict[str, Any]:
    batch = TRAINED if case.variant == PACKED else BATCH
    return FORMS[case.form] | {"max_length": MAX_LENGTH, "validation_split": None, "global_batch_size": batch}


def _logged(case: Case, figures: dict[str, float]) -> dict[str, float]:
    """Return figures without the one that train.py does not log: the margin of answers that make no pairs."""
    left_out = "rewards/margins" if kind_of(case.form) == JUDGED else ""
    return {key: value for key, value in figures.items() if key != left_out}


def steps_of(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a run logged of its steps."""
    return [entry for entry in log if "loss" in entry]


def held_out_of(log: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run's last evaluation logged, without the prefix of its figures."""
    last = [entry for entry in log if "eval_loss" in entry][-1]
    return {key.removeprefix("eval_"): value for key, value in last.items()}


def worst(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest relative difference of each of FIGURES that the others have, over all steps.

    Rewards and KTO's kl begin at 0, so theirs is relative to the largest one of the run. Accuracies are left out while rewards
    are 0 but for rounding. Raises ValueError where a run has not as many steps, or lacks a figure.
    """
    if len(own) != len(other):
        raise ValueError(f"{len(own)} steps, where {len(other)} were expected")
    rewards = max(
        (abs(step[key]) for step in other for key in REWARDS if step.get(key, NAN) == step.get(key, NAN)), default=0
    )
    differences = {}
    for key in FIGURES:
        known = [(mine, step) for mine, step in zip(own, other, strict=True) if step.get(key, NAN) == step.get(key)]
        if key == ACCURACIES:
            known = [(mine, step) for mine, step in known if abs(step["rewards/margins"]) > 1e-4 * rewards]
        if lacking := [mine for mine, _ in known if key not in mine]:
            raise ValueError(f"{len(lacking)} steps have no {key}")
        if known:
            scale = rewards if key in REWARDS else max(step[key] for _, step in known) if key == "kl" else 0.0
            of_steps = [abs(mine[key] - step[key]) / (scale or abs(step[key]) or 1.0) for mine, step in known]
            differences[key] = max(of_steps)
    return differences


def assert_equal(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """Return the worst differences, which are no larger than rounding makes them."""
    differences = worst(own, other)
    assert all(value <= LOOSER.get(key, TOLERANCE) for key, value in differences.items()), differences
    return differences
