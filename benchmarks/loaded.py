"""How many lines of ours the default run has loaded when its first step begins.

    python -m benchmarks.loaded                                        # one process
    python -m benchmarks.loaded --ds_config ds_configs/zero3.json      # further flags of train.py; --list names the modules

A fresh process trains one step of the default recipe and counts sys.modules then: whatever was imported, by whomever. With
prepared data in the cache, as all ranks but the first find it; the first run after a change of the data loads what makes it, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT = 6_000  # lines; tests/unit/test_loaded.py
REPOSITORY = Path(__file__).resolve().parent.parent
SHORT = ["--max_steps", "1", "--warmup_steps", "0", "--eval_answers", "0", "--max_eval_samples", "8", "--fresh"]


def loaded(*flags: str, limit: int = LIMIT) -> dict[str, int]:
    """Module of ours -> its lines, of a run with these flags at its first step.

    limit: of lines; a run that loads more is repeated once, for it may have made what stays in the caches
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LOADED": f"{folder}/modules.json"}
        for attempt in ("first", "second"):  # in a directory of its own: who finds an earlier run there loads more
            given = ["--worker", *SHORT, "--output_dir", f"{folder}/{attempt}", *flags]
            command = [sys.executable, "-m", "benchmarks.loaded", *given]
            done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the run ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
            found = json.loads(Path(f"{folder}/modules.json").read_text())
            if sum(found.values()) <= limit and "brigade.data.build" not in found:
                break  # else data or random weights may not have been made yet, and now they are
        return found


def modules() -> dict[str, int]:
    """Module of ours -> its lines, of all that this process has imported."""
    ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("brigade", "train")}
    files = {name: module.__file__ for name, module in ours.items() if module.__file__}
    return {name: len(Path(file).read_text().splitlines()) for name, file in files.items()}


def _work(flags: list[str]) -> None:
    import train

    class Count:
        """A TrainerCallback; made late, for Transformers is not to be imported before train.py does it."""

        def __getattr__(self, event: str):
            if not event.startswith("on_"):
                raise AttributeError(event)
            return self.count if event == "on_step_begin" else lambda *_, **__: None

        def count(self, *_, **__) -> None:
            Path(os.environ["LOADED"]).write_text(json.dumps(modules()))

    train.main(flags, callbacks=(Count(),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name every module and its lines")
    options, flags = parser.parse_known_args()
    found = loaded(*flags)
    if options.list:
        for name, lines in sorted(found.items(), key=lambda entry: -entry[1]):
            print(f"{lines:5}  {name}")
    print(f"{sum(found.values()):,} lines of ours in {len(found)} modules when the first step begins")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        _work(sys.argv[2:])
    else:
        main()
