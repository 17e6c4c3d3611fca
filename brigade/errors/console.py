"""What is printed: lines, tables and progress on a terminal or into a file, and how numbers look in them."""

import functools
import io
import math
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text
    from tqdm import tqdm

OF_LOGS = 100  # columns of a run's tables in a file
BAR_SECONDS = 30  # between two lines of progress where there is no terminal
# What a terminal obeys. Most sequences begin in one of two ways: with ESC and a letter, or with one byte of C1.
_OBEYED = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, the cursor, erasing
    r"|(?:\x1b[\]P^_X]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x80-\x9f]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS: titles, links, the clipboard
    r"|\x1b[ -/]+[0-~]"  # character sets
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"  # every other control character but tab and line feed
    r"|[\u202a-\u202e\u2066-\u2069]"  # what reverses the letters that follow, so that they read as others
)


def printable(text: str) -> str:
    """`text` without what a terminal would obey: escape sequences, control characters but tab and line feed, and marks that turn
    the direction of letters. Meant for all that comes from a file, a model or another host."""
    return _OBEYED.sub("", text)


def one_line(text: str) -> str:
    """`text` as a comment of a file can hold it: a space for each line's end, control character and letter that nobody sees."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class _Shown:
    """A stream that passes on only printable text. On a terminal's stderr libraries may still draw progress bars: there a text
    may begin with a carriage return, or consist of line feeds and cursor-up sequences."""

    _OF_A_BAR = re.compile(r"\r|(?:\n|\x1b\[A)+$")

    def __init__(self, stream: TextIO, bars: bool) -> None:
        self.beneath, self._bars = stream, bars

    def write(self, text: str) -> int:
        begin = self._OF_A_BAR.match(text) if self._bars else None
        first = begin[0] if begin else ""
        self.beneath.write(first + printable(text[len(first) :]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def beneath(stream: TextIO) -> TextIO:
    """The stream beneath the guard, for code that writes our own escape sequences, and all other text through printable()."""
    return getattr(stream, "beneath", stream)


def guard_output(errors: str = "backslashreplace") -> None:
    """Keep what this process prints from controlling a terminal, and letters that the terminal's encoding lacks
    (PYTHONIOENCODING=ascii, LANG=C) from ending it. errors: how such a letter is shown, as in io.TextIOWrapper"""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        own = beneath(stream)
        if isinstance(own, io.TextIOWrapper):
            own.reconfigure(errors=errors)
            if own is stream:
                setattr(sys, name, _Shown(own, name == "stderr" and own.isatty()))


def on_one_line(text: str) -> None:
    """Show `text` on stderr, if that is a terminal, in place of what was shown so before; "" leaves the line empty."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{printable(text)}", end="", file=beneath(sys.stderr), flush=True)


class Losses:
    """Tells once on stderr that output is lost. Whoever writes for a run holds one."""

    def __init__(self) -> None:
        self._told = False

    def tell(self, error: OSError) -> None:
        """Say that output is lost from here on, unless it has been said. error: why"""
        if not self._told:
            self._told = True
            with suppress(OSError):
                print(f"some output is lost from here on: {error}; the run goes on", file=sys.stderr, flush=True)


class _Unfailing(io.FileIO):
    """A terminal, pipe or file to which writing never fails: what it does not take is lost."""

    def __init__(self, number: int, losses: Losses) -> None:
        super().__init__(number, "w", closefd=False)
        self._losses = losses

    def write(self, data: "ReadableBuffer") -> int:
        try:
            while (written := super().write(data)) is None:  # another program made it non-blocking, and it is full
                select.select([], [self], [])
            return written
        except OSError as error:
            if self.fileno() != 2:
                self._losses.tell(error)
            return memoryview(data).nbytes


def never_end_by_writing() -> None:
    """Keep this process from ending because it cannot write: a terminal may die, a pipe's reader may end, and a log's disk may be
    full. The run that the process watches over counts for more than its words."""
    losses = Losses()
    for name in ("stdout", "stderr"):
        stream = beneath(getattr(sys, name))
        if stream is None:  # it was closed before this process began: `>&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            buffer = io.BufferedWriter(_Unfailing(stream.fileno(), losses))
            how = stream.encoding, "backslashreplace", "\n", True  # errors, line's end, line by line
            setattr(sys, name, io.TextIOWrapper(buffer, *how))
    guard_output()


def figure(value: float, digits: int) -> str:
    """`value` with `digits` decimals, or as many as show two of its digits where that would make it 0.00."""
    if value and not round(value, digits):
        digits = 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f}"


def has_width() -> bool:
    """Whether output has a limited number of columns: those of a terminal, or COLUMNS. A file or a pipe has no width."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def console(
    soft_wrap: bool = False,
    highlight: bool = True,
    file: IO[str] | None = None,
    columns: int = 160,
    **terminal: Any,
) -> "Console":
    """Return a rich Console as wide as the terminal or COLUMNS. Only our own code sets colours: brackets in a text are no markup,
    and what a terminal would obey is left out.

    columns: the width into a file or a pipe, where no line ends in blanks
    terminal: rich's own words for what it writes to, where it is not what it looks like
    """
    return _console_class()(
        width=None if has_width() else columns,
        file=file or (beneath(sys.stdout) if sys.stdout.isatty() else _Trimmed(beneath(sys.stdout))),  # type: ignore[arg-type]
        markup=False,
        emoji=False,
        soft_wrap=soft_wrap,
        highlight=highlight,
        **terminal,
    )


@functools.cache
def _console_class() -> "type[Console]":
    from rich.console import Console  # not at the top: most commands print no table
    from rich.segment import Segment

    class Printable(Console):
        def render_str(self, text: str, **how: Any) -> "Text":  # before columns are measured
            return super().render_str(printable(text), **how)

        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> Iterator[Segment]:
            for part in super().render(renderable, options):
                yield part if part.control else Segment(printable(part.text), part.style)

    return Printable


class _Trimmed:
    """Takes what a rich Console writes, whole lines at a time, and leaves out the blanks at their ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Lines:
    """Takes what tqdm writes, each state of a bar as a line."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr)

    def flush(self) -> None:
        sys.stderr.flush()


def bar(total: int | None, doing: str, unit: str) -> "tqdm[NoReturn]":
    """A tqdm for work that may take long: a bar on a terminal, elsewhere a line every BAR_SECONDS."""
    from tqdm import tqdm

    shared = {"total": total, "desc": printable(doing), "unit": unit, "unit_scale": True, "leave": False}
    if sys.stderr.isatty():
        return tqdm(**shared, delay=1, dynamic_ncols=True, file=beneath(sys.stderr))
    size = "{n_fmt} of {total_fmt} {unit}, {percentage:.0f}%" if total else "{n_fmt} {unit}"
    how = {"bar_format": f"{{desc}}: {size}, elapsed {{elapsed}}" + ", ETA {remaining}" * bool(total), "miniters": 1}
    return tqdm(**shared, **how, delay=BAR_SECONDS, mininterval=BAR_SECONDS, maxinterval=BAR_SECONDS, file=_Lines())


def marking(out: "Console") -> str:
    """How a rich Console can mark words: `green`, `underlined` (NO_COLOR), or `in [[ ]]` (a file, a pipe, TERM=dumb)."""
    if out.color_system is None:
        return "in [[ ]]"
    return "underlined" if out.no_color else "green"


def folded(parts: list[str], width: int | None) -> str:
    """Join parts with two spaces, in lines of at most `width` columns, except where one part is longer by itself.

    width: None: one line
    """
    lines = parts[:1]
    for part in parts[1:]:
        if width is None or len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(f"    {part}")
    return "\n".join(lines)


def counted(number: int, thing: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def millions(parameters: int) -> str:
    """`42 M`, `3.4 M`, `61,440`"""
    if parameters < 1e6:
        return f"{parameters:,}"
    return f"{parameters / 1e6:,.{0 if parameters >= 1e7 else 1}f} M"


def billions(parameters: int) -> str:
    """`8.19 B`; below 0.1 B in millions"""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else millions(parameters)
