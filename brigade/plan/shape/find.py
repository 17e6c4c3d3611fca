"""Find models by name: a recipe's folder, any folder or file with a config.json, or the Hub. No torch."""

from pathlib import Path
from types import SimpleNamespace

from ...errors import UserError, did_you_mean
from ...errors.tables import Document, Fields
from ...train.host.hub import hub_is_away, refusal
from ...train.model.config_json import check_causal, read_config
from ...train.recipe import continued
from ...train.recipe.files import REPOSITORY
from .from_code import shape_from_model
from .from_config import kind_of, shape_of
from .model_shape import FAMILIES, ModelShape

RECIPES = REPOSITORY / "recipes"


def known_config(name: str) -> Path | None:
    """Return the config.json of the model of that name, if a recipe here has it: `qwen3_30b_a3b` is recipes/qwen3-30b-a3b."""

    def plain(text: str) -> str:
        return "".join(filter(str.isalnum, text.lower()))

    paths = (path for path in sorted(RECIPES.glob("*/config.json")) if plain(path.parent.name) == plain(name))
    return next(paths, None)


def config_of(name: str) -> Path:
    """Return the config.json of a model by a recipe's folder, a folder or file, or its name on the Hub.

    Raises UserError where there is none, or the Hub cannot be asked.
    """
    place, path = f"model {name[:100]!r}", Path(name).expanduser()
    try:
        for candidate in (path, path / "config.json", RECIPES / name, RECIPES / name / "config.json"):
            if candidate.is_file():
                return candidate
        if continued.holds_only_adapters(path):
            problem, merge = continued.no_model(name, path)
            raise UserError(place, problem, f"name their base, or {merge}")
    except OSError as error:
        raise UserError(place, f"it cannot be looked up: {error.strerror}", "check the name") from None
    short = name.rpartition("/")[2]
    known = known_config(short)
    if known:
        return known
    none = "the folder has no config.json" if path.is_dir() else "no folder or recipe here has that name"
    # The Hub's names have an owner's before them, and none of its owners is a folder here.
    if "/" not in name or name.count("/") > 1 or Path(name).parent.is_dir():
        raise UserError(place, none, did_you_mean(short, [path.parent.name for path in RECIPES.glob("*/config.json")]))
    hub_is_away()
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        why, cure = refusal(error, name)
        cure = cure or "name a folder with a config.json, or check name, network and HF_TOKEN"
        raise UserError(place, f"{none}, and the Hub does not give its config.json: {why}", cure) from None


def positions_of(config: Document) -> int | None:
    """Return how many tokens of a sequence the text model has positions for, as far as its config.json says."""
    text = config.get("text_config") or config
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    found = map(text.get, names)
    return next((positions for positions in found if isinstance(positions, int)), None)


def stretches(config: Document) -> bool:
    """Return whether a rotary embedding is plain, with one base, which rope_parameters can stretch (train/model/rope.py)."""
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return "rope_local_base_freq" not in text and rope.get("rope_type", rope.get("type", "default")) == "default"


def named_config(name: str) -> tuple[Fields, str, str]:
    """Return (config.json, where it is, short name) of a model; name: as config_of takes it."""
    path = config_of(name)
    ours = Path(name).expanduser().exists() or path.is_relative_to(RECIPES)
    return read_config(path), str(path) if ours else name, path.parent.name if ours else name


def named_shape(name: str) -> ModelShape:
    """Return the model's shape; name: as config_of takes it."""
    return described(*named_config(name))


def described(config: Document, place: str, name: str = "") -> ModelShape:
    """Return what the config.json states, or for an architecture that FAMILIES lacks what its code builds (from_code.py).

    Raises UserError for what is no causal language model, by what it is.
    """
    if "_class_name" in config and "model_type" not in config:
        problem = f"train.py trains causal language models, and this is a part of a diffusion pipeline: {config['_class_name']}"
        raise UserError(place, problem, "name a decoder, such as Qwen/Qwen3-8B")
    if config.get("vision_config") or config.get("audio_config"):
        check_causal(SimpleNamespace(**config), place)
    if kind_of(config, place)[0] in FAMILIES:
        return shape_of(config, place, name)
    return shape_from_model(config, name)
