"""trainer_state.json as Transformers writes and reads it, without making the whole log into text for each checkpoint."""

import dataclasses
import json
from pathlib import Path
from typing import Any

_EMPTY = (
    '\n  "log_history": []'  # an object's own key has this indentation only at the top, and no text has a line break
)


class StateFile:
    """Writes the states of one run, with bytes equal to TrainerState.save_to_json's (transformers/trainer_callback.py).

    That one copies the log and makes all of it into text each time, in Python because of the indentation: 1.9 s after 20,000
    lines. Here each line is made into text once. Each time all are compared with what is written, by their repr, which tells 1
    from 1.0 and True, and sees into a list (0.07 s then): a line that was changed since, or another log after a hand-over, is
    made into text anew.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []  # the repr of each
        self._texts: list[str] = []

    def write(self, state: Any, path: Path) -> None:
        """Write a TrainerState. Raises TypeError for what JSON cannot hold, and OSError."""
        log = state.log_history
        same = self._same(log)
        del self._lines[same:], self._texts[same:]
        for line in log[same:]:
            self._texts.append(json.dumps(line, indent=2, sort_keys=True).replace("\n", "\n    "))
            self._lines.append(repr(line))
        rest = dataclasses.asdict(dataclasses.replace(state, log_history=[]))
        before, empty, after = json.dumps(rest, indent=2, sort_keys=True).partition(_EMPTY)
        with path.open("w", encoding="utf-8") as file:
            file.write(before)
            file.write(f"{empty[:-1]}\n    " + ",\n    ".join(self._texts) + "\n  ]" if log else empty)
            file.write(f"{after}\n")

    def _same(self, log: list[dict[str, Any]]) -> int:
        """Return how many lines, from the first on, are those that are already texts."""
        lines = enumerate(zip(log, self._lines, strict=False))
        changed = (number for number, (line, known) in lines if repr(line) != known)
        return next(changed, min(len(log), len(self._lines)))
