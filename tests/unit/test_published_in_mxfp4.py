"""gpt-oss is published with its experts in MXFP4, which Transformers cannot train: a run loads them in its own precision."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from brigade.train.model import base_weights
from brigade.train.model.load import load_base
from brigade.train.model.tiny import shrink
from brigade.train.recipe import flags

CONFIG = Path(__file__).parents[2] / "recipes/gpt-oss-20b/config.json"


@pytest.fixture
def published(tmp_path):
    """A tiny model as the published one lies on the Hub: 32 values of 4 bits share a scale, experts' biases are in bf16."""
    config = json.loads(CONFIG.read_text())
    tiny = shrink(config)
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensor.shape
            tensors[f"{name}_blocks"] = torch.full((experts, outer, inner // 32, 16), 0x22, dtype=torch.uint8)  # 1.0
            tensors[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 127 - 3, dtype=torch.uint8)  # 2^-3
        else:
            tensors[name] = tensor.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(tiny | {"quantization_config": config["quantization_config"]}))
    return tmp_path


def test_its_experts_can_be_trained(published):
    settings = flags.load(["--model_name_or_path", str(published), "--bf16"])
    model = load_base(settings, str(published), torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == torch.bfloat16 and (experts.gate_up_proj == 0.125).all()
    assert experts.down_proj.shape == (4, 128, 64) and (experts.down_proj == 0.125).all()
    assert not model.is_quantized and not hasattr(model.config, "quantization_config")
    model(torch.arange(8)[None]).logits.sum().backward()
    assert experts.gate_up_proj.grad is not None
    model.save_pretrained(published / "trained")
    base_weights.check(str(published / "trained"), False)  # as a run does before it counts as a success


@pytest.fixture
def fresh_memory_is_nan():
    """Memory that nobody has written holds NaN, on any machine (torch.utils.deterministic)."""
    torch.use_deterministic_algorithms(True)  # fill_uninitialized_memory is on by default, and counts beside this alone
    yield
    torch.use_deterministic_algorithms(False)


def test_a_rank_that_is_sent_its_weights_reads_none(published, monkeypatch, fresh_memory_is_nan):
    """Under FSDP2 the second rank of a host: parameters with places of their own on the CPU, buffers as they are meant."""
    settings = flags.load(["--model_name_or_path", str(published), "--bf16", "--use_peft"])
    whole = load_base(settings, str(published), torch.bfloat16)
    for name, value in {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "LOCAL_RANK": "1",
    }.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        sent = load_base(settings, str(published), torch.bfloat16)
    finally:
        torch.distributed.destroy_process_group()
    described = [
        [(name, p.shape, p.dtype, p.device) for name, p in model.named_parameters()] for model in (whole, sent)
    ]
    assert described[0] == described[1] and not hasattr(sent.config, "quantization_config")
    places = [parameter.data_ptr() for parameter in sent.parameters()]
    assert len(set(places)) == len(places)  # Accelerate tells an optimizer's parameters apart by them
    for (name, buffer), (_, other) in zip(whole.named_buffers(), sent.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert all(parameter.isfinite().all() for parameter in whole.parameters())
    for name, parameter in sent.named_parameters():
        assert parameter.isnan().all(), f"{name} was read or filled, though the first rank sends it"
