"""The tables of docs/evidence/speed.md, from the rows of benchmarks/peers.py."""

import statistics

from benchmarks.pages import EVIDENCE, RESULTS, Row, in_words, markdown, read

PAGE = EVIDENCE / "speed.md"
OURS = "ours"
PLAIN = "not compiled"

NAMES = {
    OURS: "Brigade, packed",
    PLAIN: "Brigade, packed, not compiled",
    "trl_packed": "TRL SFTTrainer, packed (`bfd`)",
    "trl_padding_free": "TRL SFTTrainer, padding-free",
    "padded": "HF Trainer, padded, grouped by length",
    "smollm2": "Brigade, fp32",
    "trl_smollm2": "TRL SFTTrainer, fp32",
    "smollm2_bf16": "Brigade, bf16",
    "trl_smollm2_bf16": "TRL SFTTrainer, bf16",
}


def newest(rows: list[Row], kind: str) -> list[Row]:
    """The rows of the latest measurement of a kind, those of `--only` aside."""
    held = [row for row in rows if row["kind"] == kind and not row["only"]]
    latest = max((row["measurement"] for row in held), default=None)
    return [row for row in held if row["measurement"] == latest]


def rates(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Supervised tokens per second: name -> round -> rate, in the order of the rows."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(row["name"], {})[row["round"]] = row["supervised_tokens_per_second"]
    return found


def ratios(over: dict[int, float], under: dict[int, float]) -> list[float]:
    """One ratio per round that both ran in: a slow minute of the machine then slows both of a pair."""
    return [over[number] / under[number] for number in sorted(over.keys() & under.keys())]


def spread(values: list[float], digits: int, unit: str = "") -> str:
    """Median (smallest to largest)."""
    middle, low, high = (
        f"{value:,.{digits}f}{unit}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} ({low} to {high})"


def ours_beside(name: str) -> str:
    """The run of ours that a run is compared with: of the same model and precision."""
    return name.removeprefix("trl_") if "smollm2" in name else OURS


def table(rows: list[Row]) -> str:
    """The peers' table: a row per program, and by how much ours is faster."""
    head = [
        "",
        "micro-batch x accumulation",
        "supervised tokens/s",
        "all tokens/s",
        "padding",
        "peak memory",
        "Brigade / it",
    ]
    lines = []
    found = rates(rows)
    for name, of in found.items():
        its = [row for row in rows if row["name"] == name]
        padding = [1 - row["tokens"] / row.get("positions", row["tokens"]) for row in its]
        factor = "" if name == ours_beside(name) else spread(ratios(found[ours_beside(name)], of), 2, "x")
        lines.append(
            [
                NAMES.get(name, name),
                _batch(its[0]["settings"]),
                spread(list(of.values()), 0),
                f"{statistics.median(row['tokens_per_second'] for row in its):,.0f}",
                f"{statistics.median(padding):.1%}",
                f"{max(row['peak_memory_gib'] for row in its):.1f} GiB",
                factor,
            ]
        )
    return markdown(head, lines)


def losses(rows: list[Row]) -> str:
    """The loss of each step of each program in the first round, and the largest difference to ours in any step of any round:
    of ours itself, between rounds."""
    lines: list[list[str]] = []
    by_name: dict[str, list[list[float]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row["losses"])
    for name, found in by_name.items():
        own = by_name[ours_beside(name)]
        apart = max(abs(a - b) for one in found for other in own for a, b in zip(one, other, strict=True))
        lines.append([NAMES[name], *(f"{loss:.4f}" for loss in found[0]), f"{apart:.1e}"])
    return markdown(["loss of step", *map(str, range(1, len(rows[0]["losses"]) + 1)), "largest difference"], lines)


def _batch(settings: Row) -> str:
    if "micro_batch" in settings:
        return f"{settings['micro_batch']} x {settings['accumulation']}"
    micro = int(settings["per_device_train_batch_size"])
    return f"{micro} x {int(settings['global_batch_size']) // micro}"


def ablation(rows: list[Row]) -> str:
    """Ours with each choice made otherwise: rate, memory, and what the choice brings."""
    lines = []
    found = rates(rows)
    base: Row = next((row["settings"] for row in rows if row["name"] == OURS), {})
    for name, of in found.items():
        settings = next(row["settings"] for row in rows if row["name"] == name)
        changed = {key: value for key, value in settings.items() if base.get(key) != value and key != "without"}
        flags = " ".join(f"`--{key} {value}`" for key, value in changed.items()) or ("" if name == OURS else "no flag")
        factor = "" if name == OURS else spread(ratios(found[OURS], of), 2, "x")
        memory = max(row["peak_memory_gib"] for row in rows if row["name"] == name)
        label = "nothing" if name == OURS else name
        lines.append([label, flags, spread(list(of.values()), 0), f"{memory:.1f} GiB", factor])
    rounds, steps = max(row["round"] for row in rows), rows[0]["steps"]
    notes = (
        f"Medians of {rounds} rounds (smallest to largest), each of {steps} steps. A factor whose range contains 1 "
        f"cannot be told from no effect. Printed by `{rows[0]['command']}`."
    )
    head = ["changed choice", "flags", "supervised tokens/s", "peak memory", "as chosen / changed"]
    return markdown(head, lines) + f"\n\n{notes}"


def verdict(rows: list[Row]) -> str:
    """How ours compares with the faster of TRL's two and with the padded Trainer, beside the aims."""
    found = rates(rows)
    faster = max(
        (name for name in found if name.startswith("trl_")), key=lambda name: statistics.median(found[name].values())
    )
    lines = []
    for name, aim in ((faster, 1.0), ("padded", 1.5)):
        compiled, plain = (spread(ratios(found[ours], found[name]), 2, "x") for ours in (OURS, PLAIN))
        lines.append([NAMES[name], f"{aim:.1f}x", compiled, plain])
    return markdown(["Brigade compared with", "aim", "measured", "not compiled, as the peers are"], lines)


def measured(peers: list[Row], every: list[Row], own: str = OURS) -> str:
    """When, where and of which versions; every: the rows whose neighbours count."""
    ours = next(row for row in peers if row["name"] == own)
    theirs = next(row for row in peers if "positions" in row)  # Brigade's log knows no padding
    return (
        f"Medians of {max(row['round'] for row in peers)} rounds (smallest to largest). Other processes had at most "
        f"{max(row['others'] for row in every):.0%} of the machine's CPU time during any run.\n\n"
        f"{ours['device']}, {ours['threads']} threads, one process; measured {ours['measurement'][:10]}. "
        f"Brigade: {in_words(ours['versions'])}. Peers: {in_words(theirs['versions'])}."
    )


def tables() -> dict[str, str]:
    """From the newest measurement of each kind."""
    rows = read(RESULTS / "peers.jsonl")
    peers, choices = newest(rows, "peers"), newest(rows, "ablation")
    real = newest(rows, "smollm2")
    return {
        "smollm2": table(real),
        "smollm2-losses": losses(real),
        "smollm2-measured": measured(real, real, "smollm2"),
        "verdict": verdict(peers),
        "peers": table(peers),
        "measured": measured(peers, peers + choices),
        "choices": ablation(choices),
    }
