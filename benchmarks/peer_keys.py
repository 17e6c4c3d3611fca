"""The table of docs/evidence/peer-keys.md that says what becomes of the keys of other tools' data sets.

    python -m benchmarks.peer_keys           # write it again
    python -m benchmarks.peer_keys --check   # 1 where the page has another

Each row is a case of testing/peer_keys.yaml, and tests/unit/data/test_peer_keys.py runs all of them.
"""

from typing import Any

from benchmarks.pages import EVIDENCE, REPOSITORY, command, markdown
from brigade.train.recipe.files import read_yaml

CASES: list[dict[str, Any]] = read_yaml(REPOSITORY / "testing/peer_keys.yaml")["keys"]


def tables() -> dict[str, str]:
    lines = ([case["by"], case["key"], case["is"], case["how"]] for case in CASES)
    return {"peer-keys": markdown(["written by", "key", "is", "how"], lines)}


def main() -> int:
    return command(EVIDENCE / "peer-keys.md", tables, __doc__ or "")


if __name__ == "__main__":
    raise SystemExit(main())
