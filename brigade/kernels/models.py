"""Models and samples to prove and time paths with: the recipe's architecture made small, or one layer of each kind."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..errors import first_line
from ..train import upstream
from ..train.data.collate import ABOUT, Collate, Layout, key_places
from ..train.data.store import IGNORED
from ..train.distributed.process import this_process
from ..train.model import attention, packed_samples, per_layer, sample_by_sample
from ..train.model.attention import NEEDS_CUMULATIVE_LENGTHS, SAMPLE_BY_SAMPLE
from ..train.model.tiny import TINY, shrink
from .paths import Row

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

# The tokens of each sample, just below and above the kernels' tiles of 64 and 128; the samples in each row; and how many tokens
# some of them may share with the sample before, with which they begin: of the second and the last pair of a row.
LENGTHS = (200, 310, 3, 64, 2, 17, 129, 65)
PACKED = ([0, 1, 2], [3], [4, 5, 6, 7])
SHARED = np.array([0, 100, 0, 0, 0, 0, 0, 49])
SEED = 3
# A tiny model would hide a window longer than its samples, or a cap far above its scores. With these values, an attention that
# leaves such a part out is far off.
SHARPENED = {"sliding_window": 48, "attn_logit_softcapping": 1.0, "attention_chunk_size": 64}
OWN_CODE = "brigade_own_code"  # the key of a config whose class is not Transformers'
# Head sizes are kept as in the model itself: kernels depend on them.
HEADS = ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Lengths in parts of max_length, which differ as in chats: of the samples that fill a row, and of single samples.
SHARES, ALONE = (0.4, 0.05, 0.3, 0.1, 0.15), (1.0, 0.4, 0.7, 0.2)


class Told(NamedTuple):
    """How a model learns of the samples in a row: its attention; packed_samples.LENGTHS, POSITIONS, MASKS or MASK; and whether
    some share what they begin with."""

    how: str
    by: str
    shares: bool = False


def way_to_tell(config: Row, how: str, shares: bool = False) -> tuple[Told, str]:
    """Return how a model with this attention learns of the samples in a row, and why it does not where they share something;
    otherwise it always does, because no other model is tried."""
    way, why = packed_samples.LENGTHS, ""
    if shares:
        way, why = packed_samples.way_of_sharing(described(config), how)
    elif how not in NEEDS_CUMULATIVE_LENGTHS:
        way, _ = packed_samples.method_of(described(config), "eager")
    return Told(how, way, shares), why


def for_proof(config: Row) -> Row:
    """The architecture with few, narrow layers, but with its own head size and grouping of heads."""
    tiny = shrink(config)
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    size = head_size(config)
    if heads:
        ratio = heads // (shared or heads)
        tiny["num_attention_heads"] = wanted = max(4, 2 * ratio) if ratio <= 8 else ratio
        if shared:
            tiny["num_key_value_heads"] = wanted // ratio
        if size:
            tiny["hidden_size"] = wanted * size if not config.get("head_dim") else wanted * 32
    if config.get("head_dim"):
        tiny["head_dim"] = config["head_dim"]
    if config.get("n_embd") and size:  # GPT-2's names
        tiny["n_embd"] = TINY["n_head"] * size
    tiny |= {key: config[key] for key in HEADS if config.get(key)}
    own = per_layer.cut(config, per_layer.representatives(config, 2)).get(per_layer.CHANGES) or {}
    for layer, change in own.items():
        tiny[per_layer.CHANGES][layer] |= {key: change[key] for key in ("head_dim", *HEADS) if key in change}
    positions = "max_position_embeddings"
    if config.get("rope_parameters") and config.get(positions):  # stretched positions have to fit into it
        tiny[positions] = config[positions]
    tiny |= {key: value for key, value in SHARPENED.items() if config.get(key)}
    if has_experts(config):  # all of them: a choice that rounding turns would hide every other error
        tiny["num_experts_per_tok"] = TINY["num_experts"]
    tiny |= {key: 0.0 for key, value in config.items() if "drop" in key and isinstance(value, float)}
    return tiny | {"initializer_range": 0.1, "vocab_size": 512}


def has_experts(config: Row) -> bool:
    """Whether a model is a mixture of experts."""
    return any(config.get(key) for key in EXPERTS)


def for_timing(config: Row) -> Row:
    """One layer of each kind in the recipe's own widths, with a small vocabulary and few experts."""
    config = config | ({"first_k_dense_replace": 0} if config.get("first_k_dense_replace") else {})
    keys = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    few: Row = {key: TINY[key] for key in (*EXPERTS, "num_experts_per_tok", "n_group", "topk_group") if config.get(key)}
    few |= per_layer.cut(config, per_layer.representatives(config))
    left_out = ("quantization_config", "dtype", "torch_dtype", "architectures", "_name_or_path", "transformers_version")
    return {key: value for key, value in config.items() if key not in left_out} | few | {key: TINY[key] for key in keys}


def unsupported(config: Row, name: str, row: Row) -> str:
    """Why the model's own class does not take an attention; "" where it does. row: the path's, of paths.yaml"""
    known = described(config)
    model = upstream.model_class(known)
    lacks = [feature for feature in row.get("wants", ()) if not upstream.supports(model, feature)]
    if name == attention.VARLEN:
        lacks += [key for key in attention.BEYOND_VARLEN if config.get(key)]
    return f"the model has {'no ' + lacks[0] if lacks[0] in row['wants'] else lacks[0]}" if lacks else ""


def head_size(config: Row) -> int | None:
    """The head size of queries and keys; None where the config does not tell."""
    width = config.get("hidden_size") or config.get("n_embd")
    heads = config.get("num_attention_heads") or config.get("n_head")
    return config.get("head_dim") or (width // heads if width and heads else None)


def described(config: Row) -> "PreTrainedConfig":
    """Return a new config object, because a model writes its attention into it."""
    from transformers import AutoConfig

    values = {key: value for key, value in config.items() if key not in ("model_type", "dtype", "torch_dtype")}
    return AutoConfig.for_model(config["model_type"], **values)


def family(config: Row) -> str:
    """The features that a kernel depends on, in words: "qwen3, head size 128, 32 heads to 8, sliding window"."""
    heads, shared = config.get("num_attention_heads") or config.get("n_head"), config.get("num_key_value_heads")
    words = [str(config.get("model_type")), f"head size {head_size(config)}"]
    words += [f"{heads} heads to {shared}" if shared and shared != heads else f"{heads} heads"]
    words += [key.replace("_", " ") for key in SHARPENED if config.get(key)]
    words += ["sinks"] * (config.get("model_type") == "gpt_oss")
    return ", ".join(words)


def build(
    config: Row, how: str, dtype: torch.dtype, device: torch.device | str, exact: bool = True
) -> "PreTrainedModel":
    """A model with random weights, in training mode. exact: the weights are the same on every device and in every dtype, because
    bf16 can hold them"""
    from transformers import AutoModelForCausalLM

    def made(how: str, dtype: torch.dtype) -> "PreTrainedModel":
        given = {"trust_remote_code": False, "attn_implementation": how, "dtype": dtype}
        return AutoModelForCausalLM.from_config(described(config), **given)

    attention.register()
    with torch.device("cpu" if exact else device):
        model = made(how, dtype)
    if exact:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            # Norms begin as ones, which would hide what they do.
            drawn = {
                name: (value + 0.05 * torch.randn_like(value)).bfloat16() if value.is_floating_point() else value
                for name, value in made("eager", torch.float32).state_dict().items()
            }
        model.load_state_dict(drawn)
    sample_by_sample.divide(model)
    return model.to(device).train()


def samples(vocabulary: int, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Random samples with masked parts, as a store of prepared data gives them."""
    draw = np.random.default_rng(SEED)
    made = []
    for length in lengths:
        ids = draw.integers(3, vocabulary, length)
        labels = np.where(draw.random(length) < 0.6, ids, IGNORED)
        labels[0], labels[1] = IGNORED, ids[1]  # nothing predicts the first token; each sample has a label
        made.append({"input_ids": ids.astype(np.int32), "labels": labels, "lengths": np.array([length])})
    return made


def pairs(samples: list[Row]) -> list[Row]:
    """The same samples, of which some begin as the one before does, without labels there: with SHARED tokens, and the one that
    predicts both answers."""
    for number in np.flatnonzero(SHARED):
        prompt = SHARED[number] + 1
        for sample in samples[number - 1 : number + 1]:
            sample["input_ids"][:prompt] = samples[number - 1]["input_ids"][:prompt]
            sample["labels"][:prompt] = IGNORED
            sample["labels"][prompt] = sample["input_ids"][prompt]
    return samples


def whole_rows(samples: list[Row]) -> list[Row]:
    """Each row of PACKED as one sample."""
    return [{key: np.concatenate([samples[number][key] for number in row]) for key in samples[0]} for row in PACKED]


def batch(
    samples: list[Row], rows: Sequence[Sequence[int]], told: Told, device: torch.device | str, as_a_run: bool = False
) -> Row:
    """Samples packed into rows as train.py's collator gives them to a model.

    rows: the numbers of the samples in each row; as_a_run: pad them where a run would, else always lay them end to end
    """
    joined = [{key: np.concatenate([samples[i][key] for i in members]) for key in samples[0]} for members in rows]
    several = any(len(members) > 1 for members in rows)
    squares, cumulative = as_a_run and told.how not in SAMPLE_BY_SAMPLE, told.how in NEEDS_CUMULATIVE_LENGTHS
    collate = Collate(0, Layout(True, several, cumulative, squares=squares, shares=told.shares))
    made = collate((joined, None))
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in made.items()}


def forward(model: "PreTrainedModel", inputs: Row, told: Told, labels: bool) -> "CausalLMOutputWithPast":
    """A forward pass as the Trainer makes it. labels: for the loss"""
    about = inputs[ABOUT]
    left_out = (ABOUT,) if labels else (ABOUT, "labels", "shift_labels", "logits_to_keep")
    given = {key: value for key, value in inputs.items() if key not in left_out}
    if told.by in packed_samples.BY_MASKS and "attention_mask" not in given:
        given["attention_mask"] = packed_samples.masks(model.config, given["position_ids"], model.dtype, told.by)
    if labels:
        given["num_items_in_batch"] = about.supervised
    with this_process.forward_pass.told(about.end_to_end):
        return model(**given, use_cache=False)


def of_samples(logits: torch.Tensor, shares: bool) -> list[torch.Tensor]:
    """Logits of samples end to end, (tokens, vocabulary), as those of each sample: what it shares lies in the one before."""
    if shares:
        places = key_places(np.array(LENGTHS) - SHARED, SHARED)
        logits = logits[torch.from_numpy(places).to(logits.device)]
    return list(logits.split(LENGTHS))


def timed_samples(shapes: Row, vocabulary: int) -> tuple[list[Row], list[list[int]]]:
    """(samples, the numbers of those in each row), which fill a micro-batch as the recipe's own samples do."""
    longest, count = shapes["max_length"], shapes["micro_batch"]
    parts = SHARES if shapes["packing"] else (None,)
    lengths = [max(2, int(longest * (share or ALONE[row % len(ALONE)]))) for row in range(count) for share in parts]
    rows = [list(range(row * len(parts), (row + 1) * len(parts))) for row in range(count)]
    return samples(vocabulary, lengths), rows


def as_json(config: "PreTrainedConfig") -> Row:
    """The values of a config object's text part, as JSON has them."""
    text = config.get_text_config()
    values = json.loads(json.dumps(text.to_dict() | {"model_type": text.model_type}, default=str))
    return values if type(text).__module__.startswith("transformers.") else values | {OWN_CODE: type(text).__name__}


def unprovable(config: Row) -> str:
    """Why no path of this model can be compared; "" where one can. config: as from as_json()"""
    if config.get(OWN_CODE):
        return f"{config[OWN_CODE]} has code of its own (trust_remote_code), which no proof runs"
    try:
        known = described(config)
    except (ValueError, KeyError) as error:
        return f"Transformers cannot build it from its config: {first_line(error)}"
    method, why = packed_samples.method_of(known, "eager")
    return f"packed samples of this model see each other: {why}" if method == packed_samples.NOTHING else ""
