"""What the planner tries of a model on a cluster, and what it takes."""

from dataclasses import replace
from typing import Any

from brigade.plan.choice.search import candidates, chosen
from brigade.plan.choice.workload import Candidate, Cluster, Workload
from brigade.plan.shape.find import named_shape


def chosen_for(model: str, cluster: Cluster, **changes: Any) -> tuple[list[Candidate], Any]:
    """Return all candidates, the best one first, and the one that is chosen, or None. changes: of the workload"""
    ranked = candidates(replace(Workload(named_shape(model)), **changes), cluster)
    return ranked, chosen(ranked)
