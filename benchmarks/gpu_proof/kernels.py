"""Every kernel against eager attention in fp32 on the first GPU: the full proof of `python -m brigade.kernels`."""

import json
import subprocess
import sys

from .parts import REPOSITORY
from .subject import Subject, command

SHARE = 0.6  # of the part's seconds, for trying paths; the others are for imports, of each process that tries them too
RECIPES = ("recipes/qwen3-0.6b/full.yaml",)
SMALL = ("recipes/tiny/full.yaml", "--quick", "--bf16", "true")


def main() -> None:
    subject = Subject(__doc__)
    seconds = ["--seconds", f"{SHARE * subject.left:.0f}"]
    words = ["-m", "brigade.kernels", *(SMALL if subject.small else RECIPES), *seconds]
    with (subject.work / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, *words, "--json"], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, text=True,
            timeout=max(1, subject.left - 5),
        )  # fmt: skip
    begin = done.stdout.find("{")
    if begin < 0:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-300:] or 'no word'}")
    proof = json.JSONDecoder().raw_decode(done.stdout[begin:])[0]
    for name, path in proof["paths"].items():
        figures = {key: value for key, value in path.items() if isinstance(value, int | float | str)}
        wrong = path["status"] in ("wrong", "failed")
        shortfall = f"{path['status']}: {path.get('why', '')}".strip(": ") if wrong else ""
        subject.row(name, figures, shortfall, command(words))


if __name__ == "__main__":
    main()
