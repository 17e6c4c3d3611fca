"""What this host lacks for an attention that a recipe names."""

from collections.abc import Iterator

from ..recipe.flags import Settings


def lacking(settings: Settings, gpu: bool) -> Iterator[tuple[str, str, str]]:
    """Key, problem and cure of each mistake. gpu: whether this host has one"""
    training, attention = settings.recipe.training, settings.recipe.model.attn_implementation
    if attention == "flex_attention" and not gpu:
        yield "attn_implementation", "flex_attention has no backward pass on a CPU", "use sdpa or eager"
    if not attention.startswith("flash_attention"):
        return
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    package, there = "pip install flash-attn", is_flash_attn_2_available
    if attention.endswith("3"):
        package, there = "install flash-attn-3, from hopper/ of Dao-AILab/flash-attention", is_flash_attn_3_available
    if not gpu:
        yield "attn_implementation", f"{attention} needs a GPU, and this host has none", "use sdpa or eager"
    if not (training.bf16 or training.fp16):
        problem = f"{attention} computes in bf16 or fp16, but the recipe says fp32"
        yield "attn_implementation", problem, "set bf16, or use sdpa"
    if not there():
        yield "attn_implementation", f"{attention} is not installed on this host", f"{package}, or use sdpa"
