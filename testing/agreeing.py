"""Worker of test_agreement.py: ranks of which one takes longer than the process group waits, dies meanwhile, or finds a mistake.

torchrun --nproc_per_node 2 -m testing.agreeing slow|dies|mistaken, or once for each rank with what torchrun would set
"""

import atexit
import datetime
import os
import signal
import sys
import time

from brigade.errors import UserError
from brigade.train.distributed import process_group, ranks
from brigade.train.host.cluster import world_from_environment

LONGEST = 1  # seconds that a collective waits
PREPARING = 3


def main() -> None:
    case, world = sys.argv[1], world_from_environment()
    process_group.COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=LONGEST)
    with ranks.agreed(world):
        pass  # the process group stands
    if case == "slow":
        with ranks.agreed(world):
            if world.rank == 0:
                time.sleep(PREPARING)
        print(f"rank {world.rank} went on after {ranks.gather(world.rank)}", flush=True)
        try:  # what would happen without that patience
            if world.rank == 0:
                time.sleep(PREPARING)
            ranks.gather(None)
        except Exception:
            print(f"rank {world.rank} gave up", flush=True)
        os._exit(0)
    if case == "mistaken":
        atexit.register(_be_ended)
        with ranks.agreed(world):
            if world.rank == 0:
                raise UserError("flag --this", "it is wrong", "say another")
    with ranks.agreed(world):
        if world.rank == int(os.environ["DIES"]):
            time.sleep(1)  # the others wait by now
            os.kill(os.getpid(), signal.SIGKILL)


def _be_ended() -> None:
    """As by a launcher that has seen another rank's end, while this one is on its way out."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)


if __name__ == "__main__":
    ranks.run_to_the_end(main)
