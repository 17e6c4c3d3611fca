"""How often the host waits for the device in a step, by strategy and by line, on fake GPUs (testing/fake_gpu/).

    python -m benchmarks.waits             # runs the lane's cases -> benchmarks/results/waits.jsonl and the pages

Each case is that of testing/gpu_lane.py: two micro-steps in a step, a line of the log after each. The third step is counted, on
every rank. ZeRO is also run with DeepSpeed's throughput timer, which DeepSpeed turns on where nobody turns it off.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.pages import EVIDENCE, Row, markdown
from testing import gpu_lane
from testing.runs import run_cases
from testing.waits import of_ours, total

RESULTS = pages.RESULTS / "waits.jsonl"
# Counted once, on rank 0, in that commit's files with testing/waits.py beside them: {"case", "micro_steps", "waits"}.
BEFORE = pages.RESULTS / "waits_before.jsonl"
PAGES = {EVIDENCE / "fake-gpu.md": ("waits",), EVIDENCE / "waits.md": ("waits_lines", "waits_before")}
TIMED = ("zero1", "zero2", "zero3")
WHEN = ("micro-step", "step", "log line")


def rows() -> dict[str, Row]:
    """Return the committed rows by case: {"case", "micro_steps", "ranks"} as testing.waits.read() has them."""
    return {row["case"]: row for row in pages.read(RESULTS)}


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        found = gpu_lane.run(gpu_lane.EVERY, lambda: Path(tempfile.mkdtemp(dir=folder)))
        timed = [with_timer(name, Path(folder)) for name in TIMED]
        found |= run_cases(gpu_lane.CASES[TIMED[0]].ranks, timed, Path(folder), gpus=True)
    names = [*gpu_lane.EVERY, *map(timed_name, TIMED)]
    return [{"case": name} | {key: found[name]["waits"][key] for key in ("micro_steps", "ranks")} for name in names]


def timed_name(name: str) -> str:
    return f"{name}, DeepSpeed's timer"


def with_timer(name: str, folder: Path) -> dict[str, Any]:
    """Return a case whose ds_config asks for DeepSpeed's throughput timer."""
    case = gpu_lane.run_case(name)
    at = case["flags"].index("--ds_config") + 1
    config = json.loads((pages.REPOSITORY / case["flags"][at]).read_text())
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config | {"timers": {"throughput": {"enabled": True}}}))
    case["flags"][at] = str(path)
    return case | {"name": timed_name(name), "waits": gpu_lane.STEPS}


# ---- the page ------------------------------------------------------------------------------------------------------
def tables() -> dict[str, str]:
    """Return the table of strategies, those that wait alike in one line, the table of lines, and that of before."""
    every = rows()
    now = [every[name] for name in gpu_lane.EVERY]
    return {"waits": by_strategy(now), "waits_lines": by_line(now), "waits_before": before_and_after(every)}


def by_strategy(every: list[Row]) -> str:
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in every:
        for group in row["ranks"]:
            alike.setdefault(cells(group["waits"], row["micro_steps"]), []).append(called(row, group["ranks"]))
    head = ["", "ours per micro-step", "per step", "others' per micro-step", "per step", "log line", "all of a step"]
    return markdown(head, ([", ".join(names), *figures] for figures, names in alike.items()))


def called(row: Row, ranks: list[int]) -> str:
    """Return a case's name, with these ranks where not all of its ranks are meant."""
    if len(ranks) == sum(len(group["ranks"]) for group in row["ranks"]):
        return str(row["case"])
    return f"{row['case']} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"


def cells(waits: list[Row], micro_steps: int) -> tuple[str, ...]:
    ours = of_ours(waits)
    theirs = [each for each in waits if each not in ours]
    figures = [sum(each[when] for each in ours) for when in WHEN[:2]]
    figures += [sum(each[when] for each in theirs) for when in WHEN[:2]] + [sum(each[WHEN[2]] for each in waits)]
    return tuple(f"{figure:g}" for figure in (*figures, total(waits, micro_steps)))


def by_line(every: list[Row]) -> str:
    """Return each line that waits, with how often and in which cases."""
    lines: dict[tuple[str, ...], list[str]] = {}
    for row in every:
        of_case: dict[tuple[str, ...], list[int]] = {}
        for group in row["ranks"]:
            for each in group["waits"]:
                often = ", ".join(f"{each[when]:g} per {when}" for when in WHEN if each[when])
                of_case.setdefault((f"`{each['line']}`", each["why"], often), []).extend(group["ranks"])
        for line, ranks in of_case.items():
            lines.setdefault(line, []).append(called(row, sorted(ranks)))
    known = {row["case"] for row in every}
    return markdown(
        ["line", "what", "how often", "where"],
        ([*line, "all" if set(cases) == known else ", ".join(cases)] for line, cases in sorted(lines.items())),
    )


def before_and_after(every: dict[str, Row]) -> str:
    """Return how often a step waited at commit 467731d, does with DeepSpeed's timer, and does, on rank 0."""
    now = {name: row | {"waits": row["ranks"][0]["waits"]} for name, row in every.items()}
    columns = [
        {row["case"]: row for row in pages.read(BEFORE)},
        {name: now[timed_name(name)] for name in TIMED},
        now,
    ]
    lines = ([name, *(in_a_step(column.get(name)) for column in columns)] for name in columns[0])
    return markdown(["waits of a step, rank 0", "at commit 467731d", "now, with DeepSpeed's timer", "now"], lines)


def in_a_step(row: Row | None) -> str:
    return f"{total(row['waits'], row['micro_steps']):g}" if row else ""


def main() -> None:
    pages.command_line(__doc__).parse_args()
    pages.save(RESULTS, measure())
    found = tables()
    for page, names in PAGES.items():
        pages.write(page, {name: found[name] for name in names})


if __name__ == "__main__":
    main()
