"""`python -m brigade VERB`: one thin module per verb in brigade/commands/, imported only when it is asked for."""

import argparse
import importlib
import sys

from .errors import UserError

VERBS = {
    "eval": ("evaluate", "load a trained model as anybody would, measure its held-out loss and let it answer"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m brigade", description="Tools around train.py.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    words = sys.argv[1:] if argv is None else argv
    asked = words[0] if words and words[0] in VERBS else None
    for verb, (module, help_text) in VERBS.items():
        verb_parser = verbs.add_parser(verb, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if verb == asked:
            importlib.import_module(f"brigade.commands.{module}").add_arguments(verb_parser)
    options = parser.parse_args(words)
    try:
        return importlib.import_module(f"brigade.commands.{VERBS[options.verb][0]}").run(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
