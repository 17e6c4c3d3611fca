"""What engines remember of the world that this process was in."""

import sys


def forget_world() -> None:
    """The number of this rank and of all, where the ranks of this process are divided anew (accelerate/state.py: _shared_state;
    deepspeed/comm/comm.py: cdb, utils/groups.py: _WORLD_GROUP)."""
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    for name, kept in (("deepspeed.comm.comm", "cdb"), ("deepspeed.utils.groups", "_WORLD_GROUP")):
        if name in sys.modules:
            setattr(sys.modules[name], kept, None)
