"""The size of a model's vocabulary, for who tokenises and builds no model."""

from ..recipe.flags import Settings
from .location import check_length, load_config, location


def vocabulary(settings: Settings) -> int:
    """Tokens of the model's vocabulary, after the checks of load_config().

    From config.json itself where it says so: building a Transformers configuration imports a second's worth of torch, which
    tokenising does not need.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    try:
        document, _ = PreTrainedConfig.get_config_dict(location(settings), revision=settings.recipe.model.revision)
        words = (document.get("text_config") or document).get("vocab_size")
        positions = document.get("max_position_embeddings")
    except Exception:  # load_config() says what is wrong
        document, words, positions = {}, None, None
    known = document.get("model_type") in CONFIG_MAPPING_NAMES and "auto_map" not in document
    known = known and not settings.recipe.model.rope_parameters
    if not known or not isinstance(words, int) or not isinstance(positions, int | None):
        return load_config(settings).get_text_config().vocab_size
    check_length(settings, positions)
    return words
