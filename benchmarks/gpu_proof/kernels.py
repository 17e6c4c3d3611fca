"""Every kernel against eager attention in fp32 on the first GPU: the full proof of `python -m brigade kernels`."""

import json
import subprocess
import sys

from .parts import NOT_BEGUN, REPOSITORY, why_it_ended
from .subject import Subject, command

SHARE = 0.6  # of the part's seconds, for trying paths; the others are for imports, of each process that tries them too
# The config beside the recipe: parts run without the Hub, and a fresh host has none of its files.
RECIPE = ("recipes/qwen3-0.6b/full.yaml", "--model_name_or_path", "recipes/qwen3-0.6b", "--revision", "null")
SMALL = ("recipes/tiny/full.yaml", "--quick", "--bf16", "true")


def main() -> None:
    subject = Subject(__doc__)
    seconds = ["--seconds", f"{SHARE * subject.left:.0f}"]
    words = ["-m", "brigade", "kernels", *(SMALL if subject.small else RECIPE), *seconds]
    written = subject.work / "kernels.log"
    with written.open("w") as log:
        done = subprocess.run(
            [sys.executable, *words, "--json"], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, text=True,
            timeout=max(1, subject.left),
        )  # fmt: skip
    begin = done.stdout.find("{")
    if begin < 0:
        raise RuntimeError(f"exit code {done.returncode}: {why_it_ended(written)}")
    proof = json.JSONDecoder().raw_decode(done.stdout[begin:])[0]
    for name, path in proof["paths"].items():
        figures = {key: value for key, value in path.items() if isinstance(value, int | float | str)}
        why = f"{path['status']}: {path.get('why', '')}".strip(": ")
        late = NOT_BEGUN if path.get("why", "").startswith("not reached") else ""
        wrong = path["status"] in ("wrong", "failed") and not late
        subject.row(name, figures, why if wrong else "", command(words), left_out=late)


if __name__ == "__main__":
    main()
