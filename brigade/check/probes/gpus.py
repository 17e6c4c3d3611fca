"""What a host says of its GPUs: NVIDIA's driver by NVML (nvidia-ml-py), and the kernel's log. A figure that a device does not
have is left out, and nothing else with it: consumer cards count no memory errors and have no NVLink."""

import ctypes
import os
import pwd
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from ...hosts import Facts

if TYPE_CHECKING:
    import pynvml

Handle = object  # of a GPU, which only NVML reads
Answer = TypeVar("Answer")
READ = 0  # NVML_P2P_CAPS_INDEX_READ, which is a tuple in pynvml
LOOK = 0.1  # seconds for Xid events that come right now
LINKS = 36  # NVML_NVLINK_MAX_LINKS
_XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): (\d+)(?:.*recovery action changed from .* to 0x([0-9a-f]+))?"
)
# Newer drivers write this instead of number 79 where a GPU is gone when it should be initialised, over several lines.
_FALLEN = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+).*fallen off the bus", re.DOTALL)
OFF_THE_BUS = 79
NO_NVML = "NVML (libnvidia-ml.so.1) is not there; NVIDIA_DRIVER_CAPABILITIES=compute,utility brings it into a container"


def look() -> Facts:
    """gpus: the figures of _figures() of each; peers: [a, b, status] of pairs; xids: that come right now
    nvswitches: of the host, fabric_manager: whether its process can be seen
    Or absent: why NVML cannot be asked, or problem: why it does not answer.
    """
    try:
        import pynvml as nvml
    except ImportError:
        return {"absent": "nvidia-ml-py is not installed there"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return {"absent": NO_NVML}
    except nvml.NVMLError as error:
        return {"problem": str(error)}
    try:
        handles = _handles(nvml)
        there = {number: handle for number, handle in handles.items() if handle is not None}
        return {
            "gpus": [
                {"index": number} | (_figures(nvml, there[number]) if number in there else {"lost": True})
                for number in handles
            ],
            "peers": _peers(nvml, there),
            "xids": _events(nvml, there),
            "nvswitches": len(list(Path("/proc/driver/nvidia-nvswitch/devices").glob("*"))),
            "fabric_manager": _runs("nv-fabricmanage"),  # the kernel keeps 15 characters of a name
        }
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _handles(nvml: ModuleType) -> dict[int, Handle]:
    """Index -> handle of each GPU, None where the driver cannot reach it; NVML counts those of others' jobs, too."""
    handles: dict[int, Handle] = {}
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            handles[number] = nvml.nvmlDeviceGetHandleByIndex(number)
        except nvml.NVMLError_NoPermission:
            continue
        except nvml.NVMLError:
            handles[number] = None
    return handles


def _asked(nvml: ModuleType, function: Callable[..., Answer], *words: object) -> Answer | None:
    """The answer, or None where the device, the driver or the installed pynvml has none."""
    try:
        return function(*words)
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError, AttributeError):  # the second is none of the first
        return None


def _figures(nvml: ModuleType, gpu: Handle) -> Facts:
    """What one GPU answers, in bytes, W and degrees Celsius; clock_reasons: NVML's bits; nvlinks: 1 for each that is up;
    performance: 0 (the highest) to 15; margin: degrees until it slows down."""

    def watts(milliwatts: int) -> float:
        return milliwatts / 1000

    queries: dict[str, Callable[[], object]] = {
        "name": lambda: _text(nvml.nvmlDeviceGetName(gpu)),
        "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(gpu)),
        "bus": lambda: _text(nvml.nvmlDeviceGetPciInfo(gpu).busId),
        "mig": lambda: bool(nvml.nvmlDeviceGetMigMode(gpu)[0]),
        "instances": lambda: _instances(nvml, gpu),
        "memory": lambda: {key: getattr(nvml.nvmlDeviceGetMemoryInfo(gpu), key) for key in ("total", "free")},
        "holders": lambda: [_holder(process) for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)],
        "ecc": lambda: bool(nvml.nvmlDeviceGetEccMode(gpu)[0]),
        "uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "remapped": lambda: dict(
            zip(("correctable", "uncorrectable", "pending", "failed"), nvml.nvmlDeviceGetRemappedRows(gpu), strict=True)
        ),
        "recovery": lambda: _recovery(nvml, gpu),
        "performance": lambda: nvml.nvmlDeviceGetPerformanceState(gpu),
        "clock_reasons": lambda: _clock_reasons(nvml, gpu),
        "power_limit": lambda: watts(nvml.nvmlDeviceGetEnforcedPowerLimit(gpu)),
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        "slowdown_at": lambda: nvml.nvmlDeviceGetTemperatureThreshold(gpu, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        "margin": lambda: nvml.nvmlDeviceGetMarginTemperature(gpu),
        "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
        "pcie_generation_most": lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu),
        "pcie_width": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
        "pcie_width_most": lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu),
        "nvlinks": lambda: _nvlinks(nvml, gpu),
        "fabric": lambda: _fabric(nvml, gpu),
    }
    answers = {name: _asked(nvml, query) for name, query in queries.items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def _instances(nvml: ModuleType, gpu: Handle) -> list[str] | None:
    """The UUIDs of a GPU's MIG instances; None where it is not divided. A number need not have one."""
    numbers = range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu))
    found = [_asked(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, number) for number in numbers]
    return [_text(nvml.nvmlDeviceGetUUID(each)) for each in found if each is not None] or None


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


def _clock_reasons(nvml: ModuleType, gpu: Handle) -> int:
    """The reasons why clocks are slowed down, as bits. NVML's function had another name before driver 535."""
    found = _asked(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    return found if found is not None else nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)


def _recovery(nvml: ModuleType, gpu: Handle) -> int | None:
    """The action that the driver wants, NVML_GPU_RECOVERY_ACTION_*; drivers before 560 do not say."""
    (found,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    return None if found.nvmlReturn else found.value.uiVal


def _nvlinks(nvml: ModuleType, gpu: Handle) -> list[int] | None:
    states = (_asked(nvml, nvml.nvmlDeviceGetNvLinkState, gpu, link) for link in range(LINKS))
    return [state for state in states if state is not None] or None


def _fabric(nvml: ModuleType, gpu: Handle) -> dict[str, int] | None:
    """state: NVML_GPU_FABRIC_STATE_*, status: of its registration. None where the device belongs to no fabric."""
    found = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(found))
    return {"state": found.state, "status": found.status} if found.state else None


def _holder(process: "pynvml.c_nvmlProcessInfo_t") -> Facts:
    """The process that computes on a GPU. user and command are left out where a container hides the process."""
    found = {"pid": process.pid, "memory": process.usedGpuMemory}
    with suppress(OSError, KeyError):
        entry = Path("/proc", str(process.pid))
        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        found |= {"user": pwd.getpwuid(entry.stat().st_uid).pw_name, "command": command[:80]}
    return found


def _peers(nvml: ModuleType, gpus: dict[int, Handle]) -> list[list[int]]:
    pairs = [(a, b) for a in gpus for b in gpus if a < b]
    asked = ((a, b, _asked(nvml, nvml.nvmlDeviceGetP2PStatus, gpus[a], gpus[b], READ)) for a, b in pairs)
    return [[a, b, status] for a, b, status in asked if status is not None]


def _events(nvml: ModuleType, gpus: dict[int, Handle]) -> list[dict[str, int]]:
    """Xids of right now. NVML tells only what happens after it was asked."""
    xids: list[dict[str, int]] = []
    with suppress(nvml.NVMLError, AttributeError):
        events = nvml.nvmlEventSetCreate()
        for gpu in gpus.values():
            _asked(nvml, nvml.nvmlDeviceRegisterEvents, gpu, nvml.nvmlEventTypeXidCriticalError, events)
        end = time.monotonic() + LOOK
        try:
            while (left := end - time.monotonic()) > 0:
                event = nvml.nvmlEventSetWait_v2(events, int(left * 1000) + 1)  # raises when nothing comes
                xids.append({"index": nvml.nvmlDeviceGetIndex(event.device), "xid": event.eventData})
        finally:
            nvml.nvmlEventSetFree(events)
    return xids


def _runs(name: str) -> bool:
    for entry in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if entry.read_text().strip() == name:
                return True
    return False


def kernel_log() -> Facts:
    """xids: [{bus, xid, age}] of the kernel log since boot, age in seconds; or unreadable: why.

    Those of number 154 have `action`: what the driver wants from then on, NVML_GPU_RECOVERY_ACTION_*; 0: nothing any more.
    """
    try:
        lines = list(_kernel_messages())
    except OSError as error:
        refused = f"/dev/kmsg: {error.strerror}"
        lines = list(_journal())
        if not lines:
            return {"unreadable": refused}
    entries = (_entry(age, text) for age, text in lines)
    return {"xids": [entry for entry in entries if entry]}


def _entry(age: float, text: str) -> Facts | None:
    xid, fallen = _XID.search(text), _FALLEN.search(text)
    if xid:
        bus, number, action = xid.groups()
        return {"bus": bus, "xid": int(number), "age": round(age)} | ({"action": int(action, 16)} if action else {})
    return {"bus": fallen[1], "xid": OFF_THE_BUS, "age": round(age)} if fallen else None


def _kernel_messages() -> Iterator[tuple[float, str]]:
    """Age and text of each message that the kernel still has. Raises OSError where this user may not read them."""
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    try:
        while True:
            try:
                head, _, text = os.read(log, 8192).decode(errors="replace").partition(";")
            except BrokenPipeError:  # overwritten meanwhile; the next read has the oldest that is left
                continue
            except BlockingIOError:
                return
            yield now - int(head.split(",")[2]) / 1e6, text
    finally:
        os.close(log)


def _journal() -> Iterator[tuple[float, str]]:
    command = ["journalctl", "--dmesg", "--boot", "--output=short-unix", "--no-pager", "--quiet"]
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=8).stdout
        for record in re.split(r"\n(?=\d)", said):  # further lines of a record are indented
            stamp, _, text = record.partition(" ")
            with suppress(ValueError):
                yield time.time() - float(stamp), text
