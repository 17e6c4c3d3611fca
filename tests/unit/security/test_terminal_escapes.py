"""Nothing that comes from a file, a model or another host controls the user's terminal."""

import time

import pytest

from brigade.errors import UserError
from brigade.errors.console import printable

TITLE = "\x1b]0;a title\x07"
CLIPBOARD = "\x1b]52;c;ZWNobyBoaQ==\x1b\\"
ERASE = "\x1b[2J\x1b[H"
OBEYED = [
    TITLE,
    CLIPBOARD,
    ERASE,
    "\x1b[8m",  # hides what follows
    "\x1b]8;;https://example.org\x1b\\",  # a link
    "\x1bP$qm\x1b\\",  # asks the terminal to type an answer
    "\x1bc",  # resets it
    "\x1b(0",  # another set of characters
    "\x9b2J",
    "\x9d0;a title\x9c",
    "\x07",
    "\x08",
    "\r",
    "\x0e",
    "\x7f",
    "\x85",
    "\u202e",
    "\u2066",
]


@pytest.mark.parametrize("obeyed", OBEYED, ids=ascii)
def test_what_a_terminal_would_obey_is_left_out(obeyed):
    left = printable(f"before{obeyed}after")
    assert not set(left) & set(map(chr, range(32))) and "\x1b" not in left
    assert left.startswith("before") and left.endswith("after") and len(left) <= len("before after")


def test_everything_else_stays():
    text = "línea 1\n\tline 2 你好 שלום \N{WINKING FACE} \\x1b[31m ~"
    assert printable(text) == text


def test_a_sequence_that_does_not_end_is_seen_as_text():
    assert printable("\x1b]0;title") == "]0;title"


def test_long_texts_take_no_time():
    begun = time.monotonic()
    for part in ("\x1b]", "\x1b[", "\x1b[1;", "\x9d", "\x1b(", "\x1b", "a"):
        printable(part * 20_000)
        printable("\x1b[" + "1" * 20_000)
    assert time.monotonic() - begun < 2


def test_a_mistake_is_told_without_escapes():
    said = str(UserError(f"a{TITLE}b.yaml", f"{ERASE}is wrong", f"do {CLIPBOARD}this\u202e"))
    assert said == "error: ab.yaml\n  is wrong\n  cure: do this"
