"""Hosts that have met for a measurement of their network."""

from typing import Any

from brigade.check.meeting import Meeting


def met(names: list[str], links: Any = None, fabric: float = 0.0) -> Meeting:
    interface = dict.fromkeys(names, "eth0")
    return Meeting(
        "token",
        {host: f"10.0.0.{number + 1}" for number, host in enumerate(names)},
        interface,
        links={host: {"eth0": links or {"speed": None, "real": False}} for host in names},
        fabric=dict.fromkeys(names, fabric),
    )
