"""The tables of docs/evidence/peer-keys.md that say what becomes of the keys of other tools' data sets.

    python -m benchmarks.peer_keys           # write it again
    python -m benchmarks.peer_keys --check   # 1 where the page has another

Each row is a case of testing/peer_keys.yaml, and tests/unit/data/test_message_keys.py runs all of them.
"""

from typing import Any

from benchmarks.pages import EVIDENCE, REPOSITORY, command, markdown
from brigade.train.recipe.files import read_yaml

_ALL: dict[str, list[dict[str, Any]]] = read_yaml(REPOSITORY / "testing/peer_keys.yaml")
CASES, PREFERENCES = _ALL["keys"], _ALL["preferences"]


def _table(cases: list[dict[str, Any]]) -> str:
    lines = ([case["by"], case["key"], case["is"], case["how"]] for case in cases)
    return markdown(["written by", "key", "is", "how"], lines)


def tables() -> dict[str, str]:
    return {"peer-keys": _table(CASES), "peer-preferences": _table(PREFERENCES)}


def main() -> int:
    return command(EVIDENCE / "peer-keys.md", tables, __doc__ or "")


if __name__ == "__main__":
    raise SystemExit(main())
