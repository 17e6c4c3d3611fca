"""What this host and a run's ranks on it use right now, as counters: whoever asks twice can compute rates from them."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from ..train.distributed.heartbeat import FOLDER
from ..train.host import files
from ..train.run import typed
from . import Facts

RAPL = "/sys/class/powercap"  # energy counters of processors, which only root reads on most systems


def sample(directory: str) -> Facts:
    """at: seconds of this host's clock; host, gpus: their figures; ranks: of this host, each what its heartbeat's file says and
    what its process uses. directory: the run's; "": none is asked for"""
    ranks = heartbeats(Path(directory)) if directory else {}
    own = {rank: says | _process(says["pid"]) for rank, says in ranks.items() if says["host"] == socket.gethostname()}
    return {"at": time.monotonic(), "host": _host(), "gpus": _gpus(), "ranks": own}


def heartbeats(directory: Path) -> dict[str, Facts]:
    """Return rank (as JSON names it) -> what its file says, and its `age`: seconds since it was written."""
    found = {}
    for path in (directory / FOLDER).glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError):  # half a disk, another program's file
            says = typed.kept(typed.loaded(files.read(path)), typed.HEARTBEAT)
            age = max(0.0, time.time() - path.stat().st_mtime)
            found[str(says["rank"])] = {**says, "pid": says["pid"], "host": says["host"], "age": age}
    return found


def _host() -> Facts:
    """The host's figures: bytes, degrees Celsius, seconds of all processors (busy of total), joules. What a host does not have is
    left out."""
    figures: Facts = {"cores": os.cpu_count() or 1}
    try:
        import psutil
    except ImportError:
        return figures | {"problem": "psutil is not installed there"}
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    memory = psutil.virtual_memory()
    cards = [card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    figures |= {
        "busy": total - idle,
        "total": total,
        "memory": memory.total - memory.available,
        "memory_total": memory.total,
    }
    figures |= {"received": sum(card.bytes_recv for card in cards), "sent": sum(card.bytes_sent for card in cards)}
    with suppress(OSError, AttributeError):
        degrees = [sensor.current for group in psutil.sensors_temperatures().values() for sensor in group]
        figures |= {"temperature": max(degrees)} if degrees else {}
    with suppress(OSError, ValueError):
        packages = [int(path.read_text()) for path in Path(RAPL).glob("intel-rapl:?/energy_uj")]
        figures |= {"joules": sum(packages) / 1e6} if packages else {}
    return figures


def _process(pid: int) -> Facts:
    """state: running, stopped or gone; cpu: seconds of processors; memory: bytes, resident."""
    try:
        import psutil

        process = psutil.Process(pid)
        state = "stopped" if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "running"
        return {"state": state, "cpu": sum(process.cpu_times()[:2]), "memory": process.memory_info().rss}
    except ImportError:
        return {"state": "running" if Path(f"/proc/{pid}").exists() else "gone"}
    except psutil.Error:
        return {"state": "gone"}


def _gpus() -> list[Facts]:
    """The figures of each GPU: used (percent of the time), memory and memory_total in bytes, temperature, watts, and the pids of
    the processes that compute on it. A figure that a device does not have is left out."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no package, no driver
        return []
    gpus = []
    try:
        for number in range(nvml.nvmlDeviceGetCount()):
            gpu: Facts = {"index": number}
            with suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                for name, ask in {
                    "used": lambda gpu=handle: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
                    "memory": lambda gpu=handle: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
                    "memory_total": lambda gpu=handle: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
                    "temperature": lambda gpu=handle: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
                    "watts": lambda gpu=handle: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
                    "pids": lambda gpu=handle: [
                        process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
                    ],
                }.items():
                    with suppress(nvml.NVMLError, nvml.NVMLLibraryMismatchError):  # an older driver than nvidia-ml-py
                        gpu[name] = ask()
            gpus.append(gpu)
    except nvml.NVMLError:
        pass
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return gpus
