"""Flags of a verb from its table, and numbers within limits."""

import argparse
import math
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from . import UserError
from .tables import Document

TYPES: dict[str, type] = {"path": Path, "int": int, "float": float}
OF_TABLES = ("word", "type", "least", "below", "also", "apart")  # what argparse does not take


def add_flags(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup", flags: Document, **tables: Collection[str]
) -> None:
    """Add flags: name -> what argparse takes of each.

    word: true of a word of the command line that is no flag; also: another spelling
    type: path, int or float; least, below: the numbers that it takes, from the first on and smaller than the second
    choices: a list, or the name of one of `tables`; apart: of flags with the same word a command takes one
    """
    words = {takes["apart"] for takes in flags.values() if "apart" in takes}
    apart = {word: parser.add_mutually_exclusive_group() for word in words}
    for flag, takes in flags.items():
        more = {key: value for key, value in takes.items() if key not in OF_TABLES}
        if "type" in takes:
            more["type"] = TYPES[takes["type"]]
        if "least" in takes:
            more["type"] = numeric(flag, takes["least"], more["type"], takes.get("below", math.inf))
        if isinstance(more.get("choices"), str):
            more["choices"] = tables[more["choices"]]
        names = [flag] if "word" in takes else [f"--{flag}", *([takes["also"]] if "also" in takes else [])]
        apart.get(takes.get("apart"), parser).add_argument(*names, **more)


def numeric(flag: str, least: float, kind: type[float] = int, below: float = math.inf) -> Callable[[str], float]:
    """Numbers from `least` on and smaller than `below`; raises UserError for all others, NaN too."""
    wanted = f"a {'whole ' if kind is int else ''}number from {least}"
    wanted += f" and below {below:g}" if below < math.inf else ""

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = kind(text)
            if least <= value < below:
                return value
        raise UserError(f"flag --{flag}", f"{text!r} is not {wanted}", f"give {wanted}, or leave the flag out")

    parse.__name__ = wanted.removeprefix("a ")  # for --help
    return parse
