"""The list of checks. Each one is a small function that asks hosts and judges what they answer."""

import importlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, get_args

from .hosts import Hosts
from .results import Result

Size = Literal["quick", "usual", "full"]  # of a check: from which size of `check` on it runs
# Whose faults stop a launch: no run could begin with them, and they are certain. All others are told, and the launch goes on.
# More slots than GPUs is no row of these: launch itself refuses that, and the row `gpus` is red too where somebody uses one.
STOP = frozenset({"ports", "python", "packages", "code", "paths", "output directory"})
SIZES: tuple[Size, ...] = get_args(Size)
Function = Callable[[Hosts], AsyncIterator[Result]]

# Groups and their modules with checks, in the order of the table.
GROUPS: dict[str, tuple[str, ...]] = {
    "reach": ("names", "reach", "users"),
    "sameness": ("sameness",),
    "devices": ("devices", "resources"),
    "storage": ("storage",),
    "network": ("network",),
    "kernels": ("kernels",),
    "rehearsal": ("rehearsal",),
}


@dataclass(frozen=True)
class Check:
    """name: of its row; group: of GROUPS; about: its docstring: what it reads, its threshold, that threshold's source

    seconds: its limit; alone: nothing else runs meanwhile, for it measures how fast something is
    """

    name: str
    group: str
    function: Function
    size: Size
    seconds: float
    alone: bool
    about: str


_CHECKS: dict[str, Check] = {}


def check(name: str, size: Size = "quick", seconds: float = 60, alone: bool = False) -> Callable[[Function], Function]:
    """Makes a function a check. It yields a Result for each host; hosts of which it yields none did not answer."""

    def register(function: Function) -> Function:
        module = function.__module__.rpartition(".")[2]
        group = next((group for group, modules in GROUPS.items() if module in modules), module)
        about = " ".join((function.__doc__ or "").split())
        _CHECKS[name] = Check(name, group, function, size, seconds, alone, about)
        return function

    return register


def checks(size: Size = "full") -> list[Check]:
    """All checks that belong to a size."""
    order = [module for modules in GROUPS.values() for module in modules]
    for module in order:
        importlib.import_module(f".{module}", __package__)
    few = SIZES[: SIZES.index(size) + 1]
    found = [one for one in _CHECKS.values() if one.group in GROUPS and one.size in few]
    return sorted(
        found, key=lambda one: order.index(one.function.__module__.rpartition(".")[2])
    )  # whoever was imported first
