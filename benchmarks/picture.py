"""docs/run.svg, the picture of a run in the README, from the output of `make demo`.

    make demo 2>&1 | .venv/bin/python -m benchmarks.picture

The lines are the run's own: its table, every 60th step, the held-out losses, and one answer of the saved model. A line that
is too long for the picture ends with "…".
"""

import io
import re
import sys

from rich.console import Console
from rich.text import Text

from benchmarks.pages import DOCS, REPOSITORY

COLUMNS = 112
TABLE = "(model|data|ranks|strategy|global batch|learning rate) "
ANSWER = "(question|reference|answer) "


def lines(output: str) -> list[str]:
    """The lines that the picture shows, in order."""
    run, _, saved = output.replace(f"{REPOSITORY}/", "").partition("Held-out loss in nats")
    losses, _, answers = saved.partition("\nquestion")
    table = [line for line in run.splitlines() if re.match(TABLE, line)]
    steps = [line for line in run.splitlines() if (at := re.match(r"step (\d+)/", line)) and int(at[1]) % 60 == 0]
    answer = [line for line in f"question{answers}".splitlines() if re.match(ANSWER, line)][:3]
    return ["$ make demo", *table, "", *steps, "", *f"Held-out loss in nats{losses}".strip().splitlines(), "", *answer]


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in lines(sys.stdin.read()):
        text = Text(line.rstrip(), no_wrap=True)
        text.highlight_regex(rf"^({TABLE}|{ANSWER}|step [\d/]+|\$ .*)", "bold cyan")
        text.highlight_regex(r"loss +[\d.]+", "green")
        text.truncate(COLUMNS, overflow="ellipsis")
        console.print(text, highlight=False)
    console.print()  # rich cuts the picture off at the last line's feet
    picture = console.export_svg(title="a small model, trained with ZeRO-3 on two processes")
    (DOCS / "run.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
