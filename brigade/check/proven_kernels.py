"""Whether fast kernels compute the right thing on each host's devices."""

from collections.abc import AsyncIterator, Iterator

from ..kernels.paths import FAILED, PROVEN, SLOWER, WRONG
from .checks import Facts, Hosts, Result, check, sound, unknown
from .findings import fault


@check("kernels", size="usual", seconds=120, alone=True)
async def kernels(hosts: Hosts) -> AsyncIterator[Result]:
    """Computes logits and gradients of a tiny model of the recipe's architecture by each path that `auto` chooses among, on the
    first GPU of each host, and times them at the recipe's shapes (kernels/prove.py). Threshold: each path's errors against eager
    in fp32 are within what rounding allows (docs/evidence/kernels.md). What is proven is kept, and `auto` takes the fastest
    of it."""
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
            yield unknown(host, "it has no GPU; what CPUs compute is measured in docs/evidence/kernels.md")
        elif job is None:
            yield unknown(host, "it needs a recipe: kernels are proven for its model")
    asked: dict[str, Facts] = {host: {} for host, hello in hosts.hello.items() if hello.get("gpus")}
    if not asked or job is None:
        return
    words = {"recipe": str(job.settings.recipe_path.absolute()), "flags": list(job.flags), "quick": quick}
    for host, proof in (await hosts.ask("actions.prove", 100 if quick else 500, per_host=asked, **words)).items():
        for result in judged(host, proof):
            yield result


def judged(host: str, proof: Facts) -> Iterator[Result]:
    """Yield results from a host's proof: a path that computes something else is a fault, one that breaks a warning."""
    if "problem" in proof:
        yield unknown(host, proof["problem"])
        return
    rows: dict[str, Facts] = proof["paths"]
    bad = {WRONG: "wrong-kernel", FAILED: "failed-kernel"}
    for path, row in rows.items():
        status = row["status"]
        if status in bad:
            device, said = proof["key"]["device"]["name"], row.get("why") or status
            yield fault(bad[status], host, path=path, status=status, device=device, said=said)
    if not any(row["status"] in bad for row in rows.values()):
        good = [path for path, row in rows.items() if row["status"] in (PROVEN, SLOWER)]
        fastest = ", ".join(proof["fastest"].values()) or "none"
        yield sound(host, f"{len(good)} proven, fastest {fastest}") if good else unknown(host, "no path could be tried")
