"""Takes the place of nvidia-ml-py on a host without GPUs: answers from a file what probes/gpus.py asks.

STAND_IN_NVML names a YAML file as in tests/data/nvml/; without it there is no NVML library, as on a host without a driver.
STAND_IN_GPUS: how many GPUs (default: the file's count). What the file does not have is not supported, as NVML says it.
"""

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
nvmlEventTypeXidCriticalError = 8
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230


class NVMLError(Exception):
    pass


class NVMLLibraryMismatchError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    def __str__(self) -> str:
        return "Not Supported"


class NVMLError_NoPermission(NVMLError):
    def __str__(self) -> str:
        return "Insufficient Permissions"


class NVMLError_LibraryNotFound(NVMLError):
    def __str__(self) -> str:
        return "NVML Shared Library Not Found"


class c_nvmlGpuFabricInfoV_t(ctypes.Structure):
    _fields_ = [("state", ctypes.c_uint), ("status", ctypes.c_uint)]


_said: dict[str, Any] = {}


def nvmlInit() -> None:
    import yaml

    name = os.environ.get("STAND_IN_NVML")
    if name is None:
        raise NVMLError_LibraryNotFound
    _said.update(yaml.safe_load(Path(name).read_text()))
    if "problem" in _said:
        raise NVMLError(_said["problem"])


def nvmlShutdown() -> None:
    _said.clear()


def nvmlSystemGetDriverVersion() -> str:
    return str(_said["driver"])


def nvmlDeviceGetCount() -> int:
    return int(os.environ.get("STAND_IN_GPUS", _said["count"]))


def nvmlDeviceGetHandleByIndex(number: int) -> SimpleNamespace:
    if number in _said.get("others", []):  # of another job
        raise NVMLError_NoPermission
    if number in _said.get("lost", []):
        raise NVMLError("GPU is lost")
    return SimpleNamespace(number=number, said=_said["gpu"] | _said.get("own", {}).get(number, {}))


def nvmlDeviceGetIndex(gpu: SimpleNamespace) -> int:
    return gpu.number


def _of(key: str) -> Any:
    def answer(gpu: SimpleNamespace, *_: Any) -> Any:
        if key not in gpu.said:
            raise NVMLError_NotSupported
        return gpu.said[key]

    return answer


nvmlDeviceGetName = _of("name")
nvmlDeviceGetTotalEccErrors = _of("uncorrected")
nvmlDeviceGetCurrentClocksEventReasons = nvmlDeviceGetCurrentClocksThrottleReasons = _of("clock_reasons")
nvmlDeviceGetTemperature, nvmlDeviceGetTemperatureThreshold = _of("temperature"), _of("slowdown_at")
nvmlDeviceGetMarginTemperature, nvmlDeviceGetPerformanceState = _of("margin"), _of("performance")
nvmlDeviceGetCurrPcieLinkGeneration = _of("pcie_generation")
nvmlDeviceGetMaxPcieLinkGeneration = _of("pcie_generation_most")
nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth = _of("pcie_width"), _of("pcie_width_most")


def nvmlDeviceGetPciInfo(gpu: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(busId=f"0000{_of('bus')(gpu).format(gpu.number)}")


def nvmlDeviceGetMemoryInfo(gpu: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**_of("memory")(gpu))


def nvmlDeviceGetComputeRunningProcesses(gpu: SimpleNamespace) -> list[SimpleNamespace]:
    held = _of("holders")(gpu)
    return [SimpleNamespace(pid=one["pid"], usedGpuMemory=one["memory"]) for one in held]


def nvmlDeviceGetEccMode(gpu: SimpleNamespace) -> list[int]:
    return [int(_of("ecc")(gpu))] * 2


def nvmlDeviceGetRemappedRows(gpu: SimpleNamespace) -> tuple[int, ...]:
    rows = _of("remapped")(gpu)
    return tuple(rows[key] for key in ("correctable", "uncorrectable", "pending", "failed"))


def nvmlDeviceGetFieldValues(gpu: SimpleNamespace, fields: list[int]) -> list[SimpleNamespace]:
    """Return the value of the one field that is asked for."""
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=_of("recovery")(gpu))) for _ in fields]


def nvmlDeviceGetEnforcedPowerLimit(gpu: SimpleNamespace) -> int:
    return int(_of("power_limit")(gpu) * 1000)


def nvmlDeviceGetMigMode(gpu: SimpleNamespace) -> list[int]:
    return [int(_of("mig")(gpu))] * 2


def nvmlDeviceGetNvLinkState(gpu: SimpleNamespace, link: int) -> int:
    links = _of("nvlinks")(gpu)
    if link >= len(links):
        raise NVMLError("Invalid Argument")
    return links[link]


def nvmlDeviceGetGpuFabricInfoV(gpu: SimpleNamespace, found: Any) -> None:
    fabric = _of("fabric")(gpu)
    found._obj.state, found._obj.status = fabric["state"], fabric["status"]


def nvmlDeviceGetP2PStatus(a: SimpleNamespace, b: SimpleNamespace, kind: int) -> int:
    if "peers" not in _said:
        raise NVMLError_NotSupported
    return _said["peers"]


def nvmlEventSetCreate() -> list[Any]:
    return list(_said.get("xids", []))


def nvmlDeviceRegisterEvents(gpu: SimpleNamespace, kinds: int, events: list[Any]) -> None:
    pass


def nvmlEventSetWait_v2(events: list[Any], milliseconds: int) -> SimpleNamespace:
    if not events:
        raise NVMLError("Timeout")
    event = events.pop(0)
    return SimpleNamespace(device=SimpleNamespace(number=event["index"]), eventData=event["xid"])


def nvmlEventSetFree(events: list[Any]) -> None:
    pass
