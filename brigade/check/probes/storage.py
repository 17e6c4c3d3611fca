"""What a host's disks and its clock say. By the standard library alone."""

import time
from typing import Any


def clock() -> dict[str, Any]:
    """Seconds since the epoch, on this host's clock."""
    return {"time": time.time()}
