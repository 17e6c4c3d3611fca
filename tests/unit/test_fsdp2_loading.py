"""Under FSDP2 one rank sends all ranks their shards of one weight after the other, out of the model's files; experts that are
published in MXFP4 are loaded in a run's own precision."""

import contextlib
import json
import weakref
from pathlib import Path

import pytest
import torch
from accelerate.utils import fsdp_utils
from safetensors.torch import save_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from brigade.train.model import adapters, base_weights, scores
from brigade.train.model.load import arrive_one_by_one, load_base, read_weights
from brigade.train.model.tiny import shrink
from brigade.train.recipe import flags
from brigade.train.upstream import fsdp2


class Decoder(torch.nn.Module):
    """Two ends that share a matrix, and a layer between them. Two buffers of one shape are in files."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.Linear(2, 2, bias=False)
        layer.register_buffer("scale", torch.zeros(1))
        self.register_buffer("scale", torch.zeros(1))
        self.embedding, self.layer = torch.nn.Embedding(3, 2), layer
        self.head = torch.nn.Linear(2, 3, False)
        self.head.weight = self.embedding.weight


class Accelerator:
    device = torch.device("cpu")

    def __init__(self, is_main_process):
        self.is_main_process = is_main_process


def sent(monkeypatch, full, read=None):
    """Return the models of the rank that sends and of one that receives."""
    messages, models = [], []

    def broadcast(tensor, src):
        tensor.copy_(messages.pop(0)) if len(models) else messages.append(tensor.clone())

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    monkeypatch.setattr(fsdp_utils, "fsdp2_load_full_state_dict", None)  # and it is put back
    checked = []
    fsdp2.send_weights(read, checked.append)
    for first in (True, False):
        model = Decoder().to("meta")
        fsdp_utils.fsdp2_load_full_state_dict(Accelerator(first), model, full if first else {})
        models.append(model)
    assert not messages and checked == models
    return models


def files(take):
    take("head.weight", torch.full((3, 2), 5.0))  # of tied weights one is in the files, whichever
    take("layer.scale", torch.full((1,), 3.0))
    take("scale", torch.full((1,), 6.0))
    take("embedding.weight", torch.full((3, 2), 5.0))  # or both
    take("layer.weight", torch.full((2, 2), 4.0))
    return {"embedding.weight", "head.weight", "layer.weight", "layer.scale", "scale"}


@pytest.mark.parametrize("read", [None, files], ids=["from the first rank's model", "from files"])
def test_each_rank_gets_all_weights_and_buffers(read, monkeypatch):
    whole = Decoder()
    if read is None:
        files(lambda name, value: whole.state_dict()[name].copy_(value))
    full = {name: value.to("meta") if read and "scale" in name else value for name, value in whole.state_dict().items()}
    for model in sent(monkeypatch, full, read):
        state = model.state_dict()
        assert {name: float(value.flatten()[0]) for name, value in state.items()} == {
            "embedding.weight": 5.0, "layer.weight": 4.0, "layer.scale": 3.0, "scale": 6.0, "head.weight": 5.0,
        }  # fmt: skip
        assert [name for name, _ in model.named_buffers()] == ["scale", "layer.scale"]


def test_a_weight_that_no_file_has_is_not_made_up(monkeypatch):
    def lacking(take):
        return files(lambda name, value: name != "layer.weight" and take(name, value))

    with pytest.raises(RuntimeError, match=r"the weight layer\.weight was not among them"):
        sent(monkeypatch, Decoder().state_dict(), lacking)


WORDS = {
    "tied": ("llama", ["--tie_word_embeddings"], []),
    "mixture": ("qwen3_moe", [], []),
    "router's bias": ("deepseek_v3", [], []),
    "fused matrices": ("phi3", [], []),
    "reward": ("llama", [], ["--objective", "reward"]),
    "in half precision": ("qwen3_moe", [], ["--use_peft", "--bf16"]),
}


@pytest.mark.parametrize("kind, tied, words", WORDS.values(), ids=WORDS)
def test_one_weight_after_the_other_is_the_model_that_is_loaded_whole(kind, tied, words, load, tmp_path):
    dtype = torch.bfloat16 if "--bf16" in words else torch.float32
    config = CONFIG_MAPPING[kind].from_dict(shrink(CONFIG_MAPPING[kind]().to_dict()))
    config.tie_word_embeddings = bool(tied)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    settings = load("--model_name_or_path", str(tmp_path), "--from_scratch", "false", *words)
    whole = load_base(settings, str(tmp_path), dtype)
    state, found, alive, drawn = whole.state_dict(), {}, [], torch.random.get_rng_state()

    def take(name, value):
        assert all(before() is None for before in alive), f"{name} was read while what came before it was in memory"
        alive.append(weakref.ref(value))
        found[name] = value.clone()

    assert read_weights(settings, str(tmp_path), dtype, take) == state.keys()
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert found.keys() == state.keys() - ({"lm_head.weight"} if tied else set())
    for name, value in found.items():
        assert value.dtype == state[name].dtype and torch.equal(value, state[name]), name
    if "reward" in words:
        assert not found[scores.HEAD].any()


@contextlib.contextmanager
def one_of_two(monkeypatch, rank, local_rank):
    """Be this rank of two under FSDP2, the other pretended."""
    told = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "LOCAL_RANK": str(local_rank)}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


COPIES = (["--use_dora"], ["--lora_modules_to_save", "lm_head"], ["--trainable_token_indices", "3"])


@pytest.mark.parametrize("words, own, rank", [
    ([], False, 0), (["--use_peft"], False, 0), (["--use_peft", *COPIES[0]], True, 0), (["--use_peft", *COPIES[0]], True, 1),
])  # fmt: skip
def test_what_adapters_begin_with_is_on_the_first_rank(words, own, rank, load, tmp_path, monkeypatch):
    """All else has places only; rotary frequencies, which no file has, are on each rank, also where each sees one GPU."""
    config = CONFIG_MAPPING["llama"].from_dict(shrink(CONFIG_MAPPING["llama"]().to_dict()))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = load("--model_name_or_path", str(tmp_path), "--from_scratch", "false", *words)
    plain, with_places = fsdp2.hold_places, []
    monkeypatch.setattr(fsdp2, "hold_places", lambda model: with_places.append(plain(model)))
    with one_of_two(monkeypatch, rank, local_rank=0):
        model = load_base(settings, str(tmp_path), torch.float32)
    assert bool(with_places) == (not own or rank == 1)
    assert arrive_one_by_one(settings, str(tmp_path)) == (not own)
    assert not any(arrive_one_by_one(load("--use_peft", *each), str(tmp_path)) for each in COPIES)
    if words:
        adapters.wrap(model, settings, str(tmp_path))
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert frequencies and all(float(buffer.sum()) > 0 for buffer in frequencies)


# ---- published in MXFP4 ----------------------------------------------------------------------------------------------
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
    with one_of_two(monkeypatch, 1, local_rank=1):
        sent = load_base(settings, str(published), torch.bfloat16)
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
