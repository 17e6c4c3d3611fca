"""Writing the section `factors` of the user's own file (calibration.py): a factor is the median over what was measured."""

import statistics
from dataclasses import replace
from pathlib import Path

import yaml

from ...errors import UserError
from ...errors.tables import Fields
from ...train.host import files
from . import calibration, gpu
from .network import links


def take_network(
    kind: str, named: str, measured: float, ranks: int, node_size: int, link: str, file: Path
) -> list[str]:
    """Fold a bandwidth that was measured without a run into the network's factor of `kind`, and write `file`.

    Returns what changed, a line each.

    named: of the measurement; the same hosts' next one takes its place
    measured: GB/s of bus bandwidth over all `ranks`; link: as a recipe names it, "" for what is usual
    """
    supposed = links(replace(gpu(kind), efficiency=1.0, network=1.0), link, node_size).ring(ranks, 1)[0]
    factors: Fields = calibration.read(file)["factors"]
    lines: list[str] = []
    factors[kind] = fold(factors.get(kind, {}), "network", {Path(named): measured * 1e9 / supposed}, kind, lines)
    write(file, factors)
    return lines


def fold(entries: Fields, name: str, found: dict[Path, float], kind: str, lines: list[str]) -> Fields:
    """Return `entries` with the factors of runs in the entry `name`, and a line on what became of it."""
    if not found:
        return entries
    old = entries.get(name, {"factor": "none", "runs": {}})
    runs = old["runs"] | {str(folder): round(factor, 4) for folder, factor in found.items()}
    before, factor = old["factor"], round(statistics.median(runs.values()), 4)
    change = f"stays {factor}" if before == factor else f"{before} -> {factor}"
    spread = f"s, {min(runs.values())} to {max(runs.values())}" if len(runs) > 1 else ""
    lines.append(f"{kind}: {name} {change} ({len(runs)} run{spread})")
    return entries | {name: {"factor": factor, "runs": runs}}


def write(file: Path, factors: Fields) -> None:
    """Replace the section `factors`; all else of the file stays as its owner wrote it."""
    kept: list[str] = []
    inside = False
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else ():
        if line[:1] not in (" ", "\t", "\n", "\r", "#", ""):
            inside = line.startswith("factors:")
        if not inside or line.startswith("#"):
            kept.append(line)
    text = "".join(kept) or "# Measured on this cluster; brigade/plan/hardware/calibration.py says what belongs here.\n"
    section = yaml.safe_dump({"factors": factors}, sort_keys=False, width=120)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, text.rstrip("\n") + "\n" + section)
    except OSError as error:
        problem = f"it cannot be written: {error.strerror}"
        raise UserError(str(file), problem, "name another file: --calibration FILE") from None
    calibration.once.cache_clear()
