"""Groups of ranks on this host that start in a tenth of a second: children of a process that has imported what a run needs.

Importing torch, Transformers and DeepSpeed takes 5 to 6 CPU-seconds per rank, more than most trials of a tiny model. One process
imports them once, before it has any thread, and forks each rank of each group. A rank is in a session of its own and finds
torchrun's variables in its environment. What torchrun itself does is the business of tests that start torchrun.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
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
_servers: dict[bool, subprocess.Popen[str]] = {}  # without fake GPUs, and with them


def run_ranks(
    module: str, *arguments: str, ranks: int, timeout: float, gpus: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` on `ranks` ranks, one thread each; returns exit code and output.

    As under torchrun a rank that fails ends the others, and its exit code is that of all. After `timeout` seconds all are killed.
    gpus: on a fake GPU for each rank (testing/fake_gpu/)
    """
    server = _servers.get(gpus)
    if server is None or server.poll() is not None:
        server = _servers[gpus] = _start(gpus)
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
        assert server.stdin and server.stdout
        print(json.dumps(job), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError("the process that forks ranks has ended")
        out, err = (Path(folder, name).read_text(errors="replace") for name in ("out", "err"))
    return subprocess.CompletedProcess([module, *arguments], json.loads(answer)["code"], out, err)


def _start(gpus: bool) -> subprocess.Popen[str]:
    found = fake_gpu.environment(MOST_GPUS) if gpus else {}
    environment = os.environ | found | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, "-m", "testing.ranks"],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(server.kill)
    return server


def serve() -> None:
    """Fork the groups that stdin asks for, one after the other; each is answered with one line: its exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    gc.collect()
    gc.freeze()  # what is imported is never looked through again, neither here nor in a rank
    for line in sys.stdin:
        print(json.dumps({"code": _group(json.loads(line))}), file=answers, flush=True)


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

    import brigade.train.upstream.cpu_facts

    ours = pkgutil.walk_packages(brigade.__path__, "brigade.")
    for name in [*" ".join(LATE).split(), *(each.name for each in ours if each.name.split(".")[1] in OURS.split())]:
        importlib.import_module(name)
    brigade.train.upstream.cpu_facts.ask_once()
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
    for port in range(PORTS.start + os.getpid() % len(PORTS), PORTS.stop):
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
    serve()
