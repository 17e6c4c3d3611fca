"""The chart library: Vega-Lite from the wheel of vl-convert-python, which also draws pictures without a browser."""

import hashlib
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..train import files
from ..train.cache import cache_directory, once

# The bundled script's SHA-256 by vl-convert-python's version: a cached file goes into a page only if its content matches.
DIGESTS = {"1.9.0": "3425bd951a44d478d0505c6b5d1e8d57656b6e9a4da7bfe88a718ce61d76e572"}
SCALE = 2  # pixels of a picture for each pixel of a page
WIDTH = 720


def vl_convert() -> Any:
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

    def is_whole(folder: Path) -> bool:
        try:
            return hashlib.sha256(files.read(folder / "vega.js")).hexdigest() == known
        except OSError:
            return False

    def bundle(aside: Path) -> None:
        (aside / "vega.js").write_text(bundled(package))

    if known is None:
        return bundled(package)
    folder = once(cache_directory("charts") / package.__version__, is_whole, bundle)
    return files.read_text(folder / "vega.js") if is_whole(folder) else bundled(package)


def bundled(package: Any) -> str:
    """The script that javascript() returns, made anew from the package."""
    text = str(package.javascript_bundle(vl_version=package.get_vegalite_versions()[-1]))
    return text.replace("</script", "<\\/script") if "</script" in text.lower() else text


def picture(spec: dict[str, Any], title: str) -> bytes:
    """A chart as a PNG on white. Needs no network."""
    package = vl_convert()
    config = spec["config"] | {"background": "white", "title": {"anchor": "start", "fontSize": 14, "offset": 12}}
    whole = spec | {"width": WIDTH, "title": title, "config": config, "padding": 12}
    return bytes(package.vegalite_to_png(whole, vl_version=package.get_vegalite_versions()[-1], scale=SCALE))
