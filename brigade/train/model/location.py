"""Where a model is (a folder, a name on the Hub, a config.json), and its configuration."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError, first_line
from ..host import files
from ..host.hub import hub_is_away, refusal
from ..recipe import continued, remote_code
from ..recipe.settings import Settings
from . import gguf_file, new_tokens, packaged, parts, per_layer
from .config_json import ALIASES, check_causal, grown_vocabulary, read_config
from .rope import stretch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Keys of a config.json that give a model its shapes.
OF_SHAPES = ("head_dim", "tie_word_embeddings", "shared_expert_intermediate_size", "attention_bias")
SHAPES = ("model_type", *ALIASES, *OF_SHAPES)


def location(settings: Settings) -> str:
    """Return model_name_or_path: a path where it is a local directory (here or in the repository), a GGUF file or a packaged
    model, both of which are read into a directory first; else a name on the Hub.

    Raises UserError for a revision of a directory, and for a GGUF file that cannot be read.
    """
    name, revision = settings.recipe.model.model_name_or_path, settings.recipe.model.revision
    folder = remote_code.folder_of(name) or _read(name, settings.place("model_name_or_path"))
    if folder and revision is not None:
        problem = f"{revision!r} is a version of a model on the Hub, but {name!r} is here"
        cure = "leave revision out (--revision null), or name the model on the Hub"
        raise UserError(settings.place("revision"), problem, cure)
    if not folder:
        hub_is_away()
    elif odd := files.odd(Path(folder).iterdir() if Path(folder).is_dir() else ()):
        problem = f"{odd.name} in {name!r} is a pipe, a socket or a device, and no file"
        raise UserError(settings.place("model_name_or_path"), problem, "remove it")
    elif Path(folder).is_dir():  # pointers to weights are no fault where none are read (prepare, plan)
        files.refuse_lfs_pointers(each for each in Path(folder).iterdir() if each.suffix in (".json", ".model", ".txt"))
    return str(folder or name)


def _read(name: str, place: str) -> Path | None:
    """Return the directory of what has to be read into one, None where `name` is no such thing."""
    if name in packaged.MODELS:
        return gguf_file.as_folder(packaged.file_of(name, place), place)
    if not name.endswith(gguf_file.SUFFIX):
        return None
    file = Path(name).expanduser()
    if not file.is_file():
        raise UserError(place, f"there is no file {name!r}", "name a GGUF file, a directory, or a model on the Hub")
    return gguf_file.as_folder(file, place)


def load_config(settings: Settings) -> "PreTrainedConfig":
    """Return the model's configuration, with the vocabulary that the recipe's new tokens need.

    Raises UserError where there is none, its positions are fewer than max_length, or check_quantization() refuses it.
    """
    from transformers import AutoConfig

    model, place, name = settings.recipe.model, settings.place("model_name_or_path"), location(settings)
    try:
        config = AutoConfig.from_pretrained(name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # OSError for a missing file or name, ValueError for an unknown architecture, ...
        if remote_code.is_refused(error):
            raise remote_code.refusal(place, [name], model.revision) from None
        raise unusable(settings, error) from None
    remote_code.check_kernels(place, name, model.revision, model.trust_remote_code)
    if settings.recipe.data.images:
        parts.check_model(settings, config)
    else:
        check_causal(config, place)
    check_quantization(settings, getattr(config, "quantization_config", None))
    if model.rope_parameters:
        stretch(settings, config)
    check_length(settings, getattr(config, "max_position_embeddings", None))
    new_tokens.grow(settings, name, config)
    return config


def unusable(settings: Settings, error: Exception) -> UserError:
    """Return what to raise where a model's configuration cannot be loaded. error: why"""
    model = settings.recipe.model
    folder = remote_code.folder_of(model.model_name_or_path)
    if folder and continued.holds_only_adapters(folder):
        return UserError(settings.place("model_name_or_path"), *continued.no_model(model.model_name_or_path, folder))
    name = str(folder or model.model_name_or_path)
    why, cure = (first_line(error), "") if Path(name).is_dir() else refusal(error, name, revision=model.revision)
    problem = f"{model.model_name_or_path!r} has no usable config: {why}"
    cure = cure or "give a name on the Hub or a directory with a config.json"
    return UserError(settings.place("model_name_or_path"), problem, cure)


def check_quantization(settings: Settings, published: dict[str, Any] | None) -> None:
    """Raise UserError where a model's weights are read and their quantisation is not undone: scales beside them would be lost,
    and where names differ Transformers begins with random weights. published: quantization_config of its config.json"""
    section = settings.recipe.model
    method = (published or {}).get("quant_method")
    # load.quantization_config() tells from_pretrained what to do with these.
    if section.from_scratch or method in (None, "mxfp4") or (method == "bitsandbytes" and section.load_in_4bit):
        return
    problem = f"the weights of {section.model_name_or_path!r} are quantised ({method}), which a run does not undo"
    cure = "name the model that has them in 16 bits"
    if method == "bitsandbytes":
        cure += ", or train adapters on 4 bits (use_peft: true, load_in_4bit: true)"
    raise UserError(settings.place("model_name_or_path"), problem, cure)


def check_length(settings: Settings, positions: int | None) -> None:
    """Raise UserError where max_length exceeds the model's positions."""
    length = settings.recipe.data.max_length
    if positions and length > positions:
        problem = f"{length} tokens, but the model has positions for {positions}"
        raise UserError(settings.place("max_length"), problem, f"set max_length to at most {positions}")


def _has_grown(settings: Settings, before: int, now: int | None) -> bool:
    """Whether the recipe's new tokens make such a vocabulary of one of `before` tokens."""
    new = len(settings.recipe.model.add_tokens + settings.recipe.model.add_special_tokens)
    return now is not None and new > 0 and before < now <= grown_vocabulary(before, before + new)


def config_beside(settings: Settings) -> Path | None:
    """Return the config.json beside the recipe, which is its model's, or None.

    It is not asked for where a flag names another model on purpose, nor beside a run.yaml, where it is what that run saved.
    """
    beside = settings.recipe_path.with_name("config.json")
    by_flag = settings.sources.get("model_name_or_path", "").startswith("flag")
    return None if by_flag or settings.recipe_path.name == "run.yaml" or not beside.is_file() else beside


def check_beside(settings: Settings, config: "PreTrainedConfig") -> None:
    """Raise UserError where the config.json beside the recipe, which rehearsals and plans go by, is another model's."""
    beside = config_beside(settings)
    if beside is None:
        return
    document = read_config(beside)
    text, ours = document.get("text_config") or document, config.get_text_config()
    for field in SHAPES:
        names = (field, *ALIASES.get(field, ()))
        there = next((text[name] for name in names if text.get(name) is not None), None)
        values = (per_layer.common(ours, name) for name in names)
        here = next((value for value in values if value is not None), None)
        if field == "vocab_size" and there is not None and _has_grown(settings, there, here):
            continue
        if there is not None and here is not None and there != here:
            problem = f"{there!r} here, but {here!r} in the model that the recipe names, "
            problem += f"{settings.recipe.model.model_name_or_path}: the model has changed, or the recipe was copied"
            raise UserError(f"{beside}: {field}", problem, "put the model's own config.json there, or remove it")
