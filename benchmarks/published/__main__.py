"""Estimate each row of a table of measured runs, and say how far the estimates are from what the rows measured.

python -m benchmarks.published TABLE.csv --out OUT.csv

pred_tok_s_gpu_low and _high, pred_mem_gib_low and _high are the ends of 80 % intervals. That of memory is about what the row's
mem_kind says was measured: pred_mem_allocated_gib where it was allocated, else pred_mem_gib.
"""

import argparse
import sys
from pathlib import Path

from rich.table import Table

from brigade.errors import UserError
from brigade.errors.console import console, guard_output

from .table import predict_file, summary

COLUMNS = (
    "set",
    "rows",
    "estimated",
    "memory: rows",
    "median",
    "p90",
    "speed: rows",
    "median",
    "p90",
    "failed, called unfit",
    "ran, called unfit",
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "table", type=Path, help="a CSV with the columns of benchmarks/data/published.csv or playbook_h100.csv"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the rows go with their estimates")
    options = parser.parse_args(argv)
    guard_output()
    try:
        rows = predict_file(options.table, options.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    table = Table(*COLUMNS)
    for one in summary(rows):
        cells = [one["set"], one["rows"], one["expressed"]]
        for count, median, p90 in (one["memory"], one["speed"]):
            cells += [count, f"{median:.1f}%" if count else "", f"{p90:.1f}%" if count else ""]
        cells += [f"{one['failed_told']} of {one['failed']}", f"{one['ran_refused']} of {one['ran']}"]
        table.add_row(*map(str, cells))
    console().print(table)
    print(
        f"Wrote {options.out}. Errors are absolute, of the estimate to the measurement; a row without estimate says why."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
