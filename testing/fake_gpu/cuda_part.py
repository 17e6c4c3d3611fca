"""In torch's build for CUDA, the device takes the place of libtorch_cuda.so: it has its name and is loaded before it.

libtorch_python.so looks for some hundred functions in that library. Here each of them raises, and says which was called.
"""

import subprocess
from pathlib import Path

NAME = "libtorch_cuda.so"
HEAD = """#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <cxxabi.h>
static void lacks(const char* name) { TORCH_CHECK(false, "the fake GPU has no ", c10::demangle(name)); }
extern "C" {
"""
# How a symbol is defined, by its beginning: a class's type, its table of functions (nobody makes an object of it), a function.
DEFINED = {
    "_ZTI": 'abi::__class_type_info {0}("{1}");',
    "_ZTV": "void* {0}[64];",
    "": 'void {0}() {{ lacks("{0}"); }}',
}


def is_in(torch: Path) -> bool:
    """Return whether this torch is a build for CUDA. torch: its folder"""
    return (torch / "lib" / NAME).exists()


def write(torch: Path, directory: Path) -> Path:
    """Write C++ that defines what libtorch_python.so looks for in libtorch_cuda.so."""
    wanted = _symbols(torch / "lib/libtorch_python.so", "--undefined-only")
    there = {
        symbol
        for name in (NAME, "libtorch_nvshmem.so")  # the second comes with the first
        for symbol in _symbols(torch / "lib" / name, "--defined-only")
    }
    lines = []
    for symbol in sorted(wanted & there):
        template = next(DEFINED[start] for start in DEFINED if symbol.startswith(start))
        # Weak, for the device's own sources define what has to do something (nccl.cpp).
        lines.append("__attribute__((weak)) " + template.format(symbol, symbol[4:]))
    path = directory / "cuda_part.cpp"
    path.write_text(HEAD + "\n".join([*lines, "}\n"]))
    return path


def _symbols(library: Path, which: str) -> set[str]:
    listed = subprocess.run(["nm", "--dynamic", which, str(library)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in listed.splitlines()}
