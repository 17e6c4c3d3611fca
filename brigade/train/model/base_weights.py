"""Whether a model's files are whole and hold its weights, before anything is loaded; and whether the weights are finite, then and
after a step.

Transformers fills a weight that its files lack with random numbers and only reports it, drops tensors that it does not know, and
under ZeRO-3 mentions neither (modeling_utils.py: _load_pretrained_model assumes "perfectly matching checkpoints").
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import UserError, first_line
from ..distributed import ranks
from ..host.files import refuse_lfs_pointers
from ..recipe import remote_code
from ..upstream import causal_models, unpickling, without_zero3
from . import parts, scores
from .config_json import published_quantization

if TYPE_CHECKING:
    import torch

AGAIN = "download or copy the model again"
# Types of safetensors that a weight does not have outside a quantised model; a cast would take something from each of them.
_NO_WEIGHTS = {
    **dict.fromkeys(("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"), "integers"),
    "C64": "complex numbers",
    "F8_E8M0": "powers of two, which are scales of other tensors",
}
_WRAPPED = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # DDP and DeepSpeed, torch.compile, FSDP1


def check(source: str, trust_remote_code: bool, images: bool = False) -> None:
    """Compare the files in `source` with the model of its config.json; images: with its vision tower

    Raises UserError for a file that is damaged or missing; and, with their names, for weights that are missing, unknown,
    no real numbers, of another shape, or two where the config ties them.

    A load onto the meta device tells what the real one would: tied weights, renamed layers, fused experts and what the
    architecture leaves out on purpose are Transformers' own business. It reads no weights.
    """
    import torch
    from transformers import AutoConfig, Mxfp4Config

    remote_code.check_kernels(source, source, None, trust_remote_code)
    causal_models()
    folder = Path(source)
    files = weight_files(folder)
    refuse_lfs_pointers([*files, *folder.glob("pytorch_model*.bin")])
    types = {name: kind for file in files for name, kind in _types(file).items()}
    quantised = published_quantization(folder)
    if quantised not in (None, "mxfp4"):  # its own loader knows what its tensors mean
        return
    try:
        with without_zero3():  # it takes no device_map, and a second model is read where the first is sharded
            model, report = scores.auto_class(source, trust_remote_code, images).from_pretrained(
                source,
                trust_remote_code=trust_remote_code,
                device_map="meta",
                dtype=torch.bfloat16,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                quantization_config=Mxfp4Config(dequantize=True) if quantised else None,
            )
    except pickle.UnpicklingError as error:  # of pytorch_model.bin, where there are no *.safetensors
        raise unpickling.refusal(source, error) from None
    except RuntimeError as error:
        of_experts = "weights of its experts are missing or of another shape"
        problem = of_experts if "conversion" in str(error) else first_line(error)
        raise UserError(source, problem, AGAIN) from None
    name, names = type(model).__name__, dict(model.named_parameters())
    # Transformers' language model of Llama 4 is built without the tower that its files hold.
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    beside = () if images else tuple(f"{path}." for path in parts.beside_language(config))
    unknown = sorted(key for key in report["unexpected_keys"] if not key.startswith(beside))
    shapes = sorted(report["mismatched_keys"])
    faults = {
        f"weights of {name} that its files lack": sorted(report["missing_keys"]),
        "weights of another shape": [f"{key} {list(theirs)} instead of {list(ours)}" for key, theirs, ours in shapes],
        "tensors that are none of the model's": unknown,
    } | {
        f"weights in {kind}": [key for key in types if key in names and _NO_WEIGHTS.get(types[key]) == kind]
        for kind in dict.fromkeys(_NO_WEIGHTS.values())
        if not quantised
    }
    cure = f"{AGAIN}, or save it with the save_pretrained() of {name}"
    prefix = next((prefix for prefix in _WRAPPED if unknown and all(key.startswith(prefix) for key in unknown)), None)
    if prefix:
        cure = f"their names begin with {prefix!r}: save the model inside the wrapper, with its save_pretrained()"
    for fault, keys in faults.items():
        if keys:
            raise UserError(source, f"{fault} ({len(keys)}): {_some(keys)}", cure)
    for one, other in _both_there(model):
        if not _same_in_files(one, other, files):
            raise of_two_matrices(source, one, other)


def of_two_matrices(source: str, one: str, other: str) -> UserError:
    """Return the error for a config that ties two weights, where the files hold different values for them. Transformers would
    warn, and leave and save them apart, under a config by which other programs tie them (modeling_utils.py: tie_weights)."""
    problem = (
        f"by its config (tie_word_embeddings) {one} and {other} are one matrix, but its files hold two that differ"
    )
    cure = (
        f"set tie_word_embeddings to false in its config.json, or remove {one} from the files: which of them is meant?"
    )
    return UserError(source, problem, cure)


def _both_there(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of weights that the config ties, where a load onto the meta device has found both."""
    for one, other in model.all_tied_weights_keys.items():
        if model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other):
            yield one, other


def _same_in_files(one: str, other: str, files: list[Path]) -> bool:
    """Whether two weights of the model are equal in its files, where their names may begin differently."""
    import torch
    from safetensors import safe_open

    values = []
    for wanted in (one, other):
        end = ".".join(wanted.split(".")[-2:])
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                values += [tensors.get_tensor(name) for name in tensors.keys() if f".{name}".endswith(f".{end}")]  # noqa: SIM118
    return all(torch.equal(values[0], each) for each in values[1:])


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that hold the model, as Transformers chooses them: a single one goes before an index. Raises
    UserError for one that its index names and that is not there."""
    kinds = ("*.safetensors.index.json", "*.bin.index.json")  # other indices are not of weights
    named = {index.name: _named(index) for kind in kinds for index in sorted(folder.glob(kind))}
    of_safetensors = "model.safetensors.index.json"
    files = named.get(of_safetensors)
    single = folder / "model.safetensors"
    if files is None or single.is_file():
        return [single] if single.is_file() else []
    gone = [name for name in files if not (folder / name).is_file()]
    if gone:
        problem = f"{len(gone)} of {len(files)} files that it names are not there: {_some(gone)}"
        raise UserError(str(folder / of_safetensors), problem, AGAIN)
    return [folder / name for name in files]


def _named(index: Path) -> list[str]:
    """Return the files that an index names. Raises UserError where it is damaged, or names one outside its directory."""
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise UserError(str(index), f"it is damaged: {first_line(error)}", AGAIN) from None
    outside = [str(name) for name in files if not unpickling.is_inside(name)]
    if outside:
        raise UserError(str(index), f"it names files that are not in its directory: {_some(outside)}", AGAIN)
    return files


def _types(file: Path) -> dict[str, str]:
    """Return name -> type of a file's tensors. Raises UserError where the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118  (no dict)
    except (SafetensorError, OSError) as error:
        problem = f"it is damaged ({file.stat().st_size:,} bytes): {first_line(error)}"
        raise UserError(str(file), problem, AGAIN) from None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def check_finite(model: torch.nn.Module, source: str) -> None:
    """Raise UserError on all ranks where any of them has loaded a weight that is NaN or infinite. A collective.

    model: None on a rank whose weights come from another
    """
    names = ranks.gather(first_not_finite(model, trained=False) if model is not None else None)
    name = next(filter(None, names), None)
    if name:
        problem = f"the weight {name} holds NaN or infinity"
        raise UserError(source, problem, f"{AGAIN}; what it was trained into is lost")


def first_not_finite(model: torch.nn.Module, trained: bool = True) -> str | None:
    """Return the name of the first parameter (of those that are trained, or of all) whose part on this rank is not finite, or
    None.

    Weights in 4 bits are left out: the bits in their containers are no numbers.
    """
    for name, parameter in model.named_parameters():
        number = parameter.is_floating_point() and not hasattr(parameter, "quant_state")
        if number and parameter.requires_grad >= trained:
            part = own_part(parameter).detach()
            # One pass, and no second tensor of its size: NaN and infinity both end up in the extremes.
            if part.numel() and not all(map(math.isfinite, map(float, part.aminmax()))):
                return name
    return None


def own_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return what this rank has of a parameter: under ZeRO-3 and FSDP2 a part of it."""
    if hasattr(parameter, "ds_tensor"):
        from ..upstream import zero_shares

        return zero_shares.own_part(parameter)
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
