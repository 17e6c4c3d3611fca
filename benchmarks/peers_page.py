"""docs/speed.md from the rows of benchmarks/peers.py."""

import json
import statistics
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "speed.md"
RESULTS = Path(__file__).with_name("results")
TEMPLATE = Path(__file__).with_name("peers_page.md")
OURS = "ours"
PLAIN = "not compiled"
Row = dict[str, Any]

NAMES = {
    OURS: "Brigade, packed",
    PLAIN: "Brigade, packed, not compiled",
    "trl_packed": "TRL SFTTrainer, packed (`bfd`)",
    "trl_padding_free": "TRL SFTTrainer, padding-free",
    "padded": "HF Trainer, padded, grouped by length",
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
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    found = rates(rows)
    for name, of in found.items():
        its = [row for row in rows if row["name"] == name]
        padding = [1 - row["tokens"] / row.get("positions", row["tokens"]) for row in its]
        factor = "" if name == OURS else spread(ratios(found[OURS], of), 2, "x")
        lines.append(
            f"| {NAMES.get(name, name)} | {_batch(its[0]['settings'])} | {spread(list(of.values()), 0)} "
            f"| {statistics.median(row['tokens_per_second'] for row in its):,.0f} | {statistics.median(padding):.1%} "
            f"| {max(row['peak_memory_gib'] for row in its):.1f} GiB | {factor} |"
        )
    return "\n".join(lines)


def _batch(settings: Row) -> str:
    if "micro_batch" in settings:
        return f"{settings['micro_batch']} x {settings['accumulation']}"
    micro = int(settings["per_device_train_batch_size"])
    return f"{micro} x {int(settings['global_batch_size']) // micro}"


def ablation(rows: list[Row]) -> str:
    """Ours with each choice made otherwise: rate, memory, and what the choice brings."""
    lines = [
        "| otherwise | flags | supervised tokens/s | peak memory | as chosen / otherwise |",
        "|---|---|---|---|---|",
    ]
    found = rates(rows)
    base: Row = next((row["settings"] for row in rows if row["name"] == OURS), {})
    for name, of in found.items():
        settings = next(row["settings"] for row in rows if row["name"] == name)
        changed = {key: value for key, value in settings.items() if base.get(key) != value and key != "without"}
        flags = " ".join(f"`--{key} {value}`" for key, value in changed.items()) or ("" if name == OURS else "no flag")
        factor = "" if name == OURS else spread(ratios(found[OURS], of), 2, "x")
        memory = max(row["peak_memory_gib"] for row in rows if row["name"] == name)
        label = "nothing" if name == OURS else name
        lines.append(f"| {label} | {flags} | {spread(list(of.values()), 0)} | {memory:.1f} GiB | {factor} |")
    rounds, steps = max(row["round"] for row in rows), rows[0]["steps"]
    notes = (
        f"Medians of {rounds} rounds (smallest to largest), each of {steps} steps. A factor whose spread holds 1 was not "
        f"told apart from none. Printed by `{rows[0]['command']}`."
    )
    return "\n".join([*lines, "", notes])


def verdict(rows: list[Row]) -> str:
    """How ours stands to the faster of TRL's two and to the padded Trainer, beside what was aimed at."""
    found = rates(rows)
    faster = max(
        (name for name in found if name.startswith("trl_")),
        default=None,
        key=lambda name: statistics.median(found[name].values()),
    )
    aims = {name: aim for name, aim in ((faster, 1.0), ("padded", 1.5)) if name in found}
    lines = []
    for name, aim in aims.items():
        if name:
            lines.append(
                f"- {spread(ratios(found[OURS], found[name]), 2, 'x')} of {NAMES[name]}; the aim was {aim:.1f}x."
            )
            if PLAIN in found:
                lines[-1] += f" Not compiled, as the peers are: {spread(ratios(found[PLAIN], found[name]), 2, 'x')}."
    return "\n".join(lines)


def preparing(results: Path) -> dict[str, str]:
    """What `python -m benchmarks.preparing` found."""
    found = json.loads(results.read_text())
    ours, theirs = found["seconds"]["brigade"], found["seconds"]["datasets.map"]
    pairs = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {
        "prepared": f"{found['megabytes']:g} MB",
        "prepare": f"{statistics.median(ours):.1f} s",
        "pairs": str(len(pairs)),
        "map": f"{statistics.median(theirs):.1f} s",
        "prepare_ratio": spread(pairs, 2),
        "prepare_where": f"{found['machine']}, {found['date']}",
    }


def write(results: Path) -> None:
    """Fill the template with the newest measurement of each kind; a part that was not measured says so."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    peers, choices = newest(rows, "peers"), newest(rows, "ablation")
    some = (peers or choices or rows)[0]
    ours = next((row for row in peers + choices if row["name"] == OURS), some)
    theirs = next((row for row in peers if row["name"] != OURS), {})
    values = {
        "table": table(peers) if peers else "Not measured yet.",
        "verdict": verdict(peers) if peers else "Not measured yet.",
        "ablation": ablation(choices) if choices else "Not measured yet.",
        **preparing(RESULTS / "preparing.json"),
        "rounds": str(max((row["round"] for row in peers), default=0)),
        "steps": str(some["steps"]),
        "others": f"{max(row['others'] for row in peers + choices or [some]):.0%}",
        "device": some["device"],
        "threads": str(some["threads"]),
        "measured": some["measurement"][:10],
        "parameters": f"{some['model']['parameters'] / 1e6:.1f} million",
        "vocabulary": f"{some['model']['vocab_size']:,}",
        "dialogues": f"{some['data']['dialogues']:,}",
        "versions": _versions(ours),
        "peers_versions": _versions(theirs),
    }
    text = TEMPLATE.read_text()
    for key, value in values.items():
        text = text.replace("{" + key + "}", value)
    PAGE.write_text(text)
    print(values["table"], values["ablation"], f"wrote {PAGE}", sep="\n\n")


def _versions(row: Row) -> str:
    return ", ".join(f"{name} {number}" for name, number in row.get("versions", {}).items()) or "not measured yet"
