"""Every strategy gives the losses and gradient norms of a single process.

    python -m benchmarks.parity                     # all strategies x world sizes x accumulation -> docs/evidence/parity.md
    python -m benchmarks.parity --revision 99ef201e # the cases of one and two processes here and there, to the last bit

The cases are those of testing/parity.py; those of one world size share one process group. The reference is one process without
any engine. --revision tells whether a change that should change nothing has changed a loss: the older code runs in a checkout of
its own, in this environment.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import EVIDENCE, markdown, where, write
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


# Runs in either checkout, with that checkout's own testing/.
OF_ONE_AND_TWO = """
import json, sys
from pathlib import Path
from testing.parity import cases, references
from testing.runs import run_cases
folder = Path(sys.argv[1])
found = run_cases(1, references(), folder / "1") | run_cases(2, cases(2, (1, 2)), folder / "2")
(folder / "figures.json").write_text(json.dumps(found))
"""


def figures_of(checkout: Path, folder: Path) -> dict[str, Any]:
    """Run the cases of one and two processes in a checkout: name -> {"loss", "grad_norm", "eval_loss"}, a list each."""
    folder.mkdir()
    subprocess.run([sys.executable, "-c", OF_ONE_AND_TWO, str(folder)], cwd=checkout, check=True)
    return json.loads((folder / "figures.json").read_text())


def compare_with(revision: str) -> int:
    """Print which cases are the same to the last bit at this revision and here. Returns 0 where all are, else 1."""
    with tempfile.TemporaryDirectory() as folder:
        then = Path(folder) / "then"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(then), revision], check=True)
        try:
            before = figures_of(then, Path(folder) / "before")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(then)], check=True)
        now = figures_of(Path.cwd(), Path(folder) / "now")
    both = sorted(before.keys() & now.keys())
    changed = [name for name in both if before[name] != now[name]]
    for name in changed:
        differences = worst(now[name], before[name])
        print(f"{name}: " + ", ".join(f"{key} {value:.1e}" for key, value in differences.items()))
    print(f"{len(both) - len(changed)} of {len(both)} cases are the same to the last bit as at {revision}")
    if before.keys() != now.keys():
        print("only in one of the two: " + ", ".join(sorted(before.keys() ^ now.keys())))
    return 1 if changed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
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
