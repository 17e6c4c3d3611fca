"""The verbs of `python -m brigade`, one thin module each: add_arguments(parser) and run(options) -> exit code."""
