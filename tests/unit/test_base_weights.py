"""A model whose files lack or distort its weights is refused before it is loaded, with file and names."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from brigade.train.model.base_weights import check_finite, first_not_finite
from brigade.train.model.load import load_base, weights

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
NORM, EXPERT = "model.norm.weight", "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Directories as Transformers saves models: one in several files, one whose ends are tied, one with experts."""
    folder = tmp_path_factory.mktemp("models")
    experts = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
    llama, tied = LlamaConfig(**SIZES), LlamaConfig(**SIZES, tie_word_embeddings=True)
    for name, config, size in (
        ("files", llama, "20KB"),
        ("one", llama, "1GB"),
        ("tied", tied, "1GB"),
        ("experts", experts, "1GB"),
    ):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name, max_shard_size=size)
    return folder


@pytest.fixture
def check(sound, tmp_path, load):
    """check(name, change): the check of that model, its tensors or its directory changed."""

    def call(name, tensors=None, files=None):
        folder = shutil.copytree(sound / name, tmp_path / "model")
        if tensors:
            changed = tensors(load_file(folder / "model.safetensors"))
            save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        if files:
            files(folder)
        settings = load("--model_name_or_path", str(folder))
        return lambda: weights(settings, None)

    return call


@pytest.mark.parametrize("name", ["files", "one", "tied", "experts"])
def test_sound_models_are_taken(name, check):
    assert check(name)()


def without(key):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != key}


def cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def pointer(name):
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    return lambda folder: (folder / name).write_text(text)


def lose(folder):
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


DAMAGED = {
    "missing": ("one", without(NORM), None, ["LlamaForCausalLM", "files lack (1)", NORM]),
    "missing in a file that ends are tied in": ("tied", without("model.embed_tokens.weight"), None, ["embed_tokens", "lack"]),
    "missing expert": ("experts", without(EXPERT), None, ["experts", "missing"]),
    "wrapped": ("one", lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()}, None,
                ["lack", "'module.'", "save_pretrained"]),
    "unknown": ("one", lambda tensors: tensors | {"model.more": torch.ones(3)}, None, ["model.more", "none of the model's"]),
    "shape": ("one", lambda tensors: tensors | {NORM: torch.ones(33)}, None, [NORM, "[33] instead of [32]"]),
    "integers": ("one", lambda tensors: tensors | {NORM: torch.ones(32, dtype=torch.int32)}, None, [NORM, "integers"]),
    "complex": ("one", lambda tensors: tensors | {NORM: torch.ones(32, dtype=torch.complex64)}, None, [NORM, "complex numbers"]),
    "truncated": ("one", None, cut, ["model.safetensors", "damaged", "bytes", "again"]),
    "empty": ("one", None, lambda folder: (folder / "model.safetensors").write_bytes(b""), ["damaged (0 bytes)"]),
    "a pointer": ("one", None, pointer("model.safetensors"), ["model.safetensors", "pointer of Git LFS", "git lfs pull"]),
    "a pointer for a pickle": ("one", None, pointer("pytorch_model.bin"), ["pytorch_model.bin", "pointer of Git LFS"]),
    "a pointer for a vocabulary": ("one", None, pointer("tokenizer.json"), ["tokenizer.json", "pointer of Git LFS"]),
    "garbage": ("one", None, lambda folder: (folder / "model.safetensors").write_bytes(b"\x00\xff" * 999), ["damaged"]),
    "a file lost": ("files", None, lose, ["model-00002-of", "1 of", "index.json"]),
    "index damaged": ("files", None, lambda folder: (folder / "model.safetensors.index.json").write_text("{"), ["damaged"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_models_are_refused(name, check, mistake):
    model, tensors, files, words = DAMAGED[name]
    message = mistake(check(model, tensors, files))
    assert all(word in message for word in words), message


def test_weights_in_integers_are_those_of_a_quantised_model(check):
    """A published quantisation's tensors are its loader's business."""

    def quantised(folder):
        config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
        (folder / "config.json").write_text(json.dumps(config))

    assert check(
        "one", lambda tensors: tensors | {"model.layers.0.qweight": torch.ones(3, dtype=torch.int32)}, quantised
    )()


def apart(tensors):
    """The head's own matrix, too: another one than the embedding's."""
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


def test_two_matrices_where_the_config_ties_them_are_refused(check, mistake, load, tmp_path):
    """Such a model was trained apart and saved as tied, so that it loaded as another one elsewhere."""
    said = [
        "tie_word_embeddings",
        "lm_head.weight and model.embed_tokens.weight are one matrix",
        "hold two that differ",
    ]
    message = mistake(check("tied", apart))
    assert all(each in message for each in said)
    folder = tmp_path / "model"
    torch.save(
        apart(load_file(folder / "model.safetensors")), folder / "pytorch_model.bin"
    )  # which is read once, as a whole
    (folder / "model.safetensors").unlink()
    settings = load("--model_name_or_path", str(folder))
    message = mistake(lambda: load_base(settings, weights(settings, None), torch.float32))
    assert all(each in message for each in said)


def test_one_matrix_twice_is_tied(check, load):
    """As files have it that other tools wrote."""
    source = check("tied", lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})()
    model = load_base(load("--model_name_or_path", source), source, torch.float32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, sound, mistake):
    model = AutoModelForCausalLM.from_pretrained(sound / "one")
    check_finite(model, "here")
    model.model.norm.weight.data[3] = value
    model.model.norm.weight.requires_grad = False  # under adapters as well
    assert NORM in mistake(check_finite, model, "here")
    assert first_not_finite(model) is None
