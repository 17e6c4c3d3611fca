"""Which kernels are right on this device, and how fast.

    python -m brigade kernels recipes/qwen3-8b/full.yaml         # a table, and the proof that later runs use
    python -m brigade kernels recipes/qwen3-8b/full.yaml --json  # the same as JSON (docs/gpu.md)

Run it on a host, in the environment that training uses. Exit code: 0; 1 where a path computes something else or breaks; 2 for a
mistake in the recipe.
"""

import argparse
import json
import sys
from pathlib import Path

from ..errors.console import console
from ..errors.flags import add_flags
from ..errors.tables import Fields, table
from ..train.model.location import load_config
from ..train.recipe import flags
from . import paths

STYLES = {"proven": "green", "slower": "green", "wrong": "bold red", "failed": "red", "absent": "dim"}


PASSES_ON = True  # words that are not ours are a recipe and train.py's flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.usage = "python -m brigade kernels [RECIPE] [--quick] [--seconds S] [--json]"
    add_flags(parser, table(Path(__file__).with_suffix(".yaml")))


def run(options: argparse.Namespace) -> int:
    """Prove, show and keep the proof. Returns the exit code."""
    from . import auto, models, proofs, prove

    named = options.rest[:1] if options.rest and not options.rest[0].startswith("-") else []
    settings = flags.load([*(["--recipe", *named] if named else []), *options.rest[len(named) :]])
    config, shapes = models.as_json(load_config(settings)), prove.shapes_of(settings)
    limits = prove.QUICK if options.quick else prove.FULL
    if options.seconds is not None:
        limits = limits | {"seconds": options.seconds}
    how = auto.words_for(settings)
    quicker = "" if options.quick else " (--quick: what `auto` chooses among, in 15 s)"
    print(f"trying kernels for at most {limits['seconds']:.0f} s{quicker}", file=sys.stderr)
    proof = prove.on_this_host(config, shapes, options.quick, limits=limits, **how)
    kept = proofs.write(proof) if prove.proven_times(proof) else None
    if options.json:
        print(json.dumps(proof, indent=1))
    else:
        show(proof)
        print(f"kept in {kept}" if kept else "not kept: no attention is proven, or the cache cannot be written")
    return 1 if any(row["status"] in (paths.WRONG, paths.FAILED) for row in proof["paths"].values()) else 0


def show(proof: Fields) -> None:
    """Print a proof as a table."""
    from rich.table import Table
    from rich.text import Text

    device, shapes = proof["key"]["device"], proof["key"]["shapes"]
    print(f"{device['name']}, driver {device['driver']}; {proof['key']['attention']}; {shapes['dtype']}, max_length "
          f"{shapes['max_length']}, micro-batch {shapes['micro_batch']}{', packed' * shapes['packing']}")  # fmt: skip
    table = Table("what", "path", "", "ms", "largest error / allowed", "why", box=None, pad_edge=False)
    for name, row in proof["paths"].items():
        parts = {key: (off, row["allowed"][key]) for key, off in row.get("errors", {}).items() if row["allowed"][key]}
        worst = max(parts, key=lambda key: parts[key][0] / parts[key][1], default=None)
        error = f"{worst} {parts[worst][0]:.1e} / {parts[worst][1]:.1e}" if worst else ""
        time = "" if row.get("ms") is None else f"{row['ms']:.2f}"
        why = row.get("why") or ("only its logits: it has no backward pass on a CPU" if row.get("forward_only") else "")
        chosen = name in proof["fastest"].values()
        status = Text(row["status"], style=STYLES[row["status"]])
        table.add_row(row["kind"], Text(name, style="bold" if chosen else ""), status, time, error, Text(why))
    console().print(table)
    taken = ", ".join(f"{kind} {name}" for kind, name in proof["fastest"].items())
    print(f"fastest that are proven: {taken or 'none'}; in {proof['seconds']} s")
