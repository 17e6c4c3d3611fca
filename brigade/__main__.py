"""`python -m brigade VERB`: one thin module per verb in brigade/commands/, imported only when it is asked for."""

import argparse
import importlib
import os
import sys

from .errors import UserError, did_you_mean, of_disk
from .errors.console import write_what_it_can

VERBS = {
    "launch": ("launch", "train a recipe on all hosts of a hostfile, or write a job file for it"),
    "prepare": ("prepare", "tokenise and pack a recipe's data into the cache, so that no run waits for it"),
    "eval": ("evaluate", "load a trained model as anybody would, measure its held-out loss and let it answer"),
    "export": ("export", "write one Hugging Face directory from any checkpoint of a run"),
    "plan": ("plan", "will it fit, how fast is it, and which strategy: before anything is queued"),
    "lint": (
        "lint",
        "say what is wrong with hostfiles, ds_configs, accelerate configs and recipes, alone and together",
    ),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m brigade", description="Tools around train.py.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    words = sys.argv[1:] if argv is None else argv
    asked = words[0] if words and words[0] in VERBS else None
    passes_on = False
    for verb, (module, help_text) in VERBS.items():
        description = help_text[0].upper() + help_text[1:] + "."
        verb_parser = verbs.add_parser(verb, help=help_text, description=description, allow_abbrev=False)
        if verb == asked:
            command = importlib.import_module(f"brigade.commands.{module}")
            command.add_arguments(verb_parser)
            passes_on = getattr(command, "PASSES_ON", False)
            if passes_on:
                verb_parser.usage = (
                    verb_parser.format_usage().removeprefix("usage: ").strip() + " [flags of train.py ...]"
                )
    try:
        options, rest = parser.parse_known_args(words)
        options.rest = rest
        if rest and not passes_on:
            raise _unknown(rest, verbs.choices[options.verb])
        return importlib.import_module(f"brigade.commands.{VERBS[options.verb][0]}").run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads has read enough: `python -m brigade plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter flushes, and fails, again
        return 1  # as rich does
    except Exception as error:
        if (known := of_disk(error)) is None:
            raise
        print(known, file=sys.stderr)
        return 2


def _unknown(rest: list[str], parser: argparse.ArgumentParser) -> UserError:
    """Of words that the verb's parser did not take."""
    flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
    if not flag:
        return UserError(
            "command line", f"{' '.join(rest)!r}: there are more words than it takes", f"see {parser.prog} --help"
        )
    known = [name for action in parser._actions for name in action.option_strings]
    return UserError(f"flag {flag}", "there is no such flag", did_you_mean(flag, known))


if __name__ == "__main__":
    write_what_it_can()
    raise SystemExit(main())
