"""What takes memory and saves time, where the recipe says `auto`: the fastest that the GPUs of this run have the memory for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors.tables import Fields
from ..distributed import ranks
from ..host.cluster import World
from ..recipe.batch import Batch
from ..recipe.schema import BY_MEMORY
from ..recipe.settings import Settings
from ..run.directory import Opened
from ..run.offers import Offers
from ..strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def settle_memory(
    settings: Settings,
    strategy: Strategy,
    batch: Batch,
    world: World,
    config: PreTrainedConfig,
    opened: Opened,
    offers: Offers,
) -> Settings:
    """Return the settings with their keys of BY_MEMORY decided: as they were when the run began, where the first rank sees that
    it has begun; otherwise the fastest that fits each rank's device, by the planner's count. A collective."""
    values, why = opened.began, "as this run began"
    with ranks.agreed(world):  # whatever this host's recipe says: that all have the same one is compared later
        if settings.by_memory and not values:
            about = settings.recipe, settings.by_memory, strategy, batch, world.part(strategy.replicas), config
            values, why = offers.fastest_that_fits(*about)
    first, *others = ranks.gather((opened.began, values, why))
    answers = [first[1:]] if first[0] else [answer[1:] for answer in (first, *others)]
    return settings.deciding(*common(settings.by_memory, answers)) if settings.by_memory else settings


def common(keys: tuple[str, ...], answers: list[tuple[Fields, str]]) -> tuple[Fields, str]:
    """(for each key the value of all ranks' answers, or what takes the least where they differ or one has none; why: in the
    words of the first rank that has those values, else of the first that lacks memory)."""
    careful = {key: BY_MEMORY[key] for key in keys}
    every = [(careful | values, why) for values, why in answers]
    values = {
        key: every[0][0][key] if all(each[key] == every[0][0][key] for each, _ in every) else careful[key]
        for key in keys
    }
    return next((answer for answer in every if answer[0] == values), (values, f"GPUs differ: {every[0][1]}"))
