"""Write a model that lies in a Hugging Face directory as a GGUF file, which llama.cpp and Ollama run.

llama.cpp's own converter knows more families, but it is a script of its repository: the `gguf` package has the writer, the
quantisation and the names of tensors, and no conversion.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import gguf
import numpy as np

from ..errors import UserError
from ..errors.disk import writing
from . import gguf_tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

# Name of a format -> how matrices are written; vectors, which are norms and biases, stay F32.
KINDS = {"F16": gguf.GGMLQuantizationType.F16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"F16": gguf.LlamaFileType.MOSTLY_F16, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}


class Family(NamedTuple):
    """interleaved: rope turns pairs of neighbouring dimensions in llama.cpp, and in Transformers those of two halves"""

    architecture: gguf.MODEL_ARCH
    interleaved: bool = False


# model_type of Transformers -> how llama.cpp has it.
FAMILIES = {
    "llama": Family(gguf.MODEL_ARCH.LLAMA, interleaved=True),
    "qwen2": Family(gguf.MODEL_ARCH.QWEN2),
    "qwen3": Family(gguf.MODEL_ARCH.QWEN3),
}


class About(NamedTuple):
    """What a file says of its model: its name, that of its base, and the licence as SPDX has it ("": unknown)."""

    name: str
    base: str = ""
    licence: str = ""


def cure_by_converter(folder: Path, exported: bool) -> str:
    """Return the command of llama.cpp's converter for `folder`, after the one that writes it where it is not there yet."""
    convert = f"`python convert_hf_to_gguf.py {folder} --outtype f16` in a clone of llama.cpp, which knows more"
    return convert if exported else f"leave --gguf out and merge the adapters (--merge); then {convert}"


def check_config(config: "PreTrainedConfig", place: str, cure: str) -> Family:
    """Return the family of a model. Raises UserError where llama.cpp would compute another model than this one."""

    def refuse(problem: str) -> UserError:
        return UserError(place, f"--gguf cannot write this model: {problem}", cure)

    if config.model_type not in FAMILIES:
        raise refuse(f"its family is {config.model_type!r}, and {', '.join(FAMILIES)} can be written")
    family = FAMILIES[config.model_type]
    if config.hidden_act != "silu":
        raise refuse(f"its activation is {config.hidden_act!r}")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        raise refuse("its projections have biases (attention_bias, mlp_bias)")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise refuse("some layers see a sliding window only")
    rope = config.rope_parameters
    known = {
        "default": set(),
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
        "yarn": {"factor", "original_max_position_embeddings"},
    }
    kind = rope.get("rope_type", "default")
    if kind not in known or (kind == "llama3" and not family.interleaved):
        raise refuse(f"its rotary embedding is {kind!r}")
    odd = {key for key, value in rope.items() if value is not None} - known[kind] - {"rope_type", "rope_theta"}
    if odd:
        raise refuse(f"its rotary embedding has {', '.join(sorted(odd))}")
    return family


def write(folder: Path, file: Path, kind: str, about: About) -> None:
    """Write the model in `folder` to `file`, its matrices in a format of KINDS. Memory holds one matrix at a time.

    Raises UserError where the model or its tokenizer cannot be written, or a weight is beyond F16's range; no file is left then.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    cure = cure_by_converter(folder, exported=True)
    # No family that can be written has code of its own.
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    family = check_config(config, str(folder), cure)
    words = gguf_tokenizer.vocabulary(tokenizer, config.vocab_size, str(folder), cure)
    generation = GenerationConfig.from_pretrained(folder)
    partial = file.with_name(f".{file.name}")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[family.architecture])
    try:
        with writing(file):
            _add_about(writer, about, kind)
            _add_config(writer, config)
            _add_words(writer, words, tokenizer, generation)
            _write_tensors(writer, folder, config, family, kind)
            writer.close()
            partial.replace(file)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


def _add_about(writer: gguf.GGUFWriter, about: About, kind: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(about.name)
    if about.licence:
        writer.add_license(about.licence.lower())
    if about.base:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, about.base)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_config(writer: gguf.GGUFWriter, config: "PreTrainedConfig") -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = _head_dim(config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _head_dim(config: "PreTrainedConfig") -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _add_words(
    writer: gguf.GGUFWriter,
    words: gguf_tokenizer.Vocabulary,
    tokenizer: "PreTrainedTokenizerBase",
    generation: "GenerationConfig",
) -> None:
    writer.add_tokenizer_model("gpt2")  # llama.cpp's name of byte-level BPE
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_eos_token(words.add_eos)
    ends = generation.eos_token_id if isinstance(generation.eos_token_id, list) else [generation.eos_token_id]
    turn = [end for end in ends if end not in (None, tokenizer.eos_token_id)]
    if turn:
        writer.add_eot_token_id(turn[0])
    template = tokenizer.chat_template
    if isinstance(template, dict):
        named = [{"name": name, "template": gguf_tokenizer.without_marks(text)} for name, text in template.items()]
        writer.add_chat_template(named)
    elif template:
        writer.add_chat_template(gguf_tokenizer.without_marks(template))


def _write_tensors(
    writer: gguf.GGUFWriter, folder: Path, config: "PreTrainedConfig", family: Family, kind: str
) -> None:
    names = gguf.get_tensor_name_map(family.architecture, config.num_hidden_layers)
    factors = _rope_factors(config)
    if factors is not None:
        name = f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]}.weight"
        writer.add_tensor_info(name, factors.shape, factors.dtype, factors.nbytes)
    for name, shape, _ in _tensors(folder, config):
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            problem = f"--gguf cannot write this model: llama.cpp has no name for its tensor {name}"
            raise UserError(str(folder), problem, cure_by_converter(folder, exported=True))
        form = _form(shape, kind)
        size = 4 if form == gguf.GGMLQuantizationType.F32 else 2
        nbytes = int(np.prod(shape)) * size
        if form == gguf.GGMLQuantizationType.Q8_0:
            nbytes = int(np.prod(gguf.quants.quant_shape_to_byte_shape(tuple(shape), form)))
        writer.add_tensor_info(mapped, shape, np.dtype(np.float32), nbytes, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for name, shape, load in _tensors(folder, config):
        values = load()
        if family.interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _interleave(values, _head_dim(config))
        with np.errstate(over="ignore", invalid="ignore"):
            written = gguf.quants.quantize(values, _form(shape, kind))
        if not np.isfinite(written if written.dtype == np.float16 else values).all():  # blocks of Q8_0 do not show it
            problem = f"{name} has a weight beyond F16's range, 65504, or one that is not finite"
            raise UserError(str(folder), problem, "write bf16: `--outtype bf16` of llama.cpp's convert_hf_to_gguf.py")
        writer.write_tensor_data(written)


def _form(shape: list[int], kind: str) -> gguf.GGMLQuantizationType:
    """Return how a tensor of this shape is written. Rows that are not whole blocks of 32 stay F16, as llama.cpp has it."""
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    whole = shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0] == 0
    return KINDS[kind] if whole else gguf.GGMLQuantizationType.F16


def _tensors(folder: Path, config: "PreTrainedConfig") -> Iterator[tuple[str, list[int], Callable[[], np.ndarray]]]:
    """Yield name, shape and a function that loads it in fp32 of each tensor in the directory."""
    import torch
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue  # llama.cpp takes the embeddings where there is no output.weight
                load = lambda file=file, name=name: file.get_tensor(name).to(torch.float32).numpy()  # noqa: E731
                yield name, file.get_slice(name).get_shape(), load


def _interleave(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Return [heads x head_dim, hidden] with the rows of each head's two halves in turn."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def _rope_factors(config: "PreTrainedConfig") -> np.ndarray | None:
    """Return what Llama 3's scaling divides each of the head_dim / 2 frequencies by, or None where there is no such scaling."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** (-np.arange(0, _head_dim(config), 2, dtype=np.float64) / _head_dim(config))
    return (plain / scaled.numpy()).astype(np.float32)
