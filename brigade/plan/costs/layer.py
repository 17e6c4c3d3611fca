"""List the operations of a decoder layer: what each computes, moves through memory and keeps for the backward pass.

One table serves two questions. Activation memory is the sum of what the operations keep; time is the sum of what they
compute and move. Bytes are per token, with activations in two bytes; h, q, kv and f are the widths of the residual
stream, the queries, keys and values together, and the MLP.

Kept and moved bytes are counted operation by operation. Without a kernel of its own a norm is what Transformers' modelling
code has autograd run (modeling_llama.py): it computes in fp32 and keeps its fp32 input and its normalised input. One kernel
keeps only its input: Liger, Transformer Engine, or torch.compile, whose partitioner never computes again what a product
reads, so that the outputs of norm and activation are kept. What adapters add is counted first.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

from ..constants import CONSTANTS
from ..shape.lora import ALL, linears
from ..shape.model_shape import CHANNELS, RULE, SPACE
from .job import Job
from .mixer import Op, mixer_ops

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


MOST_NORMS = 7  # of hidden width in a layer, Gemma 4's with experts beside a dense MLP


@functools.singledispatch
def layer_ops(job: Job, moe: bool) -> Iterator[Op]:
    """Yield the operations of a layer's forward pass in the order in which they run, those of its adapters among them."""
    shape = job.shape
    h, q, kv, family = shape.hidden, shape.query_width, shape.key_value_width, shape.family
    attending, mixing, inside = shape.parts(moe)
    beside = shape.mixer is not None and shape.mixer.beside
    # Under autocast products are in bf16 over an fp32 residual stream, of which every product makes a bf16 copy of its own.
    readers = (1.0 + beside, 1.0)
    if job.autocast:
        into_mixer = sum(inner == h for inner, _ in shape.mixer.products[:-1]) if shape.mixer else 0
        into_mlp = 2 if family.gated and not family.fused_gate else 1
        readers = (attending * (1 if family.fused_qkv else 3) + mixing * into_mixer, into_mlp)
        readers = (readers[0] + inside * into_mlp * shape.apart, into_mlp)

    def norm(number: int) -> Iterator[Op]:
        into_product = number < 2  # Gemma's third and fourth go into the residual stream, which keeps nothing of them
        gradient = 2 * h * into_product  # the residual stream's
        yield _norm(job, f"norm{number}", h, split=False, stream=job.autocast and into_product, beside=gradient)
        if into_product:
            yield Op(f"norm{number} out", "pointwise", kept=2 * h * readers[number], split=False)

    if job.context > 1:
        # Queries, keys, values and the output are copied to be sent, and the output is kept as it came and as it went; ranks
        # that share a head of keys and values have a copy each (Jacobs et al. 2023, arXiv 2309.14509, section 3).
        moved, copies = 4 * exchanged_width(job), max(1.0, job.context / shape.kv_heads) - 1
        yield Op("exchange", "pointwise", moved=moved, moved_back=moved, kept=2 * q + 2 * kv * copies)
    yield from norm(0)
    for one, share in job.alike if attending else ():
        yield from _shared(_attention_with_products(one), share * attending)
    if shape.mixer and mixing:
        yield from _shared(mixer_ops(job), mixing)
    if family.norms >= 4:
        yield from norm(2)
    yield Op("residual", "pointwise", moved=12 * h, moved_back=6 * h, split=False)
    if job.method != "full":
        moved, moved_back = adapter_traffic(job, moe)
        yield Op("adapters", "pointwise", moved=moved, moved_back=moved_back)
    if family.norms > 1:  # else attention and MLP read the same one side by side, or each layer has one of them
        yield from norm(1)
    for one, share in job.alike if inside else ():
        ops = _experts(one) if moe else _mlp(one, one.shape.ffn, autocast=job.autocast)
        yield from _shared(ops, share * inside, job.tiled_mlp)
    if family.norms >= 4:
        yield from norm(3)
    if shape.per_layer_input:
        yield from _per_layer_input(job)
        yield from norm(4)


def _shared(ops: Iterator[Op], share: float, tiled: bool = False) -> Iterator[Op]:
    """Yield operations that only a share of the layers has, or that are computed in tiles; most are neither, and stay."""
    return ops if share == 1 and not tiled else (replace(op, share=share, tiled=tiled) for op in ops)


def _attention_with_products(job: Job) -> Iterator[Op]:
    """Yield attention with what stands before and behind it."""
    shape = job.shape
    h, q, kv, family = shape.hidden, shape.query_width, shape.key_value_width, shape.family
    wide = q * (1 + family.output_gate)
    # Queries, and what a layer computes of keys and values by products of its own.
    into, out = [(h, wide + shape.made * shape.kv_heads * shape.head_dim)], (q, h)
    if shape.projections:
        *into, out = shape.projections
        latent = sum(inner for inner, _ in into if inner != h)
        if latent:
            yield _norm(job, "latent norm", latent)
            yield Op("latent norm out", "pointwise", kept=2 * latent)
    yield from (Op("qkv", "product", 2 * inner * outer, (inner, outer)) for inner, outer in into)
    turned = q + kv / 2 * (shape.made > 0)
    if family.qk_norm:
        yield _norm(job, "qk norm", turned)
    if family.v_norm and shape.made:  # without a weight
        back = CONSTANTS.norm_back * kv / 2
        yield Op("v norm", "pointwise", moved=16 * kv, moved_back=24 * kv, kept=2 * kv, back=back)
    if family.rotary:
        moved = (4 if "rotary" in job.kernels else 20) * turned
        # Values that are a slice of one tensor keep all of it, queries and keys before they are turned too.
        sliced = family.fused_qkv and not (job.attention == "eager" and shape.kv_heads != shape.heads)
        yield Op("rotary", "pointwise", moved=moved, moved_back=moved, kept=2 * turned * sliced)
    yield from _attention(job)
    if family.output_gate:  # by its sigmoid: the gate, its sigmoid, and what both are multiplied to
        yield Op("gate", "pointwise", moved=14 * q, moved_back=20 * q, kept=6 * q)
    yield Op("out", "product", 2 * out[0] * out[1], out)


def _per_layer_input(job: Job) -> Iterator[Op]:
    """Yield what a layer does with its part of a second embedding: gate it, and project it into the residual stream."""
    h, width = job.shape.hidden, job.shape.per_layer_input
    yield Op("input gate", "product", 2 * h * width, (h, width), kept=2 * h)
    yield Op("gated input", "pointwise", moved=16 * width, moved_back=24 * width, kept=6 * width, back=6 * width)
    yield Op("input out", "product", 2 * width * h, (width, h))


def _experts(job: Job) -> Iterator[Op]:
    """Yield the operations of a mixture of experts, which stands in the place of an MLP."""
    h, shape, experts, top = job.shape.hidden, job.shape, job.shape.experts, job.shape.top_k
    if shape.shared_ffn:
        yield from _mlp(job, shape.shared_ffn)
    own_norms = shape.family.norms >= MOST_NORMS
    if own_norms:
        # A norm behind the dense MLP, one before the router, without a weight, but with a scale, and one before the experts, of
        # which the dispatch keeps what it copies (Gemma4TextDecoderLayer).
        yield _norm(job, "norm4", h, split=False)
        back = CONSTANTS.norm_back * h
        yield Op("router norm", "pointwise", moved=36 * h, moved_back=54 * h, kept=8 * h, back=back, split=False)
        yield _norm(job, "norm5", h, split=False)
    if shape.family.fp32_router and not own_norms:  # whose router's norm has it
        yield Op("router input", "pointwise", moved=6 * h, moved_back=6 * h, kept=4 * h, split=False)
    yield Op("router", "product", 2 * h * experts, (h, experts), kept=4 * experts, split=False)
    yield from _mlp(job, shape.expert_ffn, top, experts)
    # Each token's hidden state is copied for each of its experts, and their outputs are weighted and added: autograd keeps the
    # copies and the outputs, and goes back through the weighted outputs' gradients and what it multiplies them with.
    moved = 8 * h * top
    yield Op("dispatch", "pointwise", moved=moved, moved_back=moved, kept=4 * h * top, back=6 * h * top)
    if own_norms:
        yield _norm(job, "norm6", h, split=False)


def exchanged_width(job: Job) -> float:
    """Return the elements per token that go through Ulysses' exchanges of heads before and after attention."""
    s = job.shape
    return 2 * s.query_width + s.key_value_width * max(1.0, job.context / s.kv_heads)


def _norm(job: Job, name: str, width: float, split: bool = True, stream: bool = False, beside: float = 0.0) -> Op:
    """Return a norm.

    Unfused, it moves per element 6 bytes to cast, 8 to square, 4 for the mean, 8 to scale, 6 to cast and 4 for the weight; half
    as much again backward, with four tensors in fp32 at once, as traces show (benchmarks/results/long_context.jsonl).

    stream: it reads an fp32 residual stream, and keeps that instead of a copy; beside: bytes that stand meanwhile
    """
    if job.one_kernel_norm:
        kept = (4 if stream else 2) * width
        return Op(name, "pointwise", moved=4 * width, moved_back=8 * width, kept=kept, split=split)
    normalised = 4 if job.shape.family.fp32_norm or stream else 2  # what the weight multiplies
    kept, back = (4 + normalised) * width, CONSTANTS.norm_back * width + beside
    return Op(name, "pointwise", moved=36 * width, moved_back=54 * width, kept=kept, back=back, split=split)


def _attention(job: Job) -> Iterator[Op]:
    """Yield attention. It keeps queries, keys, values, output, and a number per head and token; eager attention all scores."""
    shape = job.shape
    q, kv, heads = shape.query_width, shape.key_value_width, shape.heads
    keys_values = 2 * kv * (shape.made > 0)  # else they are kept where they were made
    if job.by_masks:
        # SDPA has keys and values repeated for each head, and a mask in bf16 where a window is shorter than the sequence, or
        # where the tokens of an image see each other.
        of_images = job.images is not None and job.images.tower.masks
        outside = of_images or (bool(shape.window) and job.sequence > shape.window)
        flops = 4 * q * (job.sequence if outside else job.scored / 2)
        kept = 4 * q + (4 * q if kv < 2 * q else keys_values) + 4 * heads + 2 * job.sequence * outside
        yield Op("attention", "attention", flops, moved=8 * q, moved_back=8 * q, kept=kept, back=16 * q)
        return
    if job.attention != "eager":
        kept = 2 * q + keys_values + 2 * q + 4 * heads
        # The output's gradient, those of queries (summed up in fp32), keys and values; where heads share these, first one for
        # each head (flash-attention, csrc/flash_attn/flash_api.cpp: dq_accum, dk_expanded).
        back = 2 * q + 6 * q + keys_values + 4 * q * (kv < 2 * q)
        yield Op("attention", "attention", 4 * q * job.scored / 2, kept=kept, back=back)
        return
    # Scores go through memory: written, scaled and masked, softmax, read again. The mask saves no products.
    if "softmax" in job.kernels:
        passes, kept, back = 8, 2, 2
    elif shape.family.sinks:  # gpt-oss: softmax in bf16 over scores and sink, of which the product reads a slice
        passes, kept, back, keys_values = 12, 2, 4, 4 * q
    else:  # eager_attention_forward: softmax in fp32, and its bf16 copy, which the product reads
        passes, kept, back = 18, 6, 6
        keys_values = 4 * q if shape.kv_heads > 1 else 2 * kv  # repeated, but for one head, which all queries can share
    scores, flops = heads * job.scored, 4 * q * job.scored
    once, again = passes * scores, 1.5 * passes * scores
    yield Op("scores", "attention", flops, moved=once, moved_back=again, kept=kept * scores, back=back * scores)
    yield Op("attention", "pointwise", kept=2 * q + keys_values + 2 * q)


def _mlp(job: Job, width: int, times: int = 1, experts: int = 0, autocast: bool = False) -> Iterator[Op]:
    """Yield an MLP, which keeps gate, up and their product, and without a kernel of its own the activated gate.

    On the way back there are the product's gradient and those of its two factors, but no longer the product. A kernel of its
    own writes the two over what it kept. Under autocast the layer's gradient has a bf16 copy while `down` goes back.
    """
    h, family = job.shape.hidden, job.shape.family
    into = 2 if family.gated else 1
    kept, moved, back = ((6, 6, 0) if "mlp" in job.kernels else (8, 10, 4)) if family.gated else (4, 4, 2)
    moved *= 1 + family.squared
    if family.clamped and "experts" not in job.kernels:
        # Gate and up in one tensor, each clamped, sigmoid, gate x sigmoid, up + 1, and the product.
        kept, moved, back = 14, 28, 4
    wide = times * width
    yield Op("up", "product", 2 * h * into * wide, (h, into * width), experts=experts)
    moved_back = 1.7 * moved * wide
    yield Op("activation", "pointwise", moved=moved * wide, moved_back=moved_back, kept=kept * wide, back=back * wide)
    yield Op("down", "product", 2 * wide * h, (width, h), back=2 * wide + 2 * h * autocast, experts=experts)
