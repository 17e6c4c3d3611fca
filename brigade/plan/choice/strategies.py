"""The strategies of train.py as the planner sees them: what they shard, offload and divide, and which file names them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import UserError, did_you_mean
from ...errors.tables import table
from ...train.strategy import refusal
from ...train.strategy.axes import Axes

_SIZES = re.compile(r" \d+(?: \(\d+ each\))?(?= x )")  # of axes, as a table has them: `PP 8 (2 each) x ZeRO-1`
SHORT = {"tensor": "TP", "sequence": "SP", "stages": "PP", "experts": "EP"}  # of axes, in tables and names of files


@dataclass(frozen=True)
class Choice:
    """One strategy.

    engine, stage: as of a Job; group: "node" where states are sharded inside a node and replicated across
    offload: what lies in the host's memory ("optimizer", or "all": parameters too) or on its disks ("nvme")
    file: the ds_config; "" for DDP, "fsdp2", "fsdp2_offload" and "hsdp" where an accelerate config says it
    axes: of train/strategy/axes.py, what it divides besides the data
    least_length: tokens of a sequence from which on it is offered
    quantised: what it sends is rounded to 8 and 4 bits
    unproven: few have published runs of its axes
    rank: how much there is to understand and to go wrong; of two that are about as fast the planner takes the lower
    """

    name: str
    engine: str
    stage: int
    file: str
    rank: int
    group: str = ""
    offload: str = ""
    axes: tuple[str, ...] = ()
    least_length: int = 0
    quantised: bool = False
    unproven: bool = False

    @property
    def key(self) -> str:
        """The name that a flag takes: in small letters without spaces and dashes, as in tp_zero1 and zero3_offload_param.

        Where no axis divides the model, it is its file's name without the ending, as in a run's directory.
        """
        return _key(self.name)

    @property
    def undivided(self) -> "Choice":
        """The strategy that replicates or shards alike in one group of all GPUs, without an axis."""
        plain = {choice.name: choice for choice in CHOICES}
        base = self.name.rpartition(" x ")[2]
        return plain[{"HSDP": "FSDP2", "ZeRO-3 hpZ": "ZeRO-3", "ZeRO++": "ZeRO-3"}.get(base, base)]

    @property
    def kind(self) -> str:
        """The kind of the Strategy that it is in a run."""
        return f"zero{self.stage}" if self.engine == "zero" else "hsdp" if self.file == "hsdp" else self.engine

    @property
    def why_only(self) -> str:
        """Why it is only estimated, and never chosen; "" for a strategy that may be chosen."""
        return "it rounds what it sends, which no GPU has tried here" if self.quantised else ""

    def named(self, axes: Axes) -> str:
        """Return its name with the sizes of its axes: `TP 8 x PP 2 x ZeRO-1`."""
        return with_sizes(self.name.rpartition(" x ")[2], axes)


def _key(name: str) -> str:
    return name.lower().replace(" x ", "_").replace(" ", "_").replace("-", "").replace("+", "p")


def with_sizes(name: str, axes: Axes) -> str:
    """Return a name with the sizes of axes before it; of a pipeline with several stages on each rank, `PP 8 (2 each)`."""
    sizes = {axis: f"{SHORT[axis]} {size}" for axis, size in axes.used.items()}
    if axes.virtual > 1:
        sizes["stages"] += f" ({axes.virtual} each)"
    return " x ".join([*sizes.values(), name])


def _choices() -> Iterable[Choice]:
    rows = table(Path(__file__).with_name("strategies.yaml"))
    plain = {row["name"]: Choice(**row) for row in rows["strategies"]}
    yield from plain.values()
    for row in rows["divided"]:
        for base in map(plain.__getitem__, row["beside"]):
            name = " x ".join([*(SHORT[axis] for axis in row["axes"]), base.name])
            more = {key: value for key, value in row.items() if key != "beside"}
            yield replace(base, **more | {"name": name, "axes": tuple(row["axes"]), "rank": base.rank + row["rank"]})


CHOICES = tuple(_choices())
UNPROVEN = frozenset(choice.axes for choice in CHOICES if choice.unproven)


def runs(choice: Choice, **facts: object) -> bool:
    """Return whether train.py takes a strategy with such a `method` and recipe's keys (train/strategy/refused.yaml)."""
    host_shards = choice.engine == "fsdp2" and bool(choice.offload)
    return refusal(kind=choice.kind, host_shards=host_shards, **dict.fromkeys(choice.axes, True), **facts) is None


def named(words: Iterable[str], optimizer: str) -> tuple[Choice, ...]:
    """Return the strategies of those names (`zero3`, `ZeRO-3`, `ds_configs/zero3.json`), or all.

    Those that train.py does not run with that optimizer are left out. A name may be as the table of `plan` prints it, without the
    sizes of axes.

    Raises UserError for an unknown name, or where none is left.
    """
    keys = {choice.key: choice for choice in CHOICES}
    keys |= {_key(choice.file): choice for choice in CHOICES if choice.file and not choice.axes}
    words = list(words)
    unknown = [word for word in words if _key(word) not in keys]
    if unknown:
        without = _key(_SIZES.sub("", unknown[0]))
        cure = f"write {without}: plan tries every size" if without in keys else did_you_mean(unknown[0], keys)
        raise UserError("flag --strategy", f"unknown strategy {unknown[0]!r}", cure)
    choices = [keys[_key(word)] for word in words] or CHOICES
    found = tuple(dict.fromkeys(choice for choice in choices if runs(choice, optim=optimizer)))
    if found:
        return found
    names = " or ".join(choice.name for choice in choices)
    if any(runs(choice, optim="adamw_torch_fused") for choice in choices):
        problem = f"train.py does not run {optimizer} under {names}"
        raise UserError("flag --optim", problem, "use adamw_torch_fused, or another strategy")
    raise UserError("flag --strategy", f"train.py does not run {names}", "leave it out to see what it runs")
