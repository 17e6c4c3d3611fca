"""Results, and the pages of docs/ that show them: people write the pages, and commands write the tables between markers.

    python -m benchmarks.pages             # every table anew, from the results that are committed
    python -m benchmarks.pages states      # those of docs/evidence/states.md
    python -m benchmarks.pages --check     # 1 where a page is not what the results give

A table begins at a line `<!-- table: NAME (COMMAND) -->` and ends at `<!-- end -->`. The module that COMMAND runs has a
function tables(), which returns the text of each NAME from committed results. Without one, only COMMAND can write it.
"""

import argparse
import csv
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"  # guides, which people read
EVIDENCE = DOCS / "evidence"  # what was measured, which guides link to
RESULTS = REPOSITORY / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- table: (\S+) \(([^)]+)\) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Row = dict[str, Any]


# ---- results -----------------------------------------------------------------------------------------------------
def read(path: Path) -> list[Row]:
    """Rows of a .csv, whose values are texts, or of a .jsonl."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file)) if path.suffix == ".csv" else [json.loads(line) for line in file]


def save(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def replace(path: Path, rows: list[Row], key: str) -> None:
    """Save rows in the place of those that have the same `key`; all others stay."""
    again = {row[key] for row in rows}
    save(path, [row for row in (read(path) if path.exists() else []) if row[key] not in again] + rows)


def machine() -> str:
    """The processor and how many of its cores are there."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.machine()}, no GPU"


def in_words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def where() -> dict[str, str]:
    """What a row says of where it was measured."""
    from brigade.train.run.versions import of_packages

    return {"machine": machine(), "versions": in_words(of_packages())}


# ---- commands ----------------------------------------------------------------------------------------------------
def command_line(about: str | None) -> argparse.ArgumentParser:
    """What reads a benchmark's command line. about: the module's docstring, for --help"""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


# ---- pages -------------------------------------------------------------------------------------------------------
def markdown(head: Iterable[str], lines: Iterable[Iterable[Any]]) -> str:
    """A table in Markdown."""
    head = list(head)
    rows = ("| " + " | ".join(map(str, line)) + " |" for line in lines)
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *rows])


def filled(text: str, tables: dict[str, str]) -> str:
    """A page's text with these tables in place of those of the same name. Raises KeyError for a name without a marker."""
    missing = tables.keys() - {name for _, name, *_ in TABLE.findall(text)}
    if missing:
        raise KeyError(f"no line `<!-- table: NAME (COMMAND) -->` names {', '.join(sorted(missing))}")
    return TABLE.sub(
        lambda found: f"{found[1]}{tables[found[2]]}\n{found[5]}" if found[2] in tables else found[0], text
    )


def write(page: Path, tables: dict[str, str]) -> None:
    page.write_text(filled(page.read_text(), tables))
    print(f"wrote {page}")


def command(page: Path, tables: Callable[[], dict[str, str]], about: str, argv: list[str] | None = None) -> int:
    """The command of a page whose tables are computed anew: it writes them or, with --check, returns 1 where the page has others.

    about: for --help
    """
    parser = command_line(about)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is out of date")
    check, before = parser.parse_args(argv).check, page.read_text()
    changed = (text := filled(before, tables())) != before
    if changed and not check:
        page.write_text(text)
    print(f"{page} is {'up to date' if not changed else 'out of date' if check else 'written'}.")
    return int(check and changed)


def from_results(page: Path) -> str:
    """A page's text with all tables that committed results give."""
    text = page.read_text()
    found: dict[str, str] = {}
    for module in dict.fromkeys(re.findall(r"<!-- table: \S+ \(python -m (benchmarks\.\w+)", text)):
        found |= getattr(importlib.import_module(module), "tables", dict)()
    here = {name for _, name, *_ in TABLE.findall(text)}  # a module may have tables on several pages
    return filled(text, {name: table for name, table in found.items() if name in here})


def main() -> int:
    every = sorted(DOCS.rglob("*.md"))
    parser = command_line(__doc__)
    parser.add_argument(
        "names", nargs="*", choices=[[], *(page.stem for page in every)], metavar="PAGE", help="default: all"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page is out of date")
    options = parser.parse_args()
    asked = [page for page in every if not options.names or page.stem in options.names]
    changed = [(page, text) for page in asked if (text := from_results(page)) != page.read_text()]
    for page, text in changed:
        print(f"{page.relative_to(REPOSITORY)} is not what the results give", file=sys.stderr)
        if not options.check:
            page.write_text(text)
    return bool(options.check and changed)


if __name__ == "__main__":
    raise SystemExit(main())
