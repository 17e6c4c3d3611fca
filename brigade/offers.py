"""What the rooms around the hall offer to a run: proofs of kernels, the planner's micro-batch, its figures, its
comparison, and what it would change after an out-of-memory error.

A clone that has only the hall trains as well. What a run does not use is not imported.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from .errors import first_line
from .errors.tables import Fields
from .train.distributed import ranks
from .train.host.cluster import World
from .train.recipe.settings import Settings
from .train.run.offers import Offers, Proofs
from .train.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def offers(world: World) -> Offers:
    """Return what the rooms offer that are there on all hosts: some of it is a collective. A collective.

    Each host says once where the user's own figures for the planner are broken, or the planner is.
    """
    offered: Fields = {}
    if find_spec(f"{__package__}.kernels"):
        offered |= {"prove_kernels": _prove_kernels}
    if find_spec(f"{__package__}.plan"):
        try:
            offered |= _of_the_planner(world)
        except Exception as error:  # a run that trains does not end for an estimate's sake
            if world.local_rank == 0:
                print(
                    f"{world.host}: this run goes on without the planner: {type(error).__name__}: {first_line(error)}"
                )
    of_ranks = [set(names) for names in ranks.gather(sorted(offered))]
    everywhere = set.intersection(*of_ranks)
    missed = set.union(*of_ranks) - everywhere
    if world.is_main_rank and missed:
        print(f"this run goes on without {', '.join(sorted(missed))}: not every host's clone offers it")
    return Offers(**{name: offered[name] for name in everywhere})


def _of_the_planner(world: World) -> Fields:
    from .plan.hardware import calibration
    from .plan.runs import offered, prediction, remedies

    calibration.leave_aside_if_broken("" if world.local_rank else world.host)
    by_module = {
        offered: ("rows_that_fit", "fastest_that_fits", "peak_tflops"),
        prediction: ("fails_to_load",),
        remedies: ("what_fits",),
    }
    offers = {name: getattr(module, name) for module, names in by_module.items() for name in names}
    return offers | {"callbacks": lambda *given: [prediction.CompareWithPlan(*given)]}


def _prove_kernels(
    settings: Settings, strategy: Strategy, world: World, config: "PreTrainedConfig", compiler: bool
) -> Proofs:
    from .kernels import auto

    return auto.prove_for_run(settings, strategy, world, config, compiler)
