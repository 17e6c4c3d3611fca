"""Whether a run of several hosts is among itself: its ports ask nobody who connects."""

from collections.abc import AsyncIterator

from ..errors import shortened
from ..errors.console import counted
from .hosts import Hosts
from .names import need_two
from .registry import check
from .results import Result, sound, unknown

CURE = "take hosts for yourself (sbatch --exclusive), or ask these users; and keep strangers out of the hosts' network"


@check("other users")
async def other_users(hosts: Hosts) -> AsyncIterator[Result]:
    """Reads from /proc which other people have processes on the hosts. Threshold: none. On several hosts anybody who reaches
    the port of rank 0 (29500) or those of gloo can take a rank's place, and libraries exchange pickles between ranks, which are
    code; torch is not built for networks of strangers (its SECURITY.md). Ranks of one host meet where no other user can join
    them, so it has no row. Whether a firewall keeps out the rest of the network cannot be seen from the hosts."""
    need_two(hosts)
    for host, found in (await hosts.ask("users.look")).items():
        if others := found["others"]:
            value = counted(len(others), "other user")
            problem = f"{shortened(', '.join(others), 80)} {'has' if len(others) == 1 else 'have'} processes here"
            why = "port 29500 of the first host and gloo's ports on all of them ask nobody who he is: whoever connects first"
            why += " takes a rank's place, and can run code as you"
            yield Result(host, "yellow", value, None, problem, why, CURE)
        elif found["hidden"]:
            yield unknown(host, "/proc shows no processes of other users (hidepid)")
        else:
            yield sound(host, "none")
