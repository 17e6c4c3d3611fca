"""Every strategy gives the losses and gradient norms of a single process.

    python -m benchmarks.parity                     # all strategies x world sizes x accumulation -> docs/parity.md

The cases are those of testing/parity.py; those of one world size share one process group. The reference is one process without
any engine.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from testing.parity import ACCUMULATIONS, WORLD_SIZES, cases, reference_of, references, worst
from testing.runs import REPOSITORY, STEPS, run_cases


def table(results: dict[int, dict[str, Any]], reference: dict[str, Any], accumulations: tuple[int, ...]) -> str:
    """The markdown table of docs/parity.md."""
    lines = [
        "| strategy | world size | accumulation | loss | gradient norm | held-out loss |",
        "|---|---|---|---|---|---|",
    ]
    for world_size, found in results.items():
        for case in cases(world_size, accumulations):
            difference = worst(found[case["name"]], reference[reference_of(case["strategy"])])
            figures = " | ".join(f"{difference[key]:.1e}" for key in ("loss", "grad_norm", "eval_loss"))
            lines.append(f"| {case['strategy']} | {world_size} | {case['accumulation']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "parity.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        reference = run_cases(1, references(), Path(folder) / "reference")
        results = {size: run_cases(size, cases(size), Path(folder) / str(size)) for size in WORLD_SIZES}
    first, last = reference["single+sgd"]["loss"][0], reference["single+sgd"]["loss"][-1]
    from brigade.run.directory import versions

    text = (
        Path(__file__)
        .with_name("parity_page.md")
        .read_text()
        .replace("{table}", table(results, reference, ACCUMULATIONS))
        .replace("{steps}", str(STEPS))
        .replace("{first}", f"{first:.3f}")
        .replace("{last}", f"{last:.3f}")
        .replace("{versions}", ", ".join(f"{name} {number}" for name, number in versions().items()))
    )
    options.out.write_text(text)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
