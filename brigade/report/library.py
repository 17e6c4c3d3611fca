"""The chart library: Vega-Lite from the wheel of vl-convert-python, which also draws pictures without a browser."""

import hashlib
import resource
from pathlib import Path
from types import ModuleType

from ..errors import UserError
from ..errors.tables import Fields
from ..train.host import files
from ..train.host.cache import cache_directory, once

# The bundled script's SHA-256 by vl-convert-python's version: a cached file goes into a page only if its content matches.
DIGESTS = {"1.9.0": "3425bd951a44d478d0505c6b5d1e8d57656b6e9a4da7bfe88a718ce61d76e572"}
SCALE = 2  # pixels of a picture for each pixel of a page
WIDTH = 720
ADDRESSES = 96 * 2**30  # bytes; with a limit of 64 GB V8 aborts the process, with one of 130 GB it does not


def vl_convert() -> ModuleType:
    """The package vl_convert. Raises UserError where it is not installed."""
    try:
        import vl_convert
    except ImportError:
        cure = "pip install -r requirements.txt, or `pip install vl-convert-python`"
        raise UserError("package vl-convert-python", "it is not installed, and it draws the charts", cure) from None
    return vl_convert


def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which a page carries in itself. Bundling takes two seconds; the script of a
    version in DIGESTS is kept in the cache."""
    package = vl_convert()
    known = DIGESTS.get(package.__version__)

    def forged(folder: Path) -> str:
        is_bundled = hashlib.sha256(files.read(folder / "vega.js")).hexdigest() == known
        return "" if is_bundled else "vega.js is not the package's"

    def bundle(aside: Path) -> None:
        (aside / "vega.js").write_text(bundled(package))

    if known is None:
        return bundled(package)
    folder = once(cache_directory("charts") / package.__version__, bundle, forged)
    return bundled(package) if forged(folder) else files.read_text(folder / "vega.js")


def bundled(package: ModuleType) -> str:
    """The script that javascript() returns, made anew from the package."""
    text = str(package.javascript_bundle(vl_version=package.get_vegalite_versions()[-1]))
    return text.replace("</script", "<\\/script") if "</script" in text.lower() else text


def picture(spec: Fields, title: str) -> bytes:
    """A chart as a PNG on white. Needs no network."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < ADDRESSES:
        problem = f"pictures are drawn by V8, which sets {ADDRESSES >> 30} GiB of addresses aside (it uses few of them)"
        cure = "ulimit -v unlimited, or --page_only: the page needs no pictures"
        raise UserError(f"ulimit -v {limit >> 10}", problem, cure)
    package = vl_convert()
    config = spec["config"] | {"background": "white", "title": {"anchor": "start", "fontSize": 14, "offset": 12}}
    whole = spec | {"width": WIDTH, "title": title, "config": config, "padding": 12}
    return bytes(package.vegalite_to_png(whole, vl_version=package.get_vegalite_versions()[-1], scale=SCALE))
