"""docs/run.svg, the picture of a run in the README, from the output of `make demo`.

    make demo 2>&1 | .venv/bin/python -m benchmarks.picture

The lines are the run's own: its table, every eighth step, the held-out losses, how many held-out answers were right, and three
questions with the answers before and after. A line that is too long for the picture ends with "…".
"""

import io
import re
import sys

from rich.console import Console
from rich.text import Text

from benchmarks.pages import DOCS, REPOSITORY

COLUMNS = 112
TABLE = "(model|method|data|ranks|strategy|global batch|learning rate) "
ANSWER = "(question|reference|before|answer) "


def lines(output: str) -> list[str]:
    """The lines that the picture shows, in order."""
    run, _, saved = output.replace(f"{REPOSITORY}/", "").partition("Held-out loss in nats")
    losses, _, answers = saved.partition("\nquestion")
    table = [line for line in run.splitlines() if re.match(TABLE, line)]
    steps = [line for line in run.splitlines() if (at := re.match(r"step (\d+)/", line)) and int(at[1]) % 8 == 0]
    answer = [line for line in f"question{answers}".splitlines() if re.match(ANSWER, line)]
    # The system message is the same in each question.
    answer = [re.sub(r"<\|im_start\|>system .*?<\|im_end\|> ", "", line) for line in answer]
    return ["$ make demo", *table, "", *steps, "", *f"Held-out loss in nats{losses}".strip().splitlines(), "", *answer]


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in lines(sys.stdin.read()):
        text = Text(line.rstrip(), no_wrap=True)
        text.highlight_regex(rf"^({TABLE}|{ANSWER}|step [\d/]+|\$ .*)", "bold cyan")
        text.highlight_regex(r"loss +[\d.]+|\d+% are the reference's|\d+% before training", "green")
        text.truncate(COLUMNS, overflow="ellipsis")
        console.print(text, highlight=False)
    console.print()  # rich cuts the picture off at the last line's feet
    picture = console.export_svg(title="SmolLM2-135M learns tool calls: LoRA, ZeRO-3, two processes on two CPU cores")
    (DOCS / "run.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
