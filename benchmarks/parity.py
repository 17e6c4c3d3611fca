"""Every strategy gives the losses and gradient norms of a single process.

    python -m benchmarks.parity                     # all strategies x world sizes x accumulation -> docs/evidence/parity.md
    python -m benchmarks.parity --revision main     # the runs of testing/golden.py here and there, to the last bit

The cases are those of testing/parity.py; those of one world size share one process group. The reference is one process without
any engine. --revision tells whether a change that should change nothing has changed a figure: the older code runs in a checkout
of its own, in this environment.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import golden
from benchmarks.pages import EVIDENCE, command_line, markdown, where, write
from testing.parity import ACCUMULATIONS, WORLD_SIZES, cases, reference_of, references, worst
from testing.runs import LONG, run_cases


def table(results: dict[int, dict[str, Any]], reference: dict[str, Any], accumulations: tuple[int, ...]) -> str:
    """The table of docs/evidence/parity.md."""
    lines = []
    for world_size, found in results.items():
        for case in cases(world_size, accumulations):
            difference = worst(found[case["name"]], reference[reference_of(case["strategy"])])
            figures = [f"{difference[key]:.1e}" for key in ("loss", "grad_norm", "eval_loss")]
            lines.append([case["strategy"], world_size, case["accumulation"], *figures])
    return markdown(["strategy", "world size", "accumulation", "loss", "gradient norm", "held-out loss"], lines)


def compare_with(revision: str) -> int:
    """Print which runs of testing/golden.py are not the same to the last bit at this revision and here. Returns 0 where all are,
    else 1."""
    with tempfile.TemporaryDirectory() as folder:
        then = Path(folder) / "then"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(then), revision], check=True)
        try:
            before, failed = golden.measure(golden.over(None), checkout=then)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(then)], check=True)
    if failed:
        print(f"at {revision} these fail: {', '.join(failed)}")
    return int(bool(golden.compared(golden.measure(golden.over(None)), before, tolerance=0)))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--revision", help="compare with this commit instead of writing the page")
    options = parser.parse_args()
    if options.revision:
        sys.exit(compare_with(options.revision))
    with tempfile.TemporaryDirectory() as folder:
        reference = run_cases(1, references(), Path(folder) / "reference", steps=LONG)
        results = {size: run_cases(size, cases(size), Path(folder) / str(size), steps=LONG) for size in WORLD_SIZES}
    first, last = reference["single+sgd"]["loss"][0], reference["single+sgd"]["loss"][-1]
    of_one = f"Loss of a single process: {first:.3f} at the first step, {last:.3f} at the last."
    measured = f"{of_one} Versions: {where()['versions']}."
    write(EVIDENCE / "parity.md", {"parity": table(results, reference, ACCUMULATIONS), "measured": measured})


if __name__ == "__main__":
    main()
