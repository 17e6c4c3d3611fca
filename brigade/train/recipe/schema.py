"""A recipe's schema: its sections, which keys say how a run is watched and which decide what it computes, a run's short name, and
whether two runs compute the same.

Keys are Hugging Face's own names (TrainingArguments, TRL's SFTConfig and ModelConfig). The files of the sections say their types,
defaults and meanings. This module imports no torch.
"""

import hashlib
import json
from typing import Annotated, Any

from pydantic import Field

from ...errors.tables import Document, Fields
from .data_section import DataSection
from .model_section import ModelSection
from .section import Section
from .training_section import TrainingSection
from .value_types import Table


class ClusterSection(Section):
    """The machine a recipe was made for, and by default its strategy. None of it changes what the run computes."""

    hostfile: str | None = None
    """Hosts and their slots, in DeepSpeed's syntax."""
    gpu: str | None = None
    """The GPU's usual name (`H100 80GB`), by which the planner counts memory and speed."""
    network: str | None = None
    """For the planner: what a host's network cards reach together (`100 Gb/s`), where it is not what is usual with that GPU."""
    ds_config: str | Table | None = None
    """A DeepSpeed configuration: a file, or the keys themselves; `none` for DDP."""
    accelerate_config: str | Table | None = None
    """An accelerate configuration with its own strategy: FSDP2, HSDP, axes."""
    nvme_path: str | None = None
    """Where NVMe offload swaps to; default: a folder in the output directory."""
    tensor_across_hosts: bool = False
    """Let a tensor group have ranks on two hosts: each layer then waits for the network between them."""
    gpu_mttf_hours: Annotated[float, Field(gt=0)] = 50_700
    """Mean time between two failures of a run, times its GPUs, in hours; `save_steps: auto` goes by it. Default: 419
    interruptions of Llama 3's training in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""


class Recipe(Section):
    """A whole recipe: what is trained, on what data, how, and on which machine."""

    model: ModelSection
    data: DataSection
    training: TrainingSection
    cluster: ClusterSection = ClusterSection()


SECTIONS: dict[str, type[Section]] = {name: info.annotation for name, info in Recipe.model_fields.items()}  # type: ignore[misc]
SECTION_OF = {key: section for section, model in SECTIONS.items() for key in model.model_fields}

# Keys that may say `auto`: a run takes what is proven on its GPUs (docs/gpu.md), and without a proof the default. What it
# took is not part of its identity.
BY_PROOF = ("torch_compile", "use_liger_kernel", "optim")

# Keys that may say `auto`: before a run's first step the planner decides them by the memory of its GPUs (step/memory.py). Until
# then, and where it cannot, they have these values, which take the least. A run that began keeps what was decided.
BY_MEMORY = {"activation_checkpointing": True, "tiled_loss": True}

# Keys that say how a run is watched or executed, not what it computes: they may change when a run continues.
NOT_IN_IDENTITY = {
    "dataset_num_proc", "per_device_train_batch_size", "per_device_eval_batch_size", "padding_free", "logging_steps",
    "eval_steps", "eval_answers", "save_steps", "save_total_limit", "async_save", "report_to", "report_page",
    "dataloader_num_workers", "hang_timeout", "tiled_loss", "tiled_mlp", "nonfinite", "nonfinite_limit", "loss_spike",
    "sync_replica", "eval_tasks", "eval_tasks_chat_template", "precompute_ref_log_probs", "profile",
    "share_prompts",
}  # fmt: skip


COMPUTED = ("model", "data", "training")  # sections that decide what a run computes
DEFAULTS = 1  # raise it when a key's default changes: a recipe without the key is then another run
# What runs did before a key existed, where that is not its default: {"training": {"key": value}}.
BEFORE: dict[str, dict[str, Any]] = {}


def computed(recipe: Recipe, **options: bool) -> Fields:
    """The keys that decide what a run computes, {section: {key: value}}, without those for hosts, machine and watching.

    options: of pydantic's model_dump
    """
    sections = {
        name: getattr(recipe, name).model_dump(mode="json", exclude=NOT_IN_IDENTITY, **options) for name in COMPUTED
    }
    if sections["data"].get("max_eval_samples") == "auto":  # it holds out and trains on the same as null
        sections["data"]["max_eval_samples"] = None
    return sections


def identity(recipe: Recipe, strategy: list[object]) -> str:
    """A run's short name: a hash of what it computes and of how states are sharded.

    Only what differs from the defaults counts, so that a new key in a later version renames no run. difference() says
    whether two runs are the same.
    """
    text = json.dumps([DEFAULTS, computed(recipe, exclude_defaults=True), strategy], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded(document: Document) -> Recipe:
    """The recipe in a run.yaml, which an earlier version may have written: keys that it lacks get what runs did before those
    keys existed. Raises ValidationError for a key or a value that this version does not know."""
    sections = {name: BEFORE.get(name, {}) | (document.get(name) or {}) for name in COMPUTED}
    for values in sections.values():
        for key in NOT_IN_IDENTITY:
            values.pop(key, None)
        for key in BY_PROOF:
            if values.get(key) == "auto":
                del values[key]
    return Recipe.model_validate(sections)


def difference(old: object, new: object) -> tuple[str, object, object] | None:
    """(key, value in old, value in new) of the first key in which two trees of values differ, or None. The key is written
    with dots; the value of a key that one tree lacks is None."""
    before, now = flat(old), flat(new)
    return next(((key, before.get(key), now.get(key)) for key in before | now if before.get(key) != now.get(key)), None)


def flat(tree: object, prefix: str = "") -> Fields:
    """{"a": {"b": 1}} as {"a.b": 1}. Long lists are taken apart too, so that a difference names one element."""
    if isinstance(tree, list) and len(repr(tree)) > 80:
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {key: value for name, below in tree.items() for key, value in flat(below, f"{prefix}{name}.").items()}
