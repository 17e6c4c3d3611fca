"""How long until `launch` has a verdict: each fault of testbed/faults.py, several times on real hosts.

    python -m benchmarks.faults              # measures (root) -> benchmarks/results/faults.csv, docs/evidence/faults.md

A time runs from the fault to the end of launch and of the last process on any host; for faults that are there before the
start, from the command.
"""

import re
import statistics

from benchmarks import pages
from benchmarks.pages import EVIDENCE, markdown
from testbed.cluster import Cluster
from testbed.faults import FAULTS, lost, misses, provoke
from testbed.needs import require

RESULTS = pages.RESULTS / "faults.csv"
PAGE = EVIDENCE / "faults.md"


def measure(times: int, names: list[str], rows: list[dict[str, str]]) -> None:
    """Add a row per attempt. Raises RuntimeError where launch did not say what it must, once all have been tried."""
    where, wrong = pages.where(), []
    with Cluster(3, bare=("node2",)) as cluster:
        for attempt_number in range(times):  # round by round: a slow minute of the machine spreads over all faults
            for name in names:
                try:
                    attempt = provoke(cluster, FAULTS[name])
                    if not FAULTS[name].gone and (missing := misses(FAULTS[name], attempt)):
                        raise AssertionError(f"launch does not say {missing}:\n{attempt.said}")
                except (AssertionError, TimeoutError) as error:
                    wrong.append(f"{name}: {error}")
                    print(wrong[-1], flush=True)
                    continue
                row = {"fault": name, "attempt": str(attempt_number + 1), "seconds": f"{attempt.seconds:.1f}"}
                rows.append(row | where)
                print(name, row["seconds"], flush=True)
    if wrong:
        raise RuntimeError("\n".join(wrong))


def table(rows: list[dict[str, str]]) -> str:
    """Median and slowest time per fault, in Markdown."""
    lines = []
    for name, fault in FAULTS.items():
        seconds = [float(row["seconds"]) for row in rows if row["fault"] == name]
        if seconds:
            says = f"`{_plain(fault.says[0])}`" if fault.says else "nothing, it is gone; its ranks end by themselves"
            lines.append(
                [fault.what, says, lost(fault), f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"]
            )
    all_seconds = [float(row["seconds"]) for row in rows]
    attempts = min(sum(row["fault"] == name for row in rows) for name in {row["fault"] for row in rows})
    measured = f"{attempts} attempts each on hosts of a testbed, {rows[0]['machine']}; `python -m benchmarks.faults`"
    middle, slowest = statistics.median(all_seconds), max(all_seconds)
    whole = f"Median over all: {middle:.1f} s, slowest {slowest:.1f} s ({measured})."
    return markdown(["fault", "what is said", "lost", "median", "slowest"], lines) + f"\n\n{whole}"


def _plain(pattern: str) -> str:
    """The first words that a pattern stands for, with N for numbers and `...` where it takes any words."""
    words = pattern.split("|")[0].removesuffix("\\n").removeprefix("(?s)").replace(" +", " ")
    words = re.sub(r"\[\\d,\]\+|\\d\+?", "N", words).replace(".*", " ... ").replace(r"\S+", "...")
    return words.replace("\\", "")


def tables() -> dict[str, str]:
    return {"faults": table(pages.read(RESULTS))}


def main() -> int:
    parser = pages.command_line(__doc__)
    parser.add_argument("--times", type=int, default=5, help="attempts per fault (default: 5)")
    parser.add_argument("--only", nargs="*", choices=FAULTS, help="only these faults; the others' rows stay")
    options = parser.parse_args()
    require()
    rows: list[dict[str, str]] = []
    try:
        measure(options.times, options.only or list(FAULTS), rows)
    finally:  # an hour's work: what was measured before something failed is kept
        pages.replace(RESULTS, rows, "fault")
    pages.write(PAGE, tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
