"""Compile the fake GPU: one CPU minute, once per version of its sources and of torch."""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from . import cuda_part

SOURCE = Path(__file__).resolve().parent / "source"
DEVICE, MODULE = "libfake_gpu.so", "_fake_gpu.so"
# What each library is made of. Sources of one are compiled together: most of the time goes into torch's headers.
SOURCES = {"device": ("device", "operators", "nccl"), "module": ("module",)}
FLAGS = ("-O1", "-g0", "-w", "-fPIC", "-std=c++20", "-DUSE_C10D_GLOO", "-DTORCH_EXTENSION_NAME=_fake_gpu")


def build() -> Path:
    """Return the directory with both libraries, compiled now where no run before has; others that build wait meanwhile.

    Below $XDG_CACHE_HOME/brigade-fake-gpu, or ~/.cache. Raises RuntimeError with the compiler's words.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "brigade-fake-gpu")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        spec = find_spec("torch")  # found, and not imported: this process may be one that never needs it
        assert spec and spec.origin
        objects = _compile(Path(spec.origin).parent, cache)
        directory = cache / _digest(*(each.name for each in objects.values()))
        if not (directory / MODULE).exists():  # which is linked last
            directory.mkdir(exist_ok=True)
            _link_both(Path(spec.origin).parent / "lib", objects, directory)
    return directory


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(torch: Path, cache: Path) -> dict[str, Path]:
    """Compile the sources that are not in the cache as they are now, side by side; returns name -> object file."""
    include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [*FLAGS, *(f"-I{each}" for each in include)]
    headers = [path.read_text() for path in sorted(SOURCE.glob("*.h"))]
    sources = {name: [SOURCE / f"{part}.cpp" for part in parts] for name, parts in SOURCES.items()}
    if cuda_part.is_in(torch):
        sources["cuda_part"] = [cuda_part.write(torch, cache)]
    objects, running = {}, {}
    for name, (*before, last) in sources.items():
        texts = [source.read_text() for source in (*before, last)]
        # Without the paths of torch's headers: another checkout's environment has the same ones.
        objects[name] = cache / f"{name}-{_digest(version('torch'), sys.version, *FLAGS, *headers, *texts)}.o"
        if not objects[name].exists():
            unfinished = cache / f"{name}.unfinished"
            included = [word for source in before for word in ("-include", str(source))]
            command = ["g++", *flags, *included, "-c", str(last), "-o", str(unfinished)]
            running[name] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    failed = []
    for name, process in running.items():
        said = process.communicate()[1]
        if process.returncode:
            failed.append(said)
        else:
            (cache / f"{name}.unfinished").rename(objects[name])
    if failed:
        raise RuntimeError("the fake GPU does not compile:\n" + "\n".join(failed))
    return objects


def _link_both(torch: Path, objects: dict[str, Path], directory: Path) -> None:
    """The device of its sources, and the module that Python imports against it."""
    libraries = [f"-L{torch}", "-ltorch_cpu", "-lc10"]
    of_device = [object_ for name, object_ in objects.items() if name != "module"]
    name = cuda_part.NAME if "cuda_part" in objects else DEVICE
    _link(directory / DEVICE, of_device, [*libraries, f"-Wl,-soname,{name}"])
    of_module = [*libraries, "-ltorch", "-ltorch_python", f"-L{directory}", f"-l:{DEVICE}", "-Wl,-rpath,$ORIGIN"]
    _link(directory / MODULE, [objects["module"]], of_module)


def _link(library: Path, objects: list[Path], flags: list[str]) -> None:
    """Link into a file beside it, which then takes its place: a build that was killed leaves none."""
    unfinished = library.with_suffix(".unfinished")
    command = ["g++", "-shared", *map(str, objects), "-o", str(unfinished), *flags]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
    unfinished.rename(library)
