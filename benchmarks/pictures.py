"""Pictures of README and docs, each made anew by one command from data in the repository.

    python -m benchmarks.pictures              # all of them; needs Debian's chromium and chromium-driver for the first
    python -m benchmarks.pictures parity       # one of them

`docs/run.svg` is made of a run's own output (benchmarks/picture.py), the others of docs/ by the benchmarks that measure them.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import bubble_tables, communication, local_steps_tables, network_tables, pages, states
from benchmarks.pages import DOCS, EVIDENCE, REPOSITORY, RESULTS
from brigade.__main__ import main as brigade

RUNS = (
    REPOSITORY / "benchmarks" / "data" / "runs"
)  # what two runs of the default recipe left behind, without their weights
ALLOWED, LEAST = 1e-5, 1e-8  # relative differences: in the tests of parity; the least that is told apart
DAMAGED = "a gradient 1 % too large"  # rows that show that a difference would be seen


def page(path: Path) -> None:
    """The first screen of a run's page, as a browser shows it."""
    from testing.browser import browser, show

    with tempfile.TemporaryDirectory() as folder, browser() as driver:
        html = Path(folder) / "report.html"
        if brigade(["report", str(RUNS / "lr-0.003"), "--html", str(html), "--page_only"]):
            raise SystemExit("no page was written")
        show(driver, html, width=1280, height=1180)
        driver.save_screenshot(str(path))


def parity(path: Path) -> None:
    """A mark for each run and figure: its largest relative difference from one process."""
    from brigade.report import charts, library

    rows = [row for row in pages.read(RESULTS / "parity_axes.csv") if row["covers"] != DAMAGED]
    marks = [
        {"axis": row["axis"], "of": name, "difference": max(LEAST, float(row[key]))}
        for row in rows
        for key, name in (("loss", "training loss"), ("grad_norm", "gradient norm"), ("eval_loss", "held-out loss"))
        if row[key]
    ]
    scale = {"type": "log", "domain": [LEAST, 2 * ALLOWED], "nice": False}
    title = (
        f"relative difference from a single process; at the left edge {LEAST:.0e} and less; red: what the tests allow"
    )
    powers = [10.0**power for power in range(-8, -4)]
    x = {"field": "difference", "type": "quantitative", "scale": scale, "title": title}
    x["axis"] = {"format": ".0e", "values": powers}
    y = {"field": "axis", "type": "nominal", "title": None}
    colour = {"field": "of", "type": "nominal", "scale": {"range": charts.COLOURS}, "legend": {"symbolType": "square"}}
    tick = {"type": "tick", "thickness": 1.5, "height": 12, "opacity": 0.6}
    encoding = {"x": x, "y": y, "yOffset": {"field": "of", "type": "nominal"}, "color": colour}
    rule = {"type": "rule", "color": "#d03b3b", "strokeWidth": 1.5}
    spec = {"data": {"values": marks}, "height": 300, "config": charts.CONFIG}
    limit = {"data": {"values": [{}]}, "mark": rule, "encoding": {"x": {"datum": ALLOWED}}}
    spec["layer"] = [{"mark": tick, "encoding": encoding}, limit]
    path.write_bytes(
        library.picture(spec, f"{len(rows)} runs whose matrices, sequences, experts or layers are divided over ranks")
    )


def network(path: Path) -> None:
    network_tables.draw(pages.read(RESULTS / "network.csv"), path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "page": page,
    "parity": parity,
    "network": network,
    "states": lambda path: states.draw(pages.read(states.RESULTS), path),
    "communication": lambda path: communication.draw(pages.read(communication.RESULTS), path),
    "pipeline": lambda path: bubble_tables.draw(pages.read(bubble_tables.RESULTS), path),
    "local-training": lambda _: local_steps_tables.draw(),  # and local-training-time
}


def main() -> None:
    parser = pages.command_line(__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *PICTURES], metavar="NAME", help=f"of {', '.join(PICTURES)}")
    for name in parser.parse_args().names or PICTURES:
        path = (DOCS if name == "page" else EVIDENCE) / f"{name}.png"
        PICTURES[name](path)
        print(f"wrote {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
