"""Check that a machine has what `make` needs. It uses only the standard library, for nothing else is installed yet.

python3 brigade/check/build_tools.py setup|kernels: silent when all is there; else it names the missing packages and exits with 2.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig


def missing(target: str) -> dict[str, str]:
    """{Debian package: what is missing without it}. target: `setup` needs no compiler, `kernels` does."""
    lacks = {}
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        lacks["python3-venv"] = "the venv module of this Python"
    if target == "setup":
        return lacks
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        lacks["python3-dev"] = "Python.h, to compile DeepSpeed's kernels"
    if shutil.which("g++") is None:
        lacks["g++"] = "a C++ compiler, for DeepSpeed's kernels"
    return lacks


def main() -> int:
    """Print what is missing, with the command that installs it. Returns the exit code."""
    if sys.version_info < (3, 11):
        print(
            f"error: Python {sys.version.split()[0]} at {sys.executable} is too old\n"
            "  cure: install Python 3.11 or newer, and name it: make PYTHON=python3.11 ...",
            file=sys.stderr,
        )
        return 2
    lacks = missing(sys.argv[1] if sys.argv[1:] else "setup")
    for package, part in lacks.items():
        print(f"error: {package} is missing ({part})", file=sys.stderr)
    if lacks:
        print(f"  cure: apt-get install {' '.join(lacks)}", file=sys.stderr)
    return 2 if lacks else 0


if __name__ == "__main__":
    raise SystemExit(main())
