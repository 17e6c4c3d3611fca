"""GGUF files that `export --gguf` writes, read back by Transformers, and what it refuses. llama.cpp itself: tests/serving."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from brigade.export import gguf, gguf_tokenizer
from brigade.train.data.layout import TEMPLATES
from brigade.train.data.probes import PROBES
from brigade.train.model import gguf_file, pre_tokenizers
from brigade.train.run.directory import RECORD
from brigade.train.run.success import SUCCESS
from testing import gguf_models

TEXTS = ["Hello  it's 2026\n\n x", "<|im_start|>user\nFüße 東京 🙂<|im_end|>", "\t12.5 %"]


@pytest.mark.parametrize("name", gguf_models.PLAIN)
def test_transformers_reads_the_model_and_the_tokenizer_back(name, tmp_path):
    folder = gguf_models.save(tmp_path / "model", **gguf_models.PLAIN[name])
    gguf.write(folder, tmp_path / "x.gguf", "F16", gguf.About("x"))
    model = AutoModelForCausalLM.from_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf")
    ours, theirs = model.state_dict(), read.state_dict()
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        rounded = weight.half().float() if weight.dim() > 1 else weight
        assert torch.equal(theirs[key], rounded), key
    model.load_state_dict(theirs)
    with torch.inference_mode():
        ids = torch.arange(5, 60)[None]
        torch.testing.assert_close(read(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    if name in ("llama-tied", "qwen2"):  # Transformers has one pre-tokenizer a family, whatever the file names
        again = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert [again(text).input_ids for text in TEXTS] == [tokenizer(text).input_ids for text in TEXTS]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.gguf"]


def test_weights_in_8_bits_are_within_half_a_step(tmp_path):
    folder = gguf_models.save(tmp_path / "model", **gguf_models.PLAIN["qwen3"])
    gguf.write(folder, tmp_path / "x.gguf", "Q8_0", gguf.About("x"))
    ours = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf").state_dict()
    for key in [key for key, weight in ours.items() if weight.dim() > 1]:
        blocks = ours[key].reshape(-1, 32)
        step = blocks.abs().max(-1, keepdim=True).values / 127
        off = (theirs[key].reshape(-1, 32) - blocks).abs() / step
        assert 0.4 < off.max() < 0.57, "half a step, and F16's rounding of the step"  # 127 / 2048 of a step at most


def test_what_llama_cpp_reads_stands_in_the_file(tmp_path):
    """Tokens beyond the tokenizer's, kinds of tokens, both ends of an answer, and the chat template without marks."""
    folder = gguf_models.save(tmp_path / "model", **gguf_models.PLAIN["llama-tied"])
    changed = AutoTokenizer.from_pretrained(folder)
    changed.add_tokens(["<tool>"])
    changed.eos_token, changed.chat_template = "<|endoftext|>", (TEMPLATES / "chatml.jinja").read_text()
    changed.save_pretrained(folder)
    GenerationConfig(eos_token_id=[0, 2]).save_pretrained(folder)
    gguf.write(folder, tmp_path / "x.gguf", "F16", gguf.About("mine", "someone/base", "Apache-2.0"))
    read = {name: field.contents() for name, field in GGUFReader(tmp_path / "x.gguf").fields.items()}
    assert read["tokenizer.ggml.tokens"][-8:] == ["<tool>", *(f"[PAD{number}]" for number in range(4097, 4104))]
    assert read["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert read["tokenizer.ggml.token_type"][-8:] == [4, *[5] * 7]
    assert (read["tokenizer.ggml.eos_token_id"], read["tokenizer.ggml.eot_token_id"]) == (0, 2)
    assert read["tokenizer.ggml.pre"] == "gpt-2" and not read["tokenizer.ggml.add_bos_token"]
    assert "generation -%}" not in read["tokenizer.chat_template"] and "im_start" in read["tokenizer.chat_template"]
    assert (read["general.name"], read["general.license"]) == ("mine", "apache-2.0")


PRE = gguf_models.PRE_TOKENIZERS
SPLIT, BYTES = PRE["llama-bpe"]["pretokenizers"]
DIGITS = {"type": "Digits", "individual_digits": False}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


@pytest.mark.parametrize("pre, ignore_merges, name", [
    (PRE["gpt-2"], False, "gpt-2"),
    (PRE["smollm"], False, "smollm"),
    (PRE["llama-bpe"], True, "llama-bpe"),
    (PRE["qwen2"], False, "qwen2"),
    (PRE["qwen2"], True, ""),
    (PRE["llama-bpe"], False, ""),
    (sequence(SPLIT, PRE["gpt-2"]), True, ""),
    (sequence(DIGITS, PRE["gpt-2"]), False, ""),
    (sequence({**SPLIT, "behavior": "Removed"}, BYTES), True, ""),
    ({**BYTES, "add_prefix_space": True}, False, ""),
    ({"type": "Metaspace", "replacement": "_"}, False, ""),
    (None, False, ""),
])  # fmt: skip
def test_a_pre_tokenizer_has_llama_cpps_name_or_none(pre, ignore_merges, name):
    assert pre_tokenizers.name_of({"pre_tokenizer": pre}, ignore_merges) == name


@pytest.mark.parametrize("name", pre_tokenizers.NAMES)
def test_a_tokenizer_can_be_made_to_split_as_each_name_says(name, tokenizer):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    pre_tokenizers.split(backend, name)
    document = json.loads(backend.to_str())
    assert pre_tokenizers.name_of(document, document["model"]["ignore_merges"]) == name


def test_a_gguf_file_as_a_model_splits_texts_as_it_says(tmp_path, monkeypatch, own_cache, mistake):
    """Transformers reads SmolLM2's tokenizer without its digits, which are a token each."""
    folder = gguf_models.save(tmp_path / "model", **gguf_models.PLAIN["llama-tied"] | {"pre": "smollm"})
    gguf.write(folder, tmp_path / "tiny.gguf", "F16", gguf.About("tiny"))
    ours = AutoTokenizer.from_pretrained(folder)
    read = AutoTokenizer.from_pretrained(gguf_file.as_folder(tmp_path / "tiny.gguf", "here"))
    for text in ("at 12:45,  07 of 1999", "a\n\n 30", "   8"):
        assert read.encode(text) == ours.encode(text)
    monkeypatch.delitem(pre_tokenizers.NAMES, "smollm")
    (tmp_path / "tiny.gguf").rename(tmp_path / "other.gguf")
    assert "splits texts by 'smollm', and only" in mistake(gguf_file.as_folder, tmp_path / "other.gguf", "here")


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_a_template_renders_the_same_without_marks(path, tokenizer):
    marked = path.read_text()
    bare = gguf_tokenizer.without_marks(marked)
    assert not gguf_tokenizer._MARK.search(bare) and bare != marked
    rendered, options = 0, {"tokenize": False, "bos_token": "<s>"}
    for probe in PROBES:
        try:
            wanted = tokenizer.apply_chat_template(**probe, **options, chat_template=marked)
        except Exception:  # it refuses a system turn, or tools
            continue
        assert tokenizer.apply_chat_template(**probe, **options, chat_template=bare) == wanted
        rendered += 1
    assert rendered


@pytest.mark.parametrize("keys, words", [
    ({"model_type": "mistral"}, "'mistral'"),
    ({"model_type": "llama", "hidden_act": "gelu"}, "'gelu'"),
    ({"model_type": "llama", "attention_bias": True}, "biases"),
    ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "sliding window"),
    ({"model_type": "llama", "rope": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"model_type": "qwen2", "rope": gguf_models.LLAMA3}, "'llama3'"),
    ({"model_type": "llama", "rope": gguf_models.YARN | {"beta_fast": 16.0}}, "beta_fast"),
])  # fmt: skip
def test_a_model_that_llama_cpp_would_compute_differently_is_refused(keys, words, mistake):
    config = gguf_models.config_of(**keys)
    assert words in mistake(gguf.check_config, config, "place", "cure")


def test_a_tokenizer_that_takes_spaces_around_a_token_is_refused(tokenizer, mistake):
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert "'<mask>' takes the spaces" in mistake(
        gguf_tokenizer.vocabulary, SimpleNamespace(backend_tokenizer=backend), 5000, "place", "cure"
    )


@pytest.mark.parametrize("kind, name, value", [
    ("F16", "mlp.up_proj.weight", 1e5), ("Q8_0", "mlp.up_proj.weight", math.nan), ("Q8_0", "mlp.up_proj.weight", math.inf),
    ("F16", "input_layernorm.weight", math.nan),
])  # fmt: skip
def test_a_weight_that_no_format_holds_leaves_no_file(tmp_path, mistake, kind, name, value):
    folder = gguf_models.save(tmp_path / "model", **gguf_models.PLAIN["qwen2"])
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.0.{name}"].view(-1)[0] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert f"{name} has a weight beyond F16's range, 65504, or one that is not finite" in mistake(
        lambda: gguf.write(folder, tmp_path / "x.gguf", kind, gguf.About("x"))
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_command_refuses_before_anything_is_written(tmp_path, prints):
    """llama.cpp's own converter is the cure."""
    run = gguf_models.save(tmp_path / "run", model_type="mistral")
    recipe = {"model": {"model_name_or_path": str(run), "from_scratch": False}, "data": {"dataset_name": "python-docs"}}
    recipe["data"]["max_length"] = 64
    (run / RECORD).write_text(json.dumps(recipe | {"training": {"global_batch_size": 4}}))
    (run / SUCCESS).write_text("{}")
    told = prints(2, "export", str(run), str(tmp_path / "out"), "--gguf", "Q8_0")
    assert "'mistral'" in told and f"`python convert_hf_to_gguf.py {tmp_path / 'out'} --outtype f16`" in told
    assert not (tmp_path / "out").exists()
