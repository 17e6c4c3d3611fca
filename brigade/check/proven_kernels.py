"""Whether fast kernels compute the right thing on each host's devices."""

from collections.abc import AsyncIterator, Iterator

from ..kernels.paths import FAILED, PROVEN, SLOWER, WRONG
from .checks import Facts, Hosts, Result, check, sound, unknown

WHY = "a run would go on with it, and learn something else than it should"


@check("kernels", size="usual", seconds=120, alone=True)
async def kernels(hosts: Hosts) -> AsyncIterator[Result]:
    """Computes logits and gradients of a tiny model of the recipe's architecture by each path that `auto` chooses among, on the
    first GPU of each host, and times them at the recipe's shapes (kernels/prove.py). Threshold: each path's errors against eager
    in fp32 are within what rounding allows (docs/kernels.md). What is proven is kept, and `auto` takes the fastest of it."""
    async for result in _kernels(hosts, quick=True):
        yield result


@check("all kernels", size="full", seconds=600, alone=True)
async def all_kernels(hosts: Hosts) -> AsyncIterator[Result]:
    """As kernels, for Liger, compiled layers, optimizers and precisions too. Threshold: as there."""
    async for result in _kernels(hosts, quick=False):
        yield result


async def _kernels(hosts: Hosts, quick: bool) -> AsyncIterator[Result]:
    job = hosts.wanted.job
    for host, hello in hosts.hello.items():
        if not hello.get("gpus"):
            yield unknown(host, "it has no GPU; what CPUs compute is measured in docs/kernels.md")
        elif job is None:
            yield unknown(host, "it needs a recipe: kernels are proven for its model")
    asked: dict[str, Facts] = {host: {} for host, hello in hosts.hello.items() if hello.get("gpus")}
    if not asked or job is None:
        return
    words = {"recipe": str(job.settings.recipe_path.absolute()), "flags": list(job.flags), "quick": quick}
    for host, proof in (await hosts.ask("actions.prove", 100 if quick else 500, each=asked, **words)).items():
        for result in judged(host, proof):
            yield result


def judged(host: str, proof: Facts) -> Iterator[Result]:
    """Yield results from a host's proof: a path that computes something else is a fault, one that breaks a warning."""
    if "problem" in proof:
        yield unknown(host, proof["problem"])
        return
    rows: dict[str, Facts] = proof["paths"]
    name, bad = proof["key"]["device"]["name"], False
    for path, row in rows.items():
        if row["status"] in (WRONG, FAILED):
            bad = True
            level, why = ("red", WHY) if row["status"] == WRONG else ("yellow", "a run that asks for it would break")
            problem = f"{path} on {name}: {row.get('why') or row['status']}"
            cure = f"`auto` does not take it; do not ask for {path} by name, or install another version of its package"
            yield Result(host, level, f"{path} {row['status']}", None, problem, why, cure)  # type: ignore[arg-type]
    if not bad:
        good = [path for path, row in rows.items() if row["status"] in (PROVEN, SLOWER)]
        fastest = ", ".join(proof["fastest"].values()) or "none"
        yield sound(host, f"{len(good)} proven, fastest {fastest}") if good else unknown(host, "no path could be tried")
