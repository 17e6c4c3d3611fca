"""A recipe's schema: its sections, and which keys say how a run is watched, not what it computes.

Keys are Hugging Face's own names (TrainingArguments, TRL's SFTConfig and ModelConfig). The files of the sections say their types,
defaults and meanings. This module imports no torch.
"""

from typing import Annotated

from pydantic import Field

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

# Keys that say how a run is watched or executed, not what it computes: they may change when a run continues.
NOT_IN_IDENTITY = {
    "dataset_num_proc", "per_device_train_batch_size", "per_device_eval_batch_size", "padding_free", "logging_steps",
    "eval_steps", "eval_answers", "save_steps", "save_total_limit", "async_save", "report_to", "report_page",
    "dataloader_num_workers", "hang_timeout", "tiled_loss", "tiled_mlp", "nonfinite", "nonfinite_limit", "loss_spike",
    "sync_replica", "eval_tasks", "eval_tasks_chat_template", "precompute_ref_log_probs", "profile",
}  # fmt: skip
