"""Print what images take, where samples have some: tokens, the tower's part of memory and time, and what of it is trained."""

from ...errors.console import billions, figure
from ..costs.activations import tower_bytes
from ..costs.estimate import Estimate
from ..costs.job import PROJECTOR, VISION_TOWER
from ..costs.memory import GIB
from .show import say

PARTS = {VISION_TOWER: "vision tower", PROJECTOR: "projector"}


def say_images(result: Estimate) -> None:
    """Print nothing where there are none."""
    job, images = result.job, result.job.images
    if not images:
        return
    size = f"{images.width:,} x {images.height:,} pixels"
    size += ", as is assumed without --image-size" if images.assumed else ""
    each = images.each
    say(
        "images", f"{images.per_sample:g} in a sample, {size}: {each.tokens:,} tokens and {each.patches:,} patches each"
    )
    share = images.tokens / job.sequence
    say(
        "",
        f"{images.tokens:,.0f} of the {job.sequence:,} tokens of a sequence are images' ({share:.0%}), in speed and duration too",
    )
    tower, projector = (billions(count) for count in (images.tower.parameters, images.tower.projector))
    trains = " and ".join(PARTS[part] for part in PARTS if part in images.trained)
    how = "adapters on " if job.method != "full" else ""
    what = f"{how}the {trains}: trained" if trains else "frozen"
    say("", f"vision tower {tower} parameters, projector {projector}; {what}")
    kept, most = tower_bytes(job)
    took = f"{figure(result.time.images, 2)} of the {figure(result.time.total, 2)} s of a step"
    say("", f"they keep {kept / GIB:.2f} GiB of a micro-batch on each GPU, {most / GIB:.2f} at most; {took}")
    say(
        "",
        "by formula: no GPU has measured images, and a rank whose samples have more of them needs more than this mean",
    )
