"""Count what images take beside their tokens: the vision tower as layers of its own, its projector, and pixels.

A tower's layers are attention and an MLP like a decoder's, so that the same tables count them (layer.py), over patches in the
place of tokens. No GPU has measured any of it.
"""

from dataclasses import replace

from .job import VISION_TOWER, Comparison, Job

PIXEL = 4  # bytes of a number that a processor gives, as it lies in a micro-batch


def tower_job(job: Job) -> Job:
    """Return the layers of the vision tower as a job: its sequences are the patches of a sequence's images.

    Each rank of a tensor or sequence group runs the whole tower on all images of the group (docs/images.md).

    Attention sees all patches of an image, or of a tile of it, on both sides: as much as a causal one of twice the length. Layers
    are recomputed where the decoder's are; a frozen tower keeps nothing to recompute. Kernels that are compiled, or Liger's, are
    not for them, and neither are weights in four bits.
    """
    images = job.images
    assert images
    shape, trains = images.tower.shape, VISION_TOWER in images.trained
    return replace(
        job,
        shape=replace(shape, window=2 * shape.window),
        sequence=max(1, round(images.per_sample * images.each.patches)),
        attended=2 * images.each.span,
        tensor=1,
        context=1,
        method="lora" if job.method == "qlora" else job.method,
        trained=0,
        targets=job.targets if trains else "",
        dora=job.dora and trains,
        adapter_dropout=job.adapter_dropout and trains,
        labelled=1.0,
        checkpointing=job.checkpointing if trains else "none",
        kernels=frozenset(),
        attention="flash2",
        loss="released",
        tiled_mlp=False,
        comparison=Comparison(),
        images=None,
    )


def pixel_bytes(job: Job) -> float:
    """Return the bytes of a micro-batch's pixels, which stay until its end."""
    images = job.images
    assert images
    return PIXEL * images.tower.pixels * job.micro_batch * images.per_sample * images.each.patches


def projector_bytes(job: Job) -> float:
    """Return the bytes of a micro-batch that the projector keeps of what its linear layers read and give.

    Where tower and projector are frozen it stands at once only while the projector computes.
    """
    images = job.images
    assert images
    width = 4 if job.autocast else 2
    numbers = sum(inner + outer for inner, outer in images.tower.products)
    return width * numbers * job.micro_batch * images.per_sample * images.each.projected
