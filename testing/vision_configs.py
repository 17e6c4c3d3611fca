"""What makes up the tiny models of vision_models.py: configurations, special tokens, settings of processors, chat templates."""

from typing import Any

_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = _SIZES | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
_LLAMA, _QWEN2 = _TEXT | {"model_type": "llama"}, _TEXT | {"model_type": "qwen2"}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_SMALL = _TOWER | {"image_size": 16, "patch_size": 4}  # 16 patches
_SIGLIP = _SMALL | {"model_type": "siglip_vision_model", "vision_use_head": False}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SQUARE = {"height": 16, "width": 16}
_ANYRES = {"image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]]}

# A token is an image of 8 x 8 pixels.
_QWEN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2048},
}
_STATEFUL = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    """M-RoPE: how many of a head's frequencies turn by time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}}


def _interleaved(*sections: int, **more: Any) -> dict[str, Any]:
    return _rope(*sections, mrope_interleaved=True, **more)


# Contents are strings or lists of parts; SmolVLM's and LLaVA-OneVision's templates take lists alone.
_PARTS = """{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}IMAGE{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"""


def _chatml(image: str) -> str:
    before = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    after = "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    return before + _PARTS.replace("IMAGE", image) + after


def _turns(opening: str, closing: str, image: str) -> str:
    """As Gemma's, whose assistant is called model."""
    role = "('model' if message.role == 'assistant' else message.role)"
    before = "{{ '<bos>' }}{% for message in messages %}{{ 'OPEN' + ROLE + '\\n' }}".replace("ROLE", role)
    after = "{{ 'CLOSE\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'OPENmodel\\n' }}{% endif %}"
    whole = before + _PARTS.replace("IMAGE", image) + after
    return whole.replace("OPEN", opening).replace("CLOSE", closing)


def _instructions(image: str) -> str:
    parts = _PARTS.replace("IMAGE", image)
    return (
        "{{ '<s>' }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST]' }}" + parts + "{{ '[/INST]' }}"
        "{% elif message.role == 'system' %}{{ '[SYSTEM_PROMPT]' }}" + parts + "{{ '[/SYSTEM_PROMPT]' }}"
        "{% else %}" + parts + "{{ '</s>' }}{% endif %}{% endfor %}"
    )  # fmt: skip


_UTTERANCES = """<|im_start|>{% for message in messages %}{{ message.role | capitalize }}\
{% if message.content[0].type == 'image' %}:{% else %}{{ ': ' }}{% endif %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}\
{{ '<end_of_utterance>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
# With the family's own generation marks, which end before <|im_end|>.
_IMAGES_FIRST = """{% for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}\
{% for part in message.content if part.type == 'image' %}{{ '<image>' }}{% endfor %}\
{% for part in message.content if part.type == 'text' %}{% if message.role == 'assistant' %}\
{% generation %}{{ '\\n' + part.text }}{% endgeneration %}{% else %}{{ '\\n' + part.text }}{% endif %}{% endfor %}\
{{ '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_HEADERS = (
    "{{ '<|begin_of_text|>' }}{% for message in messages %}{{ '<|header_start|>' + message.role + '<|header_end|>\\n\\n' }}"
    + _PARTS.replace("IMAGE", "<|image|>")
    + "{{ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}"
)
_USER_ASSISTANT = (
    "{% for message in messages %}{{ message.role.upper() + ': ' }}"
    + _PARTS.replace("IMAGE", "<image>\n")
    + "{% if message.role == 'assistant' %}{{ '</s>' }}{% else %}{{ ' ' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def _qwen(
    text: dict[str, Any], tower: dict[str, Any], processor: str, images: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A model of Qwen's: all of them write images alike."""
    vision = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    keys = ["vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"]
    return {
        "config": {"text_config": _TEXT | text, "vision_config": _QWEN_TOWER | tower},
        "ids": dict(zip(keys, vision, strict=True)),
        "tokens": ["<|im_start|>", "<|im_end|>", *vision],
        "end": "<|im_end|>",
        "images": _QWEN_IMAGES | (images or {}),
        "processor": {"processor_class": processor},
        "template": _chatml("<|vision_start|><|image_pad|><|vision_end|>"),
    }


def _split(kind: str) -> dict[str, Any]:
    """SmolVLM, or Idefics3, whose like it is: an image is cut into squares, beside which stands the whole one."""
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    limits = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    return {
        "config": {"text_config": _LLAMA, "vision_config": _SMALL, "scale_factor": 2},
        "ids": {"image_token_id": "<image>"},
        "tokens": ["<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>", *rows],
        "end": "<end_of_utterance>",
        "images": _HALF | limits | {"image_processor_type": f"{kind}ImageProcessor"},
        "processor": {"processor_class": f"{kind}Processor", "image_seq_len": 4},
        "template": _UTTERANCES,
    }


def _squares(
    tower: dict[str, Any], features: str, beside: int, images: dict[str, Any], **config: Any
) -> dict[str, Any]:
    """LLaVA, whose images are squares. features: all of the tower's (full), or all but the first (default); beside: how many of
    them are no patch"""
    read = {"vision_feature_select_strategy": features}
    return {
        "config": {"text_config": _LLAMA, "vision_config": _SMALL | tower, **read, **config},
        "ids": {"image_token_index": "<image>"},
        "tokens": ["<s>", "</s>", "<image>"],
        "end": "</s>",
        "images": images,
        "processor": {
            "processor_class": "LlavaProcessor",
            "patch_size": 4,
            "num_additional_image_tokens": beside,
            **read,
        },
        "template": _USER_ASSISTANT,
    }


# Kind of vision_models.yaml -> "config", without ids; "ids": keys of the config -> tokens; "tokens": special ones; "named":
# tokens by the names that the tokenizer itself has for them; "end": the token that ends a turn; "images":
# preprocessor_config.json; "processor": processor_config.json; "template".
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _qwen(_rope(2, 3, 3), {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, "Qwen2VLProcessor"),
    "qwen2_5_vl": _qwen(_rope(2, 3, 3), {"window_size": 16, "fullatt_block_indexes": [1]}, "Qwen2_5_VLProcessor"),
    "qwen3_vl": _qwen(
        _interleaved(4, 2, 2), {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}, "Qwen3VLProcessor", _HALF
    ),
    "qwen3_vl_moe": _qwen(
        _interleaved(4, 2, 2) | _EXPERTS,
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        "Qwen3VLProcessor",
        _HALF,
    ),
    "qwen3_5": _qwen(
        _interleaved(2, 1, 1, partial_rotary_factor=0.5) | _STATEFUL, {"num_position_embeddings": 64}, "Qwen3VLProcessor", _HALF
    ),
    "qwen3_5_moe": _qwen(
        _interleaved(2, 1, 1, partial_rotary_factor=0.5) | _STATEFUL | _EXPERTS | {"shared_expert_intermediate_size": 32},
        {"num_position_embeddings": 64},
        "Qwen3VLProcessor",
        _HALF,
    ),
    "gemma3": {
        "config": {
            "text_config": _TEXT | {
                "model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12,
                "query_pre_attn_scalar": 16,
            },
            "vision_config": _SIGLIP, "mm_tokens_per_image": 4,
        },
        "ids": {
            "image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        "tokens": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        "named": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "end": "<end_of_turn>",
        "images": _HALF | {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "template": _turns("<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
    },
    "gemma4": {
        "config": {
            "text_config": _TEXT | {
                "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "global_head_dim": 16,
                "hidden_size_per_layer_input": 8, "use_bidirectional_attention": "vision",
            },
            "vision_config": _TOWER | {
                "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
                "position_embedding_size": 256,
            },
            "audio_config": None,
        },
        "ids": {
            "image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>", "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>", "eoa_token_index": "<audio|>",
        },
        "tokens": ["<bos>", "<|turn>", "<turn|>", "<|video|>"],
        "named": {
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        "end": "<turn|>",
        # No fewer than 70 tokens can be asked for, and an image has nearly as many.
        "images": {
            "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3,
        },
        "processor": {"processor_class": "Gemma4Processor"},
        "template": _turns("<|turn>", "<turn|>", "<|image|>"),
    },
    "smolvlm": _split("SmolVLM"),
    "idefics3": _split("Idefics3"),
    "internvl": {
        "config": {
            "text_config": _QWEN2, "vision_config": _TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
            "image_seq_length": 4,
        },
        "ids": {"image_token_id": "<IMG_CONTEXT>"},
        "tokens": ["<|im_start|>", "<|im_end|>"],
        "named": {
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "end": "<|im_end|>",
        "images": {
            "image_processor_type": "GotOcr2ImageProcessor", "size": _SQUARE, "crop_to_patches": True, "max_patches": 4,
        },
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "template": _chatml("<IMG_CONTEXT>\n"),
    },
    "llava/clip_vision_model": _squares(
        {"model_type": "clip_vision_model"}, "default", 1,
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 16}, "crop_size": _SQUARE},
    ),
    "llava/siglip_vision_model": _squares(
        {"model_type": "siglip_vision_model"}, "full", 0,
        _HALF | {"image_processor_type": "SiglipImageProcessor", "size": _SQUARE}, vision_feature_layer=-1,
    ),
    "llava/pixtral": {
        "config": {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": _TOWER | {"model_type": "pixtral", "image_size": 32, "patch_size": 8},
            "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        },
        "ids": {"image_token_index": "[IMG]"},
        "tokens": [
            "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
        ],
        "end": "</s>",
        "images": {
            "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32},
            "patch_size": {"height": 8, "width": 8},
        },
        "processor": {"processor_class": "PixtralProcessor", "patch_size": 8},
        "template": _instructions("[IMG]"),
    },
    "llava_onevision": {
        "config": {"text_config": _QWEN2, "vision_config": _SIGLIP, **_ANYRES},
        "ids": {"image_token_index": "<image>", "video_token_index": "<video>"},
        "tokens": ["<|im_start|>", "<|im_end|>", "<image>", "<video>"],
        "end": "<|im_end|>",
        "images": _HALF | _ANYRES | {"image_processor_type": "LlavaOnevisionImageProcessor", "size": _SQUARE},
        "processor": {
            "processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "vision_feature_select_strategy": "full",
        },
        "template": _IMAGES_FIRST,
    },
    "mistral3": {
        "config": {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": _TOWER | {"model_type": "pixtral", "image_size": 32, "patch_size": 4},
            "spatial_merge_size": 2,
        },
        "ids": {"image_token_index": "[IMG]"},
        "tokens": [
            "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]",
        ],
        "end": "</s>",
        "images": {
            "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 32},
            "patch_size": {"height": 4, "width": 4},
        },
        "processor": {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
        "template": _instructions("[IMG]"),
    },
    "llama4": {
        "config": {
            # A layer with chunks and experts, and one without rotary embeddings that scales queries from the eighth token on.
            "text_config": _TEXT | {
                "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2, "moe_layers": [0], "intermediate_size_mlp": 128,
                "num_local_experts": 4, "attention_chunk_size": 12, "floor_scale": 8,
            },
            "vision_config": _SMALL | {
                "pixel_shuffle_ratio": 0.5, "intermediate_size": 128, "projector_input_dim": 48, "projector_output_dim": 48,
                "vision_output_dim": 48,
            },
        },
        "ids": {"image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>"},
        "tokens": [
            "<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|image|>", "<|patch|>", "<|image_start|>",
            "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>",
        ],
        "end": "<|eot|>",
        "images": _HALF | {"image_processor_type": "Llama4ImageProcessorFast", "size": _SQUARE, "max_patches": 4},
        "processor": {"processor_class": "Llama4Processor", "patch_size": 4, "pixel_shuffle_ratio": 0.5},
        "template": _HEADERS,
    },
}  # fmt: skip
# Kinds of each way in which models differ: of positions, masks, tiles. Tests of all others are slow ones.
QUICK = ("qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "internvl")
