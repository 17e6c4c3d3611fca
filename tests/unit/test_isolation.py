"""How each architecture learns where a row's samples begin is found out by trying."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from benchmarks.architectures import LACKING
from brigade.train.data.collate import ABOUT, Collate, Layout, cumulative, on_device
from brigade.train.model import attention, packed_samples, sample_by_sample
from brigade.train.model.tiny import shrink
from brigade.train.upstream.stateful_layers import missing_packages

METHODS = {
    ("llama", "sdpa"): packed_samples.POSITIONS, ("qwen3_moe", "eager"): packed_samples.POSITIONS,
    ("gemma3_text", "varlen"): packed_samples.LENGTHS, ("llama", "flash_attention_2"): packed_samples.LENGTHS,
    ("mistral", "flex_attention"): packed_samples.POSITIONS, ("deepseek_v3", "sdpa"): packed_samples.POSITIONS,
    ("gpt_oss", "eager"): packed_samples.MASKS,
    ("deepseek_v4", "eager"): packed_samples.NOTHING,  # it takes 4 or 128 neighbours for one, whoever's they are
    ("llama4_text", "sdpa"): packed_samples.POSITIONS,
    ("granitemoe", "sdpa"): packed_samples.POSITIONS,  # rounding moves its logits by 1.1e-6
    ("gemma4_text", "sdpa"): packed_samples.POSITIONS, ("glm_moe_dsa", "eager"): packed_samples.POSITIONS,
    ("kimi_linear", "eager"): packed_samples.POSITIONS,
    ("opt", "sdpa"): packed_samples.NOTHING,  # masks without position ids
    ("falcon", "eager"): packed_samples.POSITIONS,  # since Transformers 5.24; NOTHING before
    ("mamba", "eager"): packed_samples.POSITIONS, ("qwen3_next", "flash_attention_2"): packed_samples.LENGTHS,
    ("falcon_h1", "varlen"): packed_samples.LENGTHS, ("minimax", "sdpa"): packed_samples.POSITIONS,
    ("nemotron_h", "sdpa"): packed_samples.POSITIONS, ("recurrent_gemma", "varlen"): packed_samples.LENGTHS,
    ("rwkv", "eager"): packed_samples.POSITIONS, ("zaya", "sdpa"): packed_samples.POSITIONS,
}  # fmt: skip


@pytest.mark.parametrize("family, how", METHODS)
def test_the_method_of_an_architecture(family, how):
    """The models are the published sizes' configs; what is tried is tiny, and moves no random state."""
    before = torch.random.get_rng_state()
    assert packed_samples.method_of(AutoConfig.for_model(family), how)[0] == METHODS[family, how]
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("family, how, mended_by", [
    *((family, how, "is_stateful") for family, how in (
        ("qwen3_next", "varlen"), ("lfm2", "sdpa"), ("mamba2", "eager"), ("kimi_linear", "eager"), ("minimax", "sdpa"))),
    ("llama4_text", "sdpa", "count_within_samples"),  # queries are scaled by the number of tokens before, from the 8,192nd on
])  # fmt: skip
def test_what_goes_on_from_sample_to_sample_is_found(family, how, mended_by, monkeypatch):
    """As where a new architecture's layers are not known to have a state, or to count."""
    config = AutoConfig.for_model(family, **LACKING.get(family, {}))
    monkeypatch.setattr(packed_samples, "_tried", packed_samples._tried.__wrapped__)  # no result of another test
    assert packed_samples.method_of(config, how)[0] != packed_samples.NOTHING
    monkeypatch.setattr(sample_by_sample, mended_by, lambda _: False)
    assert packed_samples.method_of(config, how)[0] == packed_samples.NOTHING


@pytest.mark.parametrize("family, packing, lengths, longest", [
    ("gpt_oss", False, [90, 20, 30], 140), ("gpt_oss", False, [30] * 3, 30), ("gpt_oss", False, [30], 30),
    ("gpt_oss", True, [64] * 4, 64), ("llama", False, [30] * 32, 960),
])  # fmt: skip
def test_samples_lie_as_is_less_work_for_the_attention_that_runs(family, packing, lengths, longest, load, monkeypatch):
    """On a CPU. gpt-oss has eager attention alone: 32 samples end to end took it 2.4 times as long as padded."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    settings, config = load(model={"attn_implementation": "auto"}), AutoConfig.for_model(family)
    how, _ = attention.choose(settings, config)
    flat, squares, why = packed_samples.layout(settings, config, how)
    assert (flat, squares) == {"gpt_oss": (True, True), "llama": (True, False)}[family]
    said = {"gpt_oss": "padded where eager", "llama": "varlen computes no products", "opt": "padded: nothing"}
    assert said[family] in why
    rows = [
        {"input_ids": np.ones(n, np.int32), "labels": np.ones(n, np.int64), "lengths": np.array([n])} for n in lengths
    ]
    collate = Collate(0, Layout(flat, packing, cumulative=family == "llama", squares=squares))
    about = collate((rows, None))[ABOUT]
    assert about.length == longest and about.tokens == sum(lengths)
    assert about.logits == (about.slots if about.length < sum(lengths) else sum(lengths) - 1)
    off = load(model={"attn_implementation": "auto"}, training={"padding_free": False})
    assert packed_samples.layout(off, config, how)[:2] == (False, False)


def test_a_zero3_configuration_does_not_stand_in_the_way(load):
    """Transformers shards whatever it builds while one lives; then nothing could be tried, and rows were padded silently."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    lives = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
    config = AutoConfig.for_model("llama", vocab_size=4321)  # not tried before
    assert packed_samples.method_of(config, "varlen")[0] == packed_samples.LENGTHS
    assert is_deepspeed_zero3_enabled() and lives.is_zero3()


def test_packing_is_refused_where_nothing_tells_where_samples_begin(load, mistake):
    settings = load(model={"attn_implementation": "sdpa"}, data={"packing": True})
    packed_samples.check(settings, AutoConfig.for_model("llama"), "sdpa")
    assert "OPTConfig would see each other: nothing tells it where one begins" in mistake(
        lambda: packed_samples.check(settings, AutoConfig.for_model("opt"), "sdpa")
    )
    packed_samples.check(load(), AutoConfig.for_model("opt"), "sdpa")  # it is padded


def test_what_cannot_be_tried_is_not_trusted_and_the_cause_is_told(load, monkeypatch, mistake):
    settings = load(model={"attn_implementation": "eager"}, data={"packing": True})
    monkeypatch.setattr(
        "brigade.train.model.packed_samples.shrink", lambda config: config | {"num_attention_heads": "many"}
    )
    for vocabulary, said in ((1234, "num_attention_heads"), (1235, "a broken kernel")):  # not tried before
        config = AutoConfig.for_model("llama", vocab_size=vocabulary)
        assert said in mistake(packed_samples.check, settings, config, "eager")
        assert packed_samples.method_of(config, "eager")[0] == packed_samples.NOTHING
        monkeypatch.undo()
        monkeypatch.setattr("transformers.LlamaForCausalLM.forward", broken)


def broken(*_, **__):
    raise RuntimeError("a broken kernel")


# ---- leaks that are planted ------------------------------------------------------------------------------------------
def convolution(x):
    """The token before is seen, whoever's it is."""
    return x + 1e-2 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def state(x):
    """What all earlier tokens add up to goes on."""
    return x + 1e-2 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def compression(x):
    """Each token sees the mean of the eight before its own eight."""
    rest = -x.shape[1] % 8
    blocks = torch.nn.functional.pad(x, (0, 0, 8, rest)).unflatten(1, (-1, 8)).mean(2)
    return x + 1e-2 * blocks[:, :-1].repeat_interleave(8, 1)[:, : x.shape[1]]


def capacity(x):
    """What a token gets depends on all tokens of its row, as where experts take no more than so many."""
    return x - 1e-2 * x.mean(1, keepdim=True)


LEAKS = {leak.__name__: leak for leak in (convolution, state, compression, capacity)}


@pytest.mark.parametrize("leak", [None, *LEAKS, "window"])
def test_a_leak_between_samples_is_found(leak, monkeypatch):
    """In an architecture that is told where samples begin, and in a single one of its places."""
    from transformers.models.mistral import modeling_mistral as mistral

    forward, mask = mistral.MistralMLP.forward, mistral.create_sliding_window_causal_mask
    if leak == "window":  # the layers with a window alone see past a sample's begin
        monkeypatch.setattr(
            mistral, "create_sliding_window_causal_mask", lambda **given: mask(**given | {"position_ids": None})
        )
    elif leak:
        monkeypatch.setattr(mistral.MistralMLP, "forward", lambda self, x: forward(self, LEAKS[leak](x)))
    monkeypatch.setattr(packed_samples, "_tried", packed_samples._tried.__wrapped__)  # no result of another test
    found, why = packed_samples.method_of(AutoConfig.for_model("mistral", sliding_window=4096), "sdpa")
    assert (found, why) == (
        (packed_samples.NOTHING, "nothing tells it where one begins") if leak else (packed_samples.POSITIONS, "")
    )


# ---- layers with a state ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given, lengths", [
    ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])}, [3, 2, 1]),
    ({"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 1, 2]])}, [4, 2, 3, 3]),  # sequence by sequence
    ({"position_ids": torch.tensor([[5, 6, 7]])}, None), ({"position_ids": torch.arange(6).repeat(2, 1)}, None),
    (cumulative(np.array([4, 1])), [4, 1]), (cumulative(np.array([5])), None), ({}, None),
    # padding, and an answer that is being generated
    (cumulative(np.array([4, 1])) | {"attention_mask": torch.ones(1, 5)}, None),
    (cumulative(np.array([4, 1])) | {"past_key_values": object()}, None),
    (cumulative(np.array([4, 1])) | {"cache": object()}, None),  # its name from Transformers 5.24 on
])  # fmt: skip
def test_what_a_model_is_told_says_which_samples_there_are(given, lengths):
    assert sample_by_sample.lengths_of(given) == lengths


def test_position_ids_of_several_axes_are_not_passed_over():
    with pytest.raises(ValueError, match=r"shape \(3, 1, 4\)"):
        sample_by_sample.lengths_of({"position_ids": torch.zeros(3, 1, 4)})


def test_samples_of_like_lengths_are_computed_together():
    lengths = np.random.default_rng(0).integers(1, 5000, 400).tolist()
    groups = sample_by_sample.alike(lengths)
    assert sorted(sample for group in groups for sample in group) == list(range(400))
    padded = sum(len(group) * max(lengths[sample] for sample in group) for group in groups)
    assert padded < 1.5 * sum(lengths) and len(groups) < 20
    assert sample_by_sample.alike([7, 100, 100, 66]) == [[1, 2], [3], [0]]


def test_nobody_waits_for_the_device_to_learn_the_lengths():
    """A tensor on the device remembers the one on the host."""
    batch = on_device({"position_ids": torch.tensor([[0, 1, 0]])}, torch.device("meta"))
    assert batch["position_ids"].is_meta and sample_by_sample.lengths_of(batch) == [2, 1]


@pytest.mark.parametrize("family, missing", [
    ("qwen3_5_text", ["causal-conv1d", "flash-linear-attention"]), ("bamba", ["causal-conv1d", "mamba-ssm"]), ("llama", []),
])  # fmt: skip
def test_a_run_says_which_packages_its_layers_lack(family, missing):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=1))
    assert missing_packages(model) == missing


def test_models_without_a_state_are_left_alone():
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**shrink(CONFIG_MAPPING["llama"]().to_dict())))
    assert sample_by_sample.divide(model) is None and not model._forward_pre_hooks
