"""A step on a CPU takes the memory that the one before it has freed: the kernel has no new pages to fill with zeros."""

import os
import subprocess
import sys

import pytest

from testing import marks
from testing.ranks import REPOSITORY

# Tensors as large as gradients and logits are. The first steps find out where they fit; the fewest pages that a later one takes,
# for the kernel may reclaim pages meanwhile.
STEPS = """\
import resource
import torch
from brigade.train.host import freed_memory

def step():
    kept = [torch.ones(size * 2**18) for size in (1, 40, 3, 70)]

kept = freed_memory.keep()
taken = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(taken[4:]))
"""
PAGES = 114 * 2**20 // os.sysconf("SC_PAGE_SIZE")  # of a step


@pytest.mark.parametrize("chosen, keeps", marks.cases(
    ({}, True), ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}, False),
    slow=[({"MALLOC_TRIM_THRESHOLD_": "1048576"}, False)],
))  # fmt: skip
def test_freed_memory_is_used_again_unless_a_user_has_chosen(chosen, keeps):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    environment = clean | chosen | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, check=True)
    said, pages = done.stdout.split()
    assert said == str(keeps)
    assert (int(pages) < PAGES / 10) == keeps, pages
