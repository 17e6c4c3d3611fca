"""Which attention a run gets, what is refused, and that varlen computes what its definition says."""

import itertools

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from brigade.train.distributed import devices
from brigade.train.engines import kernels
from brigade.train.host.cluster import World
from brigade.train.model import attention, trial
from brigade.train.model.cpu_attention import BlockedAttention, takes
from brigade.train.recipe import flags
from brigade.train.step import preflight
from brigade.train.strategy import choose as choose_strategy
from testing.small_configs import SMALL


def config(family, **values):
    return transformers.AutoConfig.for_model(family, **values)


def choose(wanted, family, gpu=False, half=False, capability=(9, 0), **values):
    settings = flags.load(["--attn_implementation", wanted, *(["--bf16"] if half else [])])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torch.cuda.is_available", lambda: gpu)
        patched.setattr("torch.cuda.get_device_capability", lambda: capability)
        return attention.choose(settings, config(family, **values))


@pytest.fixture
def flash(monkeypatch):
    def installed(yes):
        monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda *_, **__: yes)

    installed(False)
    return installed


# ---- what is chosen ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "mistral", "phi3", "gemma3_text", "gemma3"])
def test_auto_on_a_cpu_is_varlen(family, flash):
    assert choose("auto", family) == ("varlen", "the fastest proven on a CPU")
    flash(True)  # it computes on GPUs alone
    assert choose("auto", family, half=True)[0] == "varlen"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_auto_on_a_gpu(family, flash):
    assert choose("auto", family, gpu=True, half=True, capability=(8, 0))[0] == "varlen"
    implementation, why = choose("auto", family, gpu=True, half=True, capability=(7, 5))
    assert implementation == "sdpa" and "not installed" in why
    wide = {"head_dim": 512}
    assert choose("auto", family, gpu=True, half=True, **wide)[0] == "sdpa"
    flash(True)
    assert choose("auto", family, gpu=True, half=True)[0] == "flash_attention_2"
    implementation, why = choose("auto", family, gpu=True, half=False)
    assert implementation == "sdpa" and "bf16" in why


@pytest.mark.parametrize("family, values, expected", [
    ("deepseek_v3", {}, "sdpa"),  # queries of 192, values of 128; head_dim says 64
    ("glm4_moe_lite", {}, "varlen"),  # both 256
    ("glm4_moe_lite", {"v_head_dim": 128}, "sdpa"),
    ("gpt2", {}, "sdpa"),  # attn_pdrop is 0.1
    ("gpt2", {"attn_pdrop": 0.0}, "varlen"),
    ("qwen2", {"attention_dropout": 0.1}, "sdpa"),
    ("qwen2", {}, "varlen"),
    ("gemma4_text", {}, "sdpa"),  # 256, but 512 where a layer sees all tokens
    ("gemma4_text", {"global_head_dim": 256}, "varlen"),
])  # fmt: skip
def test_auto_on_a_gpu_is_varlen_only_where_its_kernel_computes_the_heads(family, values, expected, flash):
    """Without the kernel, varlen asks the device for the samples' lengths in each layer."""
    assert choose("auto", family, gpu=True, half=True, **values)[0] == expected


@pytest.mark.parametrize("gpu, half", [(False, False), (True, True)])
@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
def test_models_without_sdpa_are_eager(family, gpu, half):
    assert choose("auto", family, gpu, half) == ("eager", "the model has no SDPA")


def test_chunks_are_beyond_varlen():
    implementation, why = choose("auto", "llama4_text", attention_chunk_size=64)
    assert implementation == "sdpa" and "attention_chunk_size" in why


@pytest.mark.parametrize(
    "named", ["varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
)
def test_a_named_one_is_taken(named):
    assert choose(named, "llama") == (named, "")


@pytest.mark.parametrize("family, lacking", [
    ("gpt_oss", "SDPA"), ("gemma2", "attn_logit_softcapping"), ("llama4_text", "attention_chunk_size"),
    ("deepseek_v32", "index_topk"),
])  # fmt: skip
def test_varlen_is_refused_where_it_would_compute_something_else(family, lacking, mistake):
    message = mistake(choose, "varlen", family)
    assert "flag --attn_implementation" in message and lacking in message and "auto" in message


@pytest.mark.parametrize("named, package", [
    ("flash_attention_2", "install flash-attn (docs/containers.md"), ("flash_attention_3", "flash-attn-3 (docs/"),
])  # fmt: skip
def test_what_is_not_installed_is_told_by_its_own_name(load, flash, mistake, monkeypatch, named, package):
    monkeypatch.setattr("transformers.utils.is_flash_attn_3_available", lambda *_, **__: False)
    for name, value in (("is_available", True), ("device_count", 8), ("is_bf16_supported", True)):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value, **_: value)
    monkeypatch.setattr(devices, "without_code", lambda _: "")  # torch's build for CUDA would ask for a driver
    settings = load("--bf16", model={"attn_implementation": named})
    world = World(0, 0, 1, 1, "host", "python")
    message = mistake(preflight.check_host, settings, choose_strategy(settings, world, {}), world)
    assert f"{named} is not installed" in message and package in message.splitlines()[-1]


def test_deepspeeds_fp16_on_a_cpu_without_instructions_for_it_is_refused(load, mistake, monkeypatch):
    settings, world = load("--fp16", "--ds_config", "ds_configs/zero2.json"), World(0, 0, 1, 1, "host", "python")
    strategy = choose_strategy(settings, world, {})
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: None)
    message = mistake(preflight.check_host, settings, strategy, world)
    assert "flag --fp16" in message and "AVX512-FP16" in message and "bf16" in message


# ---- what varlen computes ----------------------------------------------------------------------------------------
def definition(query, key, value, ends, window, scale):
    """Softmax of the scaled products within a sample, at most `window` tokens back, one query at a time."""
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    found = torch.zeros_like(query)
    for begin, end in itertools.pairwise(ends):
        for place in range(begin, end):
            first = begin if window is None else max(begin, place + 1 - window)
            scores = (query[:, :, place : place + 1] * key[:, :, first : place + 1]).sum(-1) * scale
            found[:, :, place] = (scores.softmax(-1)[..., None] * value[:, :, first : place + 1]).sum(2)
    return found.transpose(1, 2)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from([None, 1, 2, 3, 5, 20]),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.integers(0, 99),
)
def test_varlen_is_causal_attention_within_each_sample(lengths, window, heads, seed):
    draw = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, count, sum(lengths), 8, generator=draw, dtype=torch.float64)
        for count in (heads[0], *heads[1:] * 2)
    )
    ends = [0, *itertools.accumulate(lengths)]
    how = {"scaling": 0.3, "sliding_window": window}
    of_samples = {"cu_seq_lens_q": torch.tensor(ends, dtype=torch.int32), "max_length_q": max(lengths)}
    found, weights = attention.varlen(None, query, key, value, None, **how, **of_samples)
    torch.testing.assert_close(found, definition(query, key, value, ends, window, 0.3))
    assert weights is None and found.is_contiguous()
    if len(lengths) == 1:  # nobody says where samples begin: there is one
        alone, _ = attention.varlen(None, query, key, value, None, **how)
        torch.testing.assert_close(alone, found)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("size", [16, 8])  # of values; DeepSeek-V3's differs from its keys'
def test_blocks_of_half_precision_are_as_near_to_the_definition_as_sdpa(tokens, heads, size):
    """Output and gradients, each against float64."""
    draw = torch.Generator().manual_seed(tokens)
    whole = [torch.randn(1, count, tokens, 16, generator=draw).bfloat16() for count in (heads[0], *heads[1:] * 2)]
    whole[2] = whole[2][..., :size]
    assert takes(*whole[:2], 0.0, None)

    def results(compute, dtype):
        given = [tensor.to(dtype).requires_grad_() for tensor in whole]
        found = compute(*given)
        found.backward(torch.linspace(-1, 1, found.numel(), dtype=dtype).view(found.shape))
        return [found, *(tensor.grad for tensor in given)]

    def sdpa(query, key, value):
        how = {"is_causal": True, "scale": 0.3, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **how)

    exact = results(sdpa, torch.float64)
    theirs = results(sdpa, torch.bfloat16)
    ours = results(lambda *given: BlockedAttention.apply(*given, 0.3), torch.bfloat16)
    for truth, sdpas, blocks in zip(exact, theirs, ours, strict=True):  # output, and gradients of query, key and value
        worst, usual = ((found.double() - truth).norm() / truth.norm().clamp(min=1e-9) for found in (blocks, sdpas))
        assert worst <= max(3 * usual, 0.01)


def test_rows_of_a_batch_are_left_to_torch():
    """Prompts of equal length are answered together, without a mask."""
    query, key, value = (torch.randn(3, count, 5, 8).bfloat16() for count in (4, 2, 2))
    both, _ = attention.varlen(None, query, key, value, None)
    for row in range(3):
        alone, _ = attention.varlen(None, query[row : row + 1], key[row : row + 1], value[row : row + 1], None)
        torch.testing.assert_close(both[row : row + 1], alone, rtol=0.02, atol=0.02)


def test_blocks_under_autocast_stay_in_half_precision():
    """Norms of queries and keys hand over fp32, which autocast lets through to our own function."""
    query, key, value = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attention.varlen(None, query, key, value, None)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert query.grad.dtype == torch.float32 and torch.isfinite(query.grad).all()


@pytest.mark.parametrize("family, values", [("llama", {}), ("mistral", {"sliding_window": 4})])
def test_generation_with_varlen_is_sdpas(family, values):
    """Decoding with a cache, of prompts padded on the left: evaluation answers questions with the run's own attention."""
    attention.register()
    shape = SMALL | {"num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3}
    prompts = torch.tensor([[0, 0, 0, 7, 9], [5, 8, 3, 11, 6]])
    mask = (prompts != 0).long()
    answers = []
    for how in ("sdpa", "varlen"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(family, **shape | values), attn_implementation=how)
        model.eval()
        both = model.generate(prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
        alone = model.generate(prompts[1:], max_new_tokens=8, do_sample=False)
        answers.append((both.tolist(), alone.tolist()))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("asked, gpu, there, expected", [
    (False, True, True, (False, "")), (True, False, True, (False, "off: its Triton kernels need a GPU")),
    (True, True, False, (False, "off: pip install --no-deps -r requirements-gpu.txt")), (True, True, True, (True, "")),
])  # fmt: skip
def test_liger_is_off_with_one_reason_where_the_device_lacks_it(load, monkeypatch, asked, gpu, there, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if there else None)
    assert kernels.choose_liger(load(training={"use_liger_kernel": asked})) == expected


@pytest.mark.parametrize("precision, on", [({}, True), ({"bf16": True}, False), ({"fp16": True}, False)])
@pytest.mark.parametrize("gpu", [False, True])
def test_tritons_interpreter_is_taken_in_fp32_alone(load, monkeypatch, precision, on, gpu):
    """It adds and multiplies the bits of bf16 as integers: a loss of its would be wrong without a word."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    taken, why = kernels.choose_liger(load(training={"use_liger_kernel": True} | precision))
    assert taken is on and ("interpreter" in why) is not on


@pytest.mark.parametrize("family, gated", [("llama", True), ("qwen3_moe", False)])
def test_liger_is_asked_for_no_loss_and_no_experts(family, gated, monkeypatch):
    """Its losses take a weight that a rank may have a part of, and experts are what axes divide."""
    asked = []

    def apply(model, config):
        asked.append(config)
        model.forward = model.forward  # as where something was put into it

    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", apply)
    kernels.apply_liger(trial.tiny_model(config(family)))
    assert asked == [{"fused_linear_cross_entropy": False, "cross_entropy": False, "swiglu": gated, "geglu": gated}]


def test_a_model_that_liger_does_not_know_is_refused_by_name(mistake, monkeypatch):
    """Liger itself would say nothing, and the model would train without its kernels."""
    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", lambda model, config: None)
    said = mistake(kernels.apply_liger, trial.tiny_model(config("gpt2")), "recipe.yaml, use_liger_kernel")
    assert "recipe.yaml, use_liger_kernel" in said and "gpt2" in said
