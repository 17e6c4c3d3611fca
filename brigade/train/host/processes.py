"""What Linux says of other processes. Needs only the standard library."""

from pathlib import Path


def status(pid: int) -> list[str]:
    """Return the words of /proc/PID/stat from the process's state on (proc(5), 3 and later); [] where there are none to see."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent(pid: int) -> int:
    """Return the process that started `pid`; 0 where there is none to see."""
    return int([*status(pid), "0", "0"][1])


def command(pid: int) -> list[str]:
    """Return the words of a process's command; none where there are none to see."""
    return _texts(pid, "cmdline")


def environment(pid: int) -> dict[str, str] | None:
    """Return the variables with which a process of this user was started; None where there are none to see."""
    lines = _texts(pid, "environ")
    return dict(line.split("=", 1) for line in lines if "=" in line) if lines else None


def _texts(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
