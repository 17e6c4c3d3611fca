"""What `make setup` needs of the system; by the standard library alone, for there is nothing else yet.

python3 brigade/setup/system.py: silent when all is there; else names the packages that are missing and exits with 2.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig


def missing() -> dict[str, str]:
    """Debian package -> what is missing without it."""
    lacks = {}
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        lacks["python3-venv"] = "the venv module of this Python"
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        lacks["python3-dev"] = "Python.h, to compile DeepSpeed's kernels"
    if shutil.which("g++") is None:
        lacks["g++"] = "a C++ compiler, for DeepSpeed's kernels"
    return lacks


def main() -> int:
    if sys.version_info < (3, 11):
        print(
            f"error: Python {sys.version.split()[0]} at {sys.executable} is too old\n"
            "  cure: install Python 3.11 or newer, and name it: make PYTHON=python3.11 ...",
            file=sys.stderr,
        )
        return 2
    lacks = missing()
    for package, what in lacks.items():
        print(f"error: {package} is missing ({what})", file=sys.stderr)
    if lacks:
        print(f"  cure: apt-get install {' '.join(lacks)}", file=sys.stderr)
    return 2 if lacks else 0


if __name__ == "__main__":
    raise SystemExit(main())
