"""A model's dimensions from a Hugging Face config.json. No torch."""

from collections.abc import Mapping
from dataclasses import replace

from ...errors import UserError, shown
from ...errors.tables import Document
from ...train.model.config_json import ALIASES
from .model_shape import FAMILIES, LLAMA, Family, ModelShape

PUBLISHED = "take the config.json published with the model"
LARGEST = 10**9  # no number of a config is above it
MOST_LAYERS = 10_000
# What a config class assumes where a published config leaves a number out.
DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
}
# By which Granite, Cohere and Falcon-H1 multiply their logits.
SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier")
BIASED_BY_CONFIG = ("llama", "granite")  # the model_types whose modelling code reads attention_bias and mlp_bias


def whole_number(config: Document, key: str, place: str, default: int | None = None) -> int:
    """The whole number above 0 at `key` or another of its names; `default` where there is none. Raises UserError at `place`."""
    for alias in (key, *ALIASES.get(key, ())):
        value = config.get(alias)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise UserError(f"{place}: {alias}", f"{value!r} is not a whole number above 0", "fix the config")
            if value > LARGEST:
                raise UserError(f"{place}: {alias}", f"it is above {LARGEST:,}, as no model's is", "fix the config")
            return value
    if default is None:
        raise UserError(f"{place}: {key}", "the config does not state it", PUBLISHED)
    return default


def kind_of(config: Document, place: str) -> tuple[str, Document]:
    """(model_type, the text model's config). Raises UserError at `place` where there is none."""
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise UserError(f"{place}: text_config", f"{shown(text)} is not keys and values", PUBLISHED)
    kind = text.get("model_type", config.get("model_type"))
    if not isinstance(kind, str):
        problem = "the config does not state it" if kind is None else f"{kind!r} is no name"
        raise UserError(f"{place}: model_type", problem, PUBLISHED)
    return kind, text


def shape_of(config: Document, place: str, name: str = "") -> ModelShape:
    """The dimensions that a config.json of one of FAMILIES states.

    Raises UserError at `place` for a field that is not there, or fields that contradict each other.
    """
    kind, text = kind_of(config, place)

    def number(key: str, default: int | None = None) -> int:
        return whole_number(text, key, place, DEFAULTS.get(kind, {}).get(key, default))

    def hold(holds: bool, key: str, problem: str) -> None:
        if not holds:
            raise UserError(f"{place}: {key}", problem, PUBLISHED)

    hold(kind in FAMILIES, "model_type", f"{kind!r} is none of {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[kind]
    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads")
    hold(layers <= MOST_LAYERS, "num_hidden_layers", f"{layers} are more than any model has")
    experts = number("num_experts", 0) if any(text.get(k) for k in ("num_experts", *ALIASES["num_experts"])) else 0
    ffn = number("intermediate_size", 4 * hidden if not family.gated else None)
    head_dim = number("head_dim", hidden // heads if hidden % heads == 0 else 0)
    undivided = f"{heads} heads do not divide the width {hidden}, and there is no head_dim"
    hold(head_dim > 0, "num_attention_heads", undivided)
    groups = number("num_key_value_heads", heads)
    hold(heads % groups == 0, "num_key_value_heads", f"{groups} do not divide {heads} attention heads")
    top_k = number("num_experts_per_tok") if experts else 0
    hold(top_k <= experts, "num_experts_per_tok", f"{top_k} are more than the {experts} experts")
    if kind in BIASED_BY_CONFIG:
        biased = bool(text.get("attention_bias"))
        family = replace(family, qkv_bias=biased, out_bias=biased, mlp_bias=bool(text.get("mlp_bias")))
    family = replace(family, scaled=scales_logits(text))
    window, windowed = windows(text, layers, place, family)
    shared = text.get("shared_expert_intermediate_size")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return ModelShape(
        name or str(config.get("_name_or_path") or kind),
        layers,
        hidden,
        ffn,
        heads,
        groups,
        head_dim,
        number("vocab_size"),
        tied=family.tied if tied is None else bool(tied),
        family=family,
        experts=experts,
        top_k=top_k,
        expert_ffn=number("moe_intermediate_size", ffn) if experts else 0,
        shared_ffn=number("shared_expert_intermediate_size") if experts and shared else 0,
        moe_layers=_moe_layers(text, layers, place) if experts else 0,
        window=window,
        windowed_layers=windowed,
        other=_vision(config.get("vision_config"), hidden, f"{place}: vision_config"),
    )


def scales_logits(text: Document) -> bool:
    """Return whether the model multiplies its logits by a number other than 1, as far as its config says."""
    return any(text.get(key) not in (None, 1) for key in SCALES)


def windows(text: Document, layers: int, place: str = "config.json", family: Family = LLAMA) -> tuple[int, int]:
    """The sliding window, and how many layers have it. Raises UserError where they contradict each other, or nothing tells which
    layers it is."""
    if not text.get("sliding_window") or not text.get("use_sliding_window", not family.window_asked):
        return 0, 0
    window, types = whole_number(text, "sliding_window", place), text.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers:
            what_it_is = f"has {len(types)} entries" if isinstance(types, list) else f"is {shown(types)}, not a list"
            raise UserError(f"{place}: layer_types", f"it {what_it_is}, and the model {layers} layers", PUBLISHED)
        return window, sum(kind == "sliding_attention" for kind in types)
    if family.window_asked:
        problem = "the config does not state it, and plan does not read which layers have the window from anything else"
        cure = 'write layer_types: "sliding_attention" or "full_attention" for each layer; or use_sliding_window: false'
        raise UserError(f"{place}: layer_types", problem, cure)
    pattern = whole_number(text, "sliding_window_pattern", place, family.full_every)
    return window, layers if pattern == 1 else layers - layers // pattern


def sparse_attention(config: Document) -> str:
    """What a config says of layers whose tokens attend to chosen ones only (DeepSeek-V3.2, arXiv 2512.02556, and those after it):
    "index_topk 2048", or ""."""
    text = config.get("text_config") or config
    keys = ("index_topk", "index_topk_blocks", "indexer_budget", "compress_rates")
    return next((f"{key} {shown(text[key])}" for key in keys if text.get(key)), "")


def _moe_layers(text: Document, layers: int, place: str) -> int:
    """How many layers have experts: `decoder_sparse_step` and `mlp_only_layers` as Qwen's configs have them."""
    step, dense = whole_number(text, "decoder_sparse_step", place, 1), text.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UserError(f"{place}: mlp_only_layers", f"{dense!r} is not a list of layers' numbers", PUBLISHED)
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _vision(vision: object, hidden: int, place: str) -> int:
    """Parameters of a SigLIP tower and its projection, which Gemma 3 carries beside its text model."""
    if not vision:
        return 0
    if not isinstance(vision, Mapping):
        raise UserError(place, f"{shown(vision)} is not keys and values", PUBLISHED)
    keys = ("hidden_size", "intermediate_size", "patch_size", "image_size", "num_hidden_layers")
    width, ffn, patch, image, layers = (whole_number(vision, key, place) for key in keys)
    layer = 4 * (width * width + width) + 2 * width * ffn + ffn + width + 4 * width
    embeddings = width * 3 * patch * patch + width + (image // patch) ** 2 * width
    return layers * layer + embeddings + 2 * width + width * hidden + width
