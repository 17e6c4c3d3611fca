"""`python -m brigade prepare RECIPE`: tokenise a recipe's data now, so that no run waits for it."""

import argparse
import time

from .train.model import named
from .train.model.location import load_config
from .train.model.tokenizer import load_tokenizer, vocabulary
from .train.recipe import flags
from .train.recipe.batch import batch_arithmetic

PASSES_ON = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("recipe", help="a recipe; every key of its data: section is also a flag, as in train.py")


def run(options: argparse.Namespace) -> int:
    """Fill the cache that runs of this host read, and show what is in it. Returns 0 when the data is good."""
    settings = flags.load(["--recipe", options.recipe, *options.rest])
    batch = batch_arithmetic(settings.recipe.training, 1, settings.place("global_batch_size"))
    named.check_files(settings)

    from .train.data import report
    from .train.data.prepare import prepare
    from .train.loss.distillation import kept_of
    from .train.model.images.features import load_checked as load_processor

    began = time.time()
    tokenizer = load_tokenizer(settings, vocabulary(settings))
    images = load_processor(settings, tokenizer, load_config(settings)) if settings.recipe.data.images else None
    prepared = prepare(settings, tokenizer, images)
    print(report.figures(prepared, settings.recipe.data, settings.recipe.training, batch))
    for name, told in report.lines(prepared).items():
        print(f"{name}: {told}")
    kept = kept_of(settings, prepared)
    if kept:
        print(f"teacher: {kept}, by a run before its first step, or by train.py --prepare")
    report.show_sample(prepared, tokenizer)
    folder = prepared.folder
    size = sum(path.stat().st_size for path in folder.iterdir())
    done = "made" if folder.stat().st_mtime > began else "was there, read"
    print(f"{folder}: {size / 2**20:,.1f} MiB, {done} in {time.time() - began:.1f} s")
    return 0
