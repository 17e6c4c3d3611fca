"""What a model's files hold and no module takes, as layers for multi-token prediction, is carried over into what is saved; what
they lack or distort is refused before the model is loaded, with file and names."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from brigade.export import hugging_face
from brigade.train.checkpoint import carried
from brigade.train.model import base_files
from brigade.train.model.base_weights import check_finite, first_not_finite
from brigade.train.model.config_json import prediction_layers
from brigade.train.model.load import load_base, weights
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
from brigade.train.step import saved_model
from brigade.train.upstream import checkpoint_files

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "n_routed_experts": 4, "num_experts": 4}
DEEPSEEK = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
# Where their public checkpoints have such tensors, and the config's key that counts them.
ARCHITECTURES = {
    "glm4_moe": (EXPERTS | {"n_shared_experts": 1}, "model.layers.46.eh_proj.weight", "num_nextn_predict_layers"),
    "deepseek_v3": (EXPERTS | DEEPSEEK, "model.layers.61.eh_proj.weight", "num_nextn_predict_layers"),
    "qwen3_next": (EXPERTS | LINEAR, "mtp.fc.weight", "num_nextn_predict_layers"),
    "qwen3_5_text": (LINEAR, "mtp.layers.0.self_attn.q_proj.weight", "mtp_num_hidden_layers"),
    "exaone_moe": (EXPERTS | {"num_shared_experts": 1}, "mtp.fc.weight", "num_nextn_predict_layers"),
    "ernie4_5_moe": (EXPERTS, "model.mtp_block.0.mlp.up_proj.weight", "num_nextn_predict_layers"),
}


@pytest.fixture
def base(tmp_path):
    """A function that writes a tiny model with further tensors in bf16, and returns its directory."""

    def write(kind="glm4_moe", further=(), **config):
        sizes, name, counts = ARCHITECTURES[kind]
        folder = tmp_path / kind
        made = transformers.AutoConfig.for_model(kind, **SIZES | sizes | {counts: 1} | config)
        model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors |= {each: torch.randn(3, 5) for each in (name, *further)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    return write


def settings_of(folder, *options):
    return flags.load(
        ["--recipe", "recipes/tiny/full.yaml", "--model_name_or_path", str(folder), "--from_scratch", "false", *options]
    )


def look(folder, *options):
    return base_files.look(settings_of(folder, *options), folder, transformers.AutoConfig.from_pretrained(folder))


def all_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_no_module_takes_is_carried_over_bit_for_bit(kind, base, tmp_path):
    folder, name = base(kind), ARCHITECTURES[kind][1]
    held, published = look(folder), load_file(folder / "model.safetensors")
    assert [*held.carried] == [name] and held.predicts and held.counted == 1
    assert "1 tensor, 60 bytes" in held.describe()["carried over"]
    assert held.usual == torch.bfloat16 and set(held.dtypes.values()) <= {torch.bfloat16, torch.float32}

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved", max_shard_size="4KB")
    shards = len([*(tmp_path / "saved").glob("*.safetensors")])
    carried.add_to_model(tmp_path / "saved", held.carried)
    carried.correct_config(tmp_path / "saved", held.predicts)
    saved = all_of(tmp_path / "saved")
    assert shards > 1 and len([*(tmp_path / "saved").glob("*.safetensors")]) == shards + 1
    assert saved.keys() == published.keys() and all(torch.equal(saved[each], published[each]) for each in saved)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
    assert prediction_layers(json.loads((tmp_path / "saved/config.json").read_text())) == 1
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_a_model_in_one_file_gets_an_index_and_a_later_export_finds_it(base, tmp_path):
    folder = base(further=("model.layers.46.shared_head.head.weight", "model.layers.46.embed_tokens.weight"))
    settings, source = settings_of(folder), tmp_path / "saved"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(source)
    carried.add_to_model(source, look(folder).carried)
    assert sorted(path.name for path in source.glob("model*")) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip
    assert "copies of the embeddings" in look(folder).describe()["carried over"]
    config = transformers.AutoConfig.from_pretrained(folder)
    model, _ = hugging_face._whole(settings, config, source, "", None)
    model.save_pretrained(tmp_path / "exported")
    said = hugging_face._complete(settings, config, tmp_path / "exported", source)
    assert said == "Carried over from the base, not trained: 3 tensors, model.layers.46.*."
    before, after = all_of(folder), all_of(tmp_path / "exported")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def quantised(folder, method="mxfp4"):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}))


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


REWARD = ("--objective=reward", "--train_file=pairs.jsonl", "--dataset_name=null", "--validation_split=0.1")


@pytest.mark.parametrize(("change", "options", "words"), [
    (quantised, (), ""),
    (pickled, (), "its files hold none"),
    (lambda folder: None, REWARD, "a reward model predicts no tokens"),
])  # fmt: skip
def test_where_they_cannot_stay_true_the_config_counts_none(change, options, words, base, tmp_path):
    folder = base("deepseek_v3")
    change(folder)
    held = look(folder, *options)
    assert not held.carried and not held.predicts and words in held.describe()["not carried over"]
    saved = tmp_path / "config.json"
    saved.write_text(
        json.dumps({"num_nextn_predict_layers": 1, "text_config": {"mtp_num_hidden_layers": 2, "dtype": "float32"}})
    )
    carried.correct_config(tmp_path, held.predicts, "bfloat16")
    text = {"mtp_num_hidden_layers": 0, "dtype": "bfloat16"}
    assert json.loads(saved.read_text()) == {"num_nextn_predict_layers": 0, "text_config": text}


def test_rows_for_each_token_do_not_follow_a_grown_vocabulary(base, monkeypatch):
    monkeypatch.setattr(base_files, "_words_before", lambda *_: 3)  # the rows of what base() adds
    held = look(base())
    assert not held.carried and "has grown to 64 rows, and theirs has not" in held.describe()["not carried over"]


@pytest.mark.parametrize(("name", "predicts"), [
    ("model.layers.2.eh_proj.weight", True), ("model.language_model.layers.16.enorm.weight", True), ("mtp.fc.weight", True),
    ("model.mtp.layers.0.norm.weight", True), ("model.layers.1.mlp.gate.weight", False),
    ("vision_tower.encoder.layers.9.mlp.fc1.weight", False), ("model.visual.blocks.9.norm.weight", False),
])  # fmt: skip
def test_layers_that_predict_further_tokens_are_known_by_their_names(name, predicts):
    """The tower is left out of a model of images and texts that is trained on texts."""
    assert base_files.predicts(name, layers=2) == predicts


def test_a_saved_weight_has_the_bases_precision_and_a_tied_one_a_single_name():
    """Engines gather tied weights as two tensors, and hold weights in fp32 or in half precision."""
    held = base_files.BaseFiles({}, "", 0, False, {"norm": torch.float32, "table": torch.bfloat16}, torch.bfloat16)
    tied = SimpleNamespace(all_tied_weights_keys={"head": "table"})
    for trained in (torch.float32, torch.bfloat16, torch.float16):
        state = {name: torch.ones(2, dtype=trained) for name in ("norm", "table", "head", "new")} | {
            "count": torch.ones(1).int()
        }
        checkpoint_files.name_once(state, tied)
        saved_model._as_in_the_base(state, held)
        norm = torch.float32 if trained == torch.float32 else trained
        half = torch.bfloat16
        assert {name: tensor.dtype for name, tensor in state.items()} == {
            "norm": norm, "table": half, "new": half, "count": torch.int32
        }  # fmt: skip
    full = base_files.BaseFiles({}, "", 0, False, {}, torch.float32)
    assert full.saved_dtype("any", torch.bfloat16) == torch.bfloat16
    assert full.saved_dtype("any", torch.float32) == torch.float32


def test_buffers_that_a_module_computes_are_left_out(base):
    further = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.46.mlp.up_proj.weight"]
    assert sorted(look(base(further=further)).carried) == [
        "model.layers.46.eh_proj.weight", "model.layers.46.mlp.up_proj.weight"
    ]  # fmt: skip


# ---- weights ---------------------------------------------------------------------------------------------------------
NORM, EXPERT = "model.norm.weight", "model.layers.0.mlp.experts.1.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Directories as Transformers saves models: one in several files, one whose ends are tied, one with experts."""
    folder = tmp_path_factory.mktemp("models")
    llama, tied = LlamaConfig(**SIZES), LlamaConfig(**SIZES, tie_word_embeddings=True)
    experts = Qwen3MoeConfig(**SIZES, **EXPERTS)
    models = (("files", llama, "10KB"), ("one", llama, "1GB"), ("tied", tied, "1GB"), ("experts", experts, "1GB"))
    for name, config, size in models:
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
    "shape": ("one", lambda tensors: tensors | {NORM: torch.ones(17)}, None, [NORM, "[17] instead of [16]"]),
    "integers": ("one", lambda tensors: tensors | {NORM: torch.ones(16, dtype=torch.int32)}, None, [NORM, "integers"]),
    "complex": ("one", lambda tensors: tensors | {NORM: torch.ones(16, dtype=torch.complex64)}, None, [NORM, "complex numbers"]),
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
    qweight = {"model.layers.0.qweight": torch.ones(3, dtype=torch.int32)}
    assert check("one", lambda tensors: tensors | qweight, lambda folder: quantised(folder, "bitsandbytes"))()


IN_4_BITS = ("--use_peft", "--load_in_4bit")


@pytest.mark.parametrize("method, more, taken", [
    ("gptq", (), False), ("fp8", (), False), ("awq", IN_4_BITS, False), ("bitsandbytes", (), False),
    ("bitsandbytes", IN_4_BITS, True), ("mxfp4", (), True), ("gptq", ("--from_scratch",), True),
])  # fmt: skip
def test_weights_whose_quantisation_no_run_undoes_are_refused(method, more, taken, sound, tmp_path, load, mistake):
    """They trained without their scales, or with random numbers in their places, and nothing said so."""
    folder = shutil.copytree(sound / "one", tmp_path / "model")
    quantised(folder, method)
    settings = load("--model_name_or_path", str(folder), "--max_length", "64", *more)
    if taken:
        assert load_config(settings)
    else:
        assert f"are quantised ({method})" in mistake(load_config, settings)


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
    pickled(tmp_path / "model")  # which is read once, as a whole
    settings = load("--model_name_or_path", str(tmp_path / "model"))
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
