"""python -m testing.fake_gpu [--gpus 2] [--kind h100] COMMAND...: run a command on a host that seems to have GPUs."""

import argparse
import os

from . import environment

parser = argparse.ArgumentParser(prog="python -m testing.fake_gpu", description=__doc__)
parser.add_argument("--gpus", type=int, default=2, help="how many (default: 2)")
parser.add_argument("--kind", choices=("h100", "4090", "t4"), default="h100", help="of GPU (default: h100)")
parser.add_argument("command", nargs=argparse.REMAINDER)
given = parser.parse_args()
if not given.command:
    parser.error("no command")
os.execvpe(given.command[0], given.command, os.environ | environment(given.gpus, given.kind))
