"""Groups of ranks on this host that start in a tenth of a second: children of a process that has imported what a run needs.

Importing torch, Transformers and DeepSpeed takes 5 to 6 CPU-seconds per rank, more than most trials of a tiny model. One process
imports them once, before it has any thread, and forks each rank of each group, for all workers of pytest. A rank is in a session
of its own and finds torchrun's variables in its environment. What torchrun itself does is the business of tests that start it.
"""

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from . import fake_gpu

REPOSITORY = Path(__file__).resolve().parent.parent
GRACE = 10  # seconds from SIGTERM to SIGKILL, for the ranks that are left when one has failed
# Not among the ports that the kernel hands out (from 32768 on): nobody takes one between its choice and its use.
PORTS = range(20000, 30000)
MOST_GPUS = 8  # that a server is started with; each rank then finds as many as there are ranks
FOLDER = (
    "BRIGADE_TEST_RANKS"  # a directory, in which the workers of pytest find the servers that another one has started
)
_servers: dict[bool, "_Server"] = {}  # without fake GPUs, and with them


def run_ranks(
    module: str, *arguments: str, ranks: int, timeout: float, gpus: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` on `ranks` ranks, one thread each; returns exit code and output.

    As under torchrun a rank that fails ends the others, and its exit code is that of all. After `timeout` seconds all are killed.
    gpus: on a fake GPU for each rank (testing/fake_gpu/)
    """
    if gpus not in _servers:
        _servers[gpus] = _Server(gpus)
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "module": module,
            "arguments": arguments,
            "ranks": ranks,
            "timeout": timeout,
            "folder": folder,
            "environment": os.environ | (fake_gpu.environment(ranks) if gpus else {}),
            "gpus": gpus,
        }
        answer = _servers[gpus].ask(json.dumps(job))
        if not answer:
            del _servers[gpus]
            raise RuntimeError("the process that forks ranks has ended")
        out, err = (Path(folder, name).read_text(errors="replace") for name in ("out", "err"))
    return subprocess.CompletedProcess([module, *arguments], json.loads(answer)["code"], out, err)


class _Server:
    """A connection to the process that forks ranks. Who finds none starts it; it ends when its last connection is closed."""

    def __init__(self, gpus: bool) -> None:
        if FOLDER not in os.environ:
            os.environ[FOLDER] = tempfile.mkdtemp(prefix="brigade-ranks-")
            atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
        folder = Path(os.environ[FOLDER])
        address = folder / ("gpus" if gpus else "cpus")
        self.connection = socket.socket(socket.AF_UNIX)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self.connection.connect(str(address))
            except OSError:
                address.unlink(missing_ok=True)
                self.process = _start(gpus, address)
                self.connection.connect(str(address))
        self.answers = self.connection.makefile()

    def ask(self, job: str) -> str:
        """Return the answer to a job, or "" where the process has ended."""
        try:
            self.connection.sendall(job.encode() + b"\n")
            return self.answers.readline()
        except OSError:
            return ""


def _start(gpus: bool, address: Path) -> subprocess.Popen[bytes]:
    found = fake_gpu.environment(MOST_GPUS) if gpus else {}
    environment = os.environ | found | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        number = listening.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "testing.ranks", str(number)], cwd=REPOSITORY, env=environment, pass_fds=[number]
        )


def serve(listening: socket.socket) -> None:
    """Fork the groups that connections ask for, those of one connection after the other; each is answered with one line: its
    exit code. Return when all connections are closed."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    _import_all()
    gc.collect()
    gc.freeze()  # what is imported is never looked through again, neither here nor in a rank
    serving: set[int] = set()
    while select.select([listening], [], [], 1 if serving else 0)[0] or serving:
        with contextlib.suppress(BlockingIOError):
            connection, _ = listening.accept()
            serving.add(os.fork() or _serve_one(listening, connection))
            connection.close()
        serving -= {pid for pid in serving if os.waitpid(pid, os.WNOHANG)[0]}


def _serve_one(listening: socket.socket, connection: socket.socket) -> NoReturn:
    listening.close()
    try:
        with connection.makefile() as jobs:
            for line in jobs:
                answer = json.dumps({"code": _group(json.loads(line))})
                connection.sendall(answer.encode() + b"\n")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


# What a run imports late, or needs under some strategies alone; and all rooms of ours that a run enters.
LATE = (
    "bitsandbytes datasets peft pytorch_optimizer train deepspeed.comm.mori deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops deepspeed.runtime.superoffload.superoffload_stage3 deepspeed.utils.pin_memory",
    "deepspeed.runtime.zero.muon.muon_optimizer distutils.ccompiler distutils.sysconfig numpy.ctypeslib",
    "pydantic.type_adapter rich.console rich.table tensorboard.compat.proto torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.checkpoint.state_dict torch.distributed.fsdp torch.profiler._cupti_monitor torch.utils.cpp_extension",
    "torch.utils.serialization torch.utils.tensorboard transformers.generation transformers.integrations.deepspeed",
    "transformers.models.llama.modeling_llama",
)
OURS = "errors plan train"


def _import_all() -> None:
    import cpuinfo
    from deepspeed.utils import numa, nvtx
    from transformers import conversion_mapping

    import brigade.train.upstream.deepspeed_kernels

    for name in " ".join(LATE).split():
        with contextlib.suppress(ModuleNotFoundError):  # another version has it elsewhere: it is imported late there
            importlib.import_module(name)
    for each in pkgutil.walk_packages(brigade.__path__, "brigade."):
        if each.name.split(".")[1] in OURS.split():
            importlib.import_module(each.name)
    brigade.train.upstream.deepspeed_kernels.ask_cpu_once()
    cpuinfo.get_cpu_info()  # for all ranks
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # compiles the 900 patterns of all models
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)  # ZeRO-3 starts `numactl` at each reduction on a CPU
    nvtx.enable_nvtx = False  # marks for a GPU's profiler, around a thousand calls of each step


def _group(job: dict[str, Any]) -> int:
    """The exit code of the first rank that fails, else 0.

    A rank that was killed is the cause also where another that missed it was seen to end first.
    """
    port = _free_port()
    children = {os.fork() or _rank(job, rank, port): rank for rank in range(job["ranks"])}
    everybody, code, deadline, killed = list(children), 0, time.monotonic() + job["timeout"], False
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            del children[pid]
            left = os.waitstatus_to_exitcode(status)
            if code and left == -signal.SIGKILL and not killed:
                code = left
            elif left and not code:
                code, deadline = left, time.monotonic() + GRACE
                _signal(children, signal.SIGTERM)
        elif time.monotonic() > deadline and not killed:
            killed, code = True, code or -signal.SIGKILL
            _signal(children, signal.SIGKILL)
        else:
            time.sleep(0.01)
    for leader in everybody:  # a rank's own processes are of its group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
    return code


def _signal(children: Any, number: int) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _free_port() -> int:
    for port in range(
        PORTS.start + os.getpid() * 211 % len(PORTS), PORTS.stop
    ):  # connections begin far from each other
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store binds it
            probe.bind(("", port))
            return port
    return _free_port()


def _rank(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _redirect(job["folder"])
        os.environ.clear()
        size = job["ranks"]
        os.environ.update(
            job["environment"],
            OMP_NUM_THREADS="1",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            GROUP_RANK="0",
            GROUP_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="none",
        )
        if job["gpus"]:
            from .fake_gpu.native import native

            native.set_device_count(size)
        sys.argv = [job["module"], *job["arguments"]]
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(folder: str) -> None:
    """stdin from nowhere, stdout and stderr to the files of the group, where lines of all ranks follow each other."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        inherited.setblocking(False)
        serve(inherited)
