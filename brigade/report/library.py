"""The chart library: Vega-Lite, from the wheel of vl-convert-python, which also draws pictures without a browser."""

from pathlib import Path
from typing import Any

from ..cache import cache_directory, once
from ..errors import UserError

SCALE = 2  # pixels of a picture for each of a page
WIDTH = 720


def vl_convert() -> Any:
    """The package. Raises UserError where it is not installed."""
    try:
        import vl_convert
    except ImportError:
        cure = "pip install -r requirements.txt, or `pip install vl-convert-python`"
        raise UserError("package vl-convert-python", "it is not installed, and it draws the charts", cure) from None
    return vl_convert


def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that a page carries in itself. Bundled once per host and version."""
    package = vl_convert()
    versions = package.get_vegalite_versions()[-1], package.get_vega_version(), package.get_vega_embed_version()
    folder = cache_directory() / "charts" / "-".join(versions)

    def bundle(aside: Path) -> None:
        text = package.javascript_bundle(vl_version=versions[0])
        if "</script" in text.lower():
            text = text.replace("</script", "<\\/script")
        (aside / "vega.js").write_text(text)

    return (once(folder, lambda whole: (whole / "vega.js").is_file(), bundle) / "vega.js").read_text()


def picture(spec: dict[str, Any], title: str) -> bytes:
    """A chart as a PNG on white. Needs no network."""
    package = vl_convert()
    config = spec["config"] | {"background": "white", "title": {"anchor": "start", "fontSize": 14, "offset": 12}}
    whole = spec | {"width": WIDTH, "title": title, "config": config, "padding": 12}
    return bytes(package.vegalite_to_png(whole, vl_version=package.get_vegalite_versions()[-1], scale=SCALE))
