"""What the rooms around the hall offer to a run: proofs of kernels, the planner's micro-batch, its figures and its comparison.

A clone that has only the hall trains as well. What a run does not use is not imported.
"""

from importlib.util import find_spec
from typing import Any

from .train.cluster import World
from .train.offers import Offers, Proofs


def offers(world: World) -> Offers:
    """Return what those rooms offer that are there. Each host says once where the user's own figures for the planner are
    broken."""
    offered: dict[str, Any] = {}
    if find_spec(f"{__package__}.kernels"):
        offered |= {"prove_kernels": _prove_kernels}
    if find_spec(f"{__package__}.plan"):
        from .plan import runs

        runs.leave_aside_a_broken_calibration(world)
        offered |= {"rows_that_fit": runs.rows_that_fit, "peak_tflops": runs.peak_tflops, "callbacks": runs.callbacks}
    return Offers(**offered)


def _prove_kernels(settings: Any, strategy: Any, world: World, config: Any, compiler: bool) -> Proofs:
    from .kernels import auto

    return auto.prove_for_run(settings, strategy, world, config, compiler)
