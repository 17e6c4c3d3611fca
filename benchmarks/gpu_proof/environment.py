"""Which Python the proof runs in, and how near its packages are to the pinned ones. Standard library only.

1. .venv, where `make setup` has completed it.
2. With a folder of wheels: an environment of its own over the Python that runs this, whose near enough torch, Transformers and
   accelerate stay; what else is missing comes from the folder, without any network.
3. The Python that runs this, where it has all that a run imports.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from brigade.errors.versions import ANYWAY, REPOSITORY, release, supported, unsupported
from brigade.errors.versions import pins as pinned

# From these versions on what is there already is taken as it is. With --wheels an older one is replaced by the pinned one.
NEAR = {name: row["proof"] for name, row in supported().items() if "proof" in row}
# What a run needs, and the name that it is imported by; of requirements.txt, without what only pages need.
NEEDED = {
    "torch": "torch", "deepspeed": "deepspeed", "accelerate": "accelerate", "transformers": "transformers",
    "datasets": "datasets", "peft": "peft", "tokenizers": "tokenizers", "safetensors": "safetensors",
    "pydantic": "pydantic", "xxhash": "xxhash", "PyYAML": "yaml", "filelock": "filelock", "rich": "rich",
    "tqdm": "tqdm", "Jinja2": "jinja2", "psutil": "psutil", "nvidia-ml-py": "pynvml", "tensorboard": "tensorboard",
    "ninja": "ninja", "pytorch_optimizer": "pytorch_optimizer", "matplotlib": "matplotlib",
}  # fmt: skip
IMPORTED = ("torch", "transformers", "transformers.trainer", "accelerate", "deepspeed", "datasets", "peft", "train")
OPTIONAL = {"bitsandbytes": "bitsandbytes"}  # without it only QLoRA and 8-bit Adam are left out
ASK = """\
import importlib.util, importlib.metadata, json, sys
found = {}
for package, module in json.loads(sys.argv[1]).items():
    if importlib.util.find_spec(module):
        try: found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError: found[package] = "?"
print(json.dumps(found))
"""


class Lacking(Exception):
    """There is no environment that the proof can run in; says what to do."""


def choose(output: Path, wheels: Path | None) -> tuple[str, dict[str, Any]]:
    """Return the Python to run the parts in, and what compare() says of its packages. Raises Lacking."""
    own = REPOSITORY / ".venv"
    if wheels:
        python = from_wheels(output / "venv", wheels)
    elif (own / ".complete").exists():
        python = str(own / "bin" / "python")
    else:
        python = sys.executable
    packages = compare(installed(python))
    if missing := packages["missing"]:
        cure = f"run `make setup`, or give a folder of their wheels: make test-gpu WHEELS=DIR, filled by `{download(missing)}`"
        raise Lacking(f"{python} lacks {', '.join(missing)}\n  cure: {cure}")
    if packages["other"] and (why := import_error(python)):
        named = ", ".join(f"{name} {here}" for name, (_, here) in packages["other"].items())
        cure = "install what that version requires, or the pinned one (requirements.txt)"
        raise Lacking(f"{python}: with {named} a run cannot begin: {why}\n  cure: {cure}")
    return python, packages


def download(packages: list[str]) -> str:
    """Return the command that fills a folder of wheels, on a host with network and the same Python; DeepSpeed is built there."""
    return f"pip wheel --wheel-dir DIR -c constraints.txt {' '.join(f'{name}=={pinned()[name]}' for name in packages)}"


def installed(python: str) -> dict[str, str]:
    """Return the version of each of NEEDED and OPTIONAL that this Python finds; it imports none of them."""
    command = [python, "-c", ASK, json.dumps(NEEDED | OPTIONAL)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Lacking(f"{python} does not run: {error}") from None
    return json.loads(done.stdout.splitlines()[-1])


def import_error(python: str) -> str:
    """Return why this Python cannot import what each run does; "" where it can. Takes some seconds."""
    command = [python, "-c", f"import {', '.join(IMPORTED)}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=os.environ | {ANYWAY: "1"})
    return ([line for line in done.stderr.splitlines() if line.strip()] or ["no word"])[-1] if done.returncode else ""


def is_near(package: str, version: str) -> bool:
    """Whether a version is the pinned one, or near enough to prove something."""
    if package not in NEAR or version.partition("+")[0] == pinned()[package]:
        return version.partition("+")[0] == pinned().get(package)
    return release(version) >= release(NEAR[package])


def compare(versions: dict[str, str]) -> dict[str, Any]:
    """Return {"versions", "missing", "other", "proves"}.

    other: package -> [pinned, here], where they differ; proves: what a run with these versions proves, and what it leaves out
    """
    pins = pinned()
    missing = [name for name in NEEDED if name not in versions]
    other = {
        name: [pins[name], version]
        for name, version in versions.items()
        if name in pins and version.partition("+")[0] != pins[name]
    }
    too_old = [name for name in other if name in NEAR and not is_near(name, other[name][1])]
    refused = [name for name, (_, here) in other.items() if name not in too_old and unsupported(name, here)]
    without = [name for name in OPTIONAL if name not in versions]
    if not other:
        proves = "All packages are the pinned ones: what holds here holds for these versions on this kind of GPU."
    else:
        named = ", ".join(f"{name} {here} instead of {pin}" for name, (pin, here) in other.items())
        proves = (
            f"With {named}: device and NCCL paths, kernels of this GPU and driver, memory and speed are proven with these "
            "versions. Left out: what the pinned versions do differently; private names in brigade/train/upstream/, whose line "
            "numbers are the pinned versions'."
        )
    if refused:
        proves += f" {', '.join(refused)}: a run is refused with this version, and the proof sets {ANYWAY}=1."
    if too_old:
        proves += f" {', '.join(too_old)}: older than anything this was tried with."
    if without:
        proves += f" Without {', '.join(without)}: no QLoRA and no 8-bit Adam."
    return {"versions": versions, "missing": missing, "other": other, "proves": proves}


def from_wheels(folder: Path, wheels: Path) -> str:
    """Make an environment over the Python that runs this, with what it lacks from a folder of wheels. Returns its Python.

    Raises Lacking where the folder does not hold it.
    """
    if not wheels.is_dir() or not any(wheels.iterdir()):
        raise Lacking(f"--wheels {wheels}: no such folder, or an empty one\n  cure: {download(list(NEEDED))}")
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        venv.create(folder, system_site_packages=True, with_pip=True, symlinks=True)
        link_site(folder)
    here = installed(python)
    kept = [name for name in NEEDED if name in here and (name not in NEAR or is_near(name, here[name]))]
    wanted = [f"{name}=={pinned()[name]}" for name in (*NEEDED, *OPTIONAL) if name not in kept and name not in here]
    wanted += [f"{name}=={pinned()[name]}" for name in NEAR if name in here and name not in kept]
    optional = [each for each in wanted if each.partition("==")[0] in OPTIONAL]
    if error := install(python, [each for each in wanted if each not in optional], wheels):
        raise Lacking(f"{wheels} does not hold what is missing: {error}\n  cure: {download(list(NEEDED))}")
    install(python, optional, wheels)
    return python


def install(python: str, wanted: list[str], wheels: Path) -> str:
    """Install packages from a folder of wheels only; returns "" or why that failed. A source of DeepSpeed's is built there."""
    if not wanted:
        return ""
    offline = ["--no-index", "--no-build-isolation", "-f", str(wheels)]
    command = [python, "-m", "pip", "install", "--quiet", *offline]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (errors or ["pip failed"])[-1].strip()[:300] if done.returncode else ""


def link_site(folder: Path) -> None:
    """Let the environment see the packages of the Python that runs this, also where that is an environment itself."""
    import site

    (own,) = folder.glob("lib/python*/site-packages")
    (own / "outside.pth").write_text("\n".join(path for path in site.getsitepackages() if Path(path).is_dir()) + "\n")
