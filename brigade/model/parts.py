"""Parts of a model that a run tells apart."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


def beyond_texts(model: Any) -> dict[str, Any]:
    """Name -> module of what texts do not reach in a model of images (or sounds) and texts: all but its decoder and the two
    ends. {} for a model of texts. Trained, it would get no gradient, which DDP takes for an error and weight decay does not."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.get_text_config() is base.config:
        return {}
    ends = (base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings())
    reached = {id(parameter) for part in ends if part is not None for parameter in part.parameters()}
    found: dict[str, Any] = {}
    for name, module in base.named_modules():  # a module before those in it
        held = {id(parameter) for parameter in module.parameters()}
        if held and held.isdisjoint(reached) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found
