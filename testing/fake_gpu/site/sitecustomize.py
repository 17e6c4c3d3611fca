"""Where this folder is on PYTHONPATH and FAKE_GPUS is no 0, the first import of torch brings the fake GPU along."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch as others do, as often as somebody asks whether it is there, and adds to its import."""

    looking = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self.looking = False
        load = spec.loader.exec_module

        def load_both(module):
            sys.meta_path.remove(self)
            fake_gpu = _import()
            fake_gpu.load_device(Path(spec.origin).parent)
            load(module)
            fake_gpu.install()

        spec.loader.exec_module = load_both
        return spec


def _import():
    """Import testing.fake_gpu from this checkout, whatever the current directory is."""
    root = str(Path(__file__).resolve().parents[3])
    sys.path.insert(0, root)
    try:
        import testing.fake_gpu
    finally:
        sys.path.remove(root)
    return testing.fake_gpu


if os.environ.get("FAKE_GPUS", "0") != "0":
    sys.meta_path.insert(0, _Finder())
