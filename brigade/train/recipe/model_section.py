"""The keys under a recipe's `model:`. This module imports no torch."""

from typing import Literal

from pydantic import Field

from .section import Section
from .value_types import (
    Alphas,
    ExpertParameters,
    LinearLayers,
    ModelParts,
    NewTokens,
    Positive,
    Ranks,
    Tokens,
    Words,
    Yarn,
)


class ModelSection(Section):
    """The model, its tokenizer, and whether all its weights are trained or adapters."""

    model_name_or_path: str
    """A name on the Hub, a local directory in Hugging Face format, a GGUF file, or `smollm2-135m`, which is a package. A
    directory of adapters means their base, and that training goes on with them."""
    revision: str | None = None
    """A branch, tag or commit of the model on the Hub."""
    from_scratch: bool = False
    """Build random weights from the directory's config.json (with the run's seed) instead of loading any."""
    tokenizer_name_or_path: str | None = None
    """Default: the model's own. `python-docs`: the byte-level BPE that is trained with the built-in data."""
    add_tokens: NewTokens = []
    """Texts that become tokens of their own (`<call>,</call>`), or none. The model gets a row for each in both of its ends, which
    begins as the mean of those that it had."""
    add_special_tokens: NewTokens = []
    """Likewise special tokens, which decoding leaves out. A row that spells one out means it, in any role."""
    attn_implementation: Literal[
        "auto", "varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """auto: varlen on a CPU; on a GPU the fastest that is proven there (docs/gpu.md), else FlashAttention 2 where it is
    installed, else varlen where torch has its kernel, else sdpa. varlen: scaled dot products sample by sample, so that packed
    samples cost no attention to each other."""
    trust_remote_code: bool = False
    """Run the Python files that come with the model. In a file it says that the model needs them; only the flag permits it."""
    processor_name_or_path: str | None = None
    """With images: where the files of the model's processor lie. Default: the model's own."""
    freeze_vision_tower: bool = True
    """With images: leave the vision tower as it is. With adapters lora_parts decides."""
    freeze_projector: bool = False
    """With images: leave what turns the tower's features into embeddings as it is. With adapters lora_parts decides."""
    rope_parameters: Yarn | None = None
    """`{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}` stretches positions to the product."""
    use_peft: bool = False
    """Train LoRA adapters (PEFT) on frozen weights instead of all weights."""
    adapter_name_or_path: str | None = None
    """Adapters to go on with: a directory or a name on the Hub. Their adapter_config.json decides ranks, scales and targets."""
    lora_r: Positive = 16
    """The adapters' rank (arXiv 2106.09685)."""
    lora_alpha: float = Field(32, gt=0)
    """Adapters are scaled by lora_alpha / lora_r; with use_rslora by lora_alpha / sqrt(lora_r)."""
    rank_pattern: Ranks = {}
    """Other ranks for layers by name, or by a regular expression for its end: `{down_proj: 8, "layers\\.[0-3]\\..*": 32}`. The
    first that fits counts."""
    alpha_pattern: Alphas = {}
    """Other values of lora_alpha, likewise."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is left out while it is trained."""
    lora_target_modules: LinearLayers = "all-linear"
    """Names of linear layers (`q_proj,v_proj`), regular expressions for the ends of names (`layers\\.[0-3]\\..*_proj`), or
    all-linear: every one but the output layer."""
    lora_parts: ModelParts = ["language"]
    """With images: the parts that get adapters, of language, projector and vision_tower (`language,projector`)."""
    lora_target_parameters: ExpertParameters = []
    """Parameters of no linear layer that get adapters too (PEFT's target_parameters): names (`experts.gate_up_proj`), or experts:
    the weights of every layer's experts, which a mixture of experts holds fused."""
    lora_modules_to_save: Words = []
    """Modules that are trained whole besides the adapters: `embed_tokens,lm_head`, or none. For the chat tokens of a base model
    trainable_token_indices costs far less."""
    trainable_token_indices: Tokens = []
    """Tokens whose embeddings are trained besides the adapters, in both ends of the model: texts or ids
    (`<|im_start|>,<|im_end|>`), or none. What a base model has not learned of a chat (docs/methods.md)."""
    use_rslora: bool = False
    """Rank-stabilised scaling (arXiv 2312.03732)."""
    loraplus_lr_ratio: float | None = Field(None, gt=0)
    """LoRA+ (arXiv 2402.12354): the matrices B learn at so many times learning_rate, and DoRA's magnitudes with them."""
    use_dora: bool = False
    """Weight-decomposed adapters (arXiv 2402.09353)."""
    load_in_4bit: bool = False
    """QLoRA (arXiv 2305.14314): the frozen weights in 4 bits, by bitsandbytes."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    use_bnb_nested_quant: bool = True
    """Quantise the quantisation constants as well: 0.37 bits less per parameter."""

    @property
    def adds_tokens(self) -> bool:
        """Whether the tokenizer gets tokens that it may lack."""
        return bool(self.add_tokens or self.add_special_tokens)
