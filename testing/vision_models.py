"""Tiny random models of images and texts, with tokenizers, processors and chat templates built as their families build them."""

import functools
import json
from pathlib import Path
from typing import Any

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False}
# Qwen's towers have names of their own. An image of 32 x 32 is 16 tokens, of 8 x 8 pixels each.
QWEN_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2048},
}
QWEN_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

# Each takes contents that are strings or lists of parts, but SmolVLM's and LLaVA-OneVision's, which take lists alone.
PARTS = """{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}IMAGE{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"""
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    + PARTS
    + "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = (
    "{{ '<bos>' }}{% for message in messages %}{{ 'OPEN' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}"
    + PARTS
    + "{{ 'CLOSE\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'OPENmodel\\n' }}{% endif %}"
)
UTTERANCES = """<|im_start|>{% for message in messages %}{{ message.role | capitalize }}\
{% if message.content[0].type == 'image' %}:{% else %}{{ ': ' }}{% endif %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}\
{{ '<end_of_utterance>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
IMAGES_FIRST = """{% for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}\
{% for part in message.content if part.type == 'image' %}{{ '<image>' }}{% endfor %}\
{% for part in message.content if part.type == 'text' %}{{ '\\n' + part.text }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
INSTRUCTIONS = (
    "{{ '<s>' }}{% for message in messages %}{% if message.role == 'user' %}{{ '[INST]' }}"
    + PARTS.replace("IMAGE", "[IMG]")
    + "{{ '[/INST]' }}{% elif message.role == 'system' %}{{ '[SYSTEM_PROMPT]' }}"
    + PARTS.replace("IMAGE", "[IMG]")
    + "{{ '[/SYSTEM_PROMPT]' }}{% else %}"
    + PARTS.replace("IMAGE", "[IMG]")
    + "{{ '</s>' }}{% endif %}{% endfor %}"
)
QWEN_CHAT = CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")


def _qwen(
    text: dict[str, Any], tower: dict[str, Any], processor: str, images: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A model of Qwen's: without the keys that its kinds have in common."""
    return {
        "config": {"text_config": TEXT | text, "vision_config": QWEN_TOWER | tower},
        "ids": {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        "tokens": QWEN_TOKENS,
        "end": "<|im_end|>",
        "images": QWEN_IMAGES | (images or {}),
        "processor": {"processor_class": processor},
        "template": QWEN_CHAT,
    }


def _of_turns(opening: str, closing: str, image: str) -> str:
    return TURNS.replace("OPEN", opening).replace("CLOSE", closing).replace("IMAGE", image)


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    """M-RoPE: how many of a head's frequencies turn by time, height and width."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


# Model type -> "config", without ids; "ids": keys of the config -> tokens; "tokens": special ones; "named": the tokenizer's own
# names of some; "end": the token that ends a turn; "images": preprocessor_config.json; "processor": processor_config.json;
# "template".
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": _qwen(
        {"rope_parameters": _rope(2, 3, 3)},
        {"window_size": 16, "fullatt_block_indexes": [1], "spatial_merge_size": 2, "temporal_patch_size": 2},
        "Qwen2_5_VLProcessor",
    ),
    "qwen3_vl": _qwen(
        {"rope_parameters": _rope(4, 2, 2, mrope_interleaved=True)},
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        "Qwen3VLProcessor",
        HALF,
    ),
    "qwen3_5": _qwen(
        {
            "rope_parameters": _rope(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5),
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        {"num_position_embeddings": 64},
        "Qwen3VLProcessor",
        HALF,
    ),
    "gemma3": {
        "config": {
            "text_config": TEXT
            | {
                "model_type": "gemma3_text",
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 12,
                "query_pre_attn_scalar": 16,
            },
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
        "ids": {
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        "tokens": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
        "named": {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "end": "<end_of_turn>",
        "images": HALF | {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        "template": _of_turns("<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
    },
    "gemma4": {
        "config": {
            "text_config": TEXT
            | {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 12,
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 8,
                "use_bidirectional_attention": "vision",
            },
            "vision_config": TOWER
            | {
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 3,
                "position_embedding_size": 256,
            },
            "audio_config": None,
        },
        "ids": {
            "image_token_id": "<|image|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>",
            "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>",
        },
        "tokens": ["<bos>", "<|turn>", "<turn|>", "<|video|>"],
        "named": {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        "end": "<turn|>",
        # No fewer than 70 tokens can be asked for; a small image has somewhat fewer.
        "images": {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 4,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
        "processor": {"processor_class": "Gemma4Processor"},
        "template": _of_turns("<|turn>", "<turn|>", "<|image|>"),
    },
    "smolvlm": {
        "config": {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER | {"image_size": 16, "patch_size": 4},
            "scale_factor": 2,
        },
        "ids": {"image_token_id": "<image>"},
        "tokens": ["<|im_start|>", "<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>"]
        + [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)],
        "end": "<end_of_utterance>",
        "images": HALF
        | {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
        },
        "processor": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        "template": UTTERANCES,
    },
    "internvl": {
        "config": {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
            "image_seq_length": 4,
        },
        "ids": {"image_token_id": "<IMG_CONTEXT>"},
        "tokens": ["<|im_start|>", "<|im_end|>"],
        "named": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "end": "<|im_end|>",
        "images": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 16, "width": 16},
            "crop_to_patches": True,
            "max_patches": 4,
        },
        "processor": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        "template": CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
    },
    "llava_onevision": {
        "config": {
            "text_config": TEXT | {"model_type": "qwen2"},
            "vision_config": SIGLIP,
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
        },
        "ids": {"image_token_index": "<image>", "video_token_index": "<video>"},
        "tokens": ["<|im_start|>", "<|im_end|>", "<image>", "<video>"],
        "end": "<|im_end|>",
        "images": HALF
        | {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]],
        },
        "processor": {
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
        },
        "template": IMAGES_FIRST,
    },
    "mistral3": {
        "config": {
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": TOWER | {"model_type": "pixtral", "image_size": 32, "patch_size": 4},
            "spatial_merge_size": 2,
        },
        "ids": {"image_token_index": "[IMG]"},
        "tokens": [
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
            "[IMG]",
            "[IMG_BREAK]",
            "[IMG_END]",
        ],
        "end": "</s>",
        "images": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 32},
            "patch_size": {"height": 4, "width": 4},
        },
        "processor": {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2},
        "template": INSTRUCTIONS,
    },
}


def write_vision_model(folder: Path, model_type: str) -> Path:
    """Write a model of this type with random weights, the same each time, with its tokenizer, processor and chat template.

    It has two layers of 64 and a tower of two layers of 32, in fp32; an image is 2 to 25 tokens, of Gemma 4's some 60. Weights
    are large enough for each image to move each logit behind it.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = MODELS[model_type]
    ids = _write_tokenizer(folder, model)
    config = json.loads(json.dumps(model["config"])) | {key: ids[token] for key, token in model["ids"].items()}
    known = {
        "vocab_size": len(ids),
        "bos_token_id": None,
        "eos_token_id": ids[model["end"]],
        "pad_token_id": ids["<pad>"],
    }
    config["text_config"] |= known
    if model_type == "gemma4":
        config["text_config"]["vocab_size_per_layer_input"] = len(ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[model_type](**config), dtype=torch.float32)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    made.save_pretrained(folder)
    named = {"processor_class": model["processor"]["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(model["images"] | named))
    (folder / "processor_config.json").write_text(json.dumps(model["processor"]))
    return folder


@functools.cache
def _letters() -> list[str]:
    """A character for each of the 256 bytes, as byte-level BPE writes them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def _write_tokenizer(folder: Path, model: dict[str, Any]) -> dict[str, int]:
    """Write a tokenizer of bytes, with the model's special tokens and its chat template; returns token -> id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = model.get("named", {})
    special = ["<pad>", *dict.fromkeys([*model["tokens"], *named.values()])]
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token=model["end"], extra_special_tokens=named
    )
    fast.chat_template = model["template"]
    fast.save_pretrained(folder)
    return fast.get_vocab()
