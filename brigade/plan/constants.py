"""The numbers that formulas take from measurements, published runs and other programs; constants.yaml has their sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ..errors.tables import Document, Fields, table


@dataclass(frozen=True)
class Constants:
    """The values of constants.yaml, whose rows say what each is, in which unit, from whom and since when."""

    matmul_share: float
    stream_share: float
    attention_share: float
    product_tile: tuple[int, int]
    tile_fill: int
    grouped_share: float
    flash_half_length: Mapping[str, float]
    exponential_width: Mapping[str, float]
    efficient_attention: int
    scan_exponential: int
    scan_exponential_back: int
    scan_chunk: int
    rule_chunk: int
    chunk_products: int
    launch_seconds: float
    adapter_launching: float
    adam_bytes: int
    muon_products: int
    dequantise_bytes: float
    cpu_adam_rate: float
    pcie_5: int
    nvme_rate: float
    peer_share: float
    peer_latency: float
    call_latency: float
    node_latency: float
    ring_delay: float
    line_share: float
    fastest_card: int
    contention: float
    fragmentation: float
    short: float
    pools_at_most: int
    pools_with_room: int
    context_gib: float
    collectives_gib: float
    many_ranks: int
    fused_loss_bytes: int
    norm_back: int
    nf4_bytes: float
    nf4_cut_bytes: float
    deepspeed_bucket: int
    live: int
    process_bytes: float
    pinned: float
    replica_width: Mapping[str, float]
    replica_kept: Mapping[str, float]
    replica_buffers: int
    replica_exchanges: float
    replica_seconds: float
    gloo_socket: float
    tcp_hop: float
    replica_overlap: int
    replica_waits: float
    replica_most: float
    replica_every: tuple[int, ...]


def _frozen(value: object) -> object:
    if isinstance(value, dict):
        return MappingProxyType(value)
    return tuple(value) if isinstance(value, list) else value


ROWS: Mapping[str, Document] = MappingProxyType(table(Path(__file__).with_name("constants.yaml")))
_VALUES: Fields = {name: _frozen(row["value"]) for name, row in ROWS.items()}
CONSTANTS = Constants(**_VALUES)
