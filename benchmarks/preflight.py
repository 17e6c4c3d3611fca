"""What `python -m brigade check` finds, and how soon: each fault of testbed/preflight.py on three real hosts, several times.

python -m benchmarks.preflight              # measures (root) -> benchmarks/results/preflight.csv, docs/evidence/preflight.md
python -m benchmarks.preflight --only NAME  # only these faults; the others' rows stay
"""

import statistics
from typing import Any

from benchmarks import pages
from benchmarks.pages import EVIDENCE, markdown
from brigade.check.checks import checks, thresholds
from brigade.check.result_file import schema
from brigade.errors.console import counted
from testbed.cluster import Cluster
from testbed.needs import require
from testbed.preflight import INJECTED, check, misses, provoke

RESULTS = pages.RESULTS / "preflight.csv"
PAGE = EVIDENCE / "preflight.md"
SOUND = (2, 4, 8)  # hosts


def measure(times: int, names: list[str], rows: list[dict[str, str]]) -> None:
    """Add a row per attempt. Raises RuntimeError where a fault was not found, or a sound cluster not called so."""
    here, wrong = pages.where(), []

    def add(name: str, seconds: float) -> None:
        rows.append({"fault": name, "seconds": f"{seconds:.1f}"} | here)
        print(name, rows[-1]["seconds"], flush=True)

    for count in SOUND if "sound" in names else ():
        with Cluster(count) as cluster:
            cluster.hostfile(1)
            for _ in range(times):
                attempt = check(cluster)
                if attempt.exit_code:
                    wrong.append(f"{count} sound hosts: {attempt.said}")
                add(f"sound-{count}", attempt.seconds)
    with Cluster(3) as cluster:
        cluster.hostfile(1)
        for _ in range(times):
            for fault in (fault for fault in INJECTED if fault.name in names):
                attempt = provoke(cluster, fault)
                if missed := misses(fault, attempt):
                    wrong.append(f"{fault.name}: check does not say {missed}")
                    print(wrong[-1], flush=True)
                else:
                    add(fault.name, attempt.seconds)
                cluster.heal()
    if wrong:
        raise RuntimeError("\n".join(wrong))


def _faults(rows: list[dict[str, Any]]) -> str:
    lines = []
    for fault in INJECTED:
        seconds = [float(row["seconds"]) for row in rows if row["fault"] == fault.name]
        if seconds:
            size = "" if fault.size == "quick" else f" (`{'--full' if fault.size == 'full' else 'no flag'}`)"
            lines.append([fault.about, f"{fault.check}{size}", fault.level, f"{statistics.median(seconds):.1f} s"])
    counts = [sum(row["fault"] == fault.name for row in rows) for fault in INJECTED]
    least = min(filter(None, counts), default=0)
    tried = f"{len(lines)} faults, {counted(least, 'attempt')} each, three hosts"
    said = f"{tried}, {rows[0]['machine']}; `python -m benchmarks.preflight`."
    return markdown(["fault of one host", "check that names it", "level", "whole command"], lines) + f"\n\n{said}"


def _sound(rows: list[dict[str, Any]]) -> str:
    lines = []
    for count in SOUND:
        seconds = [float(row["seconds"]) for row in rows if row["fault"] == f"sound-{count}"]
        if seconds:
            lines.append([count, f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"])
    return markdown(["hosts on two cores", "`--quick`, median", "slowest"], lines)


def _checks() -> str:
    words = {"quick": "`--quick`", "usual": "no flag", "full": "`--full`"}
    rows = ([check.group, check.name, words[check.size], _cell(check.about)] for check in checks())
    return markdown(["group", "check", "from", "what it reads, and its threshold"], rows)


def _thresholds() -> str:
    rows = (
        [
            name,
            "below" if t.below else "above",
            *("-" if x is None else f"{x:g}" for x in (t.yellow, t.red)),
            t.unit,
            t.source,
        ]
        for name, t in thresholds().items()
    )
    return markdown(["threshold", "bad is", "warning", "not sound", "unit", "source"], rows)


def _json() -> str:
    found = schema()
    rows = []
    parts = {"the whole": found, "each of `checks`": "OfCheck", "each of `results`": "Found"}
    parts |= {"`sweep`": "OfSweep", "each of `timed`": "Timed"}
    for name, model in parts.items():
        properties = (found if model is found else found["$defs"][model])["properties"]
        rows += [[name, f"`{key}`", _type(of), of.get("description", "")] for key, of in properties.items()]
    return markdown(["in", "key", "type", "meaning"], rows)


def _type(of: dict[str, Any]) -> str:
    if "enum" in of or "const" in of:
        return ", ".join(f"`{value}`" for value in of.get("enum", [of.get("const")]))
    return " or ".join(_type(one) for one in of["anyOf"]) if "anyOf" in of else str(of.get("type", "see below"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def tables() -> dict[str, str]:
    rows = pages.read(RESULTS)
    return {
        "preflight-faults": _faults(rows),
        "preflight-sound": _sound(rows),
        "preflight-checks": _checks(),
        "preflight-thresholds": _thresholds(),
        "preflight-json": _json(),
    }


def main() -> int:
    parser = pages.command_line(__doc__)
    names = ["sound", *(fault.name for fault in INJECTED)]
    parser.add_argument("--times", type=int, default=3, help="attempts per fault (default: 3)")
    parser.add_argument("--only", nargs="*", choices=names, help="only these faults; the others' rows stay")
    options = parser.parse_args()
    require()
    rows: list[dict[str, str]] = []
    try:
        measure(options.times, options.only or names, rows)
    finally:
        pages.replace(RESULTS, rows, "fault")
    pages.write(PAGE, tables())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
