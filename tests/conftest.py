"""All tests run on the CPU, on hosts with GPUs too: what they compare is exact there. One thread each: tests run side by side."""

import atexit
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile

import pytest

from brigade.train.host import freed_memory
from brigade.train.upstream import deepspeed_kernels
from testing import ranks

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["BRIGADE_CALIBRATION"] = ""  # nor with what somebody measured here
os.environ["OMP_NUM_THREADS"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:
    # A cache of this session's own, for an older one says that it is made anew; and its workers share what forks ranks.
    for name in ("BRIGADE_CACHE", ranks.FOLDER):
        os.environ[name] = tempfile.mkdtemp(prefix="brigade-tests-")
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
os.environ.pop("COLUMNS", None)  # pytest-xdist's workers have 80
# Images of containers often set it. Then each of the hundreds of processes that tests start compiles the modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
logging.getLogger().addHandler(logging.NullHandler())  # else Python prints the warnings of loggers that have none
# A shell ignores Ctrl-C for what it runs in the background, and whoever is started there inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
freed_memory.keep = bool  # it is for good, and what a later test reads under a limit of memory would have that room
deepspeed_kernels.find()  # where `make setup` has compiled them, whichever test asks for them first

AT_START = dict(os.environ)
# Files whose slow cases are for `make test-matrix`, for `make test` runs quick ones of them or of their kind: on two cores
# without AVX-512 they would take CI beyond the hour and a half that it has.
SLOW_IN_MATRIX = {
    "test_auto_kernels.py",
    "test_bad_input_launched.py",
    "test_bad_input_preferences.py",
    "test_batch.py",
    "test_check_collectives.py",
    "test_compile.py",
    "test_export.py",
    "test_fp16.py",
    "test_gpu_benchmark.py",
    "test_gpu_profile.py",
    "test_gpu_proof_run.py",
    "test_host_time.py",
    "test_images_run.py",
    "test_images_soak.py",
    "test_local_steps.py",
    "test_methods.py",
    "test_nonfinite.py",
    "test_optimizers.py",
    "test_parity_experts.py",
    "test_parity_images.py",
    "test_parity_pairs.py",
    "test_parity_pipeline.py",
    "test_parity_preferences.py",
    "test_parity_sequence.py",
    "test_parity_tensor.py",
    "test_parity_terms.py",
    "test_parts.py",
    "test_processor.py",
    "test_proving.py",
    "test_recipe_headers.py",
    "test_rehearsal.py",
    "test_resume.py",
    "test_resume_images.py",
    "test_resume_preferences.py",
    "test_sequence_run.py",
    "test_streaming.py",
    "test_vision_recipes.py",
}


@pytest.fixture(autouse=True, scope="module")
def _the_next_file_has_the_same_environment():
    """What train.main leaves there, also in a session's fixture, must not reach the processes of another file's tests: with
    DS_ACCELERATOR=cpu, DeepSpeed gathers weights on the CPU whatever GPUs torch has."""
    yield
    for key in os.environ.keys() - AT_START.keys() - {"PYTEST_CURRENT_TEST"}:  # pytest takes its own away
        del os.environ[key]
    os.environ.update(AT_START)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the tests of one file keep what they share."""
    return tmp_path_factory.mktemp("shared")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported to collect tests is no garbage: neither now nor in a test that collects it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What only `make test-matrix` runs is slow too, so that `-m "not slow"` is `make test`."""
    for item in items:
        if item.path.name in SLOW_IN_MATRIX and item.get_closest_marker("slow"):
            item.add_marker("matrix")
        if item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.slow)
