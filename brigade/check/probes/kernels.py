"""Which kernels compute the right thing on a host's first GPU."""

from typing import Any

from ...errors import UserError


def prove(recipe: str, flags: list[str], quick: bool) -> dict[str, Any]:
    """The proof of kernels/prove.py, which is kept for later runs of this host; problem: why there is none."""
    from ...kernels import auto, models, proofs
    from ...kernels import prove as proving
    from ...train.model.location import load_config
    from ...train.recipe.flags import load

    try:
        settings = load(["--recipe", recipe, *flags])
        config = models.as_json(load_config(settings))
        proof = proving.on_this_host(config, proving.shapes_of(settings), quick, **auto.words_for(settings))
    except UserError as error:
        return {"problem": f"{error.place}: {error.problem}"}
    if proving.of_kind(proof):
        proofs.write(proof)
    return proof
