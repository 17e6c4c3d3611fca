"""The page: one HTML file that holds all it needs. A run's texts are data in it: they are escaped, and no script in them runs."""

import base64
import csv
import hashlib
import io
import math
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..errors import UserError
from ..errors.console import one_line
from ..train.host import files
from ..train.run.page import FILE
from ..train.run.versions import now
from . import charts, facts, figures, library
from .comparing import Comparison, compare
from .figures import Figure
from .records import Record

HERE = Path(__file__).parent
MARK = "<!-- made by python -m brigade report -->"  # a file with this mark may be overwritten
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # a spreadsheet computes a cell that begins with one of these


def write(records: list[Record], path: Path) -> None:
    """Write the page of these runs. Raises UserError where it cannot be written, or another file is there."""
    try:
        if path.exists() and not _is_page(path):
            problem = "this file is no page of a run"
            raise UserError(str(path), problem, "name another --html, or move that file away")
        content = html(records).encode(errors="replace")  # a lone surrogate is no letter
        files.write(path, content, secret=any(record.answers for record in records))
    except OSError as error:
        problem = f"the page cannot be written: {error.strerror}"
        raise UserError(str(path), problem, "name another file: --html FILE") from None


def _is_page(path: Path) -> bool:
    try:
        with files.opened(path) as file:
            return MARK.encode() in file.read(400)
    except PermissionError:  # the page of another user who began the run, and only for that user's eyes
        return path.name == FILE


def html(records: list[Record]) -> str:
    """The page as one text: markup, style, the chart library and the data."""
    scripts = [library.javascript(), (HERE / "page.js").read_text()]
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"shown": facts.shown}
    several = len(records) > 1
    return environment.get_template("page.html.jinja").render(
        mark=Markup(MARK),
        title=" and ".join(record.name for record in records),
        records=records,
        comparison=compare(records) if several else Comparison(),
        figures=[(figure, _drawing(figure), _table(figure)) for figure in figures.all_figures(records)],
        facts=facts,
        described=lambda figure: figures.in_words(figure, facts.shown),
        written=now(),
        style=Markup((HERE / "page.css").read_text()),
        scripts=[Markup(script) for script in scripts],
        # A second lock: only these two scripts may run, whatever got into the page, and nothing may be fetched.
        hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _drawing(figure: Figure) -> Markup:
    return Markup("" if figure.empty else charts.text_of(charts.chart(figure)))


def _table(figure: Figure) -> facts.Table:
    """A chart as a table. A curve's rows are its first and last values, its lowest and highest, and some between."""
    if figure.bars:
        parts = dict.fromkeys(name for bar in figure.bars for name in bar.parts)
        rows = [[part, *(bar.parts.get(part) for bar in figure.bars)] for part in parts]
        return [figure.unit, *(bar.name for bar in figure.bars)], rows
    steps: dict[int, dict[str, float]] = {}
    for line in figure.curves:
        for place in charts.kept(line.values, max(4, facts.ROWS // len(figure.curves))):
            steps.setdefault(line.points[place][0], {})[line.name] = line.values[place]
    names = [line.name for line in figure.curves]
    return ["step", *names], [[step, *map(steps[step].get, names)] for step in sorted(steps)]


def write_files(records: list[Record], folder: Path) -> list[Path]:
    """Write each figure as a PNG, and as a CSV with every value. Returns the paths."""
    written = []
    try:
        files.make_folder(folder)
        for figure in figures.all_figures(records):
            if figure.empty:
                continue
            picture, table = folder / f"{figure.name}.png", folder / f"{figure.name}.csv"
            files.write(picture, library.picture(charts.chart(figure), figure.title))
            head, rows = figures.rows(figure)
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(map(_cells, [head, *rows]))
            files.write(table, text.getvalue())
            written += [picture, table]
    except OSError as error:
        problem = f"the figures cannot be written: {error.strerror}"
        raise UserError(str(folder), problem, "name another file: --html FILE, or --page_only") from None
    return written


def _cells(row: list[object]) -> list[object]:
    """A row that is safe in a spreadsheet: a formula, which may fetch and run things, gets an apostrophe; a text is one line."""
    texts = [one_line(value) if isinstance(value, str) else value for value in row]
    texts = [f"'{t}" if isinstance(t, str) and t.lstrip().startswith(_FORMULA) else t for t in texts]
    return ["" if isinstance(value, float) and math.isnan(value) else value for value in texts]
