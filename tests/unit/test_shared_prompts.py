"""The two answers of a pair share the tokens of their prompt, and give the losses and gradients of answers by themselves."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.architectures import LACKING
from brigade.errors import UserError
from brigade.train.data.answers import ANSWERS, SHARED, TOKENS, prompts_once, samples_of
from brigade.train.data.collate import ABOUT, KEY_PLACES, KEYS, Collate, Layout, cumulative
from brigade.train.data.store import IGNORED
from brigade.train.loss import objective_checks, own_loss
from brigade.train.loss.objective.contract import sums
from brigade.train.model import attention, packed_samples
from brigade.train.model.tiny import SPAN, shrink, with_short_spans
from brigade.train.recipe.objectives import PAIRS
from brigade.train.run.directory import Kernels
from brigade.train.strategy import refusal
from brigade.train.strategy.axes import Axes
from brigade.train.strategy.strategy import Strategy

LONG = 2 * SPAN + 5
# (tokens of the prompts, of the answers, tokens in common at the beginning of these); what a pair then shares
WHOLE, ONE, NOTHING, WITHIN = (LONG, 7, 2 * SPAN + 1, 0), (LONG, 1, 1, 0), (1, 5, 3, 0), (6, 9, 4, 3)
PREFIX = (6, 9, 4, 4)  # the worse answer is how the better one begins
WAYS = {("llama", "varlen"): packed_samples.LENGTHS, ("llama", "sdpa"): packed_samples.MASK,
        ("llama", "eager"): packed_samples.MASK, ("gemma3_text", "varlen"): packed_samples.LENGTHS,
        ("gemma3_text", "sdpa"): packed_samples.MASKS, ("gemma3_text", "eager"): packed_samples.MASKS,
        ("mistral", "sdpa"): packed_samples.MASK, ("gpt_oss", "eager"): packed_samples.MASKS,
        ("qwen3_moe", "varlen"): packed_samples.LENGTHS}  # fmt: skip
WITH_STATES = [("mamba", "eager"), ("qwen3_next", "varlen"), ("falcon_h1", "varlen"), ("lfm2", "sdpa")]


def sequence(*pairs, seed=0):
    """One sequence of pairs, as a store has it."""
    draw, samples = np.random.default_rng(seed), []
    for prompt, better, worse, alike in pairs:
        asked, first, second = (draw.integers(7, 90, size) for size in (prompt, better, worse))
        second[:alike] = first[:alike]
        if alike < worse:
            second[alike] = first[alike] + 1
        samples += [(np.concatenate([asked, answer]), prompt) for answer in (first, second)]
    labels = [np.where(np.arange(len(ids)) < prompt, IGNORED, ids) for ids, prompt in samples]
    ids = np.concatenate([ids for ids, _ in samples]).astype(np.int32)
    lengths = np.array([len(each) for each in labels])
    return {"input_ids": ids, "labels": np.concatenate(labels).astype(np.int64), "lengths": lengths}


FILLER = {"input_ids": np.full(2, 96, np.int32), "labels": np.full(2, IGNORED), "lengths": np.array([2])}
MICRO_BATCH = [sequence(WHOLE, NOTHING), FILLER, sequence(ONE, seed=1), sequence(WITHIN, PREFIX, seed=2)]


@pytest.mark.parametrize("pair, shared", [(WHOLE, LONG - 1), (ONE, LONG - 1), (NOTHING, 0), (WITHIN, 5), (PREFIX, 5)])
def test_a_pair_shares_all_tokens_before_the_last_one_of_its_prompt(pair, shared):
    first, second = samples_of(sequence(pair))
    laid = prompts_once([first, second])
    assert laid[0] is first and laid[1].get(SHARED, 0) == shared
    assert np.array_equal(np.concatenate([first["input_ids"][:shared], laid[1]["input_ids"]]), second["input_ids"])
    assert laid[1]["labels"][0] == IGNORED and len(laid[1]["labels"]) == laid[1]["lengths"][0]


def test_prompts_that_differ_share_what_comes_before():
    first, second = samples_of(sequence(WHOLE))
    second["input_ids"][9] += 1
    assert prompts_once([first, second])[1][SHARED] == 8
    second["input_ids"][0] += 1
    assert prompts_once([first, second])[1] is second
    assert prompts_once([first]) == [first]


def collated(shares, cumulative=True, multiple=8):
    layout = Layout(True, True, cumulative, multiple=multiple, rows=PAIRS, shares=shares)
    return Collate(96, layout)((MICRO_BATCH, 5))


def test_a_micro_batch_counts_the_tokens_of_whole_samples():
    once, twice = (collated(shares, multiple=1) for shares in (True, False))
    saved = 2 * (LONG - 1) + 5 + 5
    assert twice["input_ids"].numel() - once["input_ids"].numel() == saved
    same = dataclasses.asdict(twice[ABOUT]) | {"length": twice[ABOUT].length - saved}
    assert dataclasses.asdict(once[ABOUT]) == same
    assert once[KEYS][-1] == twice[KEYS][-1] and torch.equal(once[ANSWERS][TOKENS], twice[ANSWERS][TOKENS])
    assert torch.equal(once["shift_labels"], twice["shift_labels"])


def model_of(family, how, dtype=torch.float32):
    """A tiny model whose attention looks back over fewer tokens than MICRO_BATCH's prompts have."""
    attention.register()
    config = AutoConfig.for_model(family)
    tiny = type(config).from_dict(with_short_spans(shrink(config.to_dict())))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny, attn_implementation=how, dtype=dtype).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    own_loss.return_token_losses(model)
    return model


def learned(model, way, shares, spoil=lambda batch: None):
    """The log-probability of each answer, and the gradient of a sum of them with other weights: both flat."""
    batch = collated(shares, cumulative=way == packed_samples.LENGTHS)
    spoil(batch)
    answers = batch.pop(ANSWERS)
    del batch[ABOUT]
    if way != packed_samples.LENGTHS:
        batch["attention_mask"] = packed_samples.masks(model.config, batch["position_ids"], model.dtype, way)
    found = sums(model(**batch, use_cache=False, num_items_in_batch=1).loss, answers)
    weights = torch.linspace(-1, 1, len(found), dtype=found.dtype)
    gradients = torch.autograd.grad((found * weights).sum(), list(model.parameters()), materialize_grads=True)
    return found.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def far(found, expected):
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family, how", WAYS)
def test_losses_and_gradients_are_those_of_answers_by_themselves(family, how):
    model, way = model_of(family, how), WAYS[family, how]
    assert packed_samples.way_of_sharing(AutoConfig.for_model(family), how) == (way, "")
    expected = learned(model, way, False)
    assert far(learned(model, way, True), expected) < 1e-6

    def off_by_one(batch):
        batch["position_ids"] += (batch["position_ids"].diff(prepend=batch["position_ids"][:, :1]) < 0) * 1

    assert far(learned(model, way, True, off_by_one), expected) > 1e-3


def test_a_package_of_flash_attention_gets_the_keys_that_samples_see(monkeypatch):
    """Its kernels would read on behind the last key. Here the definition stands for them: the last query sees the last key."""

    def forward(query, key, value, mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **_):
        assert (key.shape[1], max_length_q, max_length_k) == (int(cu_seq_lens_k[-1]), 7, 10) and mask is None
        lengths = [borders.diff().tolist() for borders in (cu_seq_lens_q, cu_seq_lens_k, cu_seq_lens_k)]
        split = (
            tensor.transpose(1, 2).split(each, 2) for tensor, each in zip((query, key, value), lengths, strict=True)
        )
        found = []
        for q, k, v in zip(*split, strict=True):
            band = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            found.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=band, enable_gqa=True))
        return torch.cat(found, 2).transpose(1, 2)

    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", forward)
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"), is_causal=True)
    told = cumulative(np.array([7, 4, 3]), np.array([0, 6, 0]))
    assert told[KEY_PLACES].tolist() == [*range(7), *range(6), *range(7, 11), *range(11, 14)]
    tensors = [torch.randn(1, heads, 14, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    attention.register()
    for name in attention.FLASH:
        found, _ = ALL_ATTENTION_FUNCTIONS[name](module, *tensors, None, scaling=None, **told)
        torch.testing.assert_close(found, attention.varlen(module, *tensors, None, **told)[0])


def test_half_precision_on_a_cpu_is_as_near_as_without_sharing():
    exact = learned(model_of("llama", "varlen"), packed_samples.LENGTHS, False)
    model = model_of("llama", "varlen", torch.bfloat16)
    once, twice = (far(learned(model, packed_samples.LENGTHS, shares), exact) for shares in (True, False))
    assert once < 1.5 * twice < 0.1


# ---- where it is on ----------------------------------------------------------------------------------------------
@pytest.fixture
def tries(monkeypatch):
    """tries(family, how): what the trial says, without results of another test."""
    monkeypatch.setattr(packed_samples, "_tried", packed_samples._tried.__wrapped__)
    return lambda family, how: packed_samples.way_of_sharing(
        AutoConfig.for_model(family, **LACKING.get(family, {})), how
    )[0]


@pytest.mark.parametrize("family, how", WITH_STATES)
def test_states_that_go_on_over_tokens_are_found(family, how, tries):
    assert tries(family, how) == packed_samples.NOTHING


@pytest.mark.parametrize("how", ["varlen", "sdpa", "eager"])
def test_positions_off_by_one_are_found(how, tries, monkeypatch):
    sound = packed_samples.positions
    monkeypatch.setattr(packed_samples, "positions", lambda lengths, before: sound(lengths, before - (before > 1)))
    assert tries("llama", how) == packed_samples.NOTHING


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_masks_by_which_an_answer_sees_the_other_are_found(how, tries, monkeypatch):
    sound = packed_samples._Sees.__init__

    def spoilt(self, position_ids, window):
        sound(self, position_ids, window)
        self.seen |= torch.ones_like(self.seen).tril(-1) & torch.ones_like(self.seen).triu(-2)

    monkeypatch.setattr(packed_samples._Sees, "__init__", spoilt)
    assert tries("llama", how) == packed_samples.NOTHING


def test_lengths_by_which_an_answer_sees_the_other_are_found(tries, monkeypatch):
    sound = packed_samples.cumulative

    def spoilt(lengths, before=0):  # all that the better answer has, in place of the prompt
        return sound(lengths, np.where(before > 0, np.roll(lengths, 1), 0))

    monkeypatch.setattr(packed_samples, "cumulative", spoilt)
    assert tries("llama", "varlen") == packed_samples.NOTHING


def run_of(settings, kernels, **axes):
    strategy = Strategy("ddp", "ddp", "a test", axes=Axes(**axes))
    return SimpleNamespace(settings=settings, kernels=kernels, strategy=strategy)


@pytest.mark.parametrize("keys, axes, on_gpus, why", [
    ({}, {}, "", ""), ({"share_prompts": True}, {}, "", ""),
    ({"share_prompts": False}, {}, "", None), ({"objective": "kto"}, {}, "", None), ({"objective": "sft"}, {}, "", None),
    ({}, {}, "logits are off", "with varlen: logits are off"), ({"padding_free": False}, {}, "", "padding_free is false"),
    ({}, {"tensor": 2}, "", "a tensor group"), ({}, {"sequence": 2}, "", "parts of each sequence"),
    ({}, {"stages": 2}, "", "in a pipeline"), ({}, {"experts": 2}, "", "experts are divided"),
    ({"torch_compile": True}, {}, "", "compiled layers"), ({"router_aux_loss_coef": 0.01}, {}, "", "a mean over tokens"),
])  # fmt: skip
def test_it_is_on_where_it_is_proven(keys, axes, on_gpus, why, load):
    run = run_of(load(training={"objective": "dpo", **keys}), Kernels("varlen", no_sharing=on_gpus), **axes)
    config = AutoConfig.for_model("llama")
    way, told = objective_checks.way_of_sharing(run, config)
    assert (way == packed_samples.LENGTHS) == (why == "")
    assert why in told if why else not told
    said = objective_checks.describe_sharing(run, config)
    assert said == {"prompts": "once for both answers of a pair"} if why == "" else ("prompts" in said) == bool(why)


@pytest.mark.parametrize("family, on", [("qwen3", True), ("qwen3_next", False)])
def test_a_reference_of_other_layers_is_tried_as_well(family, on, load, monkeypatch):
    monkeypatch.setattr(objective_checks, "load_config", lambda settings: AutoConfig.for_model(family))

    run = run_of(load(training={"objective": "dpo", "reference": "who/what"}), Kernels("varlen"))
    way, why = objective_checks.way_of_sharing(run, AutoConfig.for_model("llama"))
    assert (way == packed_samples.LENGTHS) == on and ("reference" in why) != on


@pytest.mark.parametrize("kernels, why", [
    (Kernels("flex_attention"), "nobody has compared it with flex_attention"),
    (Kernels("flash_attention_2", no_sharing="logits are off"), "with flash_attention_2: logits are off"),
])  # fmt: skip
def test_true_is_an_error_where_it_is_not_proven(kernels, why, load):
    run = run_of(load(training={"objective": "orpo", "share_prompts": True}), kernels)
    with pytest.raises(UserError, match=why):
        objective_checks.check(run, AutoConfig.for_model("llama"))
    assert refusal(share_prompts=True, sequence=True)["key"] == "share_prompts"
