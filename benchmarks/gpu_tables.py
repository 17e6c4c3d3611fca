"""The tables of docs/evidence/gpu.md, from the rows of benchmarks/gpu.py."""

from collections.abc import Callable

from benchmarks.gpu_plan import BASE, Job, plan
from benchmarks.pages import EVIDENCE, Row, in_words, markdown

PAGE = EVIDENCE / "gpu.md"
UNMEASURED = "These figures have not been measured: no GPU has run this benchmark yet; run `python -m benchmarks.gpu`"
AIM = 50.0  # percent MFU of the best full and the best LoRA row, on an H200
AIMED_DEVICE = "NVIDIA H200"
NAMES = {"full": "full fine-tuning", "lora": "LoRA"}


def newest(rows: list[Row]) -> list[Row]:
    """Return the latest row of each device, model, method and option, without --tiny, in the plan's order."""
    found: dict[tuple[str, Job], Row] = {}
    for row in sorted((row for row in rows if not row["tiny"]), key=lambda row: row["measured"]):
        found[row["device"], Job(row["model"], row["method"], row["option"])] = row
    order = {job: place for place, job in enumerate(plan([], tiny=False))}
    return [found[key] for key in sorted(found, key=lambda key: order.get(key[1], len(order)))]


def figure(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:,.{digits}f}{unit}"


def changed(settings: Row, base: Row) -> str:
    """`--key value` of each flag that is not the base's."""
    return " ".join(f"`--{key} {value}`" for key, value in settings.items() if base.get(key) != value)


def summary(row: Row) -> str:
    """A row in a line of the terminal."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    if row["method"] == "attention":
        return "; ".join(
            f"{name} logits {d['logits']:.1e} gradients {d['gradients']:.1e} moved {d['moved']:.1e}"
            for name, d in row["differences"].items()
        )
    used = f", MFU {row['mfu']:.1f} %" if row["mfu"] is not None else ""
    return f"{row['tokens_per_second']:,.0f} tokens/s, {row['step_time']:.3f} s/step{used}, {row['peak_memory_gib']:.1f} GiB"


def runs(rows: list[Row]) -> str:
    """One table for each model and method: speed, memory, and how many times the base's speed."""
    head = [
        "option",
        "flags",
        "tokens/s",
        "supervised tokens/s",
        "s/step",
        "x base",
        "MFU",
        "MFU of the work done",
        "allocated",
        "reserved",
        "last loss",
    ]
    found = []
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows if row["method"] in NAMES):
        its = [row for row in rows if (row["model"], row["method"]) == (model, method)]
        first: Row = next((row for row in its if row["option"] == "base"), {})
        lines = []
        for row in its:
            start = [row["option"], changed(row["settings"], BASE if row is first else first.get("settings", BASE))]
            if row["status"] != "ok":
                lines.append([*start, f"{row['status']}: {row['reason'].replace('|', '/')}", *[""] * 8])
                continue
            times = row["tokens_per_second"] / first["tokens_per_second"] if first.get("status") == "ok" else None
            lines.append(
                [
                    *start,
                    figure(row["tokens_per_second"], 0),
                    figure(row["supervised_tokens_per_second"], 0),
                    figure(row["step_time"], 3),
                    figure(times, 2),
                    figure(row["mfu"], 1, " %"),
                    figure(row["mfu_of_work_done"], 1, " %"),
                    figure(row["peak_memory_gib"], 1, " GiB"),
                    figure(row["reserved_memory_gib"], 1, " GiB"),
                    figure(row["last_loss"], 3),
                ]
            )
        found.append(f"### {model}, {NAMES[method]}\n\n{markdown(head, lines)}")
    return "\n\n".join(found) or "No run was measured here yet."


def attention(rows: list[Row]) -> str:
    """Packed against unpacked samples: the largest relative differences, and what rounding would excuse."""
    head = ["model", "attention", "precision", "logits (allowed)", "gradients (allowed)", "moved by other samples", ""]
    lines = []
    for row in (row for row in rows if row["method"] == "attention"):
        verdict = "equal" if row["status"] == "ok" else f"{row['status']}: {row['reason'].replace('|', '/')}"
        if not row.get("differences"):
            lines.append([row["model"], row["option"], "", "", "", "", verdict])
        for precision, off in row.get("differences", {}).items():
            pairs = (f"{off[key]:.1e} ({off[f'{key}_allowed']:.1e})" for key in ("logits", "gradients"))
            lines.append([row["model"], row["option"], precision, *pairs, f"{off['moved']:.0e}", verdict])
    return markdown(head, lines) if lines else "Not measured here yet."


def best(rows: list[Row], method: str) -> Row | None:
    """The row of a method with the highest MFU."""
    known = [row for row in rows if row["method"] == method and row["status"] == "ok" and row["mfu"] is not None]
    return max(known, key=lambda row: row["mfu"], default=None)


def verdict(rows: list[Row]) -> str:
    """The best row of each method on each device, beside what was aimed at."""
    devices = dict.fromkeys([AIMED_DEVICE, *(row["device"] for row in rows)])
    lines = []
    for device in devices:
        for method, name in NAMES.items():
            row = best([row for row in rows if row["device"] == device], method)
            aim = device == AIMED_DEVICE
            if row is None:
                lines += [f"- {device}, {name}: no run with an MFU yet; the aim is {AIM:.0f} %."] if aim else []
                continue
            met = f"; the aim of {AIM:.0f} % is {'met' if row['mfu'] >= AIM else 'missed'}" if aim else ""
            lines.append(f"- {device}, {name}: {row['mfu']:.1f} % MFU ({row['model']}, {row['option']}){met}.")
    return "\n".join(lines)


def sections(rows: list[Row]) -> str:
    """What each device gave."""
    parts = []
    for device in dict.fromkeys(row["device"] for row in rows):
        its = [row for row in rows if row["device"] == device]
        pins = list(dict.fromkeys(in_words(row["versions"]) for row in its))
        codes = list(dict.fromkeys(row["commit"] or f"code {row['code']}" for row in its))
        memory = f" ({its[0]['device_memory_gib']} GiB)" if its[0]["device_memory_gib"] else ""
        days = sorted(row["measured"][:10] for row in its)
        parts.append(
            f"## {device}{memory}\n\nMeasured {days[0]} to {days[-1]} at {', '.join(codes)}, with {'; '.join(pins)}."
        )
        parts += [runs(its), f"### Packed samples alone and together\n\n{attention(its)}"]
    return "\n\n".join(parts)


def tables(rows: list[Row]) -> dict[str, str]:
    rows = newest(rows)
    return {
        "verdict": verdict(rows) if rows else f"{UNMEASURED}.",
        "base": f"Base: {changed(BASE, {})}",
        "devices": sections(rows),
    }


def show_plan(jobs: list[Job], flags_of: Callable[[Job], Row]) -> None:
    """One line a row: what would be measured."""
    for job in jobs:
        flags = {} if job.method == "attention" else flags_of(job)
        print(" ".join(job), *(f"--{key} {value}" for key, value in flags.items() if BASE.get(key) != value))
    print(f"{len(jobs)} rows")
