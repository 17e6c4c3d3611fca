"""docs/evidence/recipes.md: how fast each recipe is by the planner's count, and whether that is its fastest choice there.

    python -m benchmarks.fast_recipes            # write the page's table
    python -m benchmarks.fast_recipes --check    # 1 where the page is out of date

The figures before are those of revision 043a827d, in results/recipes_before.jsonl.
"""

import os
from dataclasses import replace
from unittest.mock import patch

from brigade.plan.choice.job_of_recipe import RecipePlan, hosts_of
from brigade.plan.choice.search import NEAR, candidates, chosen
from brigade.plan.choice.workload import INSTALLED, Candidate, Cluster, Workload, named
from brigade.plan.costs.estimate import Estimate
from brigade.plan.hardware import calibration
from brigade.plan.output.write import recipe_plans

from .pages import EVIDENCE, RESULTS, command, markdown, read

PAGE, BEFORE = EVIDENCE / "recipes.md", RESULTS / "recipes_before.jsonl"
EAGER = tuple(
    name for name in INSTALLED if name != "torch.compile"
)  # which a run takes where it is proven, and no plan counts


def choice_for(plan: RecipePlan, axes: bool) -> Candidate | None:
    """What `plan` chooses for the recipe's model, rows, batch, optimizer and cluster, with eager layers;
    None where nothing that it searches fits. axes: whether also among strategies that divide a model along another axis"""
    job, recipe = plan.estimate.job, plan.settings.recipe
    optimizer = recipe.training.optim
    workload = Workload(
        job.shape,
        recipe.data.max_length,
        recipe.training.global_batch_size,
        job.method,
        trained=job.trained,
        kernels=EAGER,
        rank=recipe.model.lora_r,
        whole=tuple(recipe.model.lora_modules_to_save),
        objective=recipe.training.objective,
        images=job.images,
        optimizer=optimizer,
    )
    ways = tuple(way for way in named([], optimizer) if axes or not way.axes)
    cluster = Cluster.of(job.gpu, hosts_of(plan.settings).values(), link=recipe.cluster.network or "")
    return chosen(candidates(replace(workload, choices=ways), cluster))


def ahead(plan: RecipePlan, other: Candidate | None) -> float:
    """How many times as fast as the recipe a choice is; 1 where there is none."""
    return plan.estimate.time.total / other.seconds if other else 1.0


def line(plan: RecipePlan, before: dict[str, dict[str, float]]) -> tuple[str, ...]:
    name, other = plan.path.removeprefix("recipes/"), choice_for(plan, True)
    was = before.get(plan.path)
    further = f"{other.name}: {ahead(plan, other):.2f}x" if other and ahead(plan, other) > NEAR else ""
    return (
        f"[{name}](../../recipes/{name})",
        plan.cluster,
        f"{was['rate']:,.0f}, {was['share']:.1f} %" if was else "",
        f"{plan.estimate.tokens_per_second_per_gpu:,.0f}, {plan.estimate.mfu:.1f} %",
        settings_of(plan.estimate, plan.strategy_name),
        f"{plan.estimate.most_gib:.0f} of {plan.estimate.gpu.memory_gib:.0f}",
        further,
    )


def settings_of(result: Estimate, strategy: str) -> str:
    """A recipe's choices in words: `FSDP2, micro-batch 1, recomputes, loss in tiles`."""
    job = result.job
    words = [strategy, f"micro-batch {job.micro_batch}"]
    words += ["recomputes"] * (job.checkpointing != "none") + ["loss in tiles"] * (job.loss == "tiled")
    return ", ".join(words)


def tables() -> dict[str, str]:
    before = {row["recipe"]: row for row in read(BEFORE)}
    with patch.dict(os.environ, {calibration.VARIABLE: ""}):
        lines = [line(plan, before) for plan in recipe_plans()]
    head = ("recipe", "on", "before: tokens/s/GPU, of peak", "now", "with", "GiB at most", "`plan` knows faster")
    return {"recipes": markdown(head, lines)}


def main(argv: list[str] | None = None) -> int:
    return command(PAGE, tables, str(__doc__), argv)


if __name__ == "__main__":
    raise SystemExit(main())
