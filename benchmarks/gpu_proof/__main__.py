"""Let this host's GPUs prove what runs on them, in 20 minutes.

    make test-gpu                                                  # in .venv
    make test-gpu WHEELS=wheels                                    # on a host without network, from a folder of wheels
    python3 -m benchmarks.gpu_proof --compare OTHER.json           # beside what another host has given
    python3 -m benchmarks.gpu_proof --only strategies kernels      # these parts

The parts come in the order of their worth, each a process with a time limit of its own: one that crashes or hangs loses itself
only. outputs/test-gpu/report.json and report.md are whole after each part, and at the end an archive holds them with all logs.
Exit code 1 when something fell short, 2 when the host has no GPU or no environment to run in. What there is no time, disk or
memory for is left out, and no failure.

This file and what it imports need Python's standard library only.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from . import archive, disk, environment, page
from .parts import PARTS, WORK, run_part, seconds_of

REPOSITORY = Path(__file__).resolve().parents[2]
MINUTES = 20.0
LONGER = 4  # times as many with --small: a fake GPU (testing/fake_gpu/) computes on a processor, which may be busy


def prove(options: argparse.Namespace, python: str, packages: dict[str, Any]) -> dict[str, Any]:
    """Run the parts, and keep the report after each. Returns the report."""
    began = time.monotonic()
    report: dict[str, Any] = {
        "format": 2, "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "small": options.small, "packages": packages,
        "machine": {}, "parts": {}, "fell_short": [],
    }  # fmt: skip
    parts = [part for part in PARTS if not options.only or part.name in (*options.only, "machine")]
    limits = seconds_of(parts, options.minutes * 60)
    for part in parts:
        left = options.minutes * 60 - (time.monotonic() - began)
        print(f"{part.name}: {part.about} ...", flush=True)
        limit = min(limits[part.name], left)
        result = run_part(part, python, options.output, limit, options.small, report["machine"].get("gpus", 0))
        report["parts"][part.name] = result
        if part.name == "machine" and result["rows"]:
            report["machine"] = result["rows"][0]["figures"]
        report["fell_short"] = fell_short(report["parts"])
        report["seconds"] = round(time.monotonic() - began, 1)
        keep(report, options)
        print(f"{part.name}: {page.summary(result)}", flush=True)
        if part.name == "machine" and not report["machine"].get("gpus"):
            break
    return report


def fell_short(parts: dict[str, Any]) -> list[dict[str, str]]:
    """Return what fell short in all parts, each with its reason and the command that shows it."""
    found = []
    for name, part in parts.items():
        rows = [row for row in part["rows"] if row["fell_short"]]
        found += [
            {"part": name, "what": row["what"], "why": row["fell_short"], "command": row["command"]} for row in rows
        ]
        if part["fell_short"]:
            found.append({"part": name, "what": name, "why": part["fell_short"], "command": part["command"]})
    return found


def keep(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the report and its page, each whole or not at all."""
    other = json.loads(options.compare.read_text()) if options.compare else None
    for name, text in {"report.json": json.dumps(report, indent=1), "report.md": page.page(report, other)}.items():
        temporary = options.output / f".{name}"
        temporary.write_text(text + "\n")
        temporary.replace(options.output / name)


def main(argv: list[str] | None = None) -> int:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu_proof", description=about, allow_abbrev=False)
    names = [part.name for part in PARTS]
    default = f"{MINUTES:g}, with --small {LONGER * MINUTES:g}"
    parser.add_argument("--minutes", type=float, help=f"of all parts together (default: {default})")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--compare", type=Path, metavar="OTHER.json", help="another host's report, beside this one")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="install what is missing from this folder only")
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "outputs" / "test-gpu", help="where the report goes"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny shapes and few steps: proves this command, not a GPU"
    )
    options = parser.parse_args(argv)
    if options.minutes is None:
        options.minutes = MINUTES * (LONGER if options.small else 1)
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: a number above 0")
    if options.compare:
        try:
            page.check(json.loads(options.compare.read_text()))
        except (OSError, ValueError) as error:
            parser.error(f"--compare {options.compare}: {error}; name a report.json that this command wrote")
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        python, packages = environment.choose(options.output, options.wheels)
    except environment.Lacking as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(disk.in_words(options.output), flush=True)
    report = prove(options, python, packages)
    shutil.rmtree(options.output / WORK / "models", ignore_errors=True)
    print("\n" + page.verdict(report))
    print(f"{options.output / 'report.json'}\n{options.output / 'report.md'}")
    print(f"to send, with all logs: {archive.write(options.output, report)}")
    if not report["machine"].get("gpus"):
        return 2
    return 1 if report["fell_short"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
