"""What is trained of a model of images and texts: its parts are told apart, frozen, adapted and stepped as the recipe says."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from brigade.train.engines import parameter_groups
from brigade.train.loss.own_loss import why_not_divided
from brigade.train.model import adapters, attention, parts, processor_files
from brigade.train.model.load import load_base, load_model, materialise, weights
from brigade.train.model.load_trained import load_trained
from brigade.train.model.location import load_config
from brigade.train.model.packed_samples import NOTHING, method_of
from brigade.train.model.sizes import empty_model
from brigade.train.recipe.images import LANGUAGE, PARTS, PROJECTOR, VISION_TOWER, learning_rates
from brigade.train.step import preflight
from brigade.train.strategy import Strategy
from brigade.train.strategy.axes import Axes
from brigade.train.upstream import attention_of
from testing.strategies import world
from testing.vision_kinds import KINDS


@pytest.fixture
def settings_of(load, written):
    """settings_of(kind, "--use_peft"): the settings of a run with images of a tiny model."""

    def call(kind, *words, **sections):
        return load("--model_name_or_path", str(written(kind).folder), "--images", *words, **sections)

    return call


def loaded(settings, how="sdpa"):
    return load_model(settings, weights(settings, load_config(settings)), torch.float32, how)


def batch_of(tiny, picture):
    """What forward() takes of one text with an image."""
    text = tiny.processor.expansion(32, 32) + " how many?"
    tokens = np.array(tiny.tokenizer(text, add_special_tokens=False)["input_ids"])
    batch = {"input_ids": torch.from_numpy(tokens)[None]}
    sample = {"input_ids": tokens, "lengths": np.array([len(tokens)]), "images": [picture(1, 32, 32)]}
    tiny.processor.add_to(batch, [sample])
    return batch | {"use_cache": False}


def with_gradients(model, tiny, picture):
    """Names of the parameters that get a gradient from one text with an image."""
    batch = batch_of(tiny, picture)
    labels = torch.where(batch["input_ids"] == tiny.processor.image_token_id, -100, batch["input_ids"])
    model.train()(**batch, labels=labels).loss.backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


# ---- which parameters are whose --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_each_parameter_is_in_one_part(kind, settings_of):
    settings = settings_of(kind)
    model = empty_model(settings, load_config(settings))
    found = parts.parts_of(model)
    assert list(found) == list(PARTS) and all(found.values())
    count = Counter(name for names in found.values() for name in names)
    beyond = {id(p) for module in parts.unreached(model, images=True).values() for p in module.parameters()}
    assert set(count.values()) == {1}
    assert {*count} == {name for name, parameter in model.named_parameters() if id(parameter) not in beyond}
    decoder = {id(parameter) for parameter in model.get_decoder().parameters()}
    assert decoder <= {id(model.get_parameter(name)) for name in found[LANGUAGE]}
    assert not any(word in name for name in found[LANGUAGE] for word in ("vision", "visual", "projector", "connector"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tower", [True, False], ids=["frozen", "trained"])
def test_what_is_trained_gets_a_gradient_and_nothing_else(kind, tower, settings_of, written, picture):
    settings = settings_of(kind, "--freeze_vision_tower", str(tower))
    model = loaded(settings)
    found = parts.parts_of(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {*found[LANGUAGE], *found[PROJECTOR], *([] if tower else found[VISION_TOWER])}
    assert with_gradients(model, written(kind), picture) == trained
    assert parts.count_of(model, trained=True)[VISION_TOWER] == (0 if tower else parts.count_of(model)[VISION_TOWER])


def test_layers_above_the_one_that_is_read_are_never_trained(settings_of, written, picture):
    """LLaVA takes features from below the top of its tower. DDP would wait for gradients of what lies above."""
    tiny = written("llava_onevision")
    config = load_config(settings_of("llava_onevision"))
    config.vision_feature_layer = -2
    settings = settings_of("llava_onevision", "--freeze_vision_tower", "false", "--from_scratch")
    model = empty_model(settings, config)
    unread = {name.rpartition("vision_tower.")[2] for name in parts.unreached(model, images=True)}
    assert unread == {"encoder.layers.1", "post_layernorm"}
    source = materialise(config, 1, images=True)
    whole = load_base(settings, source, torch.float32)
    trained = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    assert with_gradients(whole, tiny, picture) == trained


def test_a_frozen_projector(settings_of):
    model = loaded(settings_of("qwen2_5_vl", "--freeze_projector"))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {*parts.parts_of(model)[LANGUAGE]} and not any("visual" in name for name in trained)


def test_texts_train_the_language_model_as_before(load, written):
    settings = load("--model_name_or_path", str(written("gemma3").folder))
    model = loaded(settings)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {*parts.parts_of(model)[LANGUAGE]}


# ---- attention -------------------------------------------------------------------------------------------------------
def test_a_tower_computes_by_sdpa(settings_of):
    model = loaded(settings_of("qwen2_5_vl"), attention.VARLEN)
    assert attention_of(model.config) == attention.VARLEN == attention_of(model.config.text_config)
    assert attention_of(model.model.visual.config) == "sdpa"
    assert attention_of(model.model.language_model.config) == attention.VARLEN


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_masks_of_images_need_sdpa_or_eager(kind, settings_of, mistake):
    def chosen(*words):
        settings = settings_of(kind, *words)
        return attention.choose(settings, load_config(settings), proven=[attention.VARLEN])

    assert chosen()[0] == "sdpa" and chosen("--attn_implementation", "eager")[0] == "eager"
    for how in ("varlen", "flash_attention_2", "flex_attention"):
        assert "see each other" in mistake(chosen, "--attn_implementation", how)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_kept_apart_and_losses_are_sums(kind, settings_of):
    """Also those of decoders that are no language models by themselves."""
    settings = settings_of(kind)
    config = load_config(settings)
    how, _ = attention.choose(settings, config)
    assert method_of(config, how)[0] != NOTHING, method_of(config, how)
    assert not why_not_divided(config, images=True)


# ---- adapters --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", ["language", "vision_tower", "language,projector,vision_tower"])
def test_adapters_go_on_the_named_parts(kind, named, settings_of, written, picture, mistake):
    settings = settings_of(kind, "--use_peft", "--lora_parts", named)
    config = load_config(settings)
    if kind == "gemma3" and "projector" in named:  # a bare matrix
        assert "no linear layer" in mistake(adapters.check_targets, settings, config)
        return
    adapters.check_targets(settings, config)
    model = adapters.wrap(loaded(settings), settings, "")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = parts.parts_of(model)
    for part in PARTS:
        assert bool(trained & {*found[part]}) == (part in named.split(",")), part
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # it begins at zero, and would leave lora_A without a gradient
            torch.nn.init.ones_(parameter)
    assert with_gradients(model, written(kind), picture) == trained
    assert len(trained) == 2 * sum("lora_A" in name for name in trained)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_merged_adapters_compute_the_same(kind, settings_of, written, picture, tmp_path_factory):
    settings = settings_of(kind, "--use_peft", "--lora_parts", "language,vision_tower")
    model, batch = adapters.wrap(loaded(settings), settings, ""), batch_of(written(kind), picture)
    with torch.no_grad():
        plain = model.eval()(**batch).logits
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted = model(**batch).logits
        folder = tmp_path_factory.mktemp("merged")
        model.merge_and_unload().save_pretrained(folder)
        merged = load_trained(settings.with_model(use_peft=False), folder).eval()(**batch).logits
    assert (adapted - plain).abs().max() > 1e-2 and (merged - adapted).abs().max() < 1e-4


def test_a_part_is_refused_in_which_no_name_fits(settings_of, mistake):
    """Qwen3-VL's tower has qkv, and no q_proj: it would silently get no adapters."""
    flags = ["--use_peft", "--lora_parts", "language,vision_tower", "--lora_target_modules"]
    settings = settings_of("qwen3_vl", *flags, "q_proj")
    said = mistake(adapters.check_targets, settings, load_config(settings))
    assert "vision tower" in said and "'q_proj'" in said and "qkv (2)" in said
    settings = settings_of("qwen3_vl", *flags, "q_proj,qkv")
    adapters.check_targets(settings, load_config(settings))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl", "internvl", "llama4"])
def test_only_the_language_model_is_in_four_bits(kind, settings_of):
    settings = settings_of(kind, "--use_peft", "--load_in_4bit", "--lora_parts", "language,vision_tower")
    adapters.check_targets(settings, load_config(settings))
    model, whole = loaded(settings), loaded(settings_of(kind))
    in_4bit = {name for name, parameter in model.named_parameters() if hasattr(parameter, "quant_state")}
    linear = {f"{name}.weight" for name in adapters.linear_layers(whole) if not name.endswith("lm_head")}
    assert in_4bit == linear and linear < {*parts.parts_of(model)[LANGUAGE]}
    for name in (name for part in (VISION_TOWER, PROJECTOR) for name in parts.parts_of(whole)[part]):
        assert torch.equal(model.get_parameter(name), whole.get_parameter(name)), name


# ---- learning rates --------------------------------------------------------------------------------------------------
def test_each_part_has_its_learning_rate(settings_of):
    rates = ["--vision_tower_learning_rate", "2e-6", "--projector_learning_rate", "1e-3", "--learning_rate", "1e-5"]
    settings = settings_of("qwen3_vl", "--freeze_vision_tower", "false", *rates)
    model = loaded(settings)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5)
    peaks = learning_rates(settings.recipe.training, 2e-5)  # scaled with the batch
    parameter_groups.divide(optimizer, model, settings.recipe.training, 2e-5)
    found = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert found == [(rate, decay) for rate in (2e-5, 2e-3, pytest.approx(4e-6)) for decay in (0.1, 0.0)]
    number = {id(parameter): name for name, parameter in model.named_parameters()}
    stepped = [number[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    plain = [number[id(parameter)] for parameter in decayed + others]
    assert stepped == parameter_groups.order(model, plain, settings.recipe.training) and {*stepped} == {*plain}
    at = {number[id(parameter)]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    for part, names in parts.parts_of(model).items():
        assert {at[name] for name in names} == {peaks[part]}


# ---- what is saved ---------------------------------------------------------------------------------------------------
def test_a_processors_files_go_with_a_model(settings_of, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("saved")
    files = processor_files.read(settings_of("gemma3"))
    assert {"preprocessor_config.json", "processor_config.json"} <= {*files}
    processor_files.write(files, tmp_path)
    assert not [*tmp_path.iterdir()]  # a checkpoint of FSDP2
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("the run's own")
    processor_files.write(files, tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == "the run's own"
    assert json.loads((tmp_path / "processor_config.json").read_text())["processor_class"] == "Gemma3Processor"
    assert {path.name for path in tmp_path.iterdir()} == {*files, "chat_template.jinja", "tokenizer_config.json"}


# ---- what is refused -------------------------------------------------------------------------------------------------
KEYS = {
    "processor_name_or_path": "here",
    "freeze_vision_tower": "false",
    "freeze_projector": "true",
    "lora_parts": "projector",
    "vision_tower_learning_rate": "1e-5",
    "projector_learning_rate": "1e-5",
}


@pytest.mark.parametrize("key", KEYS)
def test_keys_of_images_without_images(key, load, mistake):
    said = mistake(load, "--use_peft", f"--{key}", KEYS[key])
    assert f"flag --{key}" in said and "set data.images: true" in said


MISTAKES = {
    # name: flags, words of the message
    "a frozen tower's rate": (["--vision_tower_learning_rate", "1"], ["is not trained", "freeze_vision_tower: false"]),
    "a frozen projector's rate": (
        ["--freeze_projector", "--projector_learning_rate", "1"],
        ["freeze_projector: false"],
    ),
    "a rate of no adapters": (["--use_peft", "--projector_learning_rate", "1"], ["name projector in lora_parts"]),
    "a tower to freeze under adapters": (["--use_peft", "--freeze_vision_tower", "false"], ["lora_parts"]),
    "no such part": (["--use_peft", "--lora_parts", "eyes"], ["'vision_tower', 'projector' or 'language'"]),
    "no part": (["--use_peft", "--lora_parts", "[]"], ["--lora_parts", "at least one part"]),
    "a GGUF file": (["--model_name_or_path", "m.gguf"], ["no vision tower"]),
    "stretched positions": (
        ["--rope_parameters", "{rope_type: yarn, factor: 2.0, original_max_position_embeddings: 64}"],
        ["rope_parameters"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_recipe(name, load, mistake):
    flags, words = MISTAKES[name]
    said = mistake(load, "--images", *flags)
    assert all(word in said for word in words), said


TOGETHER = {
    # key: flags that cannot run with images
    "objective": ["--objective", "dpo"],
    "sync_every": ["--sync_every", "4"],
    "torch_compile": ["--torch_compile"],
    "use_liger_kernel": ["--use_liger_kernel"],
    "router_aux_loss_coef": ["--router_aux_loss_coef", "0.1"],
    "router_bias_update_rate": ["--router_bias_update_rate", "0.1"],
    "eval_tasks": ["--eval_tasks", "hellaswag"],
}


@pytest.mark.parametrize("key", TOGETHER)
def test_what_nobody_has_compared_with_images(key, pick, mistake):
    said = mistake(pick, "--images", *TOGETHER[key])
    assert f"flag --{key}" in said, said


def test_divided_models_with_images(pick, mistake):
    said = mistake(pick, "--images", "--ds_config", "ds_configs/zero1_pp2.json")
    assert "flag --ds_config" in said and "use ZeRO, FSDP2 or DDP" in said
    said = mistake(pick, "--images", "--accelerate_config", "accelerate_configs/fsdp2_ep2_1x4.yaml", size=4)
    assert "divided experts" in said
    for path in ("zero3", "zero3_sp2", "zero1_tp2"):
        assert pick("--images", "--ds_config", f"ds_configs/{path}.json").is_deepspeed


@pytest.mark.parametrize("kind, axis, why", [
    ("gemma4", "tensor", "reads a row of the embedding"), ("qwen3_vl", "tensor", "no tensor-parallel plan"),
    ("llama4", "tensor", "moe_tp_experts"), ("llama4", "sequence", "would need a mask"),
    ("gemma3", "sequence", "would need a mask"), ("qwen3_5", "sequence", "look at other tokens than by attention"),
])  # fmt: skip
def test_models_that_ranks_cannot_divide(kind, axis, why, settings_of, mistake):
    settings = settings_of(kind)
    config = load_config(settings)
    strategy = Strategy("ddp", "ddp", "here", axes=Axes(**{axis: 2}))
    kernels = SimpleNamespace(attention="sdpa" if kind in ("gemma3", "llama4") else attention.VARLEN, why="")
    run = SimpleNamespace(settings=settings, strategy=strategy, world=world(), kernels=kernels)
    assert why in mistake(preflight.check_axes, run, config)


def test_a_model_without_a_tower(load, mistake, tmp_path):
    assert "has no vision tower" in mistake(load_config, load("--images"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "idefics2", "vision_config": {}}))
    said = mistake(load_config, load("--images", "--model_name_or_path", str(tmp_path)))
    assert "'idefics2'" in said and "gemma3" in said and "qwen3_vl" in said


def test_a_llava_with_another_tower_than_those_compared(load, mistake, tmp_path):
    """Its tower decides how many tokens an image is, and which of its features are read."""
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {"model_type": "dinov2"}}')
    said = mistake(load_config, load("--images", "--model_name_or_path", str(tmp_path)))
    assert "'llava/dinov2'" in said and "llava/clip_vision_model" in said and "llava/pixtral" in said
