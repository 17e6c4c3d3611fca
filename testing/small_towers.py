"""Small models of images and texts of the planner's tests, by what their config.json says, and what is counted of them."""

from typing import Any

from brigade.plan.costs.images import Asked, described_with_images
from brigade.plan.costs.job import Job

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 500}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": 64, "patch_size": 8}  # fmt: skip
PIXTRAL = {"model_type": "pixtral", **VISION, "head_dim": 16}
QWEN = {"depth": 3, "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "out_hidden_size": 64}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
SMALL: dict[str, Any] = {
    "qwen2_5_vl": {"text_config": TEXT, "vision_config": QWEN | {"fullatt_block_indexes": [1]}},
    "qwen3_vl": {"text_config": TEXT, "vision_config": QWEN | {"deepstack_visual_indexes": [0, 2]}},
    "qwen3_vl_moe": {"text_config": TEXT | EXPERTS, "vision_config": QWEN | {"deepstack_visual_indexes": [0]}},
    "qwen3_5": {"text_config": TEXT | HYBRID, "vision_config": QWEN},
    "qwen3_5_moe": {"text_config": TEXT | HYBRID | SHARED, "vision_config": QWEN},
    "gemma3": {"text_config": TEXT, "vision_config": VISION | {"vision_use_head": False}, "mm_tokens_per_image": 16},
    "gemma4": {"text_config": TEXT, "audio_config": None, "vision_config": {
        "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 16, "patch_size": 8}},
    "smolvlm": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION},
    "internvl": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": VISION | {
        "image_size": [64, 64], "patch_size": [8, 8]}},
    "llava_onevision": {"text_config": {"model_type": "qwen2", **TEXT}, "vision_config": {
        "model_type": "siglip_vision_model", "vision_use_head": False, **VISION}},
    "llava/pixtral": {"text_config": {"model_type": "mistral", **TEXT}, "vision_feature_layer": -1,
                      "vision_feature_select_strategy": "full", "vision_config": PIXTRAL},
    "mistral3": {"text_config": {"model_type": "mistral", **TEXT}, "vision_config": PIXTRAL},
    "llama4": {"text_config": TEXT | {"intermediate_size_mlp": 96, "num_local_experts": 4, "no_rope_layers": [1, 0]},
               "vision_config": VISION | {"intermediate_size": 256, "projector_input_dim": 80, "projector_output_dim": 80,
                                          "vision_output_dim": 80}},
}  # fmt: skip


def config(kind: str) -> dict[str, Any]:
    """Return a small model's config.json. kind: its key in towers.yaml"""
    return {"model_type": kind.partition("/")[0], **SMALL[kind]}


def shown(
    kind: str, per_sample: float = 1.0, size: tuple[int, int] = (640, 480), trained: tuple[str, ...] = ()
) -> tuple[Any, Any]:
    """Return the shape of a small model, and its images of this size. trained: parts of the model"""
    return described_with_images(config(kind), "x", kind, Asked(per_sample, size), trained)


def job(kind: str = "gemma3", trained: tuple[str, ...] = (), **options: Any) -> Job:
    """Return a job with one image in each sample. options: of Job"""
    shape, images = shown(kind, trained=trained)
    return Job(shape, **({"sequence": 8192, "images": images, "loss": "released"} | options))
