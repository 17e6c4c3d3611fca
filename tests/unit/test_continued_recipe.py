"""Adapters that a run goes on with: what theirs decides of a recipe, what is refused, and the weights that PEFT would load."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from brigade.errors import UserError
from brigade.plan.shape.find import named_config
from brigade.train.host.cluster import World
from brigade.train.model import adapter_weights, adapters
from brigade.train.model.load_trained import untrained
from brigade.train.model.location import load_config
from brigade.train.recipe import flags
from brigade.train.strategy import choose

TINY = json.loads((Path(__file__).resolve().parents[2] / "recipes/tiny/config.json").read_text())
BATCH = torch.tensor([[1, 300, 7, 4095, 300, 12], [9, 8, 2, 2, 40, 5]])
LORA = {
    "r": 4,
    "lora_alpha": 12,
    "target_modules": ["q_proj", "v_proj"],
    "rank_pattern": {"q_proj": 6},
    "lora_dropout": 0.0,
}
DORA = {"r": 2, "lora_alpha": 3, "target_modules": ["down_proj"], "use_dora": True, "modules_to_save": ["norm"],
        "trainable_token_indices": {"embed_tokens": [5, 300]}}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model's config.json and weights, and adapters on it: base / "lora", base / "dora"."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(TINY))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_config(settings_of(folder)), dtype=torch.float32)
    model.save_pretrained(folder)
    for name, config in (("lora", LORA), ("dora", DORA)):
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM", **config))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
        adapted.save_pretrained(folder / name)
    return folder


def settings_of(folder, *words):
    return flags.load(["--model_name_or_path", str(folder), "--use_peft", *words])


def continued(base, name, *words):
    return settings_of(base, "--adapter_name_or_path", str(base / name), *words)


@pytest.fixture
def damaged(base, tmp_path):
    """damaged(key=value): a copy of the adapters "lora" whose adapter_config.json says so."""

    def change(**values):
        folder = tmp_path / "adapters"
        shutil.copytree(base / "lora", folder)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return folder

    return change


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_losses_gradients_and_what_is_saved_are_pefts(name, base, tmp_path):
    settings = continued(base, name)
    config = load_config(settings)
    adapters.check_targets(settings, config)
    ours = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(copy.deepcopy(ours), base / name, is_trainable=True)
    first = copy.deepcopy(ours)
    ours = adapters.wrap(ours, settings, str(base))
    adapter_weights.load(ours, str(base / name))
    start = ours(input_ids=BATCH, labels=BATCH).loss.item()
    for _ in range(3):
        losses = []
        for model in (ours, theirs):
            loss = model(input_ids=BATCH, labels=BATCH).loss
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                parameter.data -= 0.1 * gradient
            losses.append(loss)
        torch.testing.assert_close(*losses)
    assert abs(losses[0].item() - start) > 0.01
    ours.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(first, tmp_path)(input_ids=BATCH, labels=BATCH).loss
    torch.testing.assert_close(again, ours(input_ids=BATCH, labels=BATCH).loss)
    with untrained(settings, ours, "cpu"):
        assert ours(input_ids=BATCH, labels=BATCH).loss.item() == pytest.approx(start, rel=1e-5)
    torch.testing.assert_close(again, ours(input_ids=BATCH, labels=BATCH).loss)


def test_their_adapter_config_decides(base, damaged):
    section = continued(base, "lora").recipe.model
    assert (section.lora_r, section.lora_alpha, section.rank_pattern) == (4, 12, {"q_proj": 6})
    assert sorted(section.lora_target_modules) == ["q_proj", "v_proj"]
    section = continued(base, "dora", "--trainable_token_indices", "300,5", "--lora_dropout", "0.1").recipe.model
    assert section.use_dora and section.lora_modules_to_save == ["norm"] and section.lora_dropout == 0.1
    settings = continued(base, "lora")
    model = adapters.wrap(adapters.empty_model(settings, load_config(settings)), settings, str(base))
    assert adapter_weights.describe(settings, model) == {"adapters": f"begin as {base / 'lora'}"}
    other = settings_of(base, "--adapter_name_or_path", str(damaged(base_model_name_or_path="acme/other")))
    said = adapter_weights.describe(other, model)["adapters"]
    assert said.endswith(", trained on acme/other, which is to be this model")


@pytest.mark.parametrize("words, said", [
    (["--lora_r", "8"], ["flag --lora_r", "r of the adapters is 4", "leave the key out"]),
    (["--rank_pattern", "{v_proj: 6}"], ["flag --rank_pattern", "{'q_proj': 6}"]),
    (["--use_dora"], ["flag --use_dora", "use_dora of the adapters is False"]),
    (["--objective", "kto", "--reference", "adapters_off"], ["flag --reference", "without them", "leave the key out"]),
    (["--lora_target_modules", "q_proj"], ["v_proj", "is in their file, and belongs to nothing here"]),
    (["--lora_target_modules", "all-linear"], ["is not in their file"]),
    (["--trainable_token_indices", "7"], ["is not in their file"]),
])  # fmt: skip
def test_a_recipe_that_says_otherwise(words, said, base):
    with pytest.raises(UserError) as told:
        settings = continued(base, "lora", *words)
        adapters.check_targets(settings, load_config(settings))
    assert all(word in str(told.value) for word in said), told.value


def test_adapters_in_place_of_a_model_are_gone_on_with(base):
    """What a run with use_peft leaves is the next run's model."""
    as_model, named = settings_of(base / "lora"), continued(base, "lora")
    assert as_model.recipe == named.recipe and as_model.recipe.model.lora_r == 4
    assert "adapter_config.json" in as_model.place("model_name_or_path")


@pytest.mark.parametrize("words, taken", [
    (["--tokenizer_name_or_path", "null"], True), ([], False),
    (["--tokenizer_name_or_path", "null", "--add_tokens", "<a>"], False),
])  # fmt: skip
def test_adapters_in_place_of_a_model_bring_their_tokenizer_and_chat_template(damaged, words, taken):
    folder = damaged()
    assert settings_of(folder, "--tokenizer_name_or_path", "null").recipe.model.tokenizer_name_or_path is None
    (folder / "tokenizer_config.json").write_text("{}")
    assert (settings_of(folder, *words).recipe.model.tokenizer_name_or_path == str(folder)) is taken


@pytest.mark.parametrize("record, named", [
    ("{model_name_or_path: smollm2-135m, from_scratch: false}", "smollm2-135m"),  # found on every host
    ("{model_name_or_path: recipes/tiny, from_scratch: false}", "/cache/models/of-a-file"),
    ("{model_name_or_path: acme/weights-of-its-own, from_scratch: true}", "/cache/models/of-a-file"),
])  # fmt: skip
def test_a_base_that_was_read_into_a_cache_has_the_name_that_the_run_knew_it_by(record, named, damaged):
    folder = damaged(base_model_name_or_path="/cache/models/of-a-file")
    (folder / "run.yaml").write_text(f"model: {record}\n")
    settings = settings_of(folder)
    assert settings.recipe.model.model_name_or_path == named
    assert ("run.yaml" in settings.place("model_name_or_path")) == (named == "smollm2-135m")


def test_the_revision_of_the_base_is_that_of_its_adapters(damaged):
    folder = damaged(base_model_name_or_path="acme/model", revision="abc")
    model = settings_of(folder).recipe.model
    assert (model.model_name_or_path, model.revision) == ("acme/model", "abc")
    assert settings_of(folder, "--revision", "abc").recipe.model == model
    with pytest.raises(UserError, match=r"'main', but .* holds adapters of acme/model at abc"):
        settings_of(folder, "--revision", "main")


@pytest.mark.parametrize("words, change, said", [
    (["--use_peft", "false"], {}, ["holds adapters of", "trains all weights", "--use_peft goes on", "export", "--merge"]),
    (["--adapter_name_or_path", "other"], {}, ["adapter_name_or_path names others"]),
    ([], {"base_model_name_or_path": None}, ["a model that they do not name", "set adapter_name_or_path"]),
])  # fmt: skip
def test_adapters_in_place_of_a_model_that_cannot_be_gone_on_with(words, change, said, damaged, user_error):
    told = user_error(settings_of, damaged(**change), *words)
    assert all(word in str(told) for word in ("flag --model_name_or_path", *said)), told


def test_adapters_as_the_reference_are_told_to_be_merged(damaged, mistake):
    """Wherever a model is wanted, the same is said of a directory of adapters."""
    folder = damaged()
    compared = ["--objective", "dpo", "--reference", str(folder)]
    settings = flags.load(["--model_name_or_path", str(folder.parent), *compared])
    said = mistake(load_config, settings.of_second(str(folder)))
    assert "flag --reference" in said
    for each in (said, mistake(named_config, str(folder))):  # the planner's
        assert "holds adapters of" in each and f"export {folder} MODEL --merge" in each


def test_other_tokens_and_another_base(base, tmp_path, mistake):
    with pytest.raises(UserError, match="the adapters train the tokens") as told:
        settings = continued(base, "dora", "--trainable_token_indices", "7,300")
        adapters.check_targets(settings, load_config(settings))
    assert "[5, 300], and the recipe names [7, 300]" in str(told.value)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"hidden_size": 2 * TINY["hidden_size"]}))
    settings = settings_of(tmp_path, "--adapter_name_or_path", str(base / "lora"))
    assert "has the shape" in mistake(lambda: adapters.check_targets(settings, load_config(settings)))


@pytest.mark.parametrize("values, said", [
    ({"peft_type": "IA3"}, "only LoRA"),
    ({"bias": "all"}, "with bias 'all'"),
    ({"init_lora_weights": "pissa"}, "with init_lora_weights 'pissa'"),
    ({"layers_to_transform": [0]}, "layers_to_transform"),
    ({"a_later_key": 1}, "a_later_key"),
    ({"r": "four"}, "'four' is no value"),
    ({"r": None}, "does not say r"),
    ({"trainable_token_indices": {"embed_tokens": [5], "lm_head": [6]}}, "different trained tokens"),
])  # fmt: skip
def test_adapters_that_no_run_continues(values, said, base, damaged, mistake):
    folder = damaged(**values)
    message = mistake(settings_of, base, "--adapter_name_or_path", str(folder))
    assert "adapter_config.json" in message and said in message


def test_what_is_missing(base, damaged, mistake):
    assert "holds no adapters" in mistake(settings_of, base, "--adapter_name_or_path", str(base))
    folder = damaged()
    settings = settings_of(base, "--adapter_name_or_path", str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"half")
    assert "it is damaged" in mistake(lambda: adapters.check_targets(settings, load_config(settings)))
    (folder / "adapter_model.safetensors").unlink()
    assert "pickle's format" in mistake(adapter_weights.find, settings)
    words, alone = ["--adapter_name_or_path", str(folder)], World(0, 0, 1, 1, "host", "torchrun")
    assert "use_peft is false" in mistake(lambda: choose(flags.load(words), alone, env={}))


def test_a_regular_expression_of_pefts_means_the_same_layers(base, damaged):
    folder = damaged(target_modules=r".*\.self_attn\.(q|v)_proj")
    settings = settings_of(base, "--adapter_name_or_path", str(folder))
    adapters.check_targets(settings, load_config(settings))
    folder.joinpath("adapter_config.json").unlink()  # run.yaml has what it said
    record = folder / "run.yaml"
    record.write_text(json.dumps(settings.document()))
    assert flags.load(["--recipe", str(record)]).recipe.model.lora_r == 4


@pytest.mark.parametrize("words, said", [
    (["--ds_config", "ds_configs/zero1_tp2.json"], "tensor group"),
    (["--ds_config", "ds_configs/zero1_pp2.json"], "pipeline"),
    (["--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml"], "experts are divided"),
    (["--images", "true"], "images"),
    (["--objective", "reward"], "scores answers"),
    (["--sync_every", "4"], "independently"),
])  # fmt: skip
def test_where_nobody_has_compared_them(words, said, base, mistake):
    message = mistake(lambda: choose(continued(base, "lora", *words), World(0, 0, 4, 4, "host", "torchrun"), env={}))
    assert said in message and "adapter_name_or_path" in message
