"""What columns beside a pair say of its two answers: a row is refused where they contradict that the better one is better."""

import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import shown
from ...errors.tables import Document
from ..recipe.files import read_yaml
from .arrow_values import json_or
from .keys import Row, names_of, says_nothing
from .rows import BadRow

_TABLE = read_yaml(Path(__file__).with_name("verdicts.yaml"))
BETTER, WORSE, NEITHER = "better", "worse", "neither"
_SIDES = {side: frozenset(_TABLE[side]) for side in (BETTER, WORSE, NEITHER)}
_FILLERS = frozenset(_TABLE["fillers"])
_MEASURES = {key: frozenset(words) for key, words in _TABLE["measures"].items()}
_RATES = _MEASURES["higher"] | _MEASURES["lower"]
_NEGATIONS = frozenset(("non", "not"))  # non_preferred
_KINDS = {name: entry["is"] for entry in _TABLE["columns"] for name in entry["names"]}
LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_COMPARED = frozenset(("winner", "wins", "won", "better", "preferred"))  # what a name says of an answer: a_is_better
_PROSE = 60  # characters from which on a text explains, and does not name an answer
_OPTION = 2  # letters at most of a word that tells two columns apart: a, 0, A1


@functools.lru_cache(4096)
def _words(text: str) -> tuple[str, ...]:
    """Return the words of a name: chosen-rating, chosenRating and chosen_rating have the same."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", text)
    return tuple(word.lower() for word in found)


@functools.lru_cache(256)
def _names_of_sides(better: str, worse: str) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    """Return which words mean each of two columns, and all words that name a side."""
    own, other = frozenset(_words(better)), frozenset(_words(worse))
    apart = {BETTER: own - other, WORSE: other - own}
    names = {side: _SIDES[side] | {word for word in words if len(word) <= _OPTION} for side, words in apart.items()}
    return names, frozenset.union(*names.values(), _NEGATIONS)


def check(row: Row, better: str, worse: str) -> None:
    """Raise BadRow where a column says that the answer in column `worse` is the better one, or that none is, or means one of them
    and nothing tells which. Columns that agree count as read."""
    verdicts, label = _Verdicts(row, better, worse), row.name("label")
    known = {better, worse} | names_of(row.columns) - {label}
    measured: dict[frozenset[str], dict[str, str]] = {}
    aspects: dict[str, Any] = {}
    for name, value in row.content.items():
        if name in known or says_nothing(value):
            continue
        words = _words(name)
        kind = "label" if name == label else _KINDS.get(" ".join(words))
        if kind == "aspect":
            aspects[name] = value
        elif kind:
            verdicts.read(name, kind, value)
        elif not _RATES.isdisjoint(words):
            side = verdicts.side(frozenset(words)) if _number(value) is not None else None
            if side in (BETTER, WORSE):
                measured.setdefault(frozenset(words) - verdicts.either, {})[side] = name
        elif words[:1] == ("winner",) or verdicts.is_won(words, value):  # one column for each answer, and one for a tie
            verdicts.read(name, "won", value)
    for stem, names in measured.items():
        if len(names) == 2 and _measures(stem):
            verdicts.compare(names[BETTER], names[WORSE], lower=not stem.isdisjoint(_MEASURES["lower"]))
    for name, value in aspects.items():
        if not verdicts.agreed or verdicts.side_of(name, value) == BETTER:
            verdicts.read(name, "side", value)


def check_turns(names: Sequence[str], ours: Document, theirs: Document) -> None:
    """Raise BadRow where a number that stands in a turn of both answers, as a score, does not say that the first one is better.

    names: of their columns
    """
    better, worse = names
    for key in ours.keys() & theirs.keys():
        words, one, other = frozenset(_words(key)), _number(ours[key]), _number(theirs[key])
        if one is None or other is None or _RATES.isdisjoint(words) or not _measures(words):
            continue
        if (one >= other) if not words.isdisjoint(_MEASURES["lower"]) else (one <= other):
            problem = f"the {key} of {better!r} is {shown(ours[key])}, and of {worse!r} {shown(theirs[key])}"
            cure = f"exchange the answers, or drop the row; if the pair is right, remove {key} from its turns"
            raise BadRow(f"{problem}: it is not the better answer", cure)


def _measures(words: frozenset[str]) -> bool:
    """Whether words measure how good an answer is, and no aspect of it. Numbers are of a judge: gpt4_score."""
    return all(word.isdigit() or word in _RATES | _MEASURES["others"] for word in words)


def options(content: Document) -> tuple[str, str, str] | None:
    """Return the names of two answers that a row has, response_0 and response_1, and of the column that says which is the better
    one; None where it has no such three."""
    which = next((name for name in content if _KINDS.get(" ".join(_words(name))) in ("side", "sign", "label")), None)
    which = which or next((name for name in content if _words(name)[:1] == ("winner",)), None)
    stems: dict[tuple[str, ...], str] = {}
    for name, value in content.items():
        *stem, option = _words(name) or ("",)
        if stem and len(option) <= _OPTION and isinstance(value, (str, list)) and name != which:
            first = stems.setdefault(tuple(stem), name)
            if which and first != name:
                return first, name, which
    return None


class _Verdicts:
    """What a row's columns say of its answers in the columns `better` and `worse`."""

    def __init__(self, row: Row, better: str, worse: str) -> None:
        self.row, self.names = row, {BETTER: better, WORSE: worse}
        self.words, self.either = _names_of_sides(better, worse)
        self.agreed = False  # whether a column has said that the better answer is better

    def side(self, words: frozenset[str]) -> str | None:
        """Return which answer these words mean: BETTER, WORSE or NEITHER; None where nothing tells."""
        if not words.isdisjoint(_SIDES[NEITHER]):
            return NEITHER
        meant = [side for side, own in self.words.items() if not own.isdisjoint(words)]
        if _NEGATIONS & words and len(meant) == 1:
            return WORSE if meant == [BETTER] else BETTER
        return meant[0] if len(meant) == 1 else self._by_column(words)

    def _by_column(self, words: frozenset[str]) -> str | None:
        """Return which answer stands in a further column whose name has these words: a, where there is a response_a, too."""
        for name, value in self.row.content.items():
            if name not in self.names.values() and words and words <= frozenset(_words(name)):
                for side, column in self.names.items():
                    if value == self.row.content[column]:
                        return side
        return None

    def is_won(self, words: tuple[str, ...], value: object) -> bool:
        """Whether a column's name says of an answer that it is better, and its value whether that is so: a_is_better."""
        if _COMPARED.isdisjoint(words) or str(value).lower() not in LABELS:
            return False
        return self.side(frozenset(words) - _FILLERS - _COMPARED) is not None

    def read(self, name: str, kind: str, value: object) -> None:
        """Read one column. kind: as in verdicts.yaml, or won: 1 where its name names the better answer. Raises BadRow."""
        says = self.side_of(name, value) if kind == "side" else getattr(self, f"_{kind}")(name, value)
        if says is None:
            return
        if says == "":
            own = " and ".join(map(repr, self.names.values()))
            problem = f"column {name!r} is {shown(value)}, and nothing tells which of {own} it means"
            raise BadRow(problem, f"if the pair is right: columns: {{ignore: {name}}}")
        self._account(f"column {name!r} is {shown(value)}", says, name)

    def compare(self, better: str, worse: str, lower: bool) -> None:
        """Read a column with a number for each answer. lower: whether the smaller one is better. Raises BadRow."""
        ours, theirs = (self.row.content[name] for name in (better, worse))
        difference = (_number(ours) or 0.0) - (_number(theirs) or 0.0)
        says = _by_sign(-difference if lower else difference)
        self._account(f"column {better!r} is {shown(ours)} and {worse!r} is {shown(theirs)}", says, better, worse)

    def _account(self, found: str, says: str, *names: str) -> None:
        ignore = f"columns: {{ignore: {names[0] if len(names) == 1 else list(names)}}}".replace("'", "")
        if says == NEITHER:
            raise BadRow(
                f"{found}, so neither answer is the better one", f"drop the row; if the pair is right: {ignore}"
            )
        if says == WORSE:
            problem = f"{found}, so the answer in column {self.names[WORSE]!r} is the better one"
            raise BadRow(problem, f"exchange the answers, or drop the row; if the pair is right: {ignore}")
        self.agreed = True
        self.row.asked.update(names)

    # ---- each kind returns a side, None where it says nothing, and "" where nothing tells which side it means
    def side_of(self, name: str, value: object) -> str | None:
        if str(value).lower() in ("true", "false"):
            return BETTER if LABELS[str(value).lower()] else WORSE
        for side, column in self.names.items():
            if value == self.row.content[column]:
                return side
        if not isinstance(value, (str, int, float)):
            return ""
        if isinstance(value, str) and len(value) > _PROSE:
            return None
        number = _number(value)
        if number is not None and number % 1:
            return ""  # 1.4 of 1 and 2, say
        words = frozenset(_words(str(value) if number is None else str(int(number))))
        return self.side(words - _FILLERS or words) or ""

    def _won(self, name: str, value: object) -> str | None:
        won, side = LABELS.get(str(value).lower()), self.side(frozenset(_words(name)) - _FILLERS - _COMPARED) or ""
        if won is None:
            return self.side_of(name, value)
        return side if won else BETTER if side in (WORSE, NEITHER) else None

    def _option(self, name: str, value: object) -> str | None:
        side = self.side_of(name, value)
        named = [word for word in _words(str(value)) if word not in _FILLERS]
        return None if side == "" and not (named and max(map(len, named)) <= _OPTION) else side

    def _label(self, name: str, value: object) -> str | None:
        label = LABELS.get(str(value).strip().lower())
        if label is not None and self.side_of(name, value) == "":
            return BETTER if label else WORSE
        return self._option(name, value)

    def _sign(self, name: str, value: object) -> str:
        number = _number(value)
        if not number:
            return "" if number is None else NEITHER
        return self.side(frozenset({"1" if number < 0 else "2"})) or ""

    def _margin(self, name: str, value: object) -> str | None:
        number = _number(value)
        return WORSE if number is not None and number < 0 else None

    def _status(self, name: str, value: object) -> str | None:
        words = frozenset(_words(str(value)))
        if not words.isdisjoint(_SIDES[NEITHER]):
            return NEITHER
        return self._swapped(name, True) if words == {"swapped"} else None

    def _swapped(self, name: str, value: object) -> str:
        if not LABELS.get(str(value).lower(), True):
            return BETTER
        before = self.row.content.get("original_chosen")  # argilla's, which are exchanged already
        return BETTER if before is not None and before == self.row.content[self.names[WORSE]] else WORSE

    def _tie(self, name: str, value: object) -> str:
        return NEITHER if LABELS.get(str(value).lower(), True) else BETTER

    def _scores(self, name: str, value: object) -> str | None:
        order = self.row.content.get("order", [BETTER, WORSE])  # argilla's, which says whose the numbers are
        value, order = (json_or(one, one) if isinstance(one, str) else one for one in (value, order))  # of CSV
        if isinstance(value, dict):
            order, value = list(value), list(value.values())
        numbers = [_number(one) for one in value] if isinstance(value, list) and len(value) == 2 else []
        if not numbers or None in numbers or not isinstance(order, list):
            return None
        sides = [self.side(frozenset(_words(str(own)))) for own in order]
        if sorted(map(str, sides)) != [BETTER, WORSE]:
            return None
        self.row.asked.add("order")
        by_side = dict(zip(sides, numbers, strict=True))
        return _by_sign((by_side[BETTER] or 0.0) - (by_side[WORSE] or 0.0))

    def _ranks(self, name: str, value: object) -> str | None:
        says = self._scores(name, value)
        return {BETTER: WORSE, WORSE: BETTER}.get(says, says) if says else None


def _by_sign(difference: float) -> str:
    return BETTER if difference > 0 else WORSE if difference < 0 else NEITHER


def _number(value: object) -> float | None:
    """Return a finite number, which may stand in a text, as CSV has no others; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
