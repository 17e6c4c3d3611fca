"""What Brigade computes with other versions of torch, Transformers and the rest, beside what it computed with the pinned ones.

    python -m benchmarks.golden transformers==5.23.0   # make test-versions SPEC="transformers==5.23.0"; five minutes
    python -m benchmarks.golden                        # the same runs with this environment alone
    python -m benchmarks.golden --write                # the table anew: benchmarks/results/golden.jsonl, after an upgrade

The versions that are asked for, and what they need that is not here, are put over this environment, which stays as it is: pip
installs them into a temporary folder, and PYTHONPATH names it first. Then come tests/unit/test_upstream.py,
test_upstream_contracts.py and test_ds_keys.py, and the runs of testing/golden.py: what their figures differ by from the table is
printed. Sums are added up in another order on another processor, so where this is not the table's, the same runs with this
environment alone take its place.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.pages import REPOSITORY, RESULTS, command_line, machine, read, save, where
from brigade.errors.versions import ANYWAY
from testing import golden

TABLE = RESULTS / "golden.jsonl"
TESTS = tuple(f"tests/unit/test_{name}.py" for name in ("upstream", "upstream_contracts", "ds_keys"))
SECONDS = 1500
# In a process of its own, with other versions: their figures as JSON, and what has failed.
MEASURE = """
import json, sys
from pathlib import Path
from testing import golden
folder = Path(sys.argv[1])
(folder / "measured.json").write_text(json.dumps(golden.measured(folder / "runs", *sys.argv[2:])))
"""
Measured = tuple[dict[str, golden.Figures], dict[str, str]]


def processor() -> str:
    """What decides in which order a sum is added up: the model, and not how many cores there are."""
    return machine().partition(" x ")[2]


def overlay(specs: list[str], folder: Path) -> list[str]:
    """Install these packages into a folder, with what they need that this environment lacks or has in another version. Return
    them: ["transformers==5.23.0"]. Raises CalledProcessError where pip cannot."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    asked = subprocess.run([*pip, "--dry-run", "--report", "-", *specs], stdout=subprocess.PIPE, text=True, check=True)
    found = {each["download_info"]["url"]: each["metadata"] for each in json.loads(asked.stdout)["install"]}
    if found:
        subprocess.run([*pip, "--no-deps", "--no-compile", "--target", str(folder), *found], check=True)
    return [f"{each['name']}=={each['version']}" for each in found.values()]


def over(folder: Path | None) -> dict[str, str]:
    """The environment of a process for which the packages of this folder come first, and are refused by nobody. DeepSpeed's
    kernels are compiled against torch, so those of another one are made there."""
    found = os.environ | {ANYWAY: "1", "OMP_NUM_THREADS": "1"}
    if folder:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
        if any((folder / name).exists() for name in ("torch", "deepspeed")):
            found["TORCH_EXTENSIONS_DIR"] = str(folder / "torch_extensions")
    return found


def measure(environment: dict[str, str], *names: str, checkout: Path = REPOSITORY) -> Measured:
    """Return what testing.golden.measured() gives in a process with this environment, by the code of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", MEASURE, folder, *names]
        with (Path(folder) / "said").open("w") as said:
            done = subprocess.run(command, cwd=checkout, env=environment, stdout=said, stderr=said, timeout=SECONDS)
        if done.returncode:
            print((Path(folder) / "said").read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"error: the runs could not begin (exit code {done.returncode})")
        found, failed = json.loads((Path(folder) / "measured.json").read_text())
        return found, failed


def table() -> dict[str, golden.Figures]:
    """Name -> its figures, in the committed table."""
    return {row["name"]: {key: row[key] for key in row if key not in ("name", *where())} for row in read(TABLE)}


def compared(now: Measured, then: dict[str, golden.Figures], tolerance: float = golden.TOLERANCE) -> list[str]:
    """Print what differs, of each run. Return the names of those that do, or have failed, or are not in both."""
    (found, failed), changed = now, []
    for name in dict.fromkeys([*then, *found, *failed]):
        if name in failed:
            what = "failed\n    " + failed[name].strip().replace("\n", "\n    ")
        elif name not in found or name not in then:
            what = f"only in the {'runs' if name in found else 'table'}"
        else:
            what = golden.difference(found[name], then[name], tolerance)
        if what:
            print(f"{name}: {what}")
            changed.append(name)
    same, exact = len(found.keys() - {*changed}), sum(found[name] == then.get(name) for name in found)
    print(f"{same} of {len(then)} runs are the same to {tolerance:g}, {exact} of them to the last bit")
    return changed


def reference() -> dict[str, golden.Figures]:
    """The table, or what this environment gives by itself where the table is of another processor."""
    first = read(TABLE)[0]
    made = f"{first['machine']}; {first['versions']}"
    if first["machine"].partition(" x ")[2] == processor():
        print(f"compared with {TABLE.relative_to(REPOSITORY)}, made on {made}")
        return table()
    print(f"{TABLE.relative_to(REPOSITORY)} was made on {made}; compared with {where()['versions']} here")
    found, failed = measure(over(None))
    if failed:
        raise SystemExit(f"error: without other versions, too, these fail: {', '.join(failed)}")
    return found


def try_versions(specs: list[str]) -> int:
    """Print what tests and runs say of these versions. Return 0 where all is as before, else 1."""
    with tempfile.TemporaryDirectory() as folder:
        pins = overlay(specs, Path(folder))
        print(f"over {sys.prefix}: {' '.join(pins) or 'nothing, for it has these'}", flush=True)
        environment = over(Path(folder))
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *TESTS]
        failed = subprocess.run(tests, cwd=REPOSITORY, env=environment).returncode
        now = measure(environment)
    changed = compared(now, reference())
    print(f"{', '.join(specs)}: " + ("as the pinned versions" if not (failed or changed) else "read the lines above"))
    return int(bool(failed or changed))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("specs", nargs="*", metavar="PACKAGE==VERSION", help="what pip is asked for")
    parser.add_argument("--write", action="store_true", help="write the table from this environment")
    options = parser.parse_args()
    if options.specs:
        return try_versions(options.specs)
    found, failed = now = measure(over(None))
    if not options.write:
        return int(bool(compared(now, table())))
    if failed:
        return int(bool(compared(now, {})))
    rows: list[dict[str, Any]] = [{"name": name, **figures, **where()} for name, figures in found.items()]
    save(TABLE, rows)
    print(f"wrote {len(rows)} runs to {TABLE.relative_to(REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
