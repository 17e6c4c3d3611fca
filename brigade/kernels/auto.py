"""What `attn_implementation: auto` takes on GPUs: the fastest path that is proven on every device of a run.

All ranks of a run compute in the same way, so what one host lacks none takes.
"""

import sys
from typing import Any

from ..cluster import World
from ..distributed import ranks
from ..errors import first_line
from ..recipe.flags import Settings

Row = dict[str, Any]


def settle(settings: Settings, config: Any, world: World) -> None:
    """Set settings.proven, the same on all ranks; nothing on hosts without a GPU.

    The first rank of each host and kind of GPU looks for its proof, and makes the short one where there is none. Every rank
    has to call it; it raises nothing, for a run goes on without a proof as it would have before.
    """
    found: dict[str, float] | None = None
    device = _device(world)
    seen = ranks.gather((world.host, device))
    everywhere = all(one[1] for one in seen)
    if everywhere and seen.index((world.host, device)) == world.rank:
        try:
            found = here(settings, config, world, str(device))
        except Exception as error:  # a run that trains does not end for a proof's sake
            _say(world, f"kernels are not proven: {type(error).__name__}: {first_line(error)}")
    asked = settings.recipe.model.attn_implementation == "auto"
    told = ranks.gather(found)
    firsts = [told[rank] for rank, one in enumerate(seen) if seen.index(one) == rank]
    settings.proven = common(firsts) if asked and everywhere else {}


def common(verdicts: list[dict[str, float] | None]) -> dict[str, float]:
    """{path: milliseconds on the slowest device}, the fastest first, of what every device has proven. None: one has no proof."""
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known or len(known) < len(verdicts):
        return {}
    slowest = {name: max(one[name] for one in known) for name in known[0] if all(name in one for one in known)}
    return dict(sorted(slowest.items(), key=lambda entry: entry[1]))


def here(settings: Settings, config: Any, world: World, device: str) -> dict[str, float] | None:
    """prove.of_attention() of this rank's device, by the proof in the cache or the short one; None where neither proves any."""
    from . import judging, models, proofs, prove

    written, shapes = models.as_json(config), prove.shapes_of(settings)
    proof, note = proofs.read(proofs.key(written, shapes, proofs.device(world.local_rank)))
    for name in asked_for(settings):  # the user's word counts; but a proof that it is wrong is no secret
        row = (proof or {"paths": {}})["paths"].get(name, {})
        if row.get("status") == "wrong":
            _say(world, f"warning: {name} does not compute what eager in fp32 does on {device}: {row['why']}")
    if settings.recipe.model.attn_implementation != "auto":
        return None
    if note:
        _say(world, note)
    if proof is None:
        _say(
            world,
            f"proving kernels on {device} (at most {prove.QUICK['seconds']:.0f} s, once for this driver and these versions)",
        )
        proof = prove.on_this_host(written, shapes, quick=True, index=world.local_rank)
        for line in in_words(proof):
            _say(world, line)
        if not prove.of_attention(proof):
            reason = models.unprovable(written) or "see `python -m brigade.kernels`"
            _say(world, f"no attention is proven here ({reason}): `auto` goes by what is installed")
            return None
        if proofs.write(proof) is None:
            _say(world, f"the proof cannot be kept in {proofs.folder()}: each run makes it again")
    elif late := judging.to_try_again(proof):
        _say(
            world,
            f"trying {', '.join(late)} again on {device}, which ran out of time (at most {prove.QUICK['seconds']:.0f} s)",
        )
        proof = _again(written, shapes, world, proof)
    return in_order(prove.of_attention(proof), proof)


def _again(written: Row, shapes: Row, world: World, proof: Row) -> Row:
    """The proof with what ran out of time tried once more; the one that is there, where that cannot be done."""
    from . import judging, proofs, prove

    try:
        new = prove.on_this_host(written, shapes, quick=True, index=world.local_rank, known=proof)
    except Exception as error:  # a run that trains does not end for a proof's sake
        _say(world, f"it cannot be tried: {type(error).__name__}: {first_line(error)}")
        return proof
    for line in in_words(new):
        _say(world, line)
    proofs.write(new)
    return judging.merged(proof, new)


def asked_for(settings: Settings) -> list[str]:
    """The paths that a recipe names."""
    model, training = settings.recipe.model, settings.recipe.training
    dtype = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"
    kernels = ["liger"] * training.use_liger_kernel + ["compiled"] * training.torch_compile
    return [model.attn_implementation, training.optim, dtype, *kernels]


def in_order(times: dict[str, float], proof: Row) -> dict[str, float]:
    """The fastest first; times that cannot be told apart are equal, and stand in the table's order (judging.judge)."""
    best = times.get(proof["fastest"].get("attention", ""))
    tied = {name for name in times if best is not None and proof["paths"][name]["status"] == "proven"}
    equal = {name: best if name in tied and best is not None else value for name, value in times.items()}
    return dict(sorted(equal.items(), key=lambda entry: entry[1]))


def in_words(proof: Row) -> list[str]:
    """One line for each path that this host has."""
    lines = []
    for name, row in proof["paths"].items():
        if row["status"] == "absent":
            continue
        words = [f"  {name}: {row['status']}"]
        words += [f"{row['ms']:.1f} ms"] if row.get("ms") is not None else []
        words += [row["why"]] if row.get("why") else []
        lines.append(", ".join(words))
    return [*lines, f"  in {proof['seconds']} s"]


def _device(world: World) -> str | None:
    import torch

    there = torch.cuda.is_available() and torch.cuda.device_count() > world.local_rank
    return torch.cuda.get_device_name(world.local_rank) if there else None


def _say(world: World, line: str) -> None:
    print(f"{world.host}: {line}" if world.hosts > 1 else line, file=sys.stderr, flush=True)
