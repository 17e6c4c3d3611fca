"""Ranks that agree, ranks under a supervisor, and hosts that hold the same files."""

import os

# before torch is imported: 25 lines of C++ frames for each lost peer
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
