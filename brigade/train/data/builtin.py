"""Where the built-in data set lies: chats about Python's standard library, and a small tokenizer trained on them."""

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .. import cache
from . import python_docs

BUILT_IN = "python-docs"  # its name in recipes, as a data set and as a tokenizer
FORMAT = 1  # raise it whenever a change alters the files written
TEMPLATE = Path(__file__).parent / "templates" / "chatml.jinja"


@dataclass(frozen=True)
class BuiltIn:
    """train, heldout: JSONL files; each line is {"messages": [user message, assistant message]}.
    tokenizer: a directory that AutoTokenizer.from_pretrained loads."""

    train: Path
    heldout: Path
    tokenizer: Path

    @classmethod
    def within(cls, directory: Path) -> "BuiltIn":
        return cls(directory / "train.jsonl", directory / "heldout.jsonl", directory / "tokenizer")


def ensure(home: Path) -> BuiltIn:
    """The built-in data under `home`, built by the first call (a few seconds on one core), from the documentation that
    the running Python carries in its own sources. Nothing is downloaded.

    Raises FileNotFoundError where this Python came without the sources of its standard library, RuntimeError where
    they hold too little text for the vocabulary, and UserError where `home` cannot be written.
    """
    template = TEMPLATE.read_text(encoding="utf-8")

    def build() -> str:
        return python_docs.build(home, FORMAT, template, BuiltIn.within).name

    key = "built in", FORMAT, sys.version, sysconfig.get_paths()["stdlib"], template, str(home.resolve())
    return BuiltIn.within(home / cache.remembered(key, build, lambda name: (home / name).is_dir()))
