"""Which of a model's files are downloaded and loaded; and models that a strategy cannot train are refused by name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from brigade.errors import UserError
from brigade.train import upstream
from brigade.train.model import adapters
from brigade.train.model.base_weights import weight_files
from brigade.train.model.load import load_base, materialise, weights
from brigade.train.model.location import load_config
from brigade.train.model.tiny import shrink, with_short_spans
from brigade.train.recipe import flags
from brigade.train.step.preflight import check_strategy
from brigade.train.strategy.axes import Axes

TINY = Path(__file__).parents[2] / "recipes/tiny/config.json"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A model on the Hub as a folder, of which a snapshot has what was asked for."""
    remote, snapshot = tmp_path / "remote", tmp_path / "snapshot"
    for folder in (remote, snapshot):
        folder.mkdir()
    (remote / "config.json").write_text(json.dumps(shrink(json.loads(TINY.read_text()))))

    def download(name, revision, allow_patterns, ignore_patterns):
        for path in remote.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return remote


def test_weights_that_are_only_there_in_pytorchs_format_are_downloaded_and_loaded(hub, load, mistake):
    settings = load(model={"model_name_or_path": "somebody/older"})
    config = AutoConfig.from_pretrained(hub)
    assert "*.safetensors or pytorch_model*.bin" in mistake(weights, settings, config)
    made = AutoModelForCausalLM.from_config(config)
    torch.save(made.state_dict(), hub / "pytorch_model.bin")
    torch.save({}, hub / "training_args.bin")
    folder = weights(settings, config)
    assert {path.name for path in Path(folder).iterdir()} == {"config.json", "pytorch_model.bin"}
    loaded = load_base(settings, folder, torch.float32)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in made.state_dict().items())
    made.save_pretrained(hub)  # and beside safetensors they are left where they are
    (Path(folder) / "pytorch_model.bin").unlink()
    assert {path.suffix for path in Path(weights(settings, config)).iterdir()} == {".json", ".safetensors"}


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "of an earlier save.safetensors"}}')
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_making_random_weights_leaves_the_configuration_as_it_was(hub, own_cache):
    """One rank of a host makes them, the others find them, and all compare their configurations afterwards."""
    config = AutoConfig.from_pretrained(hub)
    before = config.to_dict()
    materialise(config, seed=3)
    assert config.to_dict() == before


@pytest.mark.parametrize(
    "kind, name", [("ernie4_5_moe", "e_score_correction_bias"), ("afmoe", "expert_bias"), ("llama", None)]
)
def test_what_a_model_does_not_train_stays_frozen_when_it_is_loaded(kind, name, tmp_path):
    """from_pretrained lets everything be trained; DDP then fails for a router's bias that gets no gradient."""
    tiny = CONFIG_MAPPING[kind].from_dict(shrink(CONFIG_MAPPING[kind]().to_dict()))
    whole = AutoModelForCausalLM.from_config(tiny)
    whole.save_pretrained(tmp_path)
    settings = flags.load(["--model_name_or_path", str(tmp_path), "--from_scratch", "false"])
    model = load_base(settings, str(tmp_path), torch.float32)
    frozen = [key for key, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == [key for key, parameter in whole.named_parameters() if not parameter.requires_grad]
    assert bool(frozen) == bool(name) and all(key.endswith(str(name)) for key in frozen)


@pytest.mark.parametrize("kind, words", [
    ("deepseek_v32", []), ("deepseek_v32", ["--use_peft"]), ("glm_moe_dsa", []), ("deepseek_v4", []),
    ("deepseek_v4", ["--use_peft"]), ("llama4_text", ["--use_peft"]),
    ("kimi_linear", ["--use_peft"]),
])  # fmt: skip
def test_all_that_is_trained_gets_a_gradient(kind, words, tmp_path):
    """What chooses tokens by an index gets none: DDP fails, and weight decay would shrink it in some strategies alone."""
    config = CONFIG_MAPPING[kind]
    tiny = config.from_dict(with_short_spans(config.from_dict(shrink(config().to_dict())).to_dict()))
    AutoModelForCausalLM.from_config(tiny).save_pretrained(tmp_path)
    settings = flags.load(["--model_name_or_path", str(tmp_path), "--from_scratch", "false", *words])
    model = load_base(settings, str(tmp_path), torch.float32)
    if words:
        model = adapters.wrap(model, settings, str(tmp_path))
    ids = torch.arange(7, 47)[None]
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None] == []


def test_the_trainer_reads_the_version_of_a_checkpoint_of_any_architecture(tmp_path):
    """By the base class of configs it refused the layers of DeepSeek-V4, which could not go on from a checkpoint."""
    CONFIG_MAPPING["deepseek_v4"]().save_pretrained(tmp_path)
    with upstream.any_layer_kinds():
        config = transformers.trainer.PreTrainedConfig.from_json_file(str(tmp_path / "config.json"))
    assert config.transformers_version == transformers.__version__
    assert transformers.trainer.PreTrainedConfig is transformers.PreTrainedConfig


# ---- rows longer than the model's positions ----------------------------------------------------------------------
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def with_yarn(folder, length, kind="qwen3", **rope):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shrink(AutoConfig.for_model(kind).to_dict()) | rope))
    document = {
        "model": {"model_name_or_path": str(folder), "from_scratch": True, "rope_parameters": YARN},
        "data": {"train_file": "d", "max_length": length},
        "training": {"global_batch_size": 1},
    }
    (folder / "r.yaml").write_text(json.dumps(document))
    return flags.load(["--recipe", str(folder / "r.yaml")])


def test_yarn_is_in_the_configuration_in_the_loaded_model_and_in_what_it_saves(tmp_path, own_cache):
    settings = with_yarn(tmp_path / "m", 256)
    config = load_config(settings)
    base = AutoConfig.from_pretrained(tmp_path / "m").rope_parameters["rope_theta"]
    assert config.rope_parameters == YARN | {"rope_theta": base} and config.max_position_embeddings == 256
    model = load_base(settings, weights(settings, config), torch.float32)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "m"))
    stretched, usual = (one.model.rotary_emb.inv_freq for one in (model, plain))
    assert stretched[-1] == pytest.approx(usual[-1].item() / 4) and stretched[0] == pytest.approx(usual[0].item())
    model.save_pretrained(tmp_path / "saved")
    saved = AutoConfig.from_pretrained(tmp_path / "saved")
    assert saved.rope_parameters["factor"] == 4.0 and saved.max_position_embeddings == 256


def test_longer_rows_than_the_product_and_other_positions_are_refused(tmp_path, mistake):
    assert "positions for 256" in mistake(lambda: load_config(with_yarn(tmp_path / "long", 257)))
    stretched = with_yarn(tmp_path / "gpt2", 64, "gpt2")
    assert "plain rotary embeddings of one base" in mistake(load_config, stretched)
    with pytest.raises(UserError, match="plain rotary embeddings of one base"):  # published with YaRN of its own
        load_config(with_yarn(tmp_path / "gpt-oss", 64, "gpt_oss"))


def test_the_model_s_own_other_words_of_its_positions_stay(tmp_path):
    """GLM-4 rotates a half of each head."""
    own = AutoConfig.for_model("glm4").rope_parameters
    config = load_config(with_yarn(tmp_path / "m", 64, "glm4"))
    assert own["partial_rotary_factor"] == config.rope_parameters["partial_rotary_factor"] != 1


def test_what_an_earlier_run_has_stretched_is_taken_as_it_is(tmp_path):
    first = load_config(with_yarn(tmp_path / "m", 64))
    first.save_pretrained(tmp_path / "m")
    again = load_config(flags.load(["--recipe", str(tmp_path / "m" / "r.yaml")]))
    assert (again.rope_parameters, again.max_position_embeddings) == (first.rope_parameters, 256)


@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "factor": 2.0}, YARN | {"factor": "4"}, YARN | {"beta_fast": 32}, YARN | {"factor": True},
])  # fmt: skip
def test_other_words_than_yarns_are_refused(rope, tmp_path, mistake):
    path = with_yarn(tmp_path / "m", 64).recipe_path
    path.write_text(path.read_text().replace(json.dumps(YARN), json.dumps(rope)))
    assert "original_max_position_embeddings: TOKENS" in mistake(flags.load, ["--recipe", str(path)])


# ---- refused by name -------------------------------------------------------------------------------------------------
def run(kind, axes):
    strategy = SimpleNamespace(kind=kind, axes=axes, source="the strategy", place=lambda axis: axis, fsdp={})
    return SimpleNamespace(settings=flags.load([]), strategy=strategy, kernels=SimpleNamespace(attention="sdpa"))


@pytest.mark.parametrize("model, kind, axes, said", [
    ("deepseek_v4", "ddp", Axes(), "compressors get no gradient"),
    ("gemma3n_text", "zero3", Axes(), "correction_coefs"),
    ("gemma3n_text", "fsdp2", Axes(sequence=2), "not finite"),
])  # fmt: skip
def test_a_strategy_that_a_model_does_not_train_with(model, kind, axes, said, mistake):
    assert said in mistake(lambda: check_strategy(run(kind, axes), CONFIG_MAPPING[model]()))


@pytest.mark.parametrize("model, kind", [("deepseek_v4", "fsdp2"), ("gemma3n_text", "fsdp2"), ("qwen3", "ddp")])
def test_and_others_are_not_refused(model, kind):
    check_strategy(run(kind, Axes()), CONFIG_MAPPING[model]())
