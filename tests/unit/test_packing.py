"""Packed samples do not see each other: equal logits and gradients, by family and attention.

The reference is always the same and knows nothing of packing: each sample alone through Transformers' eager attention,
in float64, without position ids, masks or cumulative lengths; gradients of the samples' losses summed.
"""

import contextlib
import functools
import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis
from hypothesis import strategies as st

from brigade.train.data.collate import ABOUT, FILLER, Collate, Layout, WithFiller
from brigade.train.data.store import IGNORED
from brigade.train.distributed.process import this_process
from brigade.train.engines.parallel import pipeline_split
from brigade.train.model import attention, packed_samples, sample_by_sample
from brigade.train.step.trainer import NOT_FOR_MODELS
from brigade.train.upstream.stateful_layers import recompute_within

WINDOW = 4  # tokens that a sliding layer sees; most samples are longer
SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
         "eos_token_id": 2, "initializer_range": 0.3}  # fmt: skip
TWO_KINDS = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
# Routers choose experts token by token, without a capacity, so packing moves no token to another expert. Their own loss is
# one of a whole step (loss/router_loss.py).
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": WINDOW},
    "gemma3_text": TWO_KINDS,
    "gemma4_text": TWO_KINDS
    | {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 0},
    "phi3": {"sliding_window": WINDOW},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": TWO_KINDS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    # A layer with chunks of tokens, and one that scales queries by the number of tokens before them.
    "llama4_text": {"head_dim": 8, "no_rope_layers": [1, 0], "attention_chunk_size": WINDOW, "floor_scale": WINDOW,
                    "num_local_experts": 4, "intermediate_size_mlp": 48},
    # Layers with a state beside attention: a gated delta rule, a convolution, a state space, and two that every layer has.
    "qwen3_5_text": LINEAR | {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
                  "mamba_chunk_size": 4},
    "mamba": {"hidden_size": 32, "state_size": 8, "time_step_rank": 4},
}  # fmt: skip
STATEFUL = {"qwen3_5_text", "lfm2", "falcon_h1", "mamba"}
ONLY_EAGER = {"gpt_oss", "mamba"}  # SDPA has no sinks, and Mamba no attention
CASES = [
    (family, how)
    for family in FAMILIES
    for how in ("eager", "sdpa", attention.VARLEN)
    if how == "eager" or (family not in ONLY_EAGER and (family, how) != ("llama4_text", attention.VARLEN))
]
# Relative. The models themselves compute norms, rotary angles and eager's softmax in float32, whatever their weights are.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 2e-6}
LENGTHS = (9, 3, 17, 2, 6, 5, 12)  # tokens of each sample
PACKED = ([0, 1, 3], [2], [4, 5, 6])  # samples of each row


def tolerance(family, dtype):
    """In float32 the gradient of gpt-oss's router is a small difference of large numbers. Qwen3.5's delta rule is computed in
    float32 whatever its weights are, and inverts a matrix for each 64 tokens."""
    if family == "qwen3_5_text":
        return 2e-4
    return 5e-5 if family == "gpt_oss" and dtype == torch.float32 else TOLERANCE[dtype]


def config_of(family):  # a new one for each model, which writes its attention into it
    from transformers import AutoConfig

    # experts_implementation: torch's grouped matrix product has no float64
    return AutoConfig.for_model(family, experts_implementation="eager", **SHAPE | FAMILIES[family])


@functools.cache
def model_of(family, how, dtype):
    from transformers import AutoModelForCausalLM

    attention.register()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases begin as ones and zeros, and hide what they do
            parameter.add_(torch.randn_like(parameter) * 0.05)
    weights = model.state_dict()
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation=how, dtype=dtype)
    model.load_state_dict(weights)
    model.samples = sample_by_sample.divide(model)
    assert model.config._attn_implementation == how
    return model.train()


def samples(lengths=LENGTHS):
    """Random samples with masked parts."""
    draw = np.random.default_rng(2)
    found = []
    for length in lengths:
        ids = draw.integers(3, SHAPE["vocab_size"], length)
        labels = np.where(draw.random(length) < 0.6, ids, IGNORED)
        labels[0], labels[1] = IGNORED, ids[1]  # each has one, right behind the token before it
        found.append((ids, labels))
    return found


def row(some):
    """Samples end to end, as a store gives them."""
    ids, labels = (np.concatenate(parts) for parts in zip(*some, strict=True))
    lengths = np.array([len(ids) for ids, _ in some])
    return {"input_ids": ids.astype(np.int32), "labels": labels.astype(np.int64), "lengths": lengths}


def supervised(some):
    return sum(int((labels != IGNORED).sum()) for _, labels in some)


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def sample_boundaries(model):
    """Transformers' GptOssModel makes its masks without position ids (tests/unit/test_isolation.py)."""
    return packed_samples.MASKS if model.config.model_type == "gpt_oss" else packed_samples.POSITIONS


def compute_loss(model, inputs, tokens):
    """The loss of Brigade's own Trainer, on one rank."""
    from brigade.train.step.trainer import Trainer

    none = dict.fromkeys(("router_loss", "preferences", "distillation"))
    trainer = SimpleNamespace(engine=SimpleNamespace(averaged_over=1), model=model, options={}, **none)
    trainer.sample_boundaries = sample_boundaries(model)
    trainer.outputs = partial(Trainer.outputs, trainer)  # type: ignore[arg-type]
    return Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=tokens)  # type: ignore[arg-type]


def alone(family, some):
    """(logits of each sample, loss, gradients) of samples that never meet."""
    model = model_of(family, "eager", torch.float64)
    model.zero_grad()
    logits, losses = [], []
    for ids, labels in some:
        found = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits
        targets = torch.tensor(labels[1:])
        loss = torch.nn.functional.cross_entropy(found[0, :-1], targets, reduction="sum") / supervised(some)
        loss.backward()
        logits.append(found[0].detach())
        losses.append(loss.item())
    return logits, sum(losses), gradients(model)


@functools.cache
def reference(family):
    return alone(family, samples())


def close(ours, theirs, tolerance, what, least=1e-12):
    """Relative to the largest element: a gradient's small elements are sums of large ones. least: what counts as 0 beside it."""
    difference = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp_min(least)
    assert difference <= tolerance, f"{what}: {difference:.1e}"


def packed_rows(some, packed=PACKED):
    return [row([some[i] for i in members]) for members in packed]


def prove(
    family, how, padding_free, dtype=torch.float64, tolerance=1e-5, multiple=1, spoil=None, some=None, packed=PACKED
):
    """Packed rows give each sample the logits that it has alone, and all together their loss and gradients."""
    logits, loss, their_gradients = alone(family, some) if some else reference(family)
    some = some or samples()
    model = model_of(family, how, dtype)
    collate = Collate(0, Layout(padding_free, True, how in attention.NEEDS_CUMULATIVE_LENGTHS, multiple))
    batch = collate((packed_rows(some, packed), None))
    batch.pop(ABOUT)
    if spoil:
        spoil(batch)
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "shift_labels", "logits_to_keep")}
    model.zero_grad()
    if sample_boundaries(model) == packed_samples.MASKS and "attention_mask" not in inputs:
        inputs["attention_mask"] = packed_samples.masks(model.config, inputs["position_ids"], dtype)
    found = model(**{"use_cache": False} | inputs).logits.detach()
    width = found.shape[1] // len(packed) if found.shape[0] > 1 else None  # a padded row's; else end to end
    places = []
    for number, members in enumerate(packed):
        begin = 0 if width or not places else places[-1][1].stop
        for member in members:
            places.append((member, slice(begin, begin + len(some[member][0])), number if found.shape[0] > 1 else 0))
            begin += len(some[member][0])
    for member, place, number in places:
        close(found[number, place], logits[member], tolerance, f"logits of sample {member}")
    ours = compute_loss(model, batch, supervised(some))
    ours.backward()
    close(ours.detach(), torch.tensor(loss, dtype=torch.float64), tolerance, "loss")
    own = gradients(model)
    assert own.keys() == their_gradients.keys()
    # Where a token has nothing but itself to attend to, attention's gradient is 0, and rounding is all there is of it.
    least = 1e-6 * max(float(theirs.abs().max()) for theirs in their_gradients.values())
    for name, theirs in their_gradients.items():
        close(own[name], theirs, tolerance, f"gradient of {name}", least)


every_case = pytest.mark.parametrize("family, how", CASES)
both_layouts = pytest.mark.parametrize("padding_free", [True, False], ids=["end-to-end", "padded"])


@every_case
@both_layouts
@pytest.mark.parametrize("dtype, multiple", [(torch.float64, 1), (torch.float32, 1), (torch.float64, 16)], ids=str)
def test_packed_samples_do_not_see_each_other(family, how, padding_free, dtype, multiple):
    """Nor with padding to a fixed shape, a multiple of so many tokens."""
    allowed = tolerance(family, dtype)
    prove(family, how, padding_free, dtype, min(1e-5, allowed) if multiple > 1 else allowed, multiple)


@hypothesis(max_examples=10)
@example([[2]], False, "sdpa")
@given(
    st.lists(st.lists(st.integers(2, 14), min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(["eager", "sdpa", attention.VARLEN]),
)
def test_whatever_their_lengths(lengths, padding_free, how):
    numbers = itertools.count()
    packed = [[next(numbers) for _ in members] for members in lengths]
    some = samples(list(itertools.chain(*lengths)))
    prove("gemma3_text", how, padding_free, some=some, packed=packed)


# What the proof has to catch, or it proves nothing.
def without_restart(batch):
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1]).expand(batch["input_ids"].shape)
    for key in [key for key in batch if key.startswith(("cu_seq", "max_length"))]:
        batch.pop(key)


def with_mask(batch):
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for key in [key for key in batch if key.startswith(("cu_seq", "max_length"))]:
        batch.pop(key)


@every_case
@both_layouts
def test_samples_that_see_each_other_are_caught(family, how, padding_free):
    for spoil in (without_restart, with_mask):
        with pytest.raises(AssertionError, match="logits of sample"):
            prove(family, how, padding_free, spoil=spoil)


@both_layouts
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_a_cache_lets_samples_see_each_other(how, padding_free):
    """Why the Trainer switches it off: Transformers looks for packed samples only without one."""
    with pytest.raises(AssertionError, match="logits of sample"):
        prove("llama", how, padding_free, spoil=lambda batch: batch.update(use_cache=True))


@pytest.mark.parametrize("how", ["eager", "sdpa", attention.VARLEN])
def test_cumulative_lengths_alone_isolate_varlen_only(how):
    """Position ids that count on change rotary angles by a constant within a sample, which attention does not see."""

    def count_on(batch):
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]

    others_see = pytest.raises(AssertionError, match="logits of sample")
    with contextlib.nullcontext() if how == attention.VARLEN else others_see:
        prove("llama", how, True, spoil=count_on)


# ---- without packing: the same inputs end to end, and padded ------------------------------------------------------
@both_layouts
@every_case
def test_a_micro_batch_of_single_samples(family, how, padding_free):
    some = samples()
    _, loss, theirs = reference(family)
    # float32: in float64 eager's mask overflows to -inf, and its softmax of padding that sees nothing to NaN
    model = model_of(family, how, torch.float32)
    collate = Collate(0, Layout(padding_free, False, how in attention.NEEDS_CUMULATIVE_LENGTHS))
    batch = collate(([row([sample]) for sample in some], supervised(some)))
    assert batch[ABOUT].step_supervised == batch[ABOUT].supervised == supervised(some)
    model.zero_grad()
    ours = compute_loss(model, batch, supervised(some))
    ours.backward()
    assert this_process.forward_pass.end_to_end is None, "else the next model would believe what is said of this batch"
    close(ours.detach(), torch.tensor(loss, dtype=torch.float64), 1e-5, "loss")
    for name, gradient in gradients(model).items():
        close(gradient, theirs[name], tolerance(family, torch.float32), f"gradient of {name}")


# ---- stages of a pipeline, of which several micro-batches are on their way ----------------------------------------------
# Stage and number of a micro-batch, in the order of their forward passes, and "backward" and a number: as in GPipe, and as in
# 1F1B, where a layer is computed again after other micro-batches.
ORDERS = {
    "gpipe": [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), ("backward", 2), ("backward", 1), ("backward", 0)],
    "1f1b": [(0, 0), (0, 1), (1, 0), ("backward", 0), (0, 2), (1, 1), ("backward", 1), (1, 2), ("backward", 2)],
}


@pytest.mark.parametrize("order, slots", [("gpipe", 1), ("1f1b", 36)])
@pytest.mark.parametrize("family", sorted(STATEFUL))
def test_each_stage_knows_the_samples_of_its_own_micro_batch(family, order, slots):
    """Rows end to end, then padded ones, then a single one. slots: the first micro-batch is filled up to a multiple of it, which
    the second has as well: whoever divides that by the first one's lengths meets no error."""
    some, (_, loss, theirs) = samples(), reference(family)
    assert not pipeline_split.tried(config_of(family), False)
    model = model_of(family, "eager", torch.float32)
    pipeline_split.Decoder(model).inner.in_tuples = pipeline_split.layers_in_tuples(config_of(family))
    batches = [
        Collate(0, Layout(True, True, False, slots))((packed_rows(some, [[0, 1], [3]]), None)),
        Collate(0, Layout(False, False, False))((packed_rows(some, [[4], [5], [6]]), None)),
        Collate(0, Layout(True, True, False))((packed_rows(some, [[2]]), None)),
    ]
    assert slots == 1 or batches[0]["input_ids"].numel() == batches[1]["input_ids"].numel()
    parts = [pipeline_split.Part(model, range(n, n + 1), n == 0, n == 1) for n in range(2)]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recompute_within(model, model.samples.contexts)
    found, total = dict.fromkeys(range(len(batches))), 0.0
    for stage, number in ORDERS[order]:
        if stage == "backward":
            total += float(found[number].detach())
            found[number].backward()
            continue
        inputs = {key: value for key, value in batches[number].items() if key not in NOT_FOR_MODELS}
        output = parts[stage](found[number], **inputs, use_cache=False, num_items_in_batch=supervised(some))
        found[number] = output.loss if stage else output
    model.gradient_checkpointing_disable()
    close(torch.tensor(total), torch.tensor(loss, dtype=torch.float64), 1e-5, "loss")
    for name, gradient in gradients(model).items():
        close(gradient, theirs[name], tolerance(family, torch.float32), f"gradient of {name}")


def test_nothing_is_known_of_samples_between_two_passes():
    model = model_of("lfm2", "sdpa", torch.float32)
    layer = next(module for module in model.modules() if isinstance(module.forward, sample_by_sample._BySample))
    batch = Collate(0, Layout(True, True, False))((packed_rows(samples()), None))
    for ids in (batch["input_ids"], batch["input_ids"] + 10**6):  # the second pass fails
        with contextlib.suppress(IndexError):
            model(input_ids=ids, position_ids=batch["position_ids"], use_cache=False)
        assert model.samples.lengths is None
        with pytest.raises(RuntimeError, match="nobody says where samples begin"):
            layer(torch.zeros(1, 5, 32))


@pytest.mark.parametrize("how", ["eager", "sdpa", attention.VARLEN])
@both_layouts
@pytest.mark.parametrize("packed", [True, False])
def test_filler_adds_nothing_to_loss_and_gradients(how, padding_free, packed):
    rows = WithFiller(packed_rows(samples()), 0)
    collate = Collate(0, Layout(padding_free, packed, how in attention.NEEDS_CUMULATIVE_LENGTHS))
    model = model_of("llama", how, torch.float64)
    model.zero_grad()
    loss = compute_loss(model, collate(rows.__getitems__([FILLER, FILLER])), 7)
    loss.backward()
    assert loss.item() == 0
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys(), "DDP would wait for the others"
    assert all((gradient == 0).all() for gradient in found.values())


def test_logits_are_computed_where_a_label_follows_alone():
    batch = Collate(0, Layout(True, True, False))((packed_rows(samples()), None))
    model = model_of("llama", "sdpa", torch.float64)
    del batch[ABOUT]
    assert model(**batch, use_cache=False).logits.shape[1] == supervised(samples())
