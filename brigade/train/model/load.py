"""The model and its weights: from the Hub, from a local directory, or built from a config.json with random weights."""

import copy
import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import UserError
from ...errors.tables import Fields
from .. import upstream
from ..distributed.consistency import WEIGHTS
from ..host.cache import cache_directory, once
from ..host.hub import refusal
from ..recipe.objectives import objective_of
from ..recipe.settings import Settings
from ..upstream import fsdp2, model_loading
from ..upstream.experts import biases_in_fp32, compute_as_autocast_says
from . import attention, base_weights, grown, parts, scores
from .base_weights import check_finite, of_two_matrices
from .config_json import published_quantization
from .location import load_config, location
from .rope import stretch
from .sizes import model_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin


def weights(settings: Settings, config: "PreTrainedConfig") -> str:
    """Return where load_model takes the weights from. Call it before TrainingArguments exist: see materialise."""
    if settings.recipe.model.from_scratch:
        recipe = settings.recipe
        return materialise(config, recipe.training.seed, recipe.model.trust_remote_code, recipe.data.images)
    source = location(settings)
    if not Path(source).is_dir():
        source = download(source, settings)
    if not any(any(Path(source).glob(pattern)) for pattern in WEIGHTS):
        problem = f"{source!r} holds a config, but no weights ({' or '.join(WEIGHTS)})"
        cure = "name a model with weights, or set from_scratch: true"
        raise UserError(settings.place("model_name_or_path"), problem, cure)
    base_weights.check(source, settings.recipe.model.trust_remote_code, settings.recipe.data.images)
    return grown.with_rows(settings, source, location(settings)) if settings.recipe.model.adds_tokens else source


def download(name: str, settings: Settings) -> str:
    """Return the local snapshot of a model on the Hub. Raises UserError at once, not during loading, where it is unavailable."""
    from huggingface_hub import snapshot_download

    folder = ""
    try:
        for pattern in WEIGHTS:  # the first that it has: an older model has both, and they are the same
            folder = snapshot_download(
                name,
                revision=settings.recipe.model.revision,
                allow_patterns=[pattern, "*.json", "*.py"],
                ignore_patterns=["consolidated*", "original/*"],  # the same once more, in their maker's own format
            )
            if any(Path(folder).glob(pattern)):
                break
    except Exception as error:
        why, cure = refusal(error, name, revision=settings.recipe.model.revision)
        problem = f"the weights of {name!r} cannot be had: {why}"
        cure = cure or "check the name, the network and HF_TOKEN"
        raise UserError(settings.place("model_name_or_path"), problem, cure) from None
    return folder


def materialise(config: "PreTrainedConfig", seed: int, trust_remote_code: bool = False, images: bool = False) -> str:
    """Return a directory in the cache with random weights for `config`, the same for the same seed. images: with a vision tower

    Random weights go through a directory so that every strategy loads them as it would load a real model: built in
    place, they would be other ones under ZeRO-3, which draws random numbers in an order of its own. Call it before
    TrainingArguments exist, for Transformers partitions whatever it builds while a ZeRO-3 configuration lives.
    """
    known = [config.to_dict(), seed, torch.__version__, "tied by save_pretrained", *(["images"] if images else [])]
    text = json.dumps(known, sort_keys=True, default=str)
    folder = cache_directory("models") / hashlib.sha256(text.encode()).hexdigest()[:16]
    from safetensors.torch import save_file

    def build(aside: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            own = copy.deepcopy(config)  # the model writes its dtype there
            kind = upstream.auto_class_for(images)
            model = kind.from_config(own, dtype=torch.float32, trust_remote_code=trust_remote_code)
        model.config.save_pretrained(aside)
        # Not save_pretrained: in a process group only rank 0 writes, and each host needs its own. Of tied weights the
        # same name stays, by which a model without the other end (a reward model) finds them.
        tied = model.all_tied_weights_keys
        state = {name: each for name, each in model.state_dict().items() if name not in tied}
        save_file(state, aside / "model.safetensors", metadata={"format": "pt"})

    return str(once(folder, build))


def load_model(
    settings: Settings, source: str, dtype: torch.dtype, implementation: str, **options: object
) -> "PreTrainedModel":
    """Load the model from `source` in `dtype`, with this implementation of attention (attention.choose). Under ZeRO-3
    TrainingArguments must exist by now: the model is then loaded shard by shard, and is never whole on one rank."""
    attention.register()
    how = attention.of_parts(implementation) if settings.recipe.data.images else implementation
    return load_base(settings, source, dtype, attn_implementation=how, **options)


def load_base(settings: Settings, source: str, dtype: torch.dtype, **options: object) -> "PreTrainedModel":
    """Load the model without adapters: in `dtype`, or in 4 bits with `dtype` for the computation.

    options: further ones of from_pretrained; model_class among them: a class instead of the config's own

    Under FSDP2 one rank sends all others their shards (upstream/fsdp2.py: send_weights), so that the model on this rank may have
    places in which nothing is written: on all ranks where the sender reads weights one by one (arrive_one_by_one), else on all
    but the first.
    """
    from transformers.distributed.fsdp import is_fsdp_enabled

    compute_as_autocast_says()
    # In 4 bits Accelerate leaves each rank's weights where they are (utils/fsdp_utils.py: model_has_params4bit).
    shards = is_fsdp_enabled() and not settings.recipe.model.load_in_4bit
    own = not shards or not (arrive_one_by_one(settings, source) or torch.distributed.get_rank())
    if not own:
        options["device_map"] = "meta"
    kind, how, dequantised = _reading(settings, source, dtype, own, options)
    biases = biases_in_fp32 if settings.recipe.training.router_bias_update_rate else nullcontext
    of_rank = fsdp2.every_rank_loads if own else fsdp2.sent_by_another
    with upstream.own_frozen_parameters(), biases(), of_rank():
        model = kind.from_pretrained(source, **how)
    if not own:
        fsdp2.hold_places(model)
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if one not in model.all_tied_weights_keys:  # files that base_weights.check() does not read (.bin)
            raise of_two_matrices(source, one, other)
    check_finite(model if own else None, source)
    parts.freeze(model, settings)
    upstream.fix_loaded(model, dequantised)
    return model


def arrive_one_by_one(settings: Settings, source: str) -> bool:
    """Whether FSDP2's ranks get the base model's weights only once they have their shards (read_weights): unless adapters begin
    with numbers of the base's, or are trained beside copies of it. base_weights.check() reads *.safetensors alone."""
    section = settings.recipe.model
    copies = (section.use_dora, section.lora_modules_to_save, section.trainable_token_indices)
    begins_with_numbers = any(copies) or objective_of(settings.recipe.training).scores
    safe = any(Path(source).glob("*.safetensors"))
    return safe and not section.load_in_4bit and not (section.use_peft and begins_with_numbers)


def read_weights(
    settings: Settings, source: str, dtype: torch.dtype, take: Callable[[str, torch.Tensor], None], **options: object
) -> set[str]:
    """Call take(name, weight) for each weight of the model that load_base would load, one after the other: memory never holds
    more of it than one layer's matrix, or what becomes one (a mixture's experts). Return the names of all."""
    kind, how, _ = _reading(settings, source, dtype, True, options)
    taken: set[str] = set()

    def once(name: str, value: torch.Tensor) -> None:
        taken.add(name)
        take(name, value)

    with torch.random.fork_rng(devices=[]), fsdp2.every_rank_loads(), model_loading.handed_to(once):
        model = kind.from_pretrained(source, **how)
    state = model.state_dict()
    for name, value in state.items():
        if name not in taken and not value.is_meta:  # in no file: the head of a reward model
            once(name, value)
    return {*state}


def _reading(
    settings: Settings, source: str, dtype: torch.dtype, own: bool, options: Fields
) -> tuple[type["PreTrainedModel"], Fields, bool]:
    """Return (the class whose from_pretrained reads the model, what it is told, whether it dequantises).

    own: whether this rank gets weights; options: further ones for from_pretrained, and model_class
    """
    from transformers import AutoConfig

    section, options = settings.recipe.model, {**options}

    def config() -> "PreTrainedConfig":
        known = options.get("config")
        return known or AutoConfig.from_pretrained(source, trust_remote_code=section.trust_remote_code)

    quantization = quantization_config(settings, source, dtype)
    dequantised = quantization is not None and not section.load_in_4bit
    if dequantised and not own:  # without weights there is nothing to dequantise
        quantization, dequantised = None, False
        options["config"] = config()
        del options["config"].quantization_config
    if section.rope_parameters:
        options["config"] = stretch(settings, config())
    if objective_of(settings.recipe.training).scores:
        options |= scores.loading(source, config(), settings.place("model_name_or_path"))
    kind = options.pop("model_class", None) or model_class(settings)
    told = {"dtype": dtype, "trust_remote_code": section.trust_remote_code, "quantization_config": quantization}
    return kind, options | told, dequantised


def quantization_config(settings: Settings, source: str, dtype: torch.dtype) -> "QuantizationConfigMixin | None":
    """Return what from_pretrained is told about quantised weights: for a QLoRA run that computes in `dtype`, or for a model that
    was published in MXFP4 (gpt-oss); else None."""
    from transformers import BitsAndBytesConfig, Mxfp4Config

    section = settings.recipe.model
    if not section.load_in_4bit:
        # Transformers cannot train MXFP4 as it is (quantizers/quantizer_mxfp4.py: is_trainable), and keeps it so wherever the
        # `kernels` package is installed.
        return Mxfp4Config(dequantize=True) if published_quantization(Path(source)) == "mxfp4" else None
    images = settings.recipe.data.images
    return BitsAndBytesConfig(
        load_in_4bit=True,
        # None: all but the head. With images also the tower and the projector stay as they are, which have little of the memory.
        llm_int8_skip_modules=[*parts.beside_language(load_config(settings)), "lm_head"] if images else None,
        bnb_4bit_quant_type=section.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=section.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=dtype,
        # The container of the 4-bit values: FSDP2 and ZeRO-3 shard floating-point tensors, and accelerate would leave uint8 ones
        # whole on every rank (utils/fsdp_utils.py: fsdp2_prepare_model). The bits are the same.
        bnb_4bit_quant_storage=dtype,
    )
