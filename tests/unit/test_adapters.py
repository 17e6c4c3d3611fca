"""What a recipe may ask of adapters, told before any weight is loaded, and what they are put on: all layers, or those of a
pattern; and LoRA+'s groups of the optimizer."""

import json

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from transformers import CONFIG_MAPPING

from brigade.errors import UserError
from brigade.plan.shape.from_code import shape_from_model
from brigade.plan.shape.lora import lora_parameters
from brigade.train.engines import parameter_groups
from brigade.train.model import adapters, token_rows
from brigade.train.model.load import load_base, quantization_config
from brigade.train.model.location import load_config
from brigade.train.model.sizes import beyond_texts, parameter_count
from brigade.train.model.tiny import shrink
from brigade.train.model.tokenizer import load_tokenizer
from brigade.train.recipe import flags
from brigade.train.strategy import choose
from testing.ranks import REPOSITORY
from testing.strategies import world

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 64,
    "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


OTHERS = ("deepseek_v3", "glm4_moe", "qwen3_next", "gemma3", "falcon", "falcon_h1", "mamba2", "bamba", "jamba", "mamba")


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """config_of(name): the directory of a tiny model: tied, untied or moe."""
    tied = json.loads((REPOSITORY / "recipes/tiny/config.json").read_text())
    configs = {"tied": tied, "untied": tied | {"tie_word_embeddings": False}}
    configs |= {"moe": MOE, "dense and moe": MOE | {"mlp_only_layers": [0]}}
    for name in OTHERS:
        configs[name] = shrink(CONFIG_MAPPING[name]().to_dict()) | {"model_type": name}
    folder = tmp_path_factory.mktemp("models")
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return lambda name: folder / name


def settings_of(folder, *words):
    return flags.load(["--model_name_or_path", str(folder), "--use_peft", *words])


@pytest.fixture
def asked(config_of):
    return lambda *words: settings_of(config_of("tied"), *words)


def wrapped(settings):
    """The model as a run trains it, empty."""
    adapters.check_targets(settings, load_config(settings))
    return adapters.wrap(adapters.empty_model(settings, load_config(settings)), settings, "")


def trained_of(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def layers_of(names):
    """The last part of the names of layers with adapters."""
    return {name.split(".lora_")[0].rpartition(".")[2] for name in names}


@pytest.mark.parametrize("words, place, said", [
    (["--lora_r", "8"], "flag --lora_r", "use_peft is false"),
    (["--load_in_4bit"], "flag --load_in_4bit", "use_peft is false"),
    (["--use_dora"], "flag --use_dora", "use_peft is false"),
    (["--use_peft", "--bnb_4bit_quant_type", "fp4"], "flag --bnb_4bit_quant_type", "load_in_4bit is false"),
    (["--use_bnb_nested_quant", "false"], "flag --use_bnb_nested_quant", "load_in_4bit is false"),
    (["--nonfinite_limit", "3"], "flag --nonfinite_limit", "no step would be left out"),
    (["--reference_batch_size", "64"], "flag --reference_batch_size", "learning_rate_scaling is none"),
    (["--eval_tasks_chat_template"], "flag --eval_tasks_chat_template", "eval_tasks names none"),
    (["--optim", "lars", "--adam_beta1", "0.8", "--adam_beta2", "0.99"], "flag --adam_beta1",
     "adam_beta1 and adam_beta2 are set, but lars reads nothing of Adam's"),
    (["--optim", "lion_8bit", "--adam_epsilon", "1e-6"], "flag --adam_epsilon", "lion_8bit does not read it"),
    (["--use_peft", "--load_in_4bit", "--use_dora", "--ds_config", "ds_configs/zero3.json"], "flag --use_dora",
     "QDoRA does not run under zero3"),
])  # fmt: skip
def test_keys_that_contradict_each_other_or_the_strategy(words, place, said, mistake):
    message = mistake(lambda: choose(flags.load(words), world(2), env={}))
    assert place in message and said in message


def test_keys_at_their_defaults_are_no_contradiction():
    """run.yaml names every key."""
    choose(flags.load(["--lora_r", "16", "--lora_target_modules", "all-linear"]), world(1), env={})


def test_a_flag_or_an_earlier_run_may_make_a_recipes_keys_void(write_recipe, tmp_path, mistake):
    """--optim lars for a recipe with betas is told as a flag that wins; a run.yaml that has them goes on as it was."""
    recipe = write_recipe(training={"optim": "lars", "adam_beta2": 0.99})
    assert "lars reads nothing of Adam's" in mistake(
        lambda: choose(flags.load(["--recipe", str(recipe)]), world(1), env={})
    )
    choose(flags.load(["--recipe", str(recipe.rename(tmp_path / "run.yaml"))]), world(1), env={})
    recipe = write_recipe(training={"adam_beta2": 0.99})
    choose(flags.load(["--recipe", str(recipe), "--optim", "lars", "--global_batch_size", "64"]), world(1), env={})


@pytest.mark.parametrize("model, words, said", [
    ("tied", ["--lora_target_modules", "q_proj,query"],
     ["'query' fits no linear layer of LlamaForCausalLM", "q_proj (4)", "down_proj (4)", "lm_head (1)"]),
    ("tied", ["--lora_target_modules", "self_attn"], ["'self_attn'", "model.layers.0.self_attn is a LlamaAttention"]),
    ("tied", ["--lora_target_modules", "embed_tokens"], ["model.embed_tokens is a Embedding"]),
    ("tied", ["--lora_target_modules", "q_proj,lm_head"], ["'lm_head'", "tie_word_embeddings"]),
    ("tied", ["--lora_modules_to_save", "lm_head"], ["lora_modules_to_save", "tie_word_embeddings"]),
    ("tied", ["--lora_modules_to_save", "head"], ["'head' fits no module", "embed_tokens (1)", "q_proj (4)"]),
    ("moe", ["--lora_target_modules", "q_proj,down_proj"],
     ["'down_proj'", "model.layers.0.mlp.experts.down_proj is one parameter for all experts", "q_proj (2)"]),
    ("dense and moe", ["--lora_target_modules", "gate_proj,up_proj,down_proj"], ["fused experts", "q_proj"]),
    ("dense and moe", ["--lora_target_modules", "gate_proj"], ["PEFT refuses", "fused"]),
    ("deepseek_v3", ["--lora_target_modules", "gate_proj,up_proj"], ["fused experts", "q_b_proj (2)", "all-linear"]),
    ("gemma3", ["--lora_target_modules", "fc1"], ["'fc1' fits no linear layer", "q_proj (2)"]),
    ("falcon", ["--load_in_4bit"], ["load_in_4bit", "no layer of FalconForCausalLM", "FalconLinear", "without load_in_4bit"]),
    ("gemma3", ["--lora_modules_to_save", "vision_tower"], ["'vision_tower' fits no module", "embed_tokens (1)"]),
    ("tied", ["--lora_target_parameters", "experts"], ["lora_target_parameters", "LlamaForCausalLM has no fused experts"]),
    ("moe", ["--lora_target_parameters", "experts.up_proj"], ["'experts.up_proj'", "experts.gate_up_proj"]),
    ("moe", ["--lora_target_parameters", "experts", "--lora_dropout", "0.1"], ["PEFT refuses", "lora_dropout != 0"]),
    ("moe", ["--lora_target_parameters", "experts", "--use_dora"], ["flag --lora_target_parameters", "use_dora=True"]),
])  # fmt: skip
def test_targets_that_the_model_does_not_have(model, words, said, config_of, mistake):
    settings = settings_of(config_of(model), *words)
    message = mistake(lambda: adapters.check_targets(settings, load_config(settings)))
    assert all(word in message for word in said), message


@pytest.mark.parametrize("model, words", [
    ("tied", []),
    ("moe", []),
    ("untied", ["--lora_target_modules", "q_proj,lm_head"]),
    ("untied", ["--lora_modules_to_save", "embed_tokens,lm_head"]),
    ("moe", ["--lora_target_modules", "self_attn.q_proj"]),
    ("dense and moe", []),
    ("moe", ["--lora_target_parameters", "experts"]),
    ("moe", ["--lora_target_parameters", "experts.gate_up_proj", "--lora_target_modules", "q_proj"]),
    ("qwen3_next", ["--lora_target_parameters", "experts"]),  # its convolutions have three dimensions too
    ("gemma3", ["--lora_target_modules", "q_proj"]),
])  # fmt: skip
def test_targets_that_it_has(model, words, config_of):
    settings = settings_of(config_of(model), *words)
    adapters.check_targets(settings, load_config(settings))


OF_ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]
OF_NEXT = ["in_proj_ba", "in_proj_qkvz", "out_proj", "shared_expert_gate", *OF_ATTENTION]  # linear attention's, too
OF_DEEPSEEK = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]


@pytest.mark.parametrize("model, on, left", [
    ("deepseek_v3", OF_DEEPSEEK, ["down_proj", "gate_proj", "up_proj"]),
    ("glm4_moe", OF_ATTENTION, ["down_proj", "gate_proj", "up_proj"]),
    ("qwen3_next", OF_NEXT, ["down_proj", "gate_proj", "up_proj"]),
])  # fmt: skip
def test_all_linear_beside_shared_experts_is_what_can_be_loaded_again(model, on, left, config_of, tmp_path):
    """PEFT takes shared experts' names for the fused ones', also when it loads adapters."""
    from peft import PeftConfig, get_peft_model

    settings = settings_of(config_of(model))
    found = wrapped(settings)
    trained = trained_of(found)
    assert layers_of(trained) == set(on)
    if model != "qwen3_next":  # which the planner does not know
        shape = shape_from_model(json.loads((config_of(model) / "config.json").read_text()))
        assert lora_parameters(shape, 16) == parameter_count(found, trained=True)
    said = adapters.describe(settings.recipe.model, found)["method"]
    stay = f"and so do {', '.join(left)}, which PEFT takes for them"
    assert said.endswith(f"experts are no linear layers and stay as they are, {stay}")
    found.peft_config["default"].save_pretrained(tmp_path)
    empty = adapters.empty_model(settings, load_config(settings))
    assert trained_of(get_peft_model(empty, PeftConfig.from_pretrained(tmp_path))) == trained


@pytest.mark.parametrize("words", [[], ["--lora_target_modules", "q_proj,fc1"]])
def test_what_texts_do_not_reach_is_not_trained(words, config_of):
    """A vision tower has a q_proj, too."""
    settings = settings_of(config_of("gemma3"), *words)
    model = adapters.empty_model(settings, load_config(settings))
    assert set(beyond_texts(model)) == {"model.vision_tower", "model.multi_modal_projector"}
    found = adapters.wrap(model, settings, "")
    trained = trained_of(found)
    assert len(trained) >= 2 * 2 and all("language_model" in name for name in trained)
    assert len(beyond_texts(found)) == 2


@pytest.mark.parametrize("model, layers", [("tied", 4 * 7), ("moe", 2 * 4)])
def test_all_linear_leaves_out_the_output_layer_and_fused_experts(model, layers, config_of):
    settings = settings_of(config_of(model))
    found = wrapped(settings)
    trained = trained_of(found)
    assert len(trained) == 2 * layers and not any("lm_head" in name or "experts" in name for name in trained)
    said = adapters.describe(settings.recipe.model, found)["method"]
    assert said.startswith("LoRA r 16 on all linear layers trains ") and ("experts" in said) == (model == "moe")


def test_what_is_said_of_a_run(config_of):
    settings = settings_of(config_of("untied"), "--lora_target_modules", "q_proj,v_proj", "--lora_r", "4", "--use_dora")
    model = adapters.empty_model(settings, load_config(settings))
    before = parameter_count(model)
    found = adapters.wrap(model, settings, "")
    trained = parameter_count(found, trained=True)
    assert trained == 4 * (4 * (192 + 192) + 192 + 4 * (192 + 64) + 64)  # A and B and DoRA's magnitudes, in 4 layers
    assert adapters.describe(settings.recipe.model, found) == {
        "method": f"DoRA r 4 on q_proj, v_proj trains {trained:,} in adapters only: {trained / (before + trained):.2%} of "
        f"{before + trained:,} parameters are trained"
    }
    assert adapters.describe(flags.load([]).recipe.model, model) == {}


def test_what_is_trained_whole_is_said_with_its_number_and_turned_off_by_none(config_of):
    ends = settings_of(config_of("untied"), "--lora_modules_to_save", "embed_tokens,lm_head", "--lora_r", "8")
    said = adapters.describe(ends.recipe.model, wrapped(ends))["method"]
    assert "trains 108,544 in adapters + 1.6 M in embed_tokens and lm_head, because lora_modules_to_save" in said
    assert settings_of(config_of("untied"), "--lora_modules_to_save", "none").recipe.model.lora_modules_to_save == []


@pytest.mark.parametrize("model, words, said", [
    ("untied", [], "trainable_token_indices: [<|im_start|>, <|im_end|>] trains them, 768 parameters more"),
    ("tied", [], "chat_template: tulu"),
    ("untied", ["--lora_modules_to_save", "lm_head"], ""), ("untied", ["--use_peft", "false"], ""),
])  # fmt: skip
def test_chat_tokens_that_a_base_model_has_not_learned_are_named(model, words, said, config_of):
    settings = settings_of(config_of(model), "--from_scratch", "false", *words)
    tokenizer, empty = load_tokenizer(settings, 4096), adapters.empty_model(settings, load_config(settings))
    ids = [*tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]), 100, 200]
    tokenizer.eos_token = "<|endoftext|>"

    def told(ids):
        return adapters.untrained_chat_tokens(settings.recipe.model, tokenizer, ids, empty)

    assert told(ids) == {}, "a chat model's has a template"
    tokenizer.chat_template = None
    named = told(ids).get("chat tokens", "")
    assert said in named and ("<|im_start|>" in named) == bool(said)
    assert told([100, 200]) == {}


@pytest.mark.parametrize("words, is_said", [
    (["--use_peft", "false"], True), ([], False), (["--lora_modules_to_save", "embed_tokens"], True),
])  # fmt: skip
def test_a_padding_token_that_samples_have_is_said_to_stay_untrained(words, is_said, config_of):
    """As where it also ends turns: torch gives its input embedding no gradient."""
    settings = settings_of(config_of("untied"), *words)
    tokenizer, config = load_tokenizer(settings, 4096), load_config(settings)
    model = adapters.empty_model(settings, config)
    model = adapters.wrap(model, settings, "") if settings.recipe.model.use_peft else model
    said = token_rows.describe_padding(tokenizer, [5, config.pad_token_id], model).get("padding token", "")
    assert ("its input embedding is not trained" in said) == is_said
    assert token_rows.describe_padding(tokenizer, [5, 7], model) == {}
    config.pad_token_id = None
    assert token_rows.describe_padding(tokenizer, [5, 0], adapters.empty_model(settings, config)) == {}


def test_adapters_name_a_base_that_others_find(config_of):
    """A model of the Hub by its name and revision, not by this machine's snapshot of it."""
    local = settings_of(config_of("tied"))
    model = adapters.empty_model(local, load_config(local))
    hub = settings_of("someone/model", "--revision", "abc", "--from_scratch", "false")
    named = adapters.wrap(model, hub, "/cache/snapshots/abc").peft_config["default"]
    assert (named.base_model_name_or_path, named.revision) == ("someone/model", "abc")


def test_four_bits_are_held_in_the_computations_type():
    settings = flags.load(["--use_peft", "--load_in_4bit", "--bnb_4bit_quant_type", "fp4"])
    config = quantization_config(settings, "", torch.bfloat16)
    assert config.bnb_4bit_quant_storage == config.bnb_4bit_compute_dtype == torch.bfloat16
    assert config.bnb_4bit_quant_type == "fp4" and config.bnb_4bit_use_double_quant


def test_the_share_of_weights_in_four_bits_is_said(tmp_path):
    """Ends and norms are not, and of a model with experts far more: a user of 4 bits counts on what they save."""
    from transformers import LlamaForCausalLM

    whole = LlamaForCausalLM(CONFIG_MAPPING["llama"](**shrink(CONFIG_MAPPING["llama"]().to_dict())))
    whole.save_pretrained(tmp_path)
    settings = settings_of(tmp_path, "--load_in_4bit", "--bf16")
    model = adapters.wrap(load_base(settings, str(tmp_path), torch.bfloat16), settings, "")
    four = sum(p.numel() for name, p in whole.named_parameters() if "proj" in name) / parameter_count(model)
    assert f"; {four:.0%} of them are in 4 bits" in adapters.describe(settings.recipe.model, model)["method"]


@pytest.mark.parametrize("model, trained, past", [
    ("falcon_h1", {"q_proj", "in_proj", "down_proj"}, {"out_proj"}),
    ("mamba2", {"in_proj"}, {"out_proj"}),
    ("bamba", {"in_proj", "down_proj"}, {"out_proj"}),  # of which PEFT does not know it
    ("jamba", {"in_proj", "x_proj", "out_proj", "q_proj"}, {"dt_proj"}),  # nor of dt_proj
    ("mamba", {"in_proj"}, {"dt_proj", "out_proj", "x_proj"}),
])  # fmt: skip
def test_what_mambas_kernels_read_past_an_adapter_gets_none(model, trained, past, config_of):
    """It would not be trained: at all, or with mamba-ssm."""
    one = min(past)
    with pytest.raises(UserError, match=f"Mamba layers read the weight of '{one}' past an adapter"):
        settings = settings_of(config_of(model), "--lora_target_modules", f"in_proj,{one}")
        adapters.check_targets(settings, load_config(settings))
    settings = settings_of(config_of(model))
    found = wrapped(settings)
    names = layers_of(trained_of(found))
    assert trained <= names and past.isdisjoint(names)
    said = adapters.describe(settings.recipe.model, found)["method"]
    assert f"{', '.join(sorted(past))} of Mamba's layers stay" in said


# ---- patterns of names, and groups of LoRA+ --------------------------------------------------------------------------
@pytest.mark.parametrize("target, layers", [
    (r"layers\.[01]\.self_attn\..*", {(layer, f"{name}_proj") for layer in "01" for name in "qkvo"}),
    (r"[qk]_proj", {(layer, name) for layer in "0123" for name in ("q_proj", "k_proj")}),
    (r"layers\.3\.mlp\.(up|down)_proj,v_proj", {("3", "up_proj"), ("3", "down_proj"), *((layer, "v_proj") for layer in "0123")}),
])  # fmt: skip
def test_a_regular_expression_is_for_the_end_of_a_name(target, layers, asked):
    model = wrapped(asked("--lora_target_modules", target))
    named = {name.partition(".layers.")[2] for name in trained_of(model)}
    assert {(name[0], name.split(".lora_")[0].rpartition(".")[2]) for name in named} == layers


def test_ranks_and_scales_by_patterns_are_pefts(asked):
    patterns = [r"--rank_pattern={q_proj: 2, 'layers\.3\..*': 32}", "--alpha_pattern={down_proj: 4.5}"]
    settings = asked("--lora_r=8", "--lora_alpha=16", *patterns)
    model = wrapped(settings)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A") and module.r}
    for name, layer in layers.items():
        rank = 2 if name.endswith("q_proj") else 32 if ".layers.3." in name else 8
        alpha = 4.5 if name.endswith("down_proj") else 16
        assert (layer.r["default"], layer.scaling["default"]) == (rank, pytest.approx(alpha / rank)), name
    assert len(layers) == 28
    assert adapters.describe(settings.recipe.model, model)["method"].startswith(
        r"LoRA r 8, 2 on q_proj, 32 on layers\.3\..* on all linear layers"
    )


@pytest.mark.parametrize("words, said", [
    (["--lora_target_modules", r"layers\.9\..*"], ["fits no linear layer", "q_proj (4)"]),
    (["--lora_target_modules", r"layers\.(0"], ["is none (missing )"]),
    (["--rank_pattern", "{query: 4}"], ["rank_pattern", "'query' fits no layer with an adapter", "q_proj (4)"]),
    (["--rank_pattern", "{q_proj: 4}", "--lora_target_modules", "v_proj"], ["'q_proj' fits no layer", "v_proj (4)"]),
    (["--rank_pattern", "{'.*_proj': 4, q_proj: 8}"], ["'q_proj'", "no pattern before it", "put it first"]),
    (["--alpha_pattern", "{lm_head: 8}"], ["alpha_pattern", "'lm_head'"]),
    (["--rank_pattern", "{'(': 8}"], ["rank_pattern", "'(' is none"]),
    (["--rank_pattern", "{q_proj: 0}"], ["rank_pattern"]),
])  # fmt: skip
def test_a_pattern_that_decides_nothing_is_an_error(words, said, asked, mistake):
    message = mistake(lambda: wrapped(asked(*words)))
    assert all(word in message for word in said), message


@pytest.mark.parametrize("words", [[], ["--use_dora"]])
def test_the_groups_of_lora_plus_have_pefts_rates(words, asked):
    settings = asked(*words, "--lora_modules_to_save", "norm", "--use_peft", "true", "--from_scratch")
    model = wrapped(settings)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = {name for name in trained if "modules_to_save" in name}  # whose vectors PEFT counts to the matrices B
    theirs = create_loraplus_optimizer(model, torch.optim.SGD, lr=0.5, loraplus_lr_ratio=16)
    rates = {id(parameter): group["lr"] for group in theirs.param_groups for parameter in group["params"]}
    plain = list(trained)
    groups = [{"params": [trained[name] for name in part]} for part in (plain[:9], plain[9:])]
    ours = torch.optim.SGD(groups, lr=0.5)
    parameter_groups.divide_lora_plus(ours, model, 16)
    names = {id(parameter): name for name, parameter in trained.items()}
    stepped = [(names[id(parameter)], group["lr"]) for group in ours.param_groups for parameter in group["params"]]
    assert len(ours.param_groups) == 4 and len(stepped) == len(trained)
    assert {name: rate for name, rate in stepped if name not in whole} == {
        name: rates[id(trained[name])] for name in plain if name not in whole
    }
    assert {rate for name, rate in stepped if name in whole} == {0.5}
    assert [name for name, _ in stepped] == parameter_groups.order_lora_plus(plain)
