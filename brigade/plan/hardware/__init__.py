"""Describe accelerators in numbers: the catalogue of hardware.yaml and the user's own kinds, and the share of a peak used."""

import functools
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import UserError, nearest
from ...errors.tables import Fields, table
from ...train.host import control_groups
from ..constants import CONSTANTS
from . import calibration

GIB = 2**30
CATALOGUE = Path(__file__).with_name("hardware.yaml")
# What people write around a card's own name, which tells no two cards apart.
AROUND = re.compile(r"nvidia|amd|geforce|rtx|tesla|instinct|sxm\d?|oam|hbm\d?e?|dgx|hgx|paper|gpu|.*gb")


@dataclass(frozen=True)
class Gpu:
    """One kind of accelerator. Units as hardware.yaml states them.

    seen: `sustained` is fitted to published runs on that kind, and not guessed from its generation's
    integrated: its memory is the host's
    efficiency, network: factors that the user's own runs gave (calibration.py): of all speeds inside a node, and of the
        bandwidth between nodes
    network_measured: whether the latter is known, be it 1
    """

    kind: str
    memory_gib: float
    bf16_tflops: float
    matmul_tflops: float
    hbm_gb_s: float
    peer_gb_s: float
    pcie_gb_s: float
    sms: int
    source: str
    sustained: float
    seen: bool = True
    bf16: bool = True
    integrated: bool = False
    node_gbit: float = 100.0
    host_gib: float = 64.0
    nvme_gb: float = 2000.0
    attention_tflops: Mapping[str, float] = field(default_factory=dict, hash=False)
    efficiency: float = 1.0
    network: float = 1.0
    network_measured: bool = False

    @property
    def stream_rate(self) -> float:
        """Bytes per second that streaming kernels reach in the card's own memory."""
        return self.hbm_gb_s * 1e9 * CONSTANTS.stream_share

    @property
    def product_rate(self) -> float:
        """FLOPs per second of large products in a training run."""
        return self.matmul_tflops * 1e12 * self.sustained

    def attention_rate(self, kernel: str) -> float:
        """Return FLOPs per second; only the visible half of the scores counts."""
        known = self.attention_tflops
        return 1e12 * known.get(kernel, known.get("flash2", CONSTANTS.attention_share * self.matmul_tflops))


def catalogue() -> dict[str, Fields]:
    """Return the entry of each kind of GPU, from the user's own file or hardware.yaml. Raises UserError for a broken file."""
    published, own = table(CATALOGUE)["gpus"], calibration.gpus()
    # A user's own card of a known name keeps what no measurement of it tells: the cluster's network.
    own = {kind: {"node_gbit": published.get(kind, {}).get("node_gbit", 100)} | entry for kind, entry in own.items()}
    return own | {kind: entry for kind, entry in published.items() if kind not in own}


def gpu(kind: str) -> Gpu:
    """Return the GPU of a kind by its key, the driver's name or as people write it: `A100-SXM4-80GB`, `4090 24GB`, `H100 SXM`.

    Raises UserError for an unknown one, with the nearest and all that are known.
    """

    def plain(name: str) -> str:
        return re.sub(r"[\s_-]+", "", name.lower().removeprefix("nvidia"))

    known = catalogue()
    for key, entry in known.items():
        if plain(kind) in map(plain, (key, *entry["names"])) or re.fullmatch(entry["driver"], kind):
            return _gpu(key, entry)
    kind = re.sub(r"^\d+ ?[xX*] ?|[xX]\d$", "", kind)  # how many there are is the hostfile's
    words, size = _name(kind)
    for wanted in (words, words - {"pcie"}):
        found = [(key, entry) for key, entry in known.items() if wanted and _name(key)[0] == wanted]
        found += [(key, e) for key, e in known.items() if wanted in [_name(name)[0] for name in e["names"]]]
        for key, entry in found:
            if not size or abs(size / entry["memory_gib"] - 1) < 0.12:
                return _gpu(key, entry)
    short = {re.sub(r" \d+GB$", "", key): key for key in reversed(known)}  # without its memory
    within = [name for name, key in short.items() if _name(key)[0] and _name(key)[0] <= words]
    near = max(within, key=len, default="") or nearest(re.sub(r"\d+ ?gi?b?\b", "", kind, flags=re.I).strip(), short)
    numbers = ", ".join(f"{name}: ..." for name in calibration.NUMBERS)
    others = "" if near else f"; known are {', '.join([*known][:20])}, ... ({len(known)} in all)"
    cure = f"did you mean {short[near]!r}? Or " if near else ""
    cure += f"describe it in {calibration.named()}: gpus: {{{kind[:60]!r}: {{driver: NAME, {numbers}}}}}; "
    cure += "units and examples: brigade/plan/hardware/hardware.yaml"
    raise UserError(f"GPU kind {kind[:60]!r}", f"it is not in the catalogue{others}", cure)


def _name(text: str) -> tuple[frozenset[str], float]:
    """Return (the words that tell a card from others, GB of its memory or 0): `H100-SXM-80GB` gives ({"h100"}, 80)"""
    text = re.sub(r"(\d+)\s*g(?:i?b)?\b", lambda found: f" {found[1]}gb ", text.lower())
    words = re.findall(r"[a-z0-9]+", text)
    sizes = [float(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
    return frozenset(word for word in words if not AROUND.fullmatch(word)), max(sizes, default=0.0)


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the GPU to which a driver gives exactly that name, or None: variants of a card have longer names."""
    entries = catalogue().items()
    return next((_gpu(kind, entry) for kind, entry in entries if re.fullmatch(entry["driver"], device_name)), None)


def _gpu(kind: str, entry: Fields) -> Gpu:
    values = {name: entry[name] for name in Gpu.__dataclass_fields__ if name in entry}
    usual = {"kind": kind, "matmul_tflops": CONSTANTS.matmul_share * entry["bf16_tflops"]}
    if "sustained" not in entry:
        reach = usual_share(entry.get("generation", "")) * entry["bf16_tflops"]
        usual |= {"seen": False, "sustained": reach / values.get("matmul_tflops", usual["matmul_tflops"])}
    factors = calibration.factors(kind)
    return Gpu(**usual | values | factors, network_measured="network" in factors)


@functools.cache
def usual_share(generation: str) -> float:
    """Return the share of its dense peak that products reach in training on a card that no run was fitted to.

    It is the median of its generation's fitted cards, or the least of all where there are none.
    """
    shares: dict[str, set[float]] = {}
    fitted = [entry for entry in table(CATALOGUE)["gpus"].values() if "sustained" in entry]
    for entry in fitted:
        products = entry.get("matmul_tflops", CONSTANTS.matmul_share * entry["bf16_tflops"])
        share = entry["sustained"] * products / entry["bf16_tflops"]
        shares.setdefault(entry["generation"], set()).add(share)
    return statistics.median(shares.get(generation) or {min(map(min, shares.values()))})


def gpu_here() -> Gpu | None:
    """Return the GPU of this process with the memory that the device itself reports, None without one.

    A name does not tell the memory: a laptop's card, a part of a card (MIG, vGPU) and a new one are not in the catalogue, and an
    RTX 4090 may have 48 GB.

    Where the catalogue does not know its name, the rates are those of the kind with the nearest number of multiprocessors. They
    put ways into an order, and are no estimate of its time: who estimates one asks gpu_of_device(). A GPU without memory of its
    own (GB10, Jetson) has what this process already holds of the host's, and what is left there.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    kinds, cores = catalogue(), device.multi_processor_count
    known = gpu_of_device(device.name) or gpu(min(kinds, key=lambda kind: abs(kinds[kind]["sms"] - cores)))
    integrated = bool(device.is_integrated)
    memory: int = device.total_memory
    if integrated:  # CUDA counts all of the host's memory
        memory = min(memory, torch.cuda.memory_reserved() + control_groups.memory_left()["available"])
    return replace(known, memory_gib=memory / GIB, integrated=integrated)
