"""The compiled module: devices, memory and counts. Every wait of the host for a device passes through it.

native.on_wait(callback)    callback(why) at each wait, on the thread that waits: by what Python stack?
native.counts()             {"wait: item": 3, "nccl allreduce": 2, ...} since reset_counts()
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # the module is linked against it

from .build import MODULE


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("_fake_gpu", Path(os.environ["FAKE_GPU_LIBRARY"], MODULE))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


native: Any = _load()
