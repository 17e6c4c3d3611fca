"""python -m benchmarks.court.peers PEER JOBS: let a trainer do the jobs of a file, in its own environment."""

import importlib
import sys

from benchmarks.court.peers import record

record.run(importlib.import_module(f"benchmarks.court.peers.{sys.argv[1]}").answer, sys.argv[2])
