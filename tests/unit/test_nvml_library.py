"""What asks NVIDIA's driver, through the installed nvidia-ml-py, on a library that stands in for libnvidia-ml.so.1."""

import json
import os
import subprocess
import sys

import pytest

from testing.ranks import REPOSITORY

pytest.importorskip("pynvml")

# Four GPUs: the second one is another job's, the third is lost. What else nvidia-ml-py asks for an old driver does not have.
NVML = """
#include <cstdio>
using handle = long;
extern "C" {
int nvmlInitWithFlags(unsigned) { return INIT; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "Driver/library version mismatch"; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) { return snprintf(text, size, "470.256.02"), 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 4, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, handle* found) {
  *found = number + 1;
  return number == 1 ? 4 : number == 2 ? 15 : 0;
}
int nvmlDeviceGetIndex(handle gpu, unsigned* number) { return *number = gpu - 1, 0; }
int nvmlDeviceGetName(handle gpu, char* text, unsigned size) { return snprintf(text, size, "NVIDIA GeForce RTX 3060"), 0; }
int nvmlDeviceGetMemoryInfo(handle, unsigned long long* memory) {
  memory[0] = 12ull << 30, memory[1] = 11ull << 30, memory[2] = 1ull << 30;
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(handle, unsigned* milliwatts) { return *milliwatts = 170000, 0; }
int nvmlDeviceGetPowerUsage(handle, unsigned*) { return 3; }
int nvmlDeviceGetMigMode(handle, unsigned*, unsigned*) { return 3; }
int nvmlDeviceGetMaxMigDeviceCount(handle, unsigned* count) { return *count = 2, 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(handle gpu, unsigned number, handle* found) {
  *found = 10 * gpu + number;
  return gpu == 4 && number == 1 ? 0 : 6;
}
int nvmlDeviceGetUUID(handle gpu, char* text, unsigned size) {
  return gpu < 10 ? 3 : (snprintf(text, size, "MIG-c6d4f1ef"), 0);
}
int nvmlDeviceGetP2PStatus(handle, handle, int, int* status) { return *status = 1, 0; }
}
"""
ASK = """
import json
from pathlib import Path
from brigade.check.probes import gpus
from brigade.hosts import usage
from brigade.train.distributed import devices
devices.VERSION_FILES, devices.NODES = (), Path("nowhere")
print(json.dumps([gpus.look(), usage.sample("")["gpus"], devices.count_by_driver(), devices.driver_version()]))
"""


@pytest.fixture
def answers(tmp_path):
    """answers(code): what is said where nvmlInit returns this code; None: where there is no library."""

    def ask(code):
        if code is not None:
            (tmp_path / "nvml.cpp").write_text(NVML.replace("INIT", str(code)))
            library = ["g++", "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(tmp_path / "nvml.cpp")]
            subprocess.run(library, check=True)
        environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
        asked = [sys.executable, "-c", ASK]
        done = subprocess.run(asked, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask


def test_a_driver_answers_for_this_jobs_gpus_and_what_it_lacks_is_left_out(answers):
    looked, used, count, version = answers(0)
    first, lost, last = looked["gpus"]
    assert lost == {"index": 2, "lost": True} and (first["index"], last["index"]) == (0, 3)
    assert set(last) == {"index", "name", "memory", "power_limit", "instances"}
    assert last["instances"] == ["MIG-c6d4f1ef"] and "instances" not in first
    assert last["memory"] == {"total": 12 << 30, "free": 11 << 30} and last["power_limit"] == 170.0
    assert looked["peers"] == [[0, 3, 1]] and looked["xids"] == []
    assert used[3] == {"index": 3, "memory": 1 << 30, "memory_total": 12 << 30}
    assert (count, version) == (3, "470.256.02"), "a lost GPU is this job's"


@pytest.mark.parametrize(("code", "why"), [(18, "problem"), (None, "absent")])
def test_a_driver_that_does_not_answer_counts_nothing(answers, code, why):
    """A version that does not fit the library's, and a container without NVML."""
    looked, used, count, version = answers(code)
    assert list(looked) == [why] and used == [] and (count, version) == (0, None)
