"""A stranger's tokenizer is tried in a process with limits before this one loads it.

It may make very many letters of one, or its patterns may backtrack for ever: the Rust library aborts its process then, or
holds it. Texts of its own show most of that; the first rows of the data show what only their words bring about.
"""

import faulthandler
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError, shown
from .. import upstream
from ..host import cache, files
from ..host.limits import memory_limit
from . import probe_tokenizer
from .rows import Chunk

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
DEADLINE = 180.0  # seconds until it is ended where it waits instead of computing
_CURE = "name another tokenizer, or take the step that does it out of the file"
_HELD = "it was tried, and held"
# Steps that look at each letter once, and of which no few make very many letters of one (NFKC 18, the others 2).
_PLAIN = re.compile(
    "NFK?[CD]|Lowercase|Strip(Accents)?|Bert(Normalizer|PreTokenizer|Processing)|ByteLevel|Metaspace|Whitespace(Split)?|Digits"
    "|Punctuation|UnicodeScripts|RobertaProcessing|Fuse|ByteFallback|Sequence|TemplateProcessing"
)
_FEW = 4  # plain steps
ROWS, LETTERS = 64, 2**17  # of a split that are tried, at most: usual tokenizers take 0.05 s for so many letters
_SHORT = 1000  # letters of a token; bytes of a step


def check(name: str | Path, place: str, revision: str | None = None) -> None:
    """Raise UserError at `place` for a tokenizer that cannot be tried within the limits of probe_tokenizer.py, or that makes far
    more of a text than it has letters. Each content is tried once; a file of plain steps need not be.

    name: a directory, or a name on the Hub. What is not there is left to whoever loads it.
    """
    for part in (FILE, *_further(name, revision)):
        file = _find(name, part, revision)
        if file is not None:
            key = ["tokenizer", cache.digest(Path(probe_tokenizer.__file__)), cache.digest(file)]
            cache.remembered(key, lambda file=file: _tried(file, place))  # type: ignore[misc]


def _further(name: str | Path, revision: str | None) -> list[str]:
    """Return the other files that Transformers may load in place of tokenizer.json: those of a release, and one by its path."""
    file = _find(name, CONFIG, revision)
    try:
        document = json.loads(files.read_text(file)) if file else {}
        named = [*document.get("fast_tokenizer_files", []), document.get("tokenizer_file")]
    except (OSError, ValueError, AttributeError, TypeError):  # whoever loads it says what is wrong
        return []
    return [part for part in named if isinstance(part, str) and part != FILE]


def _find(name: str | Path, part: str, revision: str | None) -> Path | None:
    if Path(name).is_dir():
        file = Path(name) / part
        return file if file.is_file() else None
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(name), part, revision=revision))
    except Exception:  # it has none, or the Hub is away
        return None


def _tried(file: Path, place: str) -> str:
    if _is_plain(file):
        return _HELD
    command = [sys.executable, "-P", probe_tokenizer.__file__, str(file)]
    alone = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # its threads' stacks would count as memory
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DEADLINE, env=alone)
        problem = done.stdout.strip()
        if done.returncode:
            said = done.stderr.strip().splitlines()[:1]
            problem = f"short texts take it more than {_limits()}{f' ({shown(said[0])})' if said else ''}"
    except subprocess.TimeoutExpired:
        problem = f"short texts take it more than {DEADLINE:g} s"
    if problem:
        raise UserError(place, f"the tokenizer {str(file)!r} is not used: {problem}", _CURE)
    return _HELD


def _limits() -> str:
    return f"{probe_tokenizer.SECONDS} s of a CPU, or {probe_tokenizer.MEMORY / 2**30:g} GiB"


def check_rows(tokenizer: "Tokenizer", chunk: Chunk) -> None:
    """Raise UserError at the first of a chunk's first rows whose texts the tokenizer does not take within the limits of
    probe_tokenizer.py. A forked process tries them, for it may be ended; a tokenizer of plain steps needs no trial.

    A row that cannot be read is left to whoever reads it.
    """
    parts = [getattr(tokenizer, step) for step in probe_tokenizer.STEPS]
    longest_word = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if _are_plain([json.loads(part.__getstate__()) for part in parts if part is not None], longest_word):
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_try_rows, args=(tokenizer, chunk, theirs), daemon=True)
    with upstream.variables(TOKENIZERS_PARALLELISM="false"):  # the library warns of a fork unless it is told so before
        child.start()
    theirs.close()
    number, problem = 0, ""
    with ours, suppress(EOFError):
        while ours.poll(DEADLINE):
            number, problem = ours.recv()
    child.kill()
    child.join()
    if problem:
        raise UserError(chunk.where.place(number), f"the tokenizer is not used: {problem}", _CURE)


def _try_rows(tokenizer: "Tokenizer", chunk: Chunk, tell: Connection) -> None:
    """Tell (row, problem) before each row, in case that it ends this process, and behind it; at the first problem return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # on which the Rust library writes as it fails
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (probe_tokenizer.SECONDS, probe_tokenizer.SECONDS))
    left = LETTERS
    with memory_limit(probe_tokenizer.MEMORY):
        for number, row in itertools.islice(chunk.rows(), ROWS):
            tell.send((number, f"the texts of this row take it more than {_limits()}"))
            for word in probe_tokenizer.words_of(row):
                text = word[: min(left, probe_tokenizer.SIZE)].encode(errors="replace").decode()
                left -= len(text)
                problem = probe_tokenizer.verdict(tokenizer, text)
                if problem:
                    tell.send((number, problem))
                    return
            tell.send((number, ""))
            if left <= 0:
                return


def _is_plain(file: Path) -> bool:
    """Whether a tokenizer.json has few steps, which are all plain, and no long tokens."""
    try:
        document: dict[str, Any] = json.loads(file.read_bytes())
        steps = [document.get(step) or {} for step in probe_tokenizer.STEPS]
        vocabulary = [*document["model"]["vocab"], *(token["content"] for token in document["added_tokens"])]
        tokens = [token if isinstance(token, str) else token[0] for token in vocabulary]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False
    longest_word = document["model"].get("max_input_chars_per_word", 0)
    return max(map(len, tokens), default=0) < _SHORT and _are_plain(steps, longest_word)


def _are_plain(steps: list[object], longest_word: int) -> bool:
    """Whether a tokenizer's parts have few steps, which are all plain, and its model takes no long words."""
    kinds = [_types(step) for step in steps]
    short = longest_word <= _SHORT and all(len(json.dumps(step)) < _SHORT for step in steps)
    return short and all(len(found) <= _FEW and all(map(_PLAIN.fullmatch, found)) for found in kinds)


def _types(node: object) -> list[str]:
    """Return the kinds of the steps within one."""
    if isinstance(node, list):
        return [kind for part in node for kind in _types(part)]
    if not isinstance(node, dict):
        return []
    kinds = [str(node["type"])] if "type" in node else []
    return kinds + [kind for part in node.values() for kind in _types(part)]
