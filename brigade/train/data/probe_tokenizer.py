"""A program of its own: `python -P probe_tokenizer.py FILE` tries a tokenizer.json on texts that are made to be expensive.

It prints what is wrong, or nothing. Its limits of memory and time may end it, or the Rust library, so it runs apart.
"""

from __future__ import annotations

import json
import resource
import string
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.normalizers import Normalizer

MEMORY = 3 * 2**29  # bytes of addresses; a vocabulary of 262,144 tokens takes 0.5 GiB
SECONDS = 30  # of a CPU, for all: usual tokenizers take 1 to 5
SIZE = 2**15  # letters of the longest probes; usual tokenizers take 10 ms for one
SLOWEST = 2.0  # seconds of a CPU for one probe
GROWTH, FIXED = 32, 1000  # letters or tokens of each byte, and of none, at most: NFKC makes 11 of U+FDFA's
LONGEST = 10_000  # letters of a token; long ones are runs of 256 blanks
STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def words_of(node: object) -> list[str]:
    """Return all texts in a part of a tokenizer.json: its patterns, and what it writes."""
    if isinstance(node, dict):
        return [word for value in node.values() for word in words_of(value)]
    if isinstance(node, list):
        return [word for value in node for word in words_of(value)]
    return [node] if isinstance(node, str) else []


def probes(document: dict[str, object]) -> list[str]:
    """Return the texts to try: nothing; then short runs of each letter, long ones of those that patterns name or have classes
    for. They end in what no pattern matches whole, and then in all that one may look for before it begins to backtrack."""
    words = [word for step in STEPS for word in words_of(document.get(step)) if len(word) < LONGEST]
    named = sorted(
        {letter for word in words for letter in word}, key=lambda letter: (letter in string.ascii_letters, letter)
    )
    letters = list(dict.fromkeys([*"aAzZ0 \n\t.'é中", *named]))[:80]
    shorts = list(dict.fromkeys([*string.printable, *letters]))
    end = "!" + "".join(letters)
    runs = [(word * 20)[:SIZE] for word in [*shorts, *words[:200]]]
    return ["", *shorts, *runs, *(run + end for run in runs), *(letter * SIZE + end for letter in letters)]


def steps_of(normalizer: Any) -> list[Normalizer]:
    """Return the steps of a normalizer one by one: what grows in nine of them is seen after two."""
    if type(normalizer).__name__ != "Sequence":
        return [] if normalizer is None else [normalizer]
    return [step for part in normalizer for step in steps_of(part)]


def flaw(tokenizer: Tokenizer, text: str) -> str:
    """Return what is wrong with how a tokenizer treats a text; "" where nothing is."""
    began, shown = time.process_time(), repr(text if len(text) < 30 else f"{text[:20]}...")
    most = FIXED + GROWTH * len(text.encode())
    written = text
    for step in steps_of(tokenizer.normalizer):
        written = step.normalize_str(written)
        if len(written) > most:
            return f"its normalizer makes {len(written):,} letters of {len(text):,} ({shown})"
    ids = tokenizer.encode(text).ids
    if len(ids) > most:
        return f"it makes {len(ids):,} tokens of {len(text):,} letters ({shown})"
    letters = len(tokenizer.decode(ids, skip_special_tokens=False))
    if letters > FIXED + GROWTH * most:
        return f"its decoder makes {letters:,} letters of {len(ids):,} tokens ({shown})"
    took = time.process_time() - began
    return f"it takes {took:.1f} s for {len(text):,} letters ({shown})" if took > SLOWEST else ""


def verdict(tokenizer: Tokenizer, text: str) -> str:
    """Return what is wrong with how a tokenizer treats a text, an error of its own included; "" where nothing is."""
    try:
        return flaw(tokenizer, text)
    except BaseException as error:  # a PanicException of Rust's is no Exception
        return f"it fails at {text[:20]!r}{'...' * (len(text) > 20)}: {type(error).__name__}: {error}"


def main(path: str) -> str:
    """Return what is wrong with the tokenizer in a file; "" where nothing is, or where it cannot be read."""
    from tokenizers import Tokenizer

    try:
        whole = json.loads(Path(path).read_bytes())
        document = {step: whole.get(step) for step in STEPS}
        del whole
        tokenizer = Tokenizer.from_file(path)
    except Exception:  # whoever loads it says what it lacks
        return ""
    token = max(tokenizer.get_vocab(), key=len, default="")
    if len(token) > LONGEST:
        return f"a token of it has {len(token):,} letters ({token[:20]!r}...)"
    return next(filter(None, (verdict(tokenizer, text) for text in probes(document))), "")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    print(main(sys.argv[1]))
