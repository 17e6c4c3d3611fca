"""The strategies of train.py and of others, as the planner sees them: what they shard and offload, and which file names them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from ...errors import UserError, did_you_mean


@dataclass(frozen=True)
class Choice:
    """One strategy.

    engine, stage: as of a Job; group: "node" where states are sharded inside a node and replicated across
    offload: what lies in the host's memory ("optimizer", or "all": parameters too) or on its disks ("nvme")
    file: the ds_config; "" for DDP, "fsdp2" and "hsdp" where an accelerate config says it
    inside: "tensor", "expert" or "context": what a node's GPUs divide among them; pipeline: each node is a stage
    quantised: what it sends is rounded to 8 and 4 bits
    rank: how much there is to understand and to go wrong; of two that are about as fast the planner takes the lower
    """

    name: str
    engine: str
    stage: int
    file: str
    rank: int
    group: str = ""
    offload: str = ""
    inside: str = ""
    pipeline: bool = False
    quantised: bool = False

    @property
    def key(self) -> str:
        """As a flag names it: its file's name without the ending, as in a run's directory, or the name in small letters."""
        file = self.file.rpartition("/")[2].removesuffix(".json")
        return file or "_".join(re.findall(r"[a-z0-9]+", self.name.lower()))

    @property
    def only(self) -> bool:
        """Estimated, but not chosen."""
        return bool(self.why_only)

    @property
    def why_only(self) -> str:
        if self.quantised:
            return "it rounds what it sends, which no GPU has tried here"
        return "train.py does not run it" if self.inside or self.pipeline else ""


CHOICES = tuple(Choice(**entry) for entry in yaml.safe_load(Path(__file__).with_name("strategies.yaml").read_text()))


def takes(choice: Choice, optimizer: str) -> bool:
    """Whether train.py runs that optimizer under it (strategy/__init__.py): some need whole parameters, some know no DTensors."""
    if choice.engine == "zero":
        return optimizer not in ("lamb", "lars")
    return not (choice.engine == "fsdp2" and optimizer.endswith("8bit"))


def named(words: Iterable[str], optimizer: str) -> tuple[Choice, ...]:
    """The strategies of those names (`zero3`, `ZeRO-3`, `ds_configs/zero3.json`), or all, less those without that optimizer.

    Raises UserError for an unknown name, or where none is left.
    """
    keys = {name.lower(): choice for choice in CHOICES for name in (choice.key, choice.name, choice.file or choice.key)}
    words = list(words)
    if unknown := [word for word in words if word.lower() not in keys]:
        cure = did_you_mean(unknown[0], [choice.key for choice in CHOICES])
        raise UserError("flag --strategy", f"unknown strategy {unknown[0]!r}", cure)
    choices = [keys[word.lower()] for word in words] or CHOICES
    if found := tuple(dict.fromkeys(choice for choice in choices if takes(choice, optimizer))):
        return found
    problem = f"train.py does not run {optimizer} under {' or '.join(choice.name for choice in choices)}"
    raise UserError("flag --optim", problem, "use adamw_torch_fused, or another strategy")
