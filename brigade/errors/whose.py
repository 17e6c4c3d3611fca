"""Whose an error is, and so what may help against it: stated where it is raised, and judged by launch/policy.py.

user: somebody has to correct something first. host: the host that meets it cannot take part, but others may go on.
run: the program or the data is at fault, and it may come again at the same place. passing: it goes away by itself.
"""

import errno
import re
from collections.abc import Sequence

from . import UserError, Whose

_OF_A_HOST = {  # its disk, what is mounted there, its memory, its network
    *(errno.EIO, errno.EROFS, errno.ENOSPC, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.EREMOTEIO),
    *(errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENOMEM),
}
_OF_A_USER = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EDQUOT, errno.EFBIG}
_PASSING = {
    *(errno.EADDRINUSE, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT),
    *(errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EAGAIN),
}
# The last resort, for libraries that name a failed device only in words. Most other errors of CUDA are the program's.
_HOST_IN_WORDS = re.compile(
    r"uncorrectable|ECC error|NVLink|fallen off the bus|no CUDA-capable device|device\(s\) is/are busy or unavailable"
    r"|hardware (stack )?error|(CUDA|NVML).*unknown error|system not yet initialized",
    re.IGNORECASE,
)


def of_errno(number: int | None) -> Whose:
    """Whose an error of the operating system is."""
    for whose, numbers in (("host", _OF_A_HOST), ("user", _OF_A_USER), ("passing", _PASSING)):
        if number in numbers:
            return whose  # type: ignore[return-value]
    return "run"


def of_error(error: BaseException) -> tuple[Whose, tuple[str, ...]]:
    """Whose an error is, and the hosts that it names; () for the one where it is raised."""
    if isinstance(error, UserError):
        return error.whose, error.hosts
    words = f"{type(error).__name__}: {error}"
    by_number = of_errno(error.errno) if isinstance(error, OSError) else "run"
    if by_number != "run":
        return by_number, ()
    return "host" if _HOST_IN_WORDS.search(words) else "run", ()


def of_ranks(verdicts: Sequence[tuple[Whose | None, str]]) -> tuple[Whose, tuple[str, ...]] | None:
    """Whose an error is that several ranks may have met in the same step.

    verdicts: (whose, its host) for each rank; whose: None where all went well

    What all of several hosts meet is no host's fault: somebody has to correct it. None: the first rank's verdict holds.
    """
    at_fault = dict.fromkeys(host for whose, host in verdicts if whose == "host")
    first = next((whose for whose, _ in verdicts if whose), None)
    if first != "host":
        return None
    hosts = {host for _, host in verdicts}
    return ("user", ()) if 1 < len(hosts) == len(at_fault) else ("host", tuple(at_fault))
