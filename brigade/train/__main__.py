"""Run a program of one's own, which calls train.main(), with all that train.py does around it: signals, exit codes, what `launch`
hears of a rank. The words after FILE are the program's, and train.main() reads them.

    python -m brigade.train FILE [--recipe RECIPE] [--KEY VALUE ...]
    torchrun --nproc_per_node 2 brigade/train/__main__.py FILE --recipe RECIPE
    python -m brigade launch --script FILE RECIPE --hostfile HOSTS
"""

import runpy
import sys
from pathlib import Path

_CLONE = str(Path(__file__).resolve().parents[2])
if __name__ == "__main__" and sys.path[0] != _CLONE:
    sys.path[0] = _CLONE  # started by its path, or from elsewhere

from brigade.errors import UserError  # noqa: E402
from brigade.train.distributed import ranks, visible  # noqa: E402


def run(words: list[str]) -> None:
    """Run the program that the first word names, as `python FILE` would. DeepSpeed's launcher puts --local_rank=N before it."""
    own, rest = [], list(words)
    while rest and rest[0].startswith("--local_rank="):
        own.append(rest.pop(0))
    if not rest or not Path(rest[0]).is_file():
        problem = f"there is no file {rest[0]!r}" if rest else "no program is named"
        print(UserError("command line", problem, "python -m brigade.train FILE --recipe RECIPE"), file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [rest[0], *own, *rest[1:]]
    visible.restore()  # the program may use a GPU before it calls train.main()
    sys.path.insert(0, str(Path(rest[0]).resolve().parent))
    runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    ranks.run_to_the_end(lambda: run(sys.argv[1:]))
