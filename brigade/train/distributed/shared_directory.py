"""Whether all hosts see one output directory. This module imports no torch."""

import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from ...errors import UserError
from ..host.cluster import OWN_NUMBER, World
from . import ranks

PATIENCE = 5.0  # seconds for a network file system to show a file that another host has written
_Leader = tuple[str, str | None]  # of a host's first rank: the host, the checkpoint that it would continue from


def is_shared(directory: Path, checkpoint: Path | None, world: World, in_parts: str) -> bool:
    """Whether all hosts see one output directory; False: each has its own, in which it can keep whole checkpoints.

    in_parts: the strategy that writes a part of each checkpoint from every host, "" where one host writes the whole

    The first rank of each host makes the directory where it is missing and leaves a note in it for a moment; then each looks
    whose notes it sees. Ends all ranks with one message where a host cannot write, where only some hosts share it or the
    strategy writes its checkpoints in parts, where ranks see one GPU each and hosts have a directory each, and where hosts
    would continue from different checkpoints. The directory is then as it was.
    """
    token = ranks.gather(secrets.token_hex(8))[0]
    leads, note = world.local_rank == 0, directory / f".host-{token}-{world.rank}"
    made: list[Path] = []
    error: UserError | None = None
    try:
        if leads:
            made = [path for path in (directory, *directory.parents) if not path.exists()]
            directory.mkdir(parents=True, exist_ok=True)
            note.touch()
    except OSError as caught:
        problem = f"the output directory cannot be written: {caught.strerror}"
        # Where others can write, it is this host's fault, whatever the system calls it: what is not mounted is root's, say.
        error = UserError(str(directory), problem, "give another --output_dir", "host")
    leader = (world.host, checkpoint.name if checkpoint else None) if leads else None
    every = ranks.gather((error is None, leader, OWN_NUMBER in os.environ))
    leaders = {rank: leader for rank, (_, leader, _) in enumerate(every) if leader}
    written = all(can_write for can_write, _, _ in every)
    seen = [set(notes) for notes in ranks.gather(_notes(directory, token, len(leaders)) if leads and written else [])]
    shared = all(seen[rank] == set(leaders) for rank in leaders)
    if written and not shared and (in_parts or any(seen[rank] != {rank} for rank in leaders)):
        error = _not_shared(
            directory, leaders, [host for rank, (host, _) in leaders.items() if 0 not in seen[rank]], in_parts
        )
    elif written:
        error = _other_checkpoint(directory, leaders)
        if not shared and not error and any(one_gpu for _, _, one_gpu in every):
            error = _all_would_write(directory)
    with suppress(OSError):
        note.unlink(missing_ok=True)
    for path in made if any(ranks.gather(error is not None)) else []:
        with suppress(OSError):  # somebody else is there, too
            path.rmdir()
    with ranks.agreed(world):  # nobody leaves before all have tidied up
        if error and (not written or world.host in error.hosts or (world.is_main_rank and not error.hosts)):
            raise error  # on the hosts at fault, where it is known which ones are
    return shared


def _notes(directory: Path, token: str, wanted: int) -> list[int]:
    """The ranks whose notes are seen here. Listing a directory asks an NFS server anew, where looking for a name may not."""
    deadline = time.monotonic() + PATIENCE
    while True:
        seen = [int(path.name.rpartition("-")[2]) for path in directory.glob(f".host-{token}-*")]
        if len(seen) >= wanted or time.monotonic() > deadline:
            return seen
        time.sleep(0.1)


def _not_shared(directory: Path, leaders: dict[int, _Leader], away: list[str], in_parts: str) -> UserError:
    """away: the hosts that do not see the first one's note."""
    begun = any(checkpoint for _, checkpoint in leaders.values())
    behind = _other_checkpoint(directory, leaders) if begun else None
    if behind:
        return behind  # the directory is not mounted there: the run began in one that all shared
    (first, _), hosts = leaders[0], list(dict.fromkeys(away or [host for host, _ in leaders.values()]))
    others = f" (and {len(hosts) - 1} more)" if len(hosts) > 1 else ""
    problem = f"{hosts[0]}{others} does not see what {first} writes there"
    cure = "give an --output_dir that all hosts share, or "
    if not in_parts:
        return UserError(str(directory), f"{problem}, while other hosts do", f"{cure}one that is each host's own")
    problem += f", and {in_parts} writes a part of each checkpoint from every host"
    return UserError(
        str(directory), problem, f"{cure}train with DDP (--ds_config none): it keeps whole checkpoints on each"
    )


def _all_would_write(directory: Path) -> UserError:
    """The fault of ranks that see one GPU each, all by LOCAL_RANK 0: so does the rank that writes for its host, as Transformers
    (training_args.py: should_save) and DeepSpeed take it."""
    problem = (
        "hosts do not share it, and each rank sees only its own GPU: all ranks of a host would write its checkpoints"
    )
    cure = "give an --output_dir that all hosts share, or let all ranks of a host see all of its GPUs"
    return UserError(str(directory), problem, cure)


def _other_checkpoint(directory: Path, leaders: dict[int, _Leader]) -> UserError | None:
    """The fault of the hosts that lack the newest checkpoint that another one has."""
    names = [name for _, name in leaders.values() if name]
    newest = max(names, key=lambda name: int("0" + re.sub(r"\D", "", name)), default=None)
    behind = [(host, name) for host, name in leaders.values() if name != newest]
    if not behind:
        return None
    (host, theirs), ahead = behind[0], next(host for host, name in leaders.values() if name == newest)
    return UserError(
        "the checkpoint to continue from",
        f"{theirs or 'none'} on {host}, but {newest} on {ahead}",
        f"is {directory} mounted on {host}? Else copy it there from {ahead}, or give another --output_dir",
        "host",
        tuple(dict.fromkeys(host for host, _ in behind)),
    )
