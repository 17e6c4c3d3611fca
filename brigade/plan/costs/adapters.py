"""Count what adapters add to a layer: bytes that autograd keeps, and that go through memory beside the products."""

from ..shape.lora import ALL, linears
from ..shape.model_shape import CHANNELS, RULE, SPACE
from .job import Job

# Bytes that go through memory for each number of a weight while DoRA takes the norm of its rows, and those that stand at most.
# PEFT (tuners/lora/dora.py) makes B A whole, scales it, adds the weight and takes the norm: in bf16, or in fp32 where
# adapters are in fp32, with copies of B A and the weight.
NORM_MOVED, NORM_STANDS = {False: 14, True: 36}, {False: 6, True: 18}


def adapter_bytes(job: Job, moe: bool) -> float:
    """Return the bytes that a layer keeps more (or less) per token with frozen weights and adapters on the job's targets.

    A frozen norm does not keep what its weight multiplies, a frozen linear layer without adapter not what it reads. Adapters in
    bf16 read what their linear layers read. In fp32 each has a copy of its own: PEFT casts its input (_cast_input_dtype), and
    autocast back. An adapter that drops has a copy too, and a byte of mask. DoRA keeps what the linear layer and its adapter
    give, for the gradient of their magnitudes.
    """
    if job.shape.sizes:
        return sum(share * adapter_bytes(one, moe) for one, share in job.alike)
    shape, targets, dropout = job.shape, job.targets, job.adapter_dropout
    h, family, top = shape.hidden, shape.family, shape.top_k
    attending, mixing, inside = shape.parts(moe)
    less = 0.0
    if not job.one_kernel_norm:
        queries = attending * (shape.query_width + shape.key_value_width / 2) * family.qk_norm
        less += (4 if family.fp32_norm else 2) * (min(family.norms, 2) * h + queries)
    less += 2 * h * (attending * (not set(targets) & set("qkv")) + mixing * (not _in_mixer(job, h)))
    if mixing:
        less += mixing * _less_in_mixer(job)
    if moe:
        less += 2 * h + 2 * top * h + 2 * top * shape.expert_ffn
    elif "m" not in targets:
        less += inside * (2 * h + 2 * shape.ffn)
    read = list(linears(shape, targets, moe=moe))
    inputs = sum(one.share * one.inner for one in read)
    # What a copy replaces; attention keeps its own output in any case.
    shared = sum({one.reads: one.share * one.inner for one in read if one.reads != "attention"}.values())
    more = 2 * (inputs - shared) if job.adapter_copies or dropout else 0
    return more + inputs * dropout + 4 * job.dora * sum(one.share * one.outer for one in read) - less


def _less_in_mixer(job: Job) -> float:
    """Return the bytes that a mixer keeps less per token where its weights are frozen: what those of its norm and gates multiply,
    and where no adapter is on its products, what these read."""
    mixer = job.shape.mixer
    assert mixer
    inner = mixer.heads * mixer.value_dim
    less = {CHANNELS: 8, RULE: 2}.get(mixer.kind, 0) * inner
    if mixer.kind != SPACE:  # whose kernel keeps it all the same
        *into, (last, _) = mixer.products
        widths = [*(width for width, _ in into if width != job.shape.hidden), last]
        less += sum(2 * width for width in widths if not _in_mixer(job, width))
    return less


def _in_mixer(job: Job, width: int) -> bool:
    """Whether an adapter is on one of the mixer's products of that inner width."""
    mixer = job.shape.mixer
    return mixer is not None and any(inner == width for inner, _ in mixer.adapted(job.targets, job.targets == ALL))


def adapter_traffic(job: Job, moe: bool) -> tuple[float, float]:
    """Return the bytes per token (forward, backward) that adapters read and write between a layer's products.

    PEFT runs them by eager kernels; activations have two bytes. An adapter's input is read by A (2); a copy of it is cast to fp32
    and back (12), and dropped from (9 in fp32, 5 in bf16, with the mask). Its output is written by B (2), scaled (4) and added to
    the layer's own output (6). Backward, gradients take the same ways, and are added up where several adapters have one input.
    DoRA multiplies both results by magnitudes, scales and adds them up, in fp32 where adapters are.
    """
    if job.shape.sizes:
        each = [(share, adapter_traffic(one, moe)) for one, share in job.alike]
        return sum(share * forward for share, (forward, _) in each), sum(share * back for share, (_, back) in each)
    copies = job.adapter_copies
    read = list(linears(job.shape, job.targets, moe=moe))
    inner, outer = (sum(one.share * getattr(one, width) for one in read) for width in ("inner", "outer"))
    between = 12 * copies + (9 if copies else 5) * job.adapter_dropout
    given, back = ((50, 46) if copies else (26, 30)) if job.dora else (12, 8)
    return (2 + between) * inner + given * outer, (8 + between) * inner + back * outer
