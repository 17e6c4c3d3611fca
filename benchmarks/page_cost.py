"""What a run's page costs: to begin it beside the training, to write it, and to open it.

    python -m benchmarks.page_cost     # measures -> benchmarks/results/page_cost.csv, docs/evidence/report.md

A page is written by a process of its own at the lowest priority. Begun: seconds that the run's thread needs to start it, from a
process that has imported torch. Written: seconds of one processor. Opened: from the call to the last chart, in headless Chromium.
"""

import resource
import tempfile
import time
from pathlib import Path

from benchmarks import pages
from benchmarks.pages import EVIDENCE, RESULTS, Row

STEPS = (240, 10_000, 100_000)
TIMES = 5
PAGE, FILE = EVIDENCE / "report.md", RESULTS / "page_cost.csv"


def measure(steps: int) -> Row:
    from brigade.train.run import page
    from testing.browser import browser, show
    from testing.recorded import write_run

    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", steps=steps)
        written, begun = [], []
        for _ in range(TIMES + 1):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            now = time.perf_counter()
            process = page._start(run)
            begun.append(time.perf_counter() - now)
            if process is None or process.wait():
                raise RuntimeError("no page was written")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            written.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        with browser() as driver:
            opened = min(show(driver, run / page.FILE) for _ in range(TIMES))
        size = (run / page.FILE).stat().st_size
    row = {"steps": steps, "begun_ms": 1000 * min(begun[1:]), "written_s": min(written[1:]), "megabytes": size / 1e6}
    return {key: f"{value:.3g}" for key, value in (row | {"opened_s": opened}).items()} | pages.where()


def tables() -> dict[str, str]:
    rows = pages.read(FILE)
    units = {"begun_ms": "ms", "written_s": "s", "megabytes": "MB", "opened_s": "s"}
    lines = [[f"{float(row['steps']):,.0f}", *(f"{row[key]} {unit}" for key, unit in units.items())] for row in rows]
    head = ["logged steps", "the run's thread, to begin it", "one processor, to write it", "size", "to open it"]
    return {"cost": f"{pages.markdown(head, lines)}\n\nMeasured on: {rows[0]['machine']}; {rows[0]['versions']}."}


def main() -> None:
    import torch  # noqa: F401  # a process as large as a run's

    pages.save(FILE, [measure(steps) for steps in STEPS])
    pages.write(PAGE, tables())


if __name__ == "__main__":
    main()
