"""What a config says of single layers is cut with them, and one of each kind stays."""

import copy

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from brigade.train.model import per_layer
from brigade.train.model.tiny import VOCABULARY, shrink


@pytest.mark.parametrize("config, least, chosen, cut", [
    ({"num_hidden_layers": 9}, 2, [0, 1], {"num_hidden_layers": 2}),
    ({"num_hidden_layers": 1}, 2, [0, 0], {"num_hidden_layers": 2}),
    ({"n_layer": 4, "layer_types": ["a", "a", "b", "a"]}, 3, [0, 1, 2], {"n_layer": 3, "layer_types": ["a", "a", "b"]}),
    ({"num_hidden_layers": 4, "first_k_dense_replace": 3}, 2, [0, 3], {"first_k_dense_replace": 1}),
    ({"num_hidden_layers": 4, "first_k_dense_replace": 0}, 2, [0, 1], {"first_k_dense_replace": 0}),
    ({"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": list("ababab")}, 2, [0, 1, 4, 5],
     {"num_kv_shared_layers": 2, "layer_types": list("abab")}),
    ({"num_hidden_layers": 6, "mlp_only_layers": [0, 1]}, 2, [0, 2], {"mlp_only_layers": [0]}),
    ({"num_hidden_layers": 3, "per_layer_config": {"02": {"head_dim": 512}}}, 2, [0, 2],
     {"per_layer_config": {"1": {"head_dim": 512}}}),
    ({"num_hidden_layers": 4, "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32}}, 2,
     [0, 3], {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 32}}),
    ({"num_hidden_layers": 8, "moe_layer_start_index": 2, "moe_layer_end_index": 5}, 2, [0, 2, 6],
     {"moe_layer_start_index": 1, "moe_layer_end_index": 1}),
    ({"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4}, 2, [0, 1],
     {"attn_layer_period": 2, "attn_layer_offset": 1}),
    ({"num_hidden_layers": 3, "eos_token_id": [1, 2, 3], "mtp_layer_types": list("abc")}, 2, [0, 1], {}),
    ({"num_hidden_layers": 5, "intermediate_size": [1, 2, 3, 4, 5]}, 2, [0, 1], {"intermediate_size": [1, 2]}),
    ({"layers_block_type": ["mamba", "moe", "mamba"]}, 2, [0, 1], {"layers_block_type": ["mamba", "moe"]}),
])  # fmt: skip
def test_layers_are_cut_with_what_is_said_of_them(config, least, chosen, cut):
    before = copy.deepcopy(config)
    found = per_layer.cut(config, per_layer.representatives(config, least))
    assert per_layer.representatives(config, least) == chosen and config == before
    assert found.items() >= cut.items() and found.keys() <= config.keys()


@pytest.mark.parametrize("name", [
    "gemma4_text", "glm_moe_dsa", "deepseek_v32", "deepseek_v4", "kimi_linear", "gemma3n_text", "mimo_v2_flash", "laguna",
    "hy_v4", "lfm3", "llama4_text", "ernie4_5_moe", "qwen3_next", "nemotron_h", "jamba", "granitemoehybrid", "olmo_hybrid",
])  # fmt: skip
def test_a_tiny_model_of_an_architecture_has_all_of_its_kinds(name):
    """Shrinks the defaults of Transformers' config, which takes the tiny one too, and shrinks that once more."""
    whole = CONFIG_MAPPING[name]().to_dict()
    for _ in range(2):
        tiny = CONFIG_MAPPING[name].from_dict(shrink(whole))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny)
        assert sum(parameter.numel() for parameter in model.parameters()) < 20 * VOCABULARY * 64
        for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
            if isinstance(kinds := whole.get(key), list):
                assert set(getattr(tiny, key)) == set(kinds)
        assert len(whole.get("per_layer_config", ())) == 0 or len(tiny.to_dict()["per_layer_config"]) > 0
        whole = tiny.to_dict()
